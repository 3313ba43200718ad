"""Rewritten programs: goldens, programs that were broken on purpose, and the step that the planner counts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.base.errors import IllegalSchedule, InvalidPlan
from elixir_compile.graph.capture.additions import add_extra_saved
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.graph.capture.convert import step_graph
from elixir_compile.graph.capture.node_facts import TICKET, parameter, ticket
from elixir_compile.graph.capture.rewire import by_owner, path_to
from elixir_compile.graph.capture.tracing import trace_step
from elixir_compile.graph.rewrite.program import actions_of, check, write_program
from elixir_compile.graph.rewrite.regions import RECOMPUTED, SlicedValues, partition_of, split_regions
from elixir_compile.ir import (
    Activations,
    GroupId,
    Phase,
    Region,
    RegionId,
    Saving,
    StepGraph,
    StorageId,
    Verb,
    fingerprint,
)
from elixir_compile.step import Depth, as_run, fused, repeats, verify
from tests.covering import covering
from tests.fx.captures import GOLDENS, Pair, Shared, record_of, tight
from tests.fx.handmade import CHOICES, activations, from_host, offload, planned, to_depth
from tests.run.models import Stack, hf_batches, seeded, small_gpt2, vectors

# ----------------------------------------------------------------------------------------------------------------------
# `rewrite`: programs as text against goldens, and `check` against programs that were broken on purpose.


CASES: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "pair": (Pair, torch.ones(3, 4)),
    "shared": (Shared, torch.zeros(2, 3, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_the_golden_one(name: str, request: pytest.FixtureRequest) -> None:
    model, batch = CASES[name]
    record = tight(model, batch)
    golden = GOLDENS / f"{name}.txt"
    assert str(record) + "\n" == golden.read_text(encoding="utf-8")


def test_a_program_runs_what_it_prints() -> None:
    record = tight(Pair, torch.ones(3, 4))
    code = record.forward.code
    assert code.index("executor.gather('b0')") < code.index("executor.wait(b0_gather)") < code.index("self.fwd_0")
    assert code.index("self.fwd_0") < code.index("executor.release('b0')")


def node(program: fx.GraphModule, verb: str, what: str | None = None) -> fx.Node:
    calls = program.graph.find_nodes(op="call_method", target=verb)
    return next(call for call in calls if what is None or call.args[1] == what)


def swap_two_releases(program: fx.GraphModule) -> None:
    first, last = program.graph.find_nodes(op="call_method", target="release")[:2]
    last.append(first)


def drop_a_release(program: fx.GraphModule) -> None:
    program.graph.erase_node(node(program, "release"))


def wait_twice(program: fx.GraphModule) -> None:
    wait = node(program, "wait")
    with program.graph.inserting_after(wait):
        program.graph.call_method("wait", wait.args)


def release_before_the_region(program: fx.GraphModule) -> None:
    release = node(program, "release", "b0")
    program.graph.find_nodes(op="call_module", target="fwd_0")[0].prepend(release)


BREAKS: dict[Callable[[fx.GraphModule], None], str] = {
    swap_two_releases: "where the schedule has",
    drop_a_release: "where the schedule has|actions, the schedule has",
    wait_twice: "where the schedule has|waited for 2 times",
    release_before_the_region: "where the schedule has|reads bucket b0 after",
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda break_it: break_it.__name__)
def test_check_refuses_a_broken_program(break_it: Callable[[fx.GraphModule], None]) -> None:
    record = tight(Pair, torch.ones(3, 4))
    check(record.forward, record.plan, Phase.FORWARD)
    break_it(record.forward)
    with pytest.raises(IllegalSchedule, match=BREAKS[break_it]):
        check(record.forward, record.plan, Phase.FORWARD)


def drop_an_offload(program: fx.GraphModule) -> None:
    offload = node(program, "offload_saved")
    for user in list(offload.users):
        program.graph.erase_node(user)
    program.graph.erase_node(offload)


def offload_another(program: fx.GraphModule) -> None:
    offload = node(program, "offload_saved")
    offload.args = (offload.args[0], "down.matmul.other", offload.args[2])


@pytest.mark.parametrize(
    "break_it", [wait_twice, drop_an_offload, offload_another], ids=lambda break_it: break_it.__name__
)
def test_check_refuses_a_program_with_broken_offloads(
    break_it: Callable[[fx.GraphModule], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned(monkeypatch, offload):
        record = record_of(Pair(), torch.ones(3, 4))
    check(record.forward, record.plan, Phase.FORWARD)
    check(record.backward, record.plan, Phase.BACKWARD)
    break_it(record.forward)
    with pytest.raises(IllegalSchedule, match=r"where the schedule has|actions, the schedule has|waited for 2 times"):
        check(record.forward, record.plan, Phase.FORWARD)


def test_offloads_of_activations_behind_the_forward_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch, offload):
        plan = record_of(Pair(), torch.ones(3, 4)).plan
    (schedule,) = plan.schedules
    first = next(action for action in schedule.actions if action.verb is Verb.OFFLOAD)
    rest = [action for action in schedule.actions if action is not first]
    late = replace(plan, schedules=(replace(schedule, actions=(*rest, first)),))
    with pytest.raises(IllegalSchedule, match="behind the forward"):
        actions_of(late, Phase.FORWARD)


def test_a_region_that_reads_what_is_away_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier refuses the schedule; a read that it does not know of would be refused by name as well."""
    with planned(monkeypatch, offload):
        record = record_of(Pair(), torch.ones(3, 4))
    captured, (schedule,) = record.active.captured, record.plan.schedules
    back = next(place for place, action in enumerate(schedule.actions) if action.verb is Verb.PREFETCH)
    # The last two actions of a group are its prefetch and the wait for it.
    group = schedule.actions[back].target
    actions = [*schedule.actions[:back], *(own for own in schedule.actions[back:] if own.target != group)]
    broken = replace(record.plan, schedules=(replace(schedule, actions=tuple(actions)),))
    with pytest.raises(IllegalSchedule, match="which is on the host"):
        verify(record.graph, broken)
    halves = partition_of(captured, record.graph, broken.activations)
    keys = {name: key for key, name in captured.param_names.items()}
    with pytest.raises(IllegalSchedule, match=rf"bwd\.\d reads relu, .* in {group}, which is offloaded and not back"):
        write_program(halves, broken, Phase.BACKWARD, keys, lambda region: region.module, None, SlicedValues())


