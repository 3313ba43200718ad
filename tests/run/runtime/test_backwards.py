"""Forwards and backwards in every order, what an exception leaves behind, and plans for something else."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.options import Options, PlanUse
from elixir_compile.base.units import GIB
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import BackwardOrder, Origin, Plan, Record, StepGraph, Tier, record_to_json
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search.problem import question_of
from elixir_compile.search.reasons import predicted
from elixir_compile.session.plan_files import load_plan_for, load_plan_or_record, load_question, question_path
from tests.pure.problems import chain_of, problem_of
from tests.pure.step.test_calls import small_pair
from tests.run.models import Stack, seeded, small_gpt2, vectors
from tests.run.training import (
    Run,
    Step,
    assert_offloads,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_torch,
    hybrid_adamw,
    loss_of,
    plain_step,
    planned_peak_bytes,
    tight_bytes,
)

# ----------------------------------------------------------------------------------------------------------------------
# Forwards and backwards in every order that a training loop uses, hooks, and what an exception leaves behind.


Compiled = Callable[..., torch.Tensor]


def two_forwards_then_one_backward(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch) + 3 * loss_of(compiled, 2 * batch)
    loss.backward()
    return finish(optimizer, loss)


def two_forwards_then_two_backwards(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    first, second = loss_of(compiled, batch), loss_of(compiled, 2 * batch)
    first.backward()
    second.backward()
    return finish(optimizer, first + second)


def two_forwards_then_two_backwards_in_reverse(
    compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any
) -> torch.Tensor:
    first, second = loss_of(compiled, batch), loss_of(compiled, 2 * batch)
    second.backward()
    first.backward()
    return finish(optimizer, first + second)


def one_forward_whose_graph_is_used_twice(
    compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any
) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    return finish(optimizer, loss)


def four_micro_batches(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    total = torch.zeros(())
    for part in batch.split(2):
        loss = loss_of(compiled, part) / 4
        loss.backward()
        total += loss.detach()
    return finish(optimizer, total)


def gradients_zeroed_in_place(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def a_forward_without_backward(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss_of(compiled, 5 * batch)
    return plain_step(compiled, optimizer, batch)


def finish(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(
    "step",
    [
        two_forwards_then_one_backward,
        two_forwards_then_two_backwards,
        two_forwards_then_two_backwards_in_reverse,
        one_forward_whose_graph_is_used_twice,
        four_micro_batches,
        gradients_zeroed_in_place,
        a_forward_without_backward,
    ],
)
def test_weights_equal_those_of_torch(step: Step) -> None:
    # Without donated buffers, which is how torch runs a graph twice.
    with torch._functorch.config.patch(donated_buffer=False):
        model, batches = seeded(Stack), vectors()
        expected = by_torch(model).train(batches, step)
        # A forward whose backward is still to come holds what it saved; 1.3 times the budget of one is enough for two.
        budget = int(1.3 * tight_bytes(model, batches[0]))
        got = by_elixir(model, device_memory=budget).train(batches, step)
    assert_offloads(got)
    assert_same(expected, got)


def test_hooks_on_parameters_fire_with_the_gradient() -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    seen: dict[int, list[torch.Tensor]] = {}
    for run in (expected, got):
        params = dict(run.model.named_parameters())
        told = seen.setdefault(id(run), [])
        params["head.weight"].register_hook(lambda grad: 2 * grad)
        params["blocks.0.up.weight"].register_hook(lambda grad, told=told: told.append(grad.clone()))
        params["blocks.1.up.bias"].register_post_accumulate_grad_hook(
            lambda param, told=told: told.append(param.grad.clone())
        )
        run.train(batches)
    assert_offloads(got)
    assert_same(expected, got)
    assert len(seen[id(got)]) == 2 * len(batches)
    for ours, theirs in zip(sorted_by_size(seen[id(got)]), sorted_by_size(seen[id(expected)]), strict=True):
        assert torch.equal(ours, theirs)


def sorted_by_size(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return sorted(tensors, key=torch.Tensor.numel)


def test_a_gradient_still_referenced_keeps_its_values() -> None:
    model, batches = seeded(Stack), vectors(4)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:1])
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        held.extend((param.grad, param.grad.clone()) for param in run.model.parameters())
        return finish(optimizer, loss)

    run.train(batches[1:], step)
    assert_offloads(run)
    assert all(torch.equal(grad, copied) for grad, copied in held)


def test_a_step_between_forward_and_backward_is_refused() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:2])
    got = by_elixir(model, device_memory=int(1.3 * tight_bytes(model, batches[0]))).train(batches[:1])
    loss = loss_of(got.compiled, batches[1])
    loss_of(got.compiled, batches[1]).backward()
    got.optimizer.step()
    with pytest.raises(elixir.StaleParameters, match=r"before `optimizer.step\(\)`"):
        loss.backward()
    got.optimizer.zero_grad()
    assert_same_tensors(expected.weights, got.weights)
    expected.train(batches[2:])
    got.train(batches[2:])
    assert_same_tensors(expected.weights, got.weights)


def test_a_resident_copy_is_never_older_than_its_parameter() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches, a_forward_without_backward)
    full = planned_peak_bytes(by_elixir(model).train(batches[:1]))
    # The paper's rule keeps copies first.
    budget = {"device_memory": int(0.7 * full), "planner": "elixir"}
    got = by_elixir(model, **budget).train(batches, a_forward_without_backward)
    placements = elixir.compilations(got.model)[0].plan.placements
    assert any(placement.param is Tier.HOST and placement.resident for placement in placements)
    assert_same(expected, got)


class Failing(torch.autograd.Function):
    """Passes values through and fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the backward")


