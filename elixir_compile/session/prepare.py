"""Prepare a model so that a plan may place its parameters in any memory, for a given schedule of calls, and draw
batches for ranks that train unequal numbers of rows.
"""

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn
from torch.utils.data import Sampler

from elixir_compile import compat
from elixir_compile.base.errors import InvalidOption, NoGraphCaptured, NotPrepared, UnsupportedModel
from elixir_compile.base.options import ParamDtype, parse_options
from elixir_compile.compat.platforms import platform_of
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.graph.ops.shards import TensorAxis
from elixir_compile.ir import BackwardOrder, Calls, Phase
from elixir_compile.ir.share import Share, batch_of, check_shares, largest_remainder
from elixir_compile.runtime.distributed.ranks import Ranks, device_of
from elixir_compile.session.backend import elixir
from elixir_compile.session.cast_and_shard import (
    cast,
    gets_master,
    load_weights,
    materialize,
    ranks_of,
    scales_of,
    shard_parameters,
    tensor_axis_of,
    torch_dtype,
    whole_owners,
)
from elixir_compile.session.model import Compilation, ManagedModel, managed_model, prepare_lock
from elixir_compile.session.rank_facts import require_same_shares, share_out, take_rows, weigh_batches
from elixir_compile.session.rank_facts import suggested_shares as shares_suggested
from elixir_compile.step.stages import Run

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# ----------------------------------------------------------------------------------------------------------------------
# The arguments of `prepare` about the calls of a step: numbers, or a schedule of torch.distributed.pipelining.


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
    backward_order, number = BackwardOrder.ANY, stage.num_micro_batches
    turns = "F" * most + "BF" * (stage.order.count("F") - most) + "B" * most
    for found_order, place in ((BackwardOrder.FIRST_FIRST, 0), (BackwardOrder.LAST_FIRST, -1)):
        forwards: list[int] = []  # the micro-batches that wait for their backward
        is_so = stage.order == turns
        for letter, micro_batch in zip(stage.order, stage.micro_batches, strict=True):
            if letter == "F":
                forwards.append(micro_batch)
            elif is_so:
                is_so = forwards.pop(place) == micro_batch
        if is_so:
            backward_order = found_order
            break
    calls = Calls.of_stage(number, most, is_first=stage.is_first, is_last=stage.is_last, num_sent=stage.num_sent)
    return replace(
        calls,
        has_loss=stage.is_last,
        is_scaled=stage.scales and number > 1,
        backward_order=backward_order,
    )


def take_calls(managed: ManagedModel, calls: Calls | None, schedule: object) -> None:
    """Let each step call `managed` as `calls` say from now on; if `schedule` is one, beside its other stages of this
    rank.

    Raises UnsupportedModel if it has no parameters, or if a forward that saves activations was planned for steps of
    other calls.
    """
    executor = managed.executor
    if calls is None:
        return
    stages = compat.scheduled_stages(schedule) or ()
    if len(stages) > 1:
        modules = [compat.undo_compile(own.module) for own in stages]
        runs = [
            Run(place, Phase.FORWARD if letter == "F" else Phase.BACKWARD, micro_batch)
            for place, letter, micro_batch in compat.scheduled_runs(schedule)
        ]
        place = next(place for place, module in enumerate(modules) if module in managed.roots)
        models = (managed_model(module) for module in modules)
        managed.join_stages(schedule, place, [model for model in models if model not in (None, managed)], runs)
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


# ----------------------------------------------------------------------------------------------------------------------
# Prepare a model: its parameters read as gathers, so that a plan may place them in any memory.
#
# And the questions to a prepared model: the compilations of its graphs, and how much the gradients of a rank weigh.


