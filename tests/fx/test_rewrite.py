"""`rewrite`: programs as text against goldens, and `check` against programs that were broken on purpose."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.graph.rewrite.micro_batches import SlicedValues
from elixir_compile.graph.rewrite.program import actions_of, check, write_program
from elixir_compile.graph.rewrite.regions import partition_of
from elixir_compile.ir import Phase, Verb
from elixir_compile.step import verify
from tests.fx.captures import GOLDENS, Pair, Shared, record_of, tight
from tests.fx.handmade import offload, planned

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