def no_offload_in_flight(run: Run) -> bool:
    executor = executor_of(run.model)
    return all(bucket.gathered is None for bucket in executor.buckets if bucket.is_away)


@pytest.mark.parametrize("verb", ["wait", "release"])
def test_an_exception_in_the_forward_leaves_a_usable_model(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:3])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    fail_at_call(got, verb, 2, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        loss_of(got.compiled, batches[3])
    monkeypatch.undo()
    assert no_offload_in_flight(got)
    assert_same(expected, got.train(batches[2:3]))


@pytest.mark.parametrize("verb", ["reduce", "offload", "release"])
def test_an_exception_in_the_backward_leaves_a_usable_model(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:3])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    loss = loss_of(got.compiled, batches[3])
    fail_at_call(got, verb, 2, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    monkeypatch.undo()
    assert no_offload_in_flight(got)
    assert all(param.grad is None for param in got.model.parameters())
    assert_same(expected, got.train(batches[2:3]))


def fail_at_call(run: Run, verb: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executor's `verb` fail when it is called the `number`-th time."""
    executor = executor_of(run.model)
    act, calls = getattr(executor, verb), []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            raise ZeroDivisionError(verb)
        return act(*args)

    monkeypatch.setattr(executor, verb, failing)


def test_an_exception_beside_the_compiled_backward_leaves_a_usable_model() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:3])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    x = batches[3].clone().requires_grad_()
    with pytest.raises(ZeroDivisionError, match="in the backward"):
        loss_of(got.compiled, Failing.apply(x)).backward()
    got.optimizer.zero_grad()
    assert_same(expected, got.train(batches[2:3]))


def test_two_models_of_one_class_do_not_share_parameters() -> None:
    first, second = seeded(Stack), Stack()
    batches = vectors()
    expected = [by_torch(model).train(batches) for model in (first, second)]
    torch._dynamo.reset()
    got = []
    for model in (first, second):
        options = {"inner": "aot_eager", "report": False}
        compiled = torch.compile(model, backend="elixir", options=options)
        got.append(Run(model=model, compiled=compiled, optimizer=hybrid_adamw(model.parameters())))
    for batch in batches:
        for run in got:
            run.train([batch])
    for theirs, ours in zip(expected, got, strict=True):
        assert_same(theirs, ours)
        assert len(elixir.compilations(ours.model)) == 1


@pytest.mark.slow
def test_two_models_in_one_process_train_in_turn() -> None:
    gpt, stack = small_gpt2(), seeded(Stack)
    ids = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (3, 2, 16))]
    expected = by_torch(gpt).train(ids), by_torch(stack).train(vectors())
    budgets = tight_bytes(gpt, ids[0]), tight_bytes(stack, vectors()[0])
    got = by_elixir(gpt, device_memory=budgets[0]), by_elixir(stack, device_memory=budgets[1])
    for batch, vector in zip(ids, vectors(), strict=True):
        got[0].train([batch])
        got[1].train([vector])
    for theirs, ours in zip(expected, got, strict=True):
        assert_offloads(ours)
        assert_same(theirs, ours)


