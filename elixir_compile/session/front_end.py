"""Callbacks of AOTAutograd for a graph: called once to partition it, and once to compile each half."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.batch import mark_inputs_of_modules
from elixir_compile.graph.capture.input_sizes import added_sizes, sizes_in
from elixir_compile.graph.capture.joint import partition_hidden, reads_parameters, show_in_inference
from elixir_compile.graph.capture.node_facts import outputs_of
from elixir_compile.graph.capture.rewire import ParameterInputs, with_handles
from elixir_compile.graph.capture.tracing import with_deep_calls
from elixir_compile.graph.ops.gather import Gate
from elixir_compile.graph.ops.registry import slot_by_key
from elixir_compile.search.joint.loss import LossAttempt
from elixir_compile.session.model import ManagedModel
from elixir_compile.session.planned_graph import PlannedGraph


class FrontEnd:
    """The callbacks for one captured graph of a model."""

    def __init__(
        self,
        model: ManagedModel,
        graph: PlannedGraph,
        gate: Gate,
        given: ParameterInputs,
        options: Options,
        attempt: LossAttempt,
    ) -> None:
        """`gate` passes the handles to the graph. `given` has the positions of the parameters among its inputs.

        `attempt` has the form of the loss, and the review of the first plan.
        """
        # AOTAutograd keeps these callbacks with the compiled code, which outlives the model.
        self._model = weakref.proxy(model)
        self._graph = weakref.ref(graph)
        self._gate = weakref.proxy(gate)
        self._regions = model.regions_for(options.inner)
        self._keys = given.keys  # `given` holds the first batch
        self._of_modules = given.of_modules
        self._attempt = attempt
        self._is_captured = False

    @property
    def _planned(self) -> PlannedGraph:
        graph = self._graph()
        assert graph is not None, "the gate, which is called first, has the same lifetime"
        return graph

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph, partitioned as torch does it, and plan the step."""
        if not reads_parameters(joint.graph, self._keys):
            return compat.min_cut_partition(joint, joint_inputs, **options)
        num_outputs = options["num_fwd_outputs"]
        mark_inputs_of_modules(joint.graph, self._of_modules)
        forward, backward = partition_hidden(joint, joint_inputs, compat.min_cut_partition, self._keys, **options)
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
        """Return the function to run the forward or the backward graph `gm`."""
        if not is_backward:
            self._check_inputs(gm.graph)
        if not self._is_captured and reads_parameters(gm.graph, self._keys):
            show_in_inference(gm, self._keys)
            self._capture(gm, None, len(outputs_of(gm.graph)))
        if self._is_captured:
            run = with_deep_calls(partial(self._planned.runner, is_backward=is_backward))
            return run if is_backward else compat.boxed(partial(self._run_forward, run, added_sizes(gm.graph)))
        given = with_handles(gm, examples, self._keys)
        return self._regions.lower_plain(gm, given, is_backward=is_backward, is_inference=is_inference, **options)

    def _check_inputs(self, forward: fx.Graph) -> None:
        """Raise UnsupportedModel if the compiled code would read or write a parameter whose input is only a handle."""
        for position in sorted(compat.inputs_that_must_be_real(forward) & self._keys.keys()):
            because = (
                "an output of the graph is a view of it, or the graph writes it, in a way that its capture did not show"
            )
            raise UnsupportedModel(slot_by_key(self._keys[position]).name, because)

    def _run_forward(self, run: Callable[[list[Any]], Any], added: Sequence[tuple[int, int]], args: list[Any]) -> Any:
        args += sizes_in(args, added)
        with self._model.executor.phases.forward(is_training=not self._planned.is_inference):
            self._gate.begin(partial(self._model.begin_forward, self._planned, args))
            return run(args)

    def _capture(self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> None:
        attempt, self._attempt = self._attempt, LossAttempt()  # compiled code must not keep it
        self._planned.capture(forward, backward, num_outputs, attempt)
        self._is_captured = True
