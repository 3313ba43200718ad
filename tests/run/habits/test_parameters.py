"""Parameters that are replaced, tied, untied, shared, frozen, cast or written between two steps."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import elixir_compile as elixir
from elixir_compile.base.errors import ParameterReplaced, StaleParameters, UnsupportedModel
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.graph.ops.gather import GATHER
from tests.run.habits.habit import habit
from tests.run.habits.stories import (
    BATCHES,
    BUDGETS,
    WIDTH,
    assert_same_story,
    compiled,
    eager,
    layers,
    new_optimizer,
    values,
)
from tests.run.training import Run, assert_same, on_host

each_budget = pytest.mark.parametrize("budget", BUDGETS)


def other_weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: values(*tensor.shape) for name, tensor in run.model.state_dict().items()}


@habit("`load_state_dict(..., assign=True)` between steps, with a new optimizer", area="Parameters")
@each_budget
def test_assigning_a_state_dict(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.load_state_dict(other_weights(run), assign=True)
        new_optimizer(run)
        run.train(BATCHES[2:])

    assert_same_story(story, budget=budget)


def test_assigning_a_state_dict_between_prepare_and_the_first_step() -> None:
    runs = [eager(layers()), compiled(layers(), BUDGETS["offload"])]
    elixir.prepare(runs[1].model)
    for run in runs:
        run.model.load_state_dict(other_weights(run), assign=True)
        new_optimizer(run)
        run.train(BATCHES[:3])
    assert_same(*runs)


@habit("`module.weight = nn.Parameter(...)` of the same shape between steps", area="Parameters")
@each_budget
def test_another_parameter_of_the_same_shape(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.middle.weight = nn.Parameter(values(WIDTH, WIDTH))
        run.train(BATCHES[2:4])  # the old optimizer does not know it
        run.model.middle.register_parameter("bias", nn.Parameter(values(WIDTH)))
        new_optimizer(run)
        run.train(BATCHES[4:])

    got = assert_same_story(story, budget=budget)
    assert len(elixir.compilations(got.model)) <= 2
    if budget == "offload":
        assert {"middle.weight", "middle.bias"} <= set(on_host(got))


@habit("`module.weight = nn.Parameter(...)` of another shape between steps", area="Parameters")
@each_budget
def test_another_parameter_of_another_shape(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.head.weight = nn.Parameter(values(2 * WIDTH, WIDTH))
        run.model.head.bias = nn.Parameter(values(2 * WIDTH))
        new_optimizer(run)
        run.train(BATCHES[2:4])

    got = assert_same_story(story, budget=budget)
    if budget == "offload":
        assert {"head.weight", "head.bias"} <= set(on_host(got))


@habit("`module._parameters[name] = nn.Parameter(...)` of the same shape between steps", area="Parameters")
def test_another_parameter_behind_the_attribute() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.middle._parameters["weight"] = nn.Parameter(values(WIDTH, WIDTH))
        new_optimizer(run)
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


@habit("`module.bias = None` and `del module.bias` between steps", area="Parameters")
def test_parameters_that_go() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.middle.bias = None
        del run.model.head.bias
        run.model.head.register_parameter("bias", None)
        new_optimizer(run)
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


@habit("Tying `a.weight = b.weight` between steps, and untying", area="Parameters")
@each_budget
def test_tying_late_and_untying(budget: str) -> None:
    def story(run: Run) -> None:
        model = run.model
        run.train(BATCHES[:2])
        model.middle.weight = model.first.weight
        new_optimizer(run)
        run.train(BATCHES[2:4])
        model.middle.weight = nn.Parameter(model.first.weight.detach().clone())
        new_optimizer(run)
        run.train(BATCHES[4:])

    assert_same_story(story, budget=budget)


@habit(
    "`a._parameters['weight'] = b._parameters['weight']`, which ties weights without setting an attribute",
    area="Parameters",
    refused=ParameterReplaced,
    says="another is in its place",
)
def test_tying_past_the_attribute() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        run.model.middle._parameters["weight"] = run.model.first._parameters["weight"]
        run.train(BATCHES[1:2])

    assert_same_story(story, budget="offload")


def test_the_call_after_a_refusal_trains_with_what_is_there() -> None:
    runs = [eager(layers()), compiled(layers(), BUDGETS["offload"])]
    for run in runs:
        run.train(BATCHES[:1])
        run.model.middle._parameters["weight"] = run.model.first._parameters["weight"]
        new_optimizer(run)
    before = runs[1].weights
    with pytest.raises(ParameterReplaced, match=r"middle\.weight"):
        runs[1].compiled(BATCHES[1])
    assert all(torch.equal(value, before[name]) for name, value in runs[1].weights.items())
    for run in runs:
        run.train(BATCHES[1:3])
    assert_same(*runs)


@habit("`load_state_dict(..., assign=True)` of a model with tied weights, which unties them", area="Parameters")
def test_assigning_to_tied_weights() -> None:
    def story(run: Run) -> None:
        run.model.middle.weight = run.model.first.weight
        new_optimizer(run)
        run.train(BATCHES[:2])
        run.model.load_state_dict({name: value.clone() for name, value in run.weights.items()}, assign=True)
        new_optimizer(run)
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


@habit("`model.to(...)` under `set_overwrite_module_params_on_conversion(True)`", area="Parameters")
def test_conversions_that_replace_parameters(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(lambda: torch.__future__.set_overwrite_module_params_on_conversion(False))

    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        run.model.to(torch.float64).to(torch.float32)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        new_optimizer(run)
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


@habit("`torch.utils.swap_tensors` of a parameter", area="Parameters", refused=RuntimeError, says="Cannot swap t1")
def test_swapping_tensors() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        torch.utils.swap_tensors(run.model.middle.weight, nn.Parameter(values(WIDTH, WIDTH)))
        run.train(BATCHES[1:2])

    assert_same_story(story, budget="offload")


@habit(
    "A parameter replaced between a forward and its backward: the old parameter gets the gradient", area="Parameters"
)
def test_replacing_between_forward_and_backward() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        loss, old = run.compiled(BATCHES[1]), run.model.middle.weight
        run.model.middle.weight = nn.Parameter(values(WIDTH, WIDTH))
        run.model.head.weight, wide = nn.Parameter(values(2, WIDTH)), run.model.head.weight
        run.model.head.bias = nn.Parameter(values(2))
        loss.backward()
        run.losses += [old.grad.sum(), wide.grad.sum()]
        assert run.model.middle.weight.grad is None
        new_optimizer(run)
        run.optimizer.zero_grad()
        run.train(BATCHES[2:3])

    assert_same_story(story, budget="offload")


@habit(
    "A parameter replaced between two forwards, then the backward of the first",
    area="Parameters",
    refused=StaleParameters,
    says="changed after the forward that saved it",
)
def test_replacing_between_two_forwards() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        first = run.compiled(BATCHES[1])
        run.model.middle.bias = nn.Parameter(values(WIDTH))
        second = run.compiled(BATCHES[2])
        first.backward()
        second.backward()

    assert_same_story(story, budget="offload")


@pytest.mark.parametrize("width", [WIDTH, 2])
def test_a_replaced_parameter_is_freed(width: int) -> None:
    run = compiled(layers(), BUDGETS["offload"])
    run.train(BATCHES[:1])
    old = weakref.ref(run.model.head.weight)
    run.model.head.weight = nn.Parameter(values(width, WIDTH))
    run.model.head.bias = nn.Parameter(values(width))
    new_optimizer(run)
    run.train(BATCHES[1:2])
    gc.collect()
    assert old() is None


def test_a_parameter_replaced_while_a_forward_waited_is_freed_behind_its_backward() -> None:
    run = compiled(layers(), BUDGETS["offload"])
    run.train(BATCHES[:1])
    waiting = run.compiled(BATCHES[1])
    old = weakref.ref(run.model.head.weight)
    run.model.head.weight, run.model.head.bias = nn.Parameter(values(2, WIDTH)), nn.Parameter(values(2))
    new_optimizer(run)
    run.compiled(BATCHES[2]).backward()
    assert old() is not None
    waiting.backward()
    del waiting
    run.train(BATCHES[3:4])
    gc.collect()
    assert old() is None


# torch.func.functional_call


@habit("`torch.func.functional_call` on the model, uncompiled, between compiled steps", area="Parameters")
@each_budget
def test_functional_call_on_the_model(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        given = {name: (0.5 * param.detach()).requires_grad_() for name, param in run.model.named_parameters()}
        loss = functional_call(run.model, given, (BATCHES[2],))
        run.losses += [loss.detach(), *(grad.sum() for grad in torch.autograd.grad(loss, list(given.values())))]
        run.train(BATCHES[2:4])

    assert_same_story(story, budget=budget)


@habit(
    "`torch.func.functional_call` on the compiled model",
    area="Parameters",
    refused=ParameterReplaced,
    says="a plain tensor is in its place",
)
def test_functional_call_on_the_compiled_model() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        given = {name: 0.5 * param.detach() for name, param in run.compiled.named_parameters()}
        run.losses.append(functional_call(run.compiled, given, (BATCHES[1],)))

    assert_same_story(story, budget="offload")


@habit(
    "`torch.func.functional_call` in a compiled function, on a prepared model",
    area="Parameters",
    refused=ParameterReplaced,
    says="outside of compiled code",
)
def test_functional_call_in_compiled_code() -> None:
    model = elixir.prepare(layers())
    given = {name: 0.5 * param.detach() for name, param in model.named_parameters()}
    options = {"inner": "aot_eager", "report": False}
    torch.compile(lambda x: functional_call(model, given, (x,)), backend="elixir", options=options)(BATCHES[0])


# Parameters over one memory


@habit("Two Parameters that share memory, `a.weight.data = b.weight.data`, before the first step", area="Parameters")
def test_two_parameters_over_one_memory() -> None:
    def story(run: Run) -> None:
        run.model.middle.weight.data = run.model.first.weight.data
        run.train(BATCHES[:3])

    got = assert_same_story(story, budget="offload")
    whole = model_of(got.model).unmanaged_because
    assert whole["first.weight"] == "it shares memory with middle.weight"
    assert "first.weight" not in on_host(got)
    assert "head.weight" in on_host(got)


@habit(
    "Two Parameters that begin to share memory in a later step, under a budget",
    area="Parameters",
    refused=ParameterReplaced,
    says="it shares memory with",
)
def test_two_parameters_over_one_memory_later() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        run.model.middle.weight.data = run.model.first.weight.data
        run.train(BATCHES[1:2])

    assert_same_story(story, budget="offload")


def test_parameters_that_share_memory_late_stay_whole_after_the_refusal() -> None:
    runs = [eager(layers()), compiled(layers(), BUDGETS["offload"])]
    for run in runs:
        run.train(BATCHES[:1])
        run.model.middle.weight.data = run.model.first.weight.data
    with pytest.raises(ParameterReplaced):
        runs[1].compiled(BATCHES[1])
    for run in runs:
        run.train(BATCHES[1:3])
    assert_same(*runs)
    assert "first.weight" in model_of(runs[1].model).unmanaged_because


@habit("Parameters as views of a flat buffer that the user keeps", area="Parameters")
def test_parameters_in_a_flat_buffer() -> None:
    def story(run: Run) -> None:
        params = list(run.model.parameters())
        flat = parameters_to_vector(params).detach().clone()
        vector_to_parameters(flat, params)
        run.train(BATCHES[:2])
        flat *= 0.5
        run.losses.append(flat.sum())
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


@habit("`parameters_to_vector`, `vector_to_parameters` between steps", area="Parameters")
@each_budget
def test_a_vector_of_parameters(budget: str) -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        params = list(run.model.parameters())
        vector_to_parameters(0.9 * parameters_to_vector(params).detach(), params)
        run.train(BATCHES[2:4])

    got = assert_same_story(story, budget=budget)
    assert budget == "free" or "first.weight" in on_host(got)


@habit("`p.data.copy_`, `p.set_` and initialising again, `model.apply(init)`, between steps", area="Parameters")
def test_writes_between_steps() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        run.model.apply(init)
        run.train(BATCHES[1:2])
        run.model.middle.weight.data.copy_(values(WIDTH, WIDTH))
        with torch.no_grad():
            run.model.head.weight.set_(values(WIDTH, WIDTH))
        run.train(BATCHES[2:4])

    assert_same_story(story, budget="offload")


@habit("Progressive unfreezing, a new param group for each layer", area="Parameters")
@pytest.mark.filterwarnings("ignore:.*began to require a gradient")
def test_progressive_unfreezing_with_a_group_for_each_layer() -> None:
    def story(run: Run) -> None:
        model = run.model
        model.requires_grad_(False)
        model.head.requires_grad_(True)
        new_optimizer(run)
        run.train(BATCHES[:2])
        for index, layer in enumerate((model.middle, model.first)):
            layer.requires_grad_(True)
            run.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
            with torch.no_grad():
                run.compiled(BATCHES[0])
            run.train(BATCHES[2 + 2 * index : 4 + 2 * index])

    assert_same_story(story, budget="offload")


@habit(
    "`model.double()` or `half()` after the first step",
    area="Parameters",
    refused=UnsupportedModel,
    says="Cast or resize the model first",
)
def test_casting_after_the_first_step() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        run.model.double()
        new_optimizer(run)
        run.train([BATCHES[1].double()])

    assert_same_story(story, budget="offload")


@habit("`model.to('cpu')`, `model.float()` between steps", area="Parameters")
def test_conversions_that_change_nothing() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:1])
        run.model.to("cpu").float()
        run.train(BATCHES[1:3])

    assert_same_story(story, budget="offload")


@habit("`load_state_dict(other.state_dict(), assign=True)`: two models that train the same memory",
       area="Parameters", note="if the home of the parameters is the host, the first call raises "
       "`ParameterReplaced` and the next works")  # fmt: skip
@each_budget
def test_sharing_the_memory_of_a_live_model(budget: str) -> None:
    def story(run: Run) -> None:
        other = layers()
        run.train(BATCHES[:2])
        run.model.load_state_dict(other.state_dict(), assign=True)
        new_optimizer(run)
        both = [*run.model.parameters(), *other.parameters()]
        for batch in BATCHES[2:4]:
            try:
                loss = run.compiled(batch)
            except ParameterReplaced as error:  # once: the next call is captured with both models in one memory
                refusals.append(str(error))
                loss = run.compiled(batch)
            (loss + other(batch)).backward()
            run.optimizer.step()
            for param in both:
                param.grad = None
            run.losses += [loss.detach(), *(param.detach().sum() for param in both)]

    refusals: list[str] = []
    assert_same_story(story, budget=budget)
    assert len(refusals) == (budget == "offload")
    assert all("it shares memory with a parameter of another model" in text for text in refusals)


def test_sharing_the_memory_of_a_live_model_from_the_start() -> None:
    def story(run: Run) -> None:
        other = layers()
        run.model.load_state_dict(other.state_dict(), assign=True)
        new_optimizer(run)
        run.train(BATCHES[:2])
        run.losses += [param.detach().sum() for param in other.parameters()]

    assert_same_story(story, budget="offload")


def test_memory_that_a_deleted_model_shared_moves_to_the_host() -> None:
    run = compiled(layers(), BUDGETS["offload"])
    other = layers()
    other.cycle = [other]  # a cycle: the model waits for the collector
    run.model.load_state_dict(other.state_dict(), assign=True)
    del other
    new_optimizer(run)
    run.train(BATCHES[:2])
    assert len(on_host(run)) == 6


def test_tensors_that_keep_memory_which_parameters_leave_are_warned_of() -> None:
    run = compiled(layers(), BUDGETS["offload"])
    taken = run.model.state_dict()
    with pytest.warns(elixir.ElixirWarning, match=r"first\.weight.* and 3 more move to the host, and other tensors"):
        run.train(BATCHES[:1])
    assert not torch.equal(taken["first.weight"], run.model.first.weight)


class Summed(nn.Module):
    """Parameters in a list and in a dict, which grow."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(values(WIDTH, WIDTH))])
        self.named = nn.ParameterDict({"scale": nn.Parameter(values(WIDTH))})
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight)
        for scale in self.named.values():
            x = x * scale
        return self.head(x).square().mean()


@habit("`nn.ParameterList` and `nn.ParameterDict` that grow between steps", area="Parameters")
def test_lists_of_parameters_that_grow() -> None:
    def story(run: Run) -> None:
        run.train(BATCHES[:2])
        run.model.listed.append(nn.Parameter(values(WIDTH, WIDTH)))
        run.model.named["more"] = nn.Parameter(values(WIDTH))
        new_optimizer(run)
        run.train(BATCHES[2:4])

    torch.manual_seed(0)
    assert_same_story(story, budget="offload", model=Summed())


def test_values_of_a_parameter_on_the_host_are_no_buffer() -> None:
    model = elixir.prepare(layers())
    slot = next(iter(executor_of(model).slots.values()))
    gathered = GATHER(slot.handle(), list(slot.param.shape), list(slot.param.stride()), slot.key)
    with pytest.raises(UnsupportedModel, match="buffer original of Module"):
        nn.Module().register_buffer("original", gathered)