def test_threads_train_one_model_in_turn() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    failures: list[BaseException] = []

    def train(batch: torch.Tensor) -> None:
        try:
            got.train([batch])
        except BaseException as error:
            failures.append(error)

    for batch in batches:
        thread = threading.Thread(target=train, args=(batch,))
        thread.start()
        thread.join()
    assert not failures
    assert_offloads(got)
    assert_same(expected, got)


def test_a_second_forward_offloads_the_first_if_both_do_not_fit() -> None:
    """Under the least budget of one, what waits goes to the host, and nothing is left of a forward without backward."""
    model, batches = seeded(Stack), vectors(3)
    expected = by_torch(model).train(batches, two_forwards_then_two_backwards)
    budget_bytes = tight_bytes(model, batches[0])
    got = by_elixir(model, device_memory=budget_bytes).train(batches[:1], two_forwards_then_two_backwards)
    loss_of(got.compiled, batches[0])
    got.train(batches[1:], two_forwards_then_two_backwards)
    assert_same(expected, got)
    assert planned_peak_bytes(got) <= budget_bytes
    assert executor_of(got.model).saved.num_outstanding == 0


def test_gradients_of_inputs_are_those_of_torch() -> None:
    model, batch = seeded(Stack), vectors(1)[0]
    grads = []
    for run in (by_torch(model), by_elixir(model, device_memory=tight_bytes(model, batch))):
        x = batch.clone().requires_grad_()
        nn.functional.mse_loss(loss_of(run.compiled, x), torch.ones(())).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_retain_graph_works_after_a_backward_without_it(inner: str) -> None:
    """The first backward decides how AOTAutograd compiles it, not what later ones may do."""
    model = Stack()
    compiled = torch.compile(model, backend="elixir", options={"inner": inner, "plan_cache": False, "report": False})
    (batch,) = vectors()[:1]
    for retains in (False, True, False, True):
        model.zero_grad()
        loss = loss_of(compiled, batch)
        loss.backward(retain_graph=retains)
        once = [param.grad.clone() for param in model.parameters()]
        if retains:
            loss.backward()
            for param, grad in zip(model.parameters(), once, strict=True):
                torch.testing.assert_close(param.grad, 2 * grad)


# ----------------------------------------------------------------------------------------------------------------------
# `saved`: a plan for something else is refused, and the error names both.


GRAPH = chain_of(3)
PROBLEM = problem_of(GRAPH)
PLAN = plan(PROBLEM, "greedy")
ASKED = question_of(PROBLEM, Options())
HERE = profile_for("cuda", GIB, GIB, "cuda")