def test_a_program_shows_offloads_and_prefetches(monkeypatch: pytest.MonkeyPatch) -> None:
    with planned(monkeypatch, offload):
        record = record_of(Pair(), torch.ones(3, 4))
    (group,) = {group.id for group in record.plan.activations}
    text = str(record)
    assert f"offload_saved('{group}', [relu])" in text
    assert f"prefetch(elixir_ticket, '{group}')" in text
    assert text.index("# d2h") < text.index("backward(args)") < text.index("prefetch(")


# ----------------------------------------------------------------------------------------------------------------------
# `graph.rewrite.regions` and `graph.capture.additions`: the rewritten halves are the step that the planner counts.


class Attending(nn.Module):
    """One matrix product cut in three, which attention reads; nothing saved leads back to the whole product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.qkv(x)
        q, k, v = (part.view(2, 8, 2, 8).transpose(1, 2) for part in whole.split(16, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return (self.out(mixed.transpose(1, 2).reshape(2, 8, 16)) + (whole * 2).mean()).square().sum()


def gpt2_batch() -> dict[str, Any]:
    return dict(hf_batches(1)[0])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "attending": (Attending, lambda: {"x": torch.randn(2, 8, 16)}),
    "gpt2": (lambda: small_gpt2(num_layers=2), gpt2_batch),
    "stack": (lambda: seeded(Stack), lambda: {"x": vectors(1)[0]}),
}


def as_it_is(graph: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """Change nothing of Dynamo's graph."""
    return inputs


def traced(name: str, inner: str) -> Captured:
    make, batch = MODELS[name]
    return trace_step(elixir.prepare(make()), (), batch(), name=name, inner=inner, edit=as_it_is)


def spared(name: str, inner: str = "aot_eager") -> tuple[Captured, StepGraph]:
    captured = traced(name, inner)
    add_extra_saved(captured)
    return captured, step_graph(captured, {})


@pytest.mark.parametrize(("name", "inner"), covering(list(MODELS), ["aot_eager", "inductor"]))
def test_extra_saved_values_do_not_change_the_step(name: str, inner: str) -> None:
    captured = traced(name, inner)
    before = step_graph(captured, {})
    num_before = len(captured.forward.graph.output_node().args[0])
    add_extra_saved(captured)
    after = step_graph(captured, {})
    has_spares = len(captured.forward.graph.output_node().args[0]) > num_before
    assert has_spares == ((name, inner) != ("stack", "aot_eager"))  # which saves all that a layer can be made from
    assert after == before
    assert fingerprint(after) == fingerprint(before)


def test_both_halves_list_saved_values_in_the_same_order() -> None:
    captured, _ = spared("attending")
    saved = captured.forward.graph.output_node().args[0][captured.num_outputs :]
    placeholders = [str(node.target) for node in captured.backward.graph.find_nodes(op="placeholder")]
    assert saved[0].target is ticket
    assert [node.name for node in saved[1:]] == placeholders[1 : len(saved)]
    assert placeholders[0] == TICKET


@pytest.mark.parametrize(("name", "inner"), covering(list(MODELS), ["inductor", "aot_eager"]))
def test_the_program_equals_the_recomputed_step(name: str, inner: str) -> None:
    """Op for op: ids, reads, writes and bytes of the rewritten halves are those of `as_run`."""
    captured, graph = spared(name, inner)
    num_repeats = 0
    for choose in CHOICES.values():
        chosen = activations(graph, choose)
        planned = as_run(graph, chosen)
        written = fused(step_graph(partition_of(captured, graph, chosen).captured, {}))
        assert [op.id for op in written.ops] == [op.id for op in planned.ops]
        for ours, theirs in zip(written.ops, planned.ops, strict=True):
            assert (ours.reads, ours.writes, ours.moved_bytes) == (theirs.reads, theirs.writes, theirs.moved_bytes)
        num_repeats += len(repeats(graph, chosen))
    assert num_repeats > 0


