"""The labels of a measured step, and the bytes of each, are those of the simulated step of its plan."""

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.options import Planner
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import InnerVerb, Lane, Plan, Record, Tally, Tier, Update, Verb, tallies, verb_of
from elixir_compile.runtime.recording import Ledger, Taken
from elixir_compile.step.seconds import Drawing, simulate
from tests.run.races.combinations import Combination, batches_of, wide
from tests.run.training import hybrid_adamw, loss_of
from tests.run.updating import small_buckets

SEARCHES = ("milp", "greedy")


@dataclass(frozen=True, slots=True)
class Case:
    planner: str
    update: Update
    state: str = "placed"
    """`placed` by the planner; `disk`: all on disk; `streamed`: of every second bucket on the host, and streamed."""
    activations: str = "keep"
    micro_batches: int = 1

    def __str__(self) -> str:
        extra = f"-in{self.micro_batches}" if self.micro_batches > 1 else ""
        return f"{self.planner}-{self.update}-{self.state}-{self.activations}{extra}"

    def decide(self, plan: Plan) -> Plan:
        """Return `plan` with the update mode of the case, and state where it wants it."""
        homes = list(plan.placements)
        for number, home in enumerate(homes):
            if self.state == "disk":
                homes[number] = replace(home, optim=Tier.DISK, streamed=False)
            elif self.state == "streamed" and number % 2 == 0:
                homes[number] = replace(home, optim=Tier.HOST, streamed=True)
        return replace(plan, placements=tuple(homes), update=self.update)


QUICK = (
    Case("milp", Update.ACROSS_STEPS, "streamed"),
    Case("zero3_offload", Update.IN_BACKWARD, "disk"),
    Case("keep_all", Update.AFTER_BACKWARD),
    Case("greedy", Update.IN_BACKWARD, activations="offload", micro_batches=4),
)
ALL = tuple(
    dict.fromkeys(
        (
            *QUICK,
            *(Case(*case) for case in product(get_args(Planner), Update, ("placed", "disk", "streamed"))),
            *(Case("greedy", update, activations=saving) for update in Update for saving in ("offload", "recompute")),
        )
    )
)


@dataclass(frozen=True, slots=True)
class Steps:
    """A step as it is simulated, and as it is measured."""

    simulated: Record
    measured: Record
    taken: tuple[Taken, ...]
    """The blocks of device memory that the measured step took for actions."""


def steps_of(case: Case, folder: Path) -> Steps:
    """Return a step of `case`, simulated and measured."""
    batches = batches_of(Combination(update=case.update), 3)
    model = elixir.prepare(wide())
    torch._dynamo.reset()
    # Another test may have left a note that gradients of this step stay from earlier backward passes.
    options: dict[str, Any] = {
        "inner": "aot_eager", "report": False, "replan": False, "planner": case.planner, "accumulate": False,
        "activations": case.activations, "micro_batches": case.micro_batches,
    }  # fmt: skip
    if case.state == "disk":
        options["disk_path"] = folder
    if case.planner in SEARCHES:
        probe = torch.compile(elixir.prepare(wide()), backend="elixir", options={**options, "device_memory": 1})
        with small_buckets(lambda plan: plan), pytest.raises(elixir.NoFeasiblePlan) as raised:
            probe(batches[0])
        options["device_memory"] = int(1.05 * raised.value.needed_bytes)
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer: Any = hybrid_adamw(model.parameters())

    def step(batch: torch.Tensor) -> None:
        loss_of(compiled, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with small_buckets(case.decide):
        for batch in batches[:2]:
            step(batch)
        optimizer.wait()
        recording = executor_of(model).ledger.start_recording()
        measured = elixir.measure_step(lambda: step(batches[2]))
        recording.end()
    active = model_of(model).graphs[-1].active
    simulated = simulate(active.graph, active.plan, active.problem.cluster)
    return Steps(simulated, measured, tuple(recording.taken))


def graphs_of(record: Record) -> Mapping[tuple[Lane, str], set[str]]:
    """Return the graphs of the spans of each lane and label."""
    found: dict[tuple[Lane, str], set[str]] = {}
    for span in record.spans:
        if span.lane is not Lane.CALLER:
            found.setdefault((span.lane, span.label), set()).add(span.graph)
    return found


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL],  # 1 s of CPU time each
    ids=str,
)
def test_a_measured_step_has_the_labels_and_the_bytes_of_its_plan(case: Case, tmp_path: Path) -> None:
    steps = steps_of(case, tmp_path)
    simulated, measured = steps.simulated, steps.measured
    assert dict(tallies(measured.spans)) == dict(tallies(simulated.spans))
    assert graphs_of(measured) == graphs_of(simulated)
    planned = {verb: simulated.counts.get(verb, 0) for verb in ("gather", "release", "reduce", "offload", "prefetch")}
    assert {verb: measured.counts.get(verb, 0) for verb in planned} == planned
    verbs = {verb_of(span.label) for span in measured.spans}
    assert (InnerVerb.WRITE in verbs) == (case.state == "disk")
    assert (Verb.PREFETCH in verbs) == (case.activations == "offload")
    # A copy to the device has memory of its own there, except of state, which passes through rooms for all buckets.
    placed = Counter(block.label for block in steps.taken)
    arriving = {span.label for span in measured.spans if span.lane is Lane.H2D and not span.label.endswith(".state")}
    assert placed.keys() >= arriving
    gathers = {name: num for name, num in placed.items() if name in arriving and verb_of(name) == Verb.GATHER}
    assert gathers == {
        name: tally.times
        for (lane, name), tally in tallies(measured.spans).items()
        if lane is Lane.H2D and name in gathers
    }
    assert case.planner != "zero3_offload" or len(gathers) == 4


@pytest.mark.parametrize("owner", [Ledger, Drawing])
def test_a_span_that_either_side_drops_shows(owner: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the release of one bucket on one side, the two differ."""
    name = "_timed" if owner is Ledger else "add"
    usual = getattr(owner, name)

    def without(self: Any, lane: Any, label: str, *args: Any, **more: Any) -> Any:
        dropped = (label if owner is Ledger else lane.label(label)) == "release b1"
        return (nullcontext() if owner is Ledger else None) if dropped else usual(self, lane, label, *args, **more)

    monkeypatch.setattr(owner, name, without)
    steps = steps_of(Case("zero3_offload", Update.AFTER_BACKWARD), tmp_path)
    found = [tallies(record.spans) for record in (steps.simulated, steps.measured)]
    assert found[0] != found[1]
    assert {*found[0].items()} ^ {*found[1].items()} == {((Lane.COMPUTE, "release b1"), Tally(2, 0))}