def pair() -> Cluster:
    """Return two of the same device on one host."""
    return replace(HERE, nodes=(replace(HERE.nodes[0], num_devices=2, peer=HERE.h2d),))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    elixir.save_plan(PLAN, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def problem_on(cluster: Cluster, graph: StepGraph = GRAPH, **more: Any) -> Problem:
    return replace(PROBLEM, graph=graph, cluster=cluster, **more)


def on_device(name: str, memory_bytes: int) -> Cluster:
    """Return a machine whose driver calls its device `name`."""
    found = profile_for("cuda", memory_bytes, GIB, name)
    return replace(found, nodes=(replace(found.nodes[0], device=replace(found.device, name=name)),))


USES = get_args(PlanUse)


@pytest.mark.parametrize("use", USES)
def test_a_plan_for_the_same_graph_and_machine_is_read(path: Path, use: PlanUse) -> None:
    assert load_plan_for(path, problem_on(HERE), use) == PLAN


@pytest.mark.parametrize("use", USES)
def test_a_plan_for_another_model_is_refused(path: Path, use: PlanUse) -> None:
    with pytest.raises(elixir.PlanMismatch, match="another graph") as caught:
        load_plan_for(path, problem_on(HERE, chain_of(2)), use)
    assert caught.value.expected == PLAN.graph
    assert caught.value.got != PLAN.graph


def test_a_plan_for_another_graph_of_the_model_is_a_start_unless_it_has_to_be_exact(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # The ops have other names for the compiler: nothing of the model has changed.
    graph = replace(GRAPH, ops=tuple(replace(op, kernel=not op.kernel) for op in GRAPH.ops))
    with pytest.raises(elixir.PlanMismatch, match="another graph"):
        load_plan_for(path, problem_on(HERE, graph), "exact")
    for use, does in (("start", "the search starts from it"), ("follow", "it is followed as far as it fits")):
        with caplog.at_level(logging.INFO, "elixir_compile"):
            asked = load_plan_for(path, problem_on(HERE, graph), use)
        assert isinstance(asked, Problem)
        assert asked == problem_on(HERE, graph, start=replace(PLAN, name="plan.json"), follows_start=use == "follow")
        assert caplog.messages[-1] == f"plan.json was made for another graph of this model: {does}"


@pytest.mark.parametrize(
    ("asked", "here"),
    [
        ("h100-80g", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("a100-40g", "NVIDIA A100-SXM4-40GB"),
        ("h100-80g", "h100-80g"),
        ("NVIDIA L4", "NVIDIA L4"),
    ],
)
def test_two_names_of_a_machine_are_one_machine(
    asked: str, here: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory_bytes = (24 if "L4" in asked else 40 if "40" in asked else 80) * GIB
    made = replace(PLAN, cluster=f"1 x {asked}")
    elixir.save_plan(made, tmp_path / "plan.json")
    with caplog.at_level(logging.INFO, "elixir_compile"):
        assert load_plan_for(tmp_path / "plan.json", problem_on(on_device(here, memory_bytes)), "exact") == made
    assert not caplog.messages


def test_another_machine_is_a_line_in_the_log(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the plan fits there, it gets a new prediction; if not, it is carried over to the budget there."""
    other = profile_for("cuda", GIB, GIB, "a100")
    with pytest.raises(elixir.PlanMismatch, match="another machine: it was made for 1 x cuda, here is 1 x a100"):
        load_plan_for(path, problem_on(other), "exact")
    asked = problem_on(other, base_bytes=512)
    with caplog.at_level(logging.INFO, "elixir_compile"):
        found = load_plan_for(path, asked, "start")
    assert isinstance(found, Plan)
    assert (found.cluster, found.budget_bytes, found.placements) == ("1 x a100", asked.budget_bytes, PLAN.placements)
    assert found.prediction == predicted(asked, found)[0]
    assert found.prediction.device_peak_bytes == PLAN.prediction.device_peak_bytes + 512
    assert caplog.messages == ["plan.json was made for 1 x cuda, here is 1 x a100"]
    for tight in ({"budget_bytes": PLAN.prediction.device_peak_bytes - 1}, {"host_budget_bytes": -1}):
        started = load_plan_for(path, problem_on(other, **tight), "start")
        assert isinstance(started, Problem)
        assert started.start is not None
        assert not started.follows_start


@pytest.mark.parametrize("disk", [True, False])
def test_state_on_disk_travels_to_a_machine_with_a_disk(disk: bool, tmp_path: Path) -> None:
    away = plan(PROBLEM, "zero3_offload")
    homes = tuple(replace(home, optim=Tier.DISK) for home in away.placements)
    elixir.save_plan(replace(away, placements=homes), tmp_path / "plan.json")
    found = load_plan_for(
        tmp_path / "plan.json", problem_on(profile_for("cuda", GIB, GIB, "a100"), disk=disk), "follow"
    )
    assert isinstance(found, Plan if disk else Problem)


def test_another_number_of_ranks_names_both(path: Path) -> None:
    with pytest.raises(elixir.PlanMismatch, match=r"made for 1 \(1 x cuda\), here is 2 \(2 x cuda\)") as caught:
        load_plan_for(path, problem_on(pair()))
    assert caught.value.what == "number of ranks"


@pytest.mark.parametrize("asked", BackwardOrder)
@pytest.mark.parametrize("made_for", BackwardOrder)
def test_lean_calls_counted_for_one_order_are_no_plan_for_another(
    made_for: BackwardOrder, asked: BackwardOrder, tmp_path: Path
) -> None:
    problem, made = small_pair(made_for)
    elixir.save_plan(made, tmp_path / "plan.json")
    calls = replace(made.calls, backward_order=asked)
    if made_for in (BackwardOrder.ANY, asked):
        assert load_plan_for(tmp_path / "plan.json", replace(problem, calls=calls)) == made
    else:
        with pytest.raises(elixir.PlanMismatch, match="another order of backward passes"):
            load_plan_for(tmp_path / "plan.json", replace(problem, calls=calls))


def test_a_file_is_read_as_the_kind_that_it_names(path: Path, tmp_path: Path) -> None:
    record = Record(origin=Origin.MEASURED, step_s=1.0, device_peak_bytes=1, host_peak_bytes=1)
    (tmp_path / "record.json").write_text(record_to_json(record))
    assert load_plan_or_record(path) == PLAN
    assert load_plan_or_record(tmp_path / "record.json") == record
    (tmp_path / "other.json").write_text('{"elixir": "machine"}')
    with pytest.raises(elixir.PlanFileError, match="expected 'plan'"):
        load_plan_or_record(tmp_path / "other.json")


def test_a_plan_is_saved_with_its_question_beside_it(tmp_path: Path) -> None:
    for name, beside in (("plan.json", "plan.question.json.gz"), ("other", "other.question.json.gz")):
        assert question_path(tmp_path / name) == tmp_path / beside
        elixir.save_plan(PLAN, tmp_path / name, ASKED)
        assert (tmp_path / beside).is_file()
        assert load_question(tmp_path / name, elixir.load_plan(tmp_path / name)) == ASKED


def test_a_plan_of_before_questions_has_none(path: Path) -> None:
    assert load_question(path, PLAN) is None
    assert load_plan_for(path, problem_on(HERE)) == PLAN


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"graph": chain_of(2)}, f"the question about graph {PLAN.graph}, which plan.json"),
        ({"cluster": pair()}, "the question about machine 1 x cuda, .* got 'machine 2 x cuda'"),
        (
            {"budget_bytes": PLAN.budget_bytes + 1},
            f"about budget of bytes {PLAN.budget_bytes}, .*{PLAN.budget_bytes + 1}",
        ),
        ({"base_bytes": 7}, "about number of bytes beside the plan 0, .* got 'number of bytes beside the plan 7'"),
    ],
)
def test_a_question_that_the_plan_does_not_answer_is_refused(path: Path, change: dict[str, Any], sentence: str) -> None:
    elixir.save_plan(PLAN, path, question_of(replace(PROBLEM, **change), Options()))
    with pytest.raises(elixir.QuestionFileError, match=sentence):
        load_question(path, PLAN)


@pytest.mark.parametrize(
    "other", [plan(problem_of(chain_of(2)), "greedy"), replace(PLAN, budget_bytes=PLAN.budget_bytes + 1)]
)
def test_saving_another_plan_alone_removes_the_question_of_the_one_before(path: Path, other: Plan) -> None:
    elixir.save_plan(PLAN, path, ASKED)
    elixir.save_plan(replace(PLAN, name="renamed"), path)
    assert load_question(path, PLAN) == ASKED  # the same step, so the question still holds
    elixir.save_plan(other, path)
    assert not question_path(path).exists()


def test_what_is_no_question_file_stays_when_a_plan_is_saved_alone(path: Path) -> None:
    question_path(path).write_text("a file of somebody")
    elixir.save_plan(PLAN, path)
    assert question_path(path).read_text() == "a file of somebody"


def test_a_link_at_the_place_of_the_question_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("a file of somebody")
    question_path(path).symlink_to(victim)
    elixir.save_plan(PLAN, path, ASKED)
    assert victim.read_text() == "a file of somebody"
    assert load_question(path, PLAN) == ASKED


def test_a_question_that_cannot_be_read_names_its_file(path: Path) -> None:
    elixir.save_plan(PLAN, path, ASKED)
    question_path(path).write_bytes(question_path(path).read_bytes()[:50])
    with pytest.raises(
        elixir.QuestionFileError, match=r"plan\.question\.json\.gz, the whole file: .*; remove the file"
    ):
        load_question(path, PLAN)
    question_path(path).unlink()
    question_path(path).mkdir()
    elixir.save_plan(PLAN, path)
    with pytest.raises(elixir.QuestionFileError, match=r"plan\.question\.json\.gz: expected a file that can be read"):
        load_question(path, PLAN)