def test_the_forward_returns_only_values_that_the_backward_reads() -> None:
    captured, graph = spared("stack")
    halves = partition_of(captured, graph, activations(graph, to_depth(Depth.MATMUL)))
    outputs = halves.captured.forward.graph.output_node().args[0][captured.num_outputs :]
    placeholders = halves.captured.backward.graph.find_nodes(op="placeholder")
    read = {str(node.target) for node in placeholders if node.users}
    assert {node.name for node in outputs if isinstance(node, fx.Node)} - {"ticket"} <= read
    assert outputs.count(None) > 0


def test_recomputed_nodes_are_marked_in_the_region_that_runs_them() -> None:
    captured, graph = spared("stack")
    chosen = activations(graph, to_depth(Depth.MATMUL))
    backward = partition_of(captured, graph, chosen).captured.backward
    ops = [op for op in as_run(graph, chosen).ops if op.phase is Phase.BACKWARD]
    spans = [Region(id=RegionId("bwd.0"), phase=Phase.BACKWARD, first=ops[0].id, last=ops[-1].id, buckets=())]
    (region,) = split_regions(backward, spans, Phase.BACKWARD).values()
    marked = {node.name for node in region.module.graph.nodes if node.meta.get(RECOMPUTED)}
    repeated = {repeat.op for repeat in repeats(graph, chosen)}
    assert len(marked) >= len(repeated) > 1
    assert marked.isdisjoint(node.name for node in captured.backward.graph.nodes)


def test_the_ticket_names_the_parameters_that_repeated_ops_read() -> None:
    captured, graph = spared("stack")
    halves = partition_of(captured, graph, activations(graph, to_depth(Depth.MATMUL))).captured
    keys = [half.forward.graph.find_nodes(op="call_function", target=ticket)[0].args[0] for half in (captured, halves)]
    read = {node.args[0] for node in halves.backward.graph.find_nodes(op="call_function", target=parameter)}
    assert set(keys[0]) < set(keys[1])
    assert read <= set(keys[1])


def test_rewriting_leaves_the_capture_as_it_is() -> None:
    captured, graph = spared("gpt2")
    graphs = captured.forward.graph, captured.backward.graph
    code = [each.python_code("self").src for each in graphs]
    partition_of(captured, graph, activations(graph, from_host))
    assert [each.python_code("self").src for each in graphs] == code


def test_recomputing_an_op_that_must_run_once_is_refused() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(self.up(x), 0.5).sum()

    captured = trace_step(
        elixir.prepare(Dropping()), (torch.randn(3, 4),), {}, name="d", inner="aot_eager", edit=as_it_is
    )
    add_extra_saved(captured)
    graph = step_graph(captured, {})
    mask = next(op for op in graph.ops if op.once)
    size = sum(storage.nbytes for storage in graph.storages if storage.id in mask.writes)
    saved = [name for name in mask.writes if any(s.id == name and s.kind == "saved" for s in graph.storages)]
    assert saved
    group = Activations(id=GroupId("mask"), storages=tuple(map(StorageId, saved)), nbytes=size, saving=Saving.RECOMPUTE)
    with pytest.raises(InvalidPlan, match="must not run twice"):
        partition_of(captured, graph, (group,))


def graph_of_views() -> dict[str, fx.Node]:
    """x -> mm; view, permute and a slice of it."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        mm = torch.ops.aten.mm.default(x, x)
        view = torch.ops.aten.view.default(mm, [2, 2, 4])
        permute = torch.ops.aten.permute.default(view, [0, 2, 1])
        part = torch.ops.aten.slice.Tensor(view, 2, 0, 2)
        return permute, part

    module = fx.symbolic_trace(forward)
    fx.passes.shape_prop.ShapeProp(module).propagate(torch.ones(4, 4))
    for node in module.graph.nodes:
        if "tensor_meta" in node.meta and node.op != "output":
            node.meta["val"] = torch.empty(node.meta["tensor_meta"].shape)
    return {node.name.removesuffix("_default").removesuffix("_tensor"): node for node in module.graph.nodes}


def test_a_path_undoes_views_and_ignores_fake_addresses() -> None:
    nodes = graph_of_views()
    mm, view, permute, part = nodes["mm"], nodes["view"], nodes["permute"], nodes["slice"]
    back = path_to(mm, by_owner([permute]), ())
    assert back is not None
    assert (back.source, back.undo, back.redo) == (permute, (permute, view), ())
    across = path_to(part, by_owner([permute]), ())
    assert across is not None
    assert (across.undo, across.redo) == ((permute,), (part,))
    assert path_to(view, by_owner([part]), ()) is None