def prepare(
    model: nn.Module,
    device: "torch.device | str | None" = None,
    *,
    param_dtype: ParamDtype | None = None,
    mesh: "DeviceMesh | None" = None,
    shares: "Sequence[Share]" = (),
    whole: "Collection[str]" = (),
    outstanding: "int | object | None" = None,
    calls: int | None = None,
    weights: "str | os.PathLike[str] | None" = None,
) -> nn.Module:
    """Make every parameter of `model` readable on `device`, whatever memory it is in, and return `model`.

    The parameters keep their identity and stay in their memory; one on `meta` is created on the host, or mapped from
    `weights`, a safetensors file or a folder of them, by its key in `state_dict()`. The first step copies each bucket
    to its home, so a model larger than the device or the host is never there as a whole. Buffers move to `device`, by
    default that of the first parameter that is not on `meta`. No `state_dict()` key changes, nor does preparing again.

    `param_dtype` casts fp32 parameters, not buffers, to `"bfloat16"` or `"float16"`. HybridAdamW then updates fp32
    masters, which start with every bit of the present weights; those already of `param_dtype` get one too.

    With a `mesh` of several ranks, each rank must call this together. Parameters become DTensors, sharded along
    dimension 0 over the last axis of the mesh; ranks along an axis before it hold copies. Small tensors are complete on
    each rank; one named in `whole` is on one rank, which alone updates it, as Muon must. All have the first's values.
    Make the optimizer after this. If `parallelize_module` cut the model, `mesh` is another axis of its mesh, or None.

    `shares`, of `elixir_compile.shares`, are for ranks with unequal numbers of rows, by which gradients count. Each
    rank owns its shard of the state, and as many rows of parameters. See `weigh` for means over tokens, `ShareSampler`.

    `outstanding` is for a stage of a pipeline, called by several forwards of a step before their backward: the schedule
    of torch.distributed.pipelining that runs it, or the most forwards that wait at once, of which a step has `calls`,
    by default as many. The plan counts the bytes of all; each bucket is gathered and reduced once in a step. Call
    `prepare` again to name the schedule later; its stages on this rank share the budget.

    Raises UnsupportedModel if the model has no parameters, is no stage of the schedule, has a schedule that splits the
    backward, was prepared for another device or `param_dtype`, has shares or `whole` and a mesh of two axes, is cut in
    unequal shards or not in `weights`; InvalidOption if an argument cannot be; and RanksDiffer if ranks differ in one.

    Example:
        compiled = torch.compile(elixir.prepare(torch.nn.Linear(4, 4, device="meta"), "cpu"), backend="elixir")
    """
    param_dtype = parse_options({"param_dtype": param_dtype}).param_dtype
    model = compat.undo_compile(model)
    asked = calls_asked(model, outstanding, calls)
    with prepare_lock:
        target = _target_device(model, device if mesh is None else device or device_of(mesh))
        prepared = managed_model(model)
        if weights is not None:
            load_weights(model, weights)
        if prepared is not None:
            _require_as_prepared(model, prepared, target if device is not None else None, param_dtype)
            take_calls(prepared, asked, outstanding)
            return model
        compat.name_backend(elixir)
        managed = ManagedModel([model], target, *_share(model, mesh, shares, whole, param_dtype))
        take_calls(managed, asked, outstanding)
        managed.swap_modules()
        managed.move_rest()
    return model


def compilations(model: nn.Module, *, inference: bool = False) -> list[Compilation]:
    """Return a compilation for each captured training graph of `model`, in order of capture.

    `model` is the module or its compiled form. With `inference`, graphs without a backward are included. Warns
    NoGraphCaptured if nothing was captured: the model never ran compiled, or Dynamo found no graph in it.

    Example:
        compilation = elixir.compilations(compiled)[-1]
        print(compilation.plan.prediction.device_peak_bytes, "of", compilation.plan.budget_bytes)
    """
    managed = managed_model(compat.undo_compile(model))
    captured = [] if managed is None else [made for made in managed.compilations if not made.is_superseded]
    if not captured:
        name = type(compat.undo_compile(model)).__name__
        warnings.warn(
            NoGraphCaptured(
                f"no graph of {name} was captured: call `torch.compile(model, backend='elixir')` and run a step first."
            ),
            stacklevel=2,
        )
    return [made for made in captured if inference or not made.is_inference]


def weigh(model: nn.Module, num_samples: int) -> None:
    """Weight the gradients of this rank by `num_samples` from the next backward on, if ranks have batches of different
    sizes. Every rank must call this together, before each backward with new sizes.

    The gradient of a parameter is then sum(num_samples * gradient) / sum(num_samples), both sums over the ranks. If the
    loss is a mean over samples, that is the gradient of a single process with the complete batch. Ranks along a tensor
    axis have the same batch, and give the same number. On one rank, this changes nothing.

    Raises NotPrepared for a model that is not prepared, ValueError if the samples of all ranks are 0, or in the middle
    of a step of several calls, RanksDiffer if the numbers differ along a tensor axis or between ranks that a collective
    of the model itself joins, and PeerFailed if a rank does not call this.

    Example:
        elixir.weigh(model, num_samples=len(batch))
        compiled(batch).backward()
    """
    managed = prepared_model(model, "weigh")
    if managed.executor.calls.is_under_way:
        raise ValueError("weigh before the first call of a step: the gradients of all calls are reduced together")
    weigh_batches(managed.executor, num_samples)


