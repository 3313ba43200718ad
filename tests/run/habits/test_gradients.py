"""What training loops ask autograd for besides `loss.backward()`: chosen tensors, hooks, several losses."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import elixir_compile as elixir
from tests.run.habits.habit import habit
from tests.run.habits.stories import (
    PLACES,
    Net,
    Tools,
    assert_same_in_both,
    batches,
    compiled_tools,
    copies_of,
    gradients,
)
from tests.run.models import seeded
from tests.run.training import fused_adamw

everywhere = pytest.mark.parametrize("place", PLACES)
offloaded = pytest.mark.parametrize("place", ["offload"])


def finish(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


# Gradients of inputs.


@habit("Adversarial training: `torch.autograd.grad(loss, x)`, then a normal step", area="Gradients")
@everywhere
def test_the_gradient_of_an_input_leaves_those_of_parameters_alone(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches():
            x.requires_grad_()
            (grad,) = torch.autograd.grad(loss_of(compiled(x)), x)
            seen += [grad, *gradients(model)]
            loss = loss_of(compiled((x + 0.1 * grad.sign()).detach()))
            loss.backward()
            seen += [loss.detach(), *gradients(model)]
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("Adversarial training: `loss.backward(inputs=[x])`, then a normal step", area="Gradients")
@offloaded
def test_a_backward_for_inputs_alone_leaves_parameters_alone(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches():
            x.requires_grad_()
            loss_of(compiled(x)).backward(inputs=[x])
            seen += [x.grad, *gradients(model)]
            loss_of(compiled((x + 0.1 * x.grad.sign()).detach())).backward()
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("PGD: several `torch.autograd.grad(loss, delta)` before a step", area="Gradients")
@offloaded
def test_pgd(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        for x in batches():
            delta = torch.zeros_like(x, requires_grad=True)
            for _ in range(3):
                (grad,) = torch.autograd.grad(loss_of(compiled(x + delta)), delta)
                delta = (delta + 0.05 * grad.sign()).clamp(-0.1, 0.1).detach().requires_grad_()
            loss_of(compiled(x + delta.detach())).backward()
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit(
    "FGSM with `x.grad` of a full backward, then `optimizer.zero_grad()` before the backward of the step",
    area="Gradients",
)
@offloaded
def test_fgsm_by_a_full_backward(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        for x in batches():
            x.requires_grad_()
            loss_of(compiled(x)).backward()
            optimizer.zero_grad()
            loss_of(compiled((x + 0.1 * x.grad.sign()).detach())).backward()
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("`out.retain_grad()` on an output of the model", area="Gradients")
@offloaded
def test_the_gradient_of_an_output(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches(2):
            out = compiled(x)
            out.retain_grad()
            loss_of(out).backward()
            seen += [out.grad, *gradients(model)]
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


# Gradients of chosen parameters.


@habit("`loss.backward(inputs=list(head.parameters()))`", area="Gradients")
@everywhere
def test_a_backward_for_the_head_alone(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches():
            loss_of(compiled(x)).backward(inputs=list(model.head.parameters()))
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("`torch.autograd.grad(loss, model.parameters())`, `.grad` set by hand", area="Gradients")
@everywhere
def test_gradients_of_all_parameters_are_returned(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches():
            params = list(model.parameters())
            grads = torch.autograd.grad(loss_of(compiled(x)), params)
            seen += [*grads, *gradients(model)]
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit(
    "`torch.autograd.grad` of some parameters and an input, with `allow_unused` and `grad_outputs`", area="Gradients"
)
@everywhere
def test_gradients_of_some_tensors_are_returned(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        unused = torch.zeros(1, requires_grad=True)
        seen: list[torch.Tensor | None] = []
        for x in batches():
            x.requires_grad_()
            asked = [model.head.weight, x, unused, model.first.bias]
            out = compiled(x)
            grads = torch.autograd.grad(out, asked, grad_outputs=torch.cos(out), allow_unused=True, retain_graph=True)
            seen += [*grads, *gradients(model)]
            loss_of(out).backward()
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("An unused parameter in `torch.autograd.grad`, without `allow_unused`: torch's own error", area="Gradients")
@offloaded
def test_an_unused_parameter_is_told_by_torch(place: str) -> None:
    tools = compiled_tools(place)
    _, compiled, _ = tools.net()
    other, compiled_other, _ = tools.net()
    x = batches(1)[0]
    loss_of(compiled_other(x)).backward()
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss_of(compiled(x)), [other.head.weight])


@habit("PCGrad: gradients of each task by `torch.autograd.grad`, projected, then set as `.grad`", area="Gradients")
@offloaded
def test_gradient_surgery(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        for x in batches():
            params, out = list(model.parameters()), compiled(x)
            tasks = [loss_of(out), out.abs().mean()]
            one, two = (torch.autograd.grad(task, params, retain_graph=True) for task in tasks)
            for param, first, second in zip(params, one, two, strict=True):
                dot = (first * second).sum()
                param.grad = first + second - (dot.clamp(max=0) / second.square().sum()) * second
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("FOMAML: `torch.autograd.grad`, an inner step on a copy of the weights, the outer gradient is copied back",
       area="Gradients")  # fmt: skip
@offloaded
def test_first_order_meta_learning(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model = seeded(Net)
        optimizer = fused_adamw(model.parameters())
        inner = copy.deepcopy(model)
        compiled = tools.compile(inner)
        for support, query in zip(batches(), batches(6)[3:], strict=True):
            inner.load_state_dict(model.state_dict())
            grads = torch.autograd.grad(loss_of(compiled(support)), list(inner.parameters()))
            with torch.no_grad():
                for param, grad in zip(inner.parameters(), grads, strict=True):
                    param -= 0.1 * grad
            outer = torch.autograd.grad(loss_of(compiled(query)), list(inner.parameters()))
            for param, grad in zip(model.parameters(), outer, strict=True):
                param.grad = grad
            finish(optimizer)
        return copies_of(model, inner)

    assert_same_in_both(loop, place)


@habit("Gradients of each sample in a loop, as for influence functions", area="Gradients")
@offloaded
def test_gradients_per_sample(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, _ = tools.net()
        return [
            grad
            for x in batches(1)[0].split(2)
            for grad in torch.autograd.grad(loss_of(compiled(x)), list(model.parameters()))
        ]

    assert_same_in_both(loop, place)


# Several models.


@habit("GAN: a discriminator step on detached fakes, then `loss.backward(inputs=list(G.parameters()))`",
       area="Gradients")  # fmt: skip
@offloaded
def test_gan_by_inputs(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        (generator, generate, generated), (critic, evaluator, judged) = tools.net(), tools.net()
        seen: list[torch.Tensor | None] = []
        for real, noise in zip(batches(), batches(6)[3:], strict=True):
            loss = loss_of(evaluator(real)) - loss_of(evaluator(generate(noise).detach()))
            loss.backward()
            finish(judged)
            loss_of(evaluator(generate(noise))).backward(inputs=list(generator.parameters()))
            seen += gradients(critic) + gradients(generator)
            finish(generated)
        return seen + copies_of(generator, critic)

    assert_same_in_both(loop, place)


@habit("GAN: `D.requires_grad_(False)` for the generator's step, `True` after it", area="Gradients",
       note="a warning says that the first forward after a thaw runs op by op, without a plan")  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*began to require a gradient:elixir_compile.ElixirWarning")
@everywhere
def test_gan_by_freezing(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        (generator, generate, generated), (critic, evaluator, judged) = tools.net(), tools.net()
        seen: list[torch.Tensor | None] = []
        for real, noise in zip(batches(), batches(6)[3:], strict=True):
            critic.requires_grad_(False)
            loss_of(evaluator(generate(noise))).backward()
            seen += gradients(critic) + gradients(generator)
            finish(generated)
            critic.requires_grad_(True)
            (loss_of(evaluator(real)) - loss_of(evaluator(generate(noise).detach()))).backward()
            seen += gradients(critic)
            finish(judged)
        return seen + copies_of(generator, critic)

    assert_same_in_both(loop, place)


@habit("RLHF: a policy and its frozen reference copy in one loss", area="Gradients")
@offloaded
def test_policy_and_reference(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        policy, act, optimizer = tools.net()
        reference = seeded(Net).requires_grad_(False)
        refer = tools.compile(reference)
        for x in batches():
            with torch.no_grad():
                expected = refer(x).log_softmax(-1)
            loss = nn.functional.kl_div(
                act(x).log_softmax(-1), expected, log_target=True, reduction="batchmean"
            ) + loss_of(act(x))
            loss.backward()
            finish(optimizer)
        return copies_of(policy, reference)

    assert_same_in_both(loop, place)


@habit("Self-distillation: the teacher is the same model under `torch.no_grad()`", area="Gradients")
@offloaded
def test_self_distillation(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        for x in batches():
            with torch.no_grad():
                teacher = compiled(x)
            nn.functional.mse_loss(compiled(x + 0.1), teacher).backward()
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("`torch.autograd.backward([loss1, loss2])` of two forwards", area="Gradients")
@offloaded
def test_two_losses_at_once(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        for x in batches():
            torch.autograd.backward([loss_of(compiled(x)), compiled(2 * x).abs().mean()])
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("`loss1.backward(retain_graph=True)`, then `loss2.backward()` of the same forward", area="Gradients")
@offloaded
def test_two_losses_one_after_the_other(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches():
            out = compiled(x)
            loss_of(out).backward(retain_graph=True)
            seen += gradients(model)
            out.abs().mean().backward()
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


# Hooks.


@habit("`p.register_hook` with a hook that scales the gradient and is removed later", area="Gradients")
@everywhere
def test_a_hook_on_a_parameter(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []

        def scale(grad: torch.Tensor) -> torch.Tensor:
            seen.append(grad.clone())
            return 3 * grad

        handle = model.first.weight.register_hook(scale)
        for index, x in enumerate(batches(4)):
            if index == 2:
                handle.remove()
            for part in x.split(4):
                loss_of(compiled(part)).backward()
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("A hook on a parameter of one of two models in a step: it runs for the backward of this model only",
       area="Gradients")  # fmt: skip
@offloaded
def test_a_hook_is_not_called_without_a_gradient(place: str) -> None:
    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(16, 16)
            self.uses_other = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x) if self.uses_other else super().forward(x)

    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model = seeded(TwoHeads)
        compiled, optimizer = tools.compile(model), tools.optimizer(model.parameters())
        seen: list[torch.Tensor | None] = []
        model.other.weight.register_hook(seen.append)
        model.first.weight.register_hook(seen.append)
        for index, x in enumerate(batches(4)):
            model.uses_other = index % 2 == 1
            loss_of(compiled(x)).backward()
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("A hook on the autograd node of `p` that adds each gradient to a sum in another dtype", area="Gradients")
@everywhere
def test_a_hook_on_an_accumulate_node(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        sums = {param: torch.zeros_like(param, dtype=torch.float64) for param in model.parameters()}
        nodes = []  # torch lets go of a node, and of its hooks, if nobody holds it
        for param in model.parameters():

            def add(*_: object, param: torch.Tensor = param) -> None:
                sums[param] += param.grad
                param.grad = None

            nodes.append(param.expand_as(param).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(add)
        for x in batches():
            for part in x.split(4):
                loss_of(compiled(part)).backward()
            for param, total in sums.items():
                param.grad = total.to(param.dtype)
                total.zero_()
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("`p.register_post_accumulate_grad_hook`, as for an optimizer step inside the backward", area="Gradients")
@offloaded
def test_a_step_in_a_hook(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, _ = tools.net()
        each = {param: torch.optim.AdamW([param], lr=1e-2) for param in model.parameters()}

        def step(param: torch.Tensor) -> None:
            each[param].step()
            each[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for x in batches():
            loss_of(compiled(x)).backward()
        return copies_of(model) + gradients(model)

    assert_same_in_both(loop, place)


@habit("`torch.autograd.graph.register_multi_grad_hook` over parameters", area="Gradients")
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_parameters(mode: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []

        def see(found: torch.Tensor | list[torch.Tensor | None]) -> None:
            if isinstance(found, torch.Tensor):
                seen.append(torch.ones(()))  # which parameter's gradient is the first is up to the engine
            else:
                seen.extend(None if grad is None else grad.clone() for grad in found)

        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), see, mode=mode)
        for x in batches(2):
            loss_of(compiled(x)).backward(inputs=list(model.head.parameters()))
            loss_of(compiled(x)).backward()
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, "offload")


# Gradients that the loop writes or keeps.


@habit(
    "SAM: an ascent step on the weights, a second forward and backward, then the weights are restored", area="Gradients"
)
@offloaded
def test_sharpness_aware_minimization(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        for x in batches():
            loss_of(compiled(x)).backward()
            kept = [param.detach().clone() for param in model.parameters()]
            with torch.no_grad():
                norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
                for param in model.parameters():
                    param.add_(param.grad * (0.05 / norm))
            optimizer.zero_grad()
            loss_of(compiled(x)).backward()
            with torch.no_grad():
                for param, value in zip(model.parameters(), kept, strict=True):
                    param.copy_(value)
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("Accumulation with `optimizer.zero_grad(set_to_none=False)` and a forward under `no_grad` between",
       area="Gradients")  # fmt: skip
@offloaded
def test_accumulation_with_zeroed_gradients(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches():
            for part in x.split(4):
                (loss_of(compiled(part)) / 2).backward()
                with torch.no_grad():
                    seen.append(compiled(part))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return seen + copies_of(model) + gradients(model)

    assert_same_in_both(loop, place)


@habit("`p.grad = None` for some parameters, and another tensor in place of `p.grad`, before the step",
       area="Gradients")  # fmt: skip
@offloaded
def test_gradients_replaced_before_the_step(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        for x in batches():
            loss_of(compiled(x)).backward()
            model.first.bias.grad = None
            model.head.weight.grad = 2 * model.head.weight.grad.sign()
            model.second.weight.grad.mul_(0.5)
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("`p.requires_grad_(False)` in the middle of training, then `True` again", area="Gradients")
@offloaded
def test_freezing_and_thawing(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for index, x in enumerate(batches(6)):
            model.second.requires_grad_(index not in (2, 3))
            loss_of(compiled(x)).backward()
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("Progressive unfreezing: layers that were frozen at the first call are thawed later", area="Gradients",
       note="a warning says that the first forward after a thaw runs op by op, without a plan; a forward under "
       "`torch.no_grad()` before it avoids that")  # fmt: skip
@pytest.mark.parametrize("evaluates", [False, True])
def test_progressive_unfreezing(evaluates: bool) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        layers = [model.head, model.second, model.first]
        model.requires_grad_(False)
        seen: list[torch.Tensor | None] = []
        for x, layer in zip(batches(), layers, strict=True):
            layer.requires_grad_(True)
            if evaluates:
                with torch.no_grad():
                    compiled(x)
            for part in x.split(4):
                loss_of(compiled(part)).backward()
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", elixir.ElixirWarning)
        assert_same_in_both(loop, "offload")
    assert any("began to require a gradient" in str(one.message) for one in said) is not evaluates


@habit("`torch.autograd.set_detect_anomaly(True)`", area="Gradients")
@offloaded
def test_anomaly_mode(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        with torch.autograd.set_detect_anomaly(True):
            for x in batches(2):
                loss_of(compiled(x)).backward()
                finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


# Gradients of gradients.


@habit("`torch.autograd.grad(loss, model.parameters(), create_graph=True)`, as in MAML and Hessian products",
       area="Gradients", refused=elixir.UnsupportedBackward, says="create_graph=True: neither compiled code",
       )  # fmt: skip
@offloaded
def test_a_graph_of_the_gradients_of_parameters(place: str) -> None:
    model, compiled, _ = compiled_tools(place).net()
    loss = loss_of(compiled(batches(1)[0]))
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@habit("`loss.backward(create_graph=True)`", area="Gradients",
       refused=elixir.UnsupportedBackward, says="create_graph=True: neither compiled code")  # fmt: skip
@offloaded
def test_a_backward_that_makes_a_graph(place: str) -> None:
    _, compiled, _ = compiled_tools(place).net()
    loss_of(compiled(batches(1)[0])).backward(create_graph=True)


@habit("Gradient penalty: `torch.autograd.grad(out, x, create_graph=True)`, then a backward through it",
       area="Gradients", refused=RuntimeError, says="does not currently support double backward")  # fmt: skip
@offloaded
def test_a_gradient_penalty(place: str) -> None:
    _, compiled, _ = compiled_tools(place).net()
    x = batches(1)[0].requires_grad_()
    (grad,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    (grad.norm() - 1).square().backward()


@habit("Gradient penalty on a copy of the model that is neither compiled nor prepared", area="Gradients",
       note="copy its gradients to the parameters of the compiled model, as `UnsupportedBackward` advises")  # fmt: skip
@offloaded
def test_a_gradient_penalty_on_a_plain_copy(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        plain = copy.deepcopy(model)
        for x in batches():
            loss_of(compiled(x)).backward()
            plain.load_state_dict(model.state_dict())
            x.requires_grad_()
            (grad,) = torch.autograd.grad(plain(x).sum(), x, create_graph=True)
            of_penalty = torch.autograd.grad((grad.norm() - 1).square(), list(plain.parameters()), allow_unused=True)
            for param, more in zip(model.parameters(), of_penalty, strict=True):
                if more is not None:
                    param.grad += more
            finish(optimizer)
        return copies_of(model)

    assert_same_in_both(loop, place)


@habit("`torch.autograd.grad(..., is_grads_batched=True)`, as in `functional.jacobian(..., vectorize=True)`",
       area="Gradients", refused=elixir.UnsupportedBackward,
       says="is_grads_batched=True: neither compiled code")  # fmt: skip
@offloaded
def test_many_gradients_at_once(place: str) -> None:
    model, compiled, _ = compiled_tools(place).net()
    loss = loss_of(compiled(batches(1)[0]))
    torch.autograd.grad(loss, list(model.parameters()), torch.arange(3.0), is_grads_batched=True)


@habit("`torch.autograd.functional.jacobian` and `vjp`, `torch.func.grad` and `torch.func.vjp` by an input",
       area="Gradients")  # fmt: skip
@offloaded
def test_functional_transforms_by_an_input(place: str) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        seen: list[torch.Tensor | None] = []
        for x in batches(2):
            loss_of(compiled(x)).backward()
            seen.append(torch.autograd.functional.jacobian(lambda v: compiled(v).sum(0)[:2], x))
            seen.append(torch.autograd.functional.vjp(compiled, x, torch.ones_like(x))[1])
            seen.append(torch.func.grad(lambda v: loss_of(compiled(v)))(x))
            seen.append(torch.func.vjp(compiled, x)[1](torch.ones_like(x))[0])
            seen += gradients(model)
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, place)


@habit("`torch.utils.checkpoint.checkpoint` around a compiled model, and `torch.autograd.grad` through it",
       area="Gradients")  # fmt: skip
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_model(use_reentrant: bool) -> None:
    def loop(tools: Tools) -> list[torch.Tensor | None]:
        model, compiled, optimizer = tools.net()
        model.head.weight.register_hook(lambda grad: 2 * grad)
        seen: list[torch.Tensor | None] = []
        for x in batches(2):
            x.requires_grad_()
            loss = loss_of(checkpoint(compiled, x, use_reentrant=use_reentrant)) + loss_of(compiled(2 * x))
            if not use_reentrant:  # which refuses chosen tensors itself
                seen += torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
            loss.backward()
            seen += [x.grad, *gradients(model)]
            finish(optimizer)
        return seen + copies_of(model)

    assert_same_in_both(loop, "offload")
