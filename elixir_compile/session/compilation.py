"""What a user reads of a captured graph: its plan, its programs, and the bytes and seconds planned."""

from torch import fx

from elixir_compile.graph.rewrite.show import program_text
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.search.question import Question
from elixir_compile.session.outstanding import OutstandingForwards
from elixir_compile.session.planned_graph import PlannedGraph
from elixir_compile.session.profile import RegionProfile
from elixir_compile.session.variants import ActivePlan
from elixir_compile.step import MemoryTimeline, plan_timeline


class Compilation:
    """The record of a captured graph. The backend makes it; the user reads it."""

    def __init__(self, planned: PlannedGraph, loss_chunks: int | None, outstanding: OutstandingForwards) -> None:
        self._planned, self._outstanding = planned, outstanding
        self.loss_chunks = loss_chunks
        """The number of chunks of the loss; None if no loss that could be chunked was found."""

    @property
    def name(self) -> str:
        """The name of the graph: the class of the model, and a number from the second graph on."""
        return self._planned.name

    @property
    def forward(self) -> fx.GraphModule | None:
        """The program of the next forward."""
        return self._planned.programs.forward

    @property
    def backward(self) -> fx.GraphModule | None:
        """The program of the backward; None before the first backward, and for inference."""
        return self._planned.programs.backward

    @property
    def active(self) -> ActivePlan:
        """The plan in use, with its capture and problem; exists once the graph was planned."""
        return self._planned.active

    @property
    def graph(self) -> StepGraph | None:
        """The captured step, torch-free; None before it was planned."""
        return self.active.graph if self._planned.is_planned else None

    @property
    def plan(self) -> Plan | None:
        """The plan of the graph; None before it was planned."""
        return self.active.plan if self._planned.is_planned else None

    @property
    def question(self) -> Question | None:
        """What the plan answers: the graph, the machine and the budgets; None before the graph was planned."""
        return self._planned.planner.question(self.active) if self._planned.is_planned else None

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes by kind at every op under the plan."""
        return plan_timeline(self.active.graph, self.active.plan)

    @property
    def rank_peak_bytes(self) -> int:
        """The planned peak of this rank: of all stages of a pipeline that it runs and that have a plan, together, in
        the order of their schedule. Without other stages it is the peak of the plan.

        Example:
            compilation = elixir.compilations(stage)[-1]
            print(compilation.rank_peak_bytes, "of", compilation.plan.budget_bytes)
        """
        active, stages = self.active, self._outstanding.stages
        if stages is None or self.is_inference:
            return active.plan.prediction.device_peak_bytes
        return stages.peak_bytes(self._outstanding, self._outstanding.planned())

    @property
    def profile(self) -> RegionProfile | None:
        """Seconds and bytes of each region, measured before planning; None without the option `profile_regions`."""
        return self._planned.planner.profile

    @property
    def is_inference(self) -> bool:
        """Whether the graph has no backward."""
        return self._planned.is_inference

    @property
    def is_superseded(self) -> bool:
        """Whether a later capture of the same step took its place."""
        return self._planned.is_superseded

    def __str__(self) -> str:
        if not self._planned.is_planned:
            return f"{self.name}: not planned"
        return program_text(self.active.plan, self.timeline, self.active.graph, self.forward, self.backward)