def mean_loss(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """Return the mean of `loss` over all ranks, in which each rank counts as its gradients do: by the rows of its
    share, or by the number that it last gave to `weigh`. On one rank, this is `loss` itself, without its gradient.

    If the losses of ranks are means over their rows, the result is the mean over the rows of all ranks. Every rank must
    call this together: it takes an all-reduce of one number, so call it where a loss is printed, not in every step.

    Raises NotPrepared for a model that is not prepared, and PeerFailed if a rank does not call this.

    Example:
        loss = compiled(batch)
        loss.backward()
        print("loss of all ranks:", float(elixir.mean_loss(model, loss)))
    """
    managed = prepared_model(model, "mean_loss")
    if managed.executor.ranks is None:
        return loss.detach()
    return managed.executor.ranks.means([loss.detach()], loss.dtype)[0]


def suggested_shares(model: nn.Module) -> tuple[Share, ...]:
    """Return the shares that the log line of uneven ranks suggests for `model`, for `ShareSampler.take`; empty if there
    is no such line.

    After seven steps, ranks exchange the seconds in which they compute. If the slowest is more than a tenth above the
    mean, these shares have the rows with which all ranks would take as long as each other, and the shards of the state
    that the ranks own. All ranks get the same ones in the same step; nothing is exchanged here.

    Raises NotPrepared for a model that is not prepared.

    Example:
        for share in elixir.suggested_shares(model):
            print("rank", share.rank, "would train", share.num_rows, "rows")
    """
    ranks = prepared_model(model, "suggested_shares").executor.ranks
    return () if ranks is None else shares_suggested(ranks)


def prepared_model(model: nn.Module, name: str) -> ManagedModel:
    """Return the managed model of `model`, a module or its compiled form, for the function called `name`.

    Raises NotPrepared for a model that is not prepared.
    """
    managed = managed_model(compat.undo_compile(model))
    if managed is None:
        raise NotPrepared(f"`{name}` is for a model that `elixir_compile.prepare(model, mesh=...)` was given first.")
    return managed


def _share(
    model: nn.Module,
    mesh: "DeviceMesh | None",
    shares: "Sequence[Share]",
    whole: "Collection[str]",
    param_dtype: ParamDtype | None,
) -> tuple[Ranks | None, TensorAxis | None]:
    """Give the parameters of `model` values, its ranks and `param_dtype`; return the ranks of `mesh` and the tensor
    axis, each None if there is none."""
    axis = tensor_axis_of(model, mesh)
    ranks = ranks_of(mesh, axis)
    if ranks is not None:
        share_out(ranks, shares, whole)
    elif shares:
        check_shares(shares, 1)
    owners = whole_owners(model, whole, ranks, axis)
    if ranks is None and axis is None:
        materialize(model)
    else:
        shard_parameters(model, ranks, None if param_dtype is None else torch_dtype(param_dtype), axis, owners)
    if param_dtype is not None:
        cast(model, param_dtype)
    return ranks, axis


def _require_as_prepared(
    model: nn.Module, prepared: ManagedModel, target: torch.device | None, param_dtype: ParamDtype | None
) -> None:
    """Raise UnsupportedModel if `model` was prepared for another device than `target`, or without masters."""
    here = prepared.executor.device
    if target not in (None, here):
        raise UnsupportedModel(type(model).__name__, f"it was prepared for {here} and cannot move to {target}")
    if param_dtype is not None:
        scales = scales_of(model.modules())
        for name, param in model.named_parameters():
            is_cast = id(param) not in scales and gets_master(param, torch_dtype(param_dtype))
            if is_cast and not has_master(param):
                because = (
                    f"it was prepared as {param.dtype} and cannot become {param_dtype}. Name `param_dtype` in the "
                )
                raise UnsupportedModel(name, because + "first call of `prepare`, before the model is compiled and run")


def _target_device(model: nn.Module, device: "torch.device | str | None") -> torch.device:
    if device is not None:
        target = torch.device(device)
        return target if target.index is not None else platform_of(target).current()
    for param in model.parameters():
        if param.device.type != "meta":
            return param.device
    if next(iter(model.parameters()), None) is None:
        raise UnsupportedModel(type(model).__name__, "it has no parameters, so there is nothing to place")
    raise NotPrepared(
        "every parameter is on `meta`, so the device must be named: `elixir_compile.prepare(model, device=...)`."
    )


# ----------------------------------------------------------------------------------------------------------------------
# A batch sampler for ranks that train unequal numbers of rows.
#
#   epoch      3 1 7 0 | 5 2 6 4        one permutation for all ranks, from the seed and the epoch
#   batch 0    3 1 7 0                  the batch that one process would have
#   rank 0     3 1                      rows 0 and 1, by its share of 2 rows of 4
#   rank 1         7
#   rank 2           0
#
# So the rows of all ranks together are the batch of one process, in its order, whatever the shares are: a run that
# goes on with other shares, or on other ranks, continues with the same data. A rank whose share has no rows gets the
# first two rows of the batch, which count 0: it has to run a step, because every rank takes part in every collective.


_ROWS_THAT_COUNT_0 = 2
"""Torch traces a batch of one row in another way than any larger one, so its graph would differ from the others."""


class ShareSampler(Sampler[list[int]]):
    """The batches of this rank, by its share: a `batch_sampler` of a `torch.utils.data.DataLoader`.

    Attributes:
        epoch: the number of the epoch, which `set_epoch` changes.
        next_batch: the number of the batch that is asked for next.

    Example:
        sampler = elixir.ShareSampler(len(data), shares, seed=0)
        loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    """

    def __init__(
        self,
        num_samples: int,
        shares: Sequence[Share],
        *,
        rank: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        """Sample from `num_samples` rows as `shares` say, those of all ranks in order, for `rank`.

        `rank` is by default the rank of this process in the default process group, 0 without one. Each epoch has
        another permutation, from `seed` and its number; without `shuffle`, rows come in their order. A last batch of
        fewer rows is left out if `drop_last`; else it is divided in proportion to the rows of the shares, and the ranks
        must call `elixir.weigh` with their rows before its backward: `rows_of_batch` has them.

        Raises InvalidOption if `shares` do not belong together, or `rank` has none.
        """
        self.num_samples = num_samples
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        if rank is None:
            is_alone = not (distributed.is_available() and distributed.is_initialized())
            rank = 0 if is_alone else distributed.get_rank()
        self.rank = rank
        self.epoch = 0
        self.next_batch = 0
        self._resume_at = 0
        self._shares: tuple[Share, ...] = ()
        self.take(shares)

    @property
    def shares(self) -> tuple[Share, ...]:
        """The shares of all ranks."""
        return self._shares

    def take(self, shares: Sequence[Share], model: nn.Module | None = None) -> None:
        """Divide the batches from the next one on as `shares` say, of a batch of as many rows. The permutation stays,
        so the epoch goes on with the rows that no rank has had.

        With `model`, a prepared model or its compiled form, its gradients count by the new rows, from the next backward
        on. All ranks must call this between the same steps, and with a model they find out whether they did. Batches
        that a `DataLoader` with workers has asked for in advance keep their rows: call `weigh` before their backward.

        Raises InvalidOption if the shares do not belong together, or have another batch: then the order of the data
        would change; with a model also if they have other shards of the state than its ranks own. Raises RanksDiffer if
        ranks take other shares, or take them from another batch on; UnsupportedModel for a mesh of two axes; and
        NotPrepared for a model that was not prepared. Nothing changes then.

        Example:
            sampler = elixir.ShareSampler(len(data), shares, seed=0)
            suggested = elixir.suggested_shares(model)
            if suggested:
                sampler.take(suggested, model)
        """
        ranks = None if model is None else prepared_model(model, "take").executor.ranks
        if ranks is not None:
            require_same_shares(ranks, shares, f"from batch {self.next_batch} of epoch {self.epoch} on")
        check_shares(shares, len(shares))
        if not 0 <= self.rank < len(shares):
            raise InvalidOption("shares", len(shares), f"one per rank of the mesh, also for rank {self.rank}")
        if self._shares and batch_of(shares) != batch_of(self._shares):
            raise InvalidOption("shares", batch_of(shares), f"rows of the batch of {batch_of(self._shares)} in all")
        if ranks is not None:
            take_rows(ranks, shares)
        self._shares = tuple(shares)

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number `epoch` with its first batch; its permutation is another one."""
        self.epoch, self.next_batch, self._resume_at = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        """Return where the sampler is: it says nothing of the shares, so a run can go on with others.

        Batches that a `DataLoader` with workers has asked for in advance count as done.
        """
        return {"epoch": self.epoch, "next_batch": self.next_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where the sampler was that returned `state`."""
        self.epoch = state["epoch"]
        self.next_batch = self._resume_at = state["next_batch"]

    def rows_of_batch(self, batch: int) -> tuple[int, ...]:
        """Return the rows that each rank has of batch number `batch`: fewer than its share only in the last one."""
        left = self.num_samples - batch * batch_of(self._shares)
        rows = tuple(share.num_rows for share in self._shares)
        return rows if left >= sum(rows) else largest_remainder(max(left, 0), rows)

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        batch = batch_of(self._shares)
        return self.num_samples // batch if self.drop_last else -(-self.num_samples // batch)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of this rank for each batch of the epoch: all, or the rest after `load_state_dict`."""
        order = list(range(self.num_samples))
        if self.shuffle:
            generator = torch.Generator()
            generator.manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        self.next_batch, self._resume_at = self._resume_at, 0
        while self.next_batch < len(self):
            number = self.next_batch
            self.next_batch += 1
            first = number * batch_of(self._shares)
            rows = self.rows_of_batch(number)
            begin = first + sum(rows[: self.rank])
            if rows[self.rank]:
                yield order[begin : begin + rows[self.rank]]
            else:
                yield order[first : first + min(_ROWS_THAT_COUNT_0, sum(rows))]
