"""The arguments of `prepare` about the calls of a step: numbers, or a schedule of torch.distributed.pipelining."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, UnsupportedModel
from elixir_compile.ir import BackwardOrder, Calls, Phase
from elixir_compile.session.model import ManagedModel, managed_model
from elixir_compile.step.rank_peak import Run

_SCHEDULES = "ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS"


def calls_asked(model: nn.Module, outstanding: object, calls: object) -> Calls | None:
    """Return the calls of a step of `model`, given the arguments `outstanding` and `calls` of `prepare`; None if
    neither is given.

    Raises InvalidOption for a value that is neither a number of 1 or more nor such a schedule, and UnsupportedModel if
    the schedule has no such stage, or splits the backward.
    """
    if outstanding is None:
        if calls is not None:
            raise InvalidOption("calls", calls, "no `calls` without `outstanding`, the most forwards that wait at once")
        return None
    if not isinstance(outstanding, int):
        if calls is not None:
            raise InvalidOption("calls", calls, "no `calls` beside a schedule, which has their number")
        return _calls_of(model, outstanding)
    for name, value in (("outstanding", outstanding), ("calls", outstanding if calls is None else calls)):
        if type(value) is not int or value < 1:
            raise InvalidOption(name, value, "a number of 1 or more, or for `outstanding` the schedule of the stage")
    number = outstanding if calls is None else calls
    assert isinstance(number, int)
    if number < outstanding:
        raise InvalidOption("calls", number, f"at least the {outstanding} forwards that are outstanding at once")
    return Calls(num=number, outstanding=outstanding)


def _calls_of(model: nn.Module, schedule: object) -> Calls:
    stages = compat.scheduled_stages(schedule)
    name = type(model).__name__
    if stages is None:
        expected = f"a number, or a schedule of torch.distributed.pipelining: {_SCHEDULES}"
        raise InvalidOption("outstanding", type(schedule).__name__, expected)
    stage = next((own for own in stages if compat.undo_compile(own.module) is model), None)
    if stage is None:
        found = ", ".join(f"stage {own.index} is {type(compat.undo_compile(own.module)).__name__}" for own in stages)
        raise UnsupportedModel(
            name,
            f"{type(schedule).__name__} has no such stage on this rank ({found}). Give `prepare` the module that its "
            "PipelineStage was made with",
        )
    if "S" in stage.order:
        because = f"{type(schedule).__name__} splits its backward in two, which compiled code cannot. Use {_SCHEDULES}"
        raise UnsupportedModel(name, because)
    most = waiting = 0
    for letter in stage.order:
        waiting += 1 if letter == "F" else -1
        most = max(most, waiting)
    number = stage.num_micro_batches
    calls = Calls.of_stage(number, most, is_first=stage.is_first, is_last=stage.is_last, num_sent=stage.num_sent)
    return replace(
        calls,
        has_loss=stage.is_last,
        is_scaled=stage.scales and number > 1,
        backward_order=_backward_order(stage.order, stage.micro_batches, most),
    )


def _backward_order(order: str, micro_batches: Sequence[int], outstanding: int) -> BackwardOrder:
    """Return the order of the backward passes among the letters `order`, each of the micro-batch with its place in
    `micro_batches`; ANY if it is neither of the two others."""
    number = order.count("F")
    turns = "F" * outstanding + "BF" * (number - outstanding) + "B" * outstanding
    for found, place in ((BackwardOrder.FIRST_FIRST, 0), (BackwardOrder.LAST_FIRST, -1)):
        waiting: list[int] = []
        is_so = order == turns
        for letter, micro_batch in zip(order, micro_batches, strict=True):
            if letter == "F":
                waiting.append(micro_batch)
            elif is_so:
                is_so = waiting.pop(place) == micro_batch
        if is_so:
            return found
    return BackwardOrder.ANY


def take_calls(managed: ManagedModel, calls: Calls | None, schedule: object) -> None:
    """Let each step call `managed` as `calls` say from now on; if `schedule` is one, beside its other stages of this
    rank.

    Raises UnsupportedModel if it has no parameters, or if a forward that saves activations was planned for steps of
    other calls.
    """
    executor = managed.executor
    if calls is None:
        return
    _join_stages(managed, schedule)
    if calls == executor.calls.spec:
        return
    if not executor.slots:
        because = "it has no parameter that a plan could place. Leave it as it is: a pipeline runs it without `prepare`"
        raise UnsupportedModel(executor.name, because)
    if any(not graph.is_inference for graph in managed.graphs):
        because = (
            f"a forward of it was planned for steps of {executor.calls.spec}, and cannot change to {calls}. Call "
            "`prepare` with `outstanding` before its first forward; one before that, as to see that it runs, is under "
            "`torch.no_grad()`"
        )
        raise UnsupportedModel(executor.name, because)
    executor.calls.spec = calls


def _join_stages(managed: ManagedModel, schedule: object) -> None:
    stages = compat.scheduled_stages(schedule) or ()
    if len(stages) < 2:
        return
    modules = [compat.undo_compile(own.module) for own in stages]
    runs = [
        Run(place, Phase.FORWARD if letter == "F" else Phase.BACKWARD, micro_batch)
        for place, letter, micro_batch in compat.scheduled_runs(schedule)
    ]
    place = next(place for place, module in enumerate(modules) if module in managed.roots)
    models = (managed_model(module) for module in modules)
    managed.join_stages(schedule, place, [model for model in models if model not in (None, managed)], runs)
