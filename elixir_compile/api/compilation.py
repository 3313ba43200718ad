"""One captured graph on its way from capture to a running program, and its record after."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.analysis import MemoryTimeline, plan_timeline
from elixir_compile.api.planning import graph_of, problem_of
from elixir_compile.api.progress import Progress
from elixir_compile.api.saved import load_plan_for
from elixir_compile.capture.convert import Captured
from elixir_compile.capture.joint import gather_keys, parameter, partition_hidden, show_in_inference
from elixir_compile.ir import Kind, Phase, Plan, StepGraph
from elixir_compile.ops.registry import slot_by_key
from elixir_compile.options import Options
from elixir_compile.rewrite.check import check
from elixir_compile.rewrite.program import write_program
from elixir_compile.rewrite.regions import RegionGraph
from elixir_compile.rewrite.show import program_text
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import CompiledRegion, RegionCompiler
from elixir_compile.search import Problem, plan

_compile_lock = threading.RLock()


class Compilation:
    """One captured graph, its plan and the programs that obey it. Made by the backend; the user reads it."""

    def __init__(self, executor: Executor, regions: RegionCompiler, options: Options, name: str) -> None:
        self.name = name
        self.graph: StepGraph | None = None
        """The captured step, torch-free."""
        self.plan: Plan | None = None
        """What was decided."""
        self.forward: fx.GraphModule | None = None
        """The forward program."""
        self.backward: fx.GraphModule | None = None
        """The backward program; None before the first backward, and for inference."""
        self._executor = executor
        self._regions = regions
        self._options = options
        self._captured: Captured | None = None
        self._progress = Progress(executor.device, is_on=options.report)
        self._sizes: dict[str, int] = {}
        self._generation = -1
        self._beside_bytes = 0
        self._wants_backward = False
        self._traced: list[Any] = []
        self._restrided: list[Any] = []
        self.is_superseded = False
        """Whether a later capture of the same step took its place."""
        self._strides: dict[fx.Node, compat.Strides] = {}

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes by kind at every op, as the plan has them."""
        return plan_timeline(self.graph, self.plan)

    @property
    def is_inference(self) -> bool:
        """Whether the graph has no backward."""
        return self._captured is not None and self._captured.backward is None

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.name}: not planned"
        return program_text(self.plan, self.timeline, self.graph, self.forward, self.backward)

    # Callbacks of the compiler front ends.

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph as torch would, and plan the step."""
        if not gather_keys(joint.graph):
            return compat.min_cut_partition(joint, joint_inputs, **options)
        num_outputs = options["num_fwd_outputs"]
        forward, backward = partition_hidden(joint, joint_inputs, compat.min_cut_partition, **options)
        self._capture(forward, backward, num_outputs)
        return forward, backward

    def lower(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        *,
        is_backward: bool = False,
        is_inference: bool = False,
        **options: Any,
    ) -> Callable[[list[Any]], Any]:
        """Return what runs one half of the graph."""
        if self._captured is None and gather_keys(gm.graph):
            show_in_inference(gm)
            self._capture(gm, None, len(gm.graph.output_node().args[0]))
        if self._captured is None:
            return self._regions.lower_plain(
                gm, examples, is_backward=is_backward, is_inference=is_inference, **options
            )
        if not is_backward:
            self._write_forward()
            return compat.boxed(self._run_forward)
        self._restrided = list(examples)
        self._wants_backward = True
        self._write_backward()
        return compat.boxed(self._run_backward)

    # Planning.

    def _capture(self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> None:
        keys = dict.fromkeys(node.args[0] for half in (forward, backward) if half for node in _parameter_markers(half))
        self._captured = Captured(
            name=self.name,
            forward=forward,
            backward=backward,
            num_outputs=num_outputs,
            param_names={key: slot_by_key(key).name for key in keys},
            fused=self._options.inner == "inductor",
        )
        self._traced = [] if backward is None else [node.meta.get("val") for node in _placeholders(backward)]
        self._replan()
        if not self.is_inference and not any(other.is_superseded for other in self._executor.compilations):
            self._progress.planned(self.plan)

    def _replan(self) -> None:
        """Plan for the sizes at hand, on top of what is in force."""
        self._beside_bytes = self._executor.outstanding_bytes()
        self.graph = graph_of(self._captured, self._executor, self._sizes)
        problem = problem_of(self._captured, self.graph, self._executor, self._options, self._beside_bytes)
        self.plan = self._plan_in_force() or self._saved_plan(problem) or plan(problem, planner=self._options.planner)

    def _plan_in_force(self) -> Plan | None:
        """Return the plan in force of an earlier capture of the same step: the first call of a plain model made it."""
        executor = self._executor
        for other in executor.compilations:
            is_another = other is not self and other.plan is not None
            is_same = is_another and other.graph == replace(self.graph, name=other.graph.name)
            is_same = is_same and other._beside_bytes >= self._beside_bytes
            if is_same and executor.agrees(other.plan.buckets, other.plan.placements, may_adopt=False):
                other.is_superseded = True
                return other.plan
        return None

    def _saved_plan(self, problem: Problem) -> Plan | None:
        """Return the plan that the user asked for, which is of the training graph."""
        if self._options.plan is None or self.is_inference:
            return None
        return load_plan_for(self._options.plan, self.graph, problem.cluster.name)

    # Programs.

    def _is_one_region_each(self) -> bool:
        return all(
            sum(region.phase is phase for region in self.plan.regions) <= 1 for phase in (Phase.FORWARD, Phase.BACKWARD)
        )

    def _write_forward(self) -> None:
        self.forward = self._write(Phase.FORWARD)
        if self._is_one_region_each() and not self.is_inference:
            outputs = self._captured.forward.graph.output_node().args[0]
            compat.report_output_strides([self._strides.get(node) for node in outputs])

    def _write_backward(self) -> None:
        # A forward of one region saves in the strides its kernels chose, one of several in those of the capture.
        examples = self._restrided if self._is_one_region_each() else self._traced
        for node, example in zip(_placeholders(self._captured.backward), examples, strict=True):
            node.meta["val"] = example
        self.backward = self._write(Phase.BACKWARD)

    def _write(self, phase: Phase) -> fx.GraphModule:
        keys = {name: key for key, name in self._captured.param_names.items()}
        program = write_program(self._captured, self.plan, phase, keys, self._lower_region, self._executor)
        check(program, self.plan, phase)
        return program

    def _lower_region(self, region: RegionGraph) -> CompiledRegion:
        visible = list(range(len(region.outputs)))
        if region.is_whole and region.phase is Phase.FORWARD and self._is_one_region_each() and not self.is_inference:
            visible = self._visible_to_the_user(region)
        compiled = self._regions.lower(region, visible, is_inference=self.is_inference)
        if region.is_whole and region.phase is Phase.FORWARD:
            self._strides = dict(zip(region.outputs, compiled.strides, strict=False))
        return compiled

    def _visible_to_the_user(self, region: RegionGraph) -> list[int]:
        """Return the outputs of a whole forward that the user sees; Inductor may choose the strides of the rest."""
        output = self._captured.forward.graph.output_node()
        seen = output.meta.get("user_visible_output_idxs", range(self._captured.num_outputs))
        nodes = {output.args[0][index] for index in seen}
        return [index for index, node in enumerate(region.outputs) if node in nodes]

    # Running.

    def _run_forward(self, args: list[Any]) -> Any:
        self._keep_current(args)
        if not self.is_inference:
            self._progress.forward_begins(self.plan)
        self._executor.begin()
        try:
            results = self.forward.forward(args)
            self._executor.end()
        except BaseException:
            self._executor.abandon()
            raise
        if not self.is_inference:
            self._executor.note_forward(results[self._captured.num_outputs], self._saved_bytes())
        return results

    def _saved_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.graph.storages if storage.kind is Kind.SAVED)

    def _run_backward(self, args: list[Any]) -> Any:
        try:
            return self.backward.forward(args)
        except BaseException:
            self._executor.abandon()
            raise

    def _keep_current(self, args: Sequence[Any]) -> None:
        """Before a forward: adopt the plan, or make a new one where it would not hold.

        That is for larger inputs, beside forwards that still wait for their backward, and after another graph moved a
        bucket.
        """
        executor = self._executor
        grown = self._grown(args)
        has_company = not self.is_inference and executor.outstanding_bytes() > self._beside_bytes
        if not grown and not has_company and executor.generation == self._generation:
            return
        with _compile_lock:
            if (
                grown
                or has_company
                or not executor.agrees(self.plan.buckets, self.plan.placements, may_adopt=self._generation < 0)
            ):
                self._sizes.update(grown)
                self._replan()
                self._progress.planned(self.plan)
                self._write_forward()
                if self._wants_backward:
                    self._write_backward()
            executor.adopt(self.plan.buckets, self.plan.placements, for_training=not self.is_inference)
            self._generation = executor.generation

    def _grown(self, args: Sequence[Any]) -> Mapping[str, int]:
        """Return the symbols whose value exceeds what was planned for."""
        placeholders = self._captured.forward.graph.find_nodes(op="placeholder")
        grown: dict[str, int] = {}
        for node, value in zip(placeholders, args, strict=True):
            example = node.meta.get("val")
            if isinstance(example, torch.SymInt):
                name = compat.symbol_name(example)
                if name is not None and value > self._sizes.setdefault(name, compat.evaluate_size(example, {})):
                    grown[name] = value
        return grown


def _parameter_markers(half: fx.GraphModule) -> list[fx.Node]:
    return half.graph.find_nodes(op="call_function", target=parameter)


def _placeholders(half: fx.GraphModule) -> list[fx.Node]:
    return half.graph.find_nodes(op="placeholder")
