"""The running side of a bucket: its parameters, their home, and the gathered copy while there is one.

home DEVICE   param.data is an ordinary device tensor; `whole` is an alias of it
home HOST     param.data is cut from a slab; `gather` copies the slab into one flat device tensor, `whole` is cut from
that
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from elixir_compile.ir import Bucket, Placement, Tier, Update, Verb
from elixir_compile.ops.registry import Slot
from elixir_compile.ops.shards import rehome
from elixir_compile.runtime.pending import begin_update, end_update
from elixir_compile.runtime.slab import Slab, aligned_bytes, is_slab_memory
from elixir_compile.runtime.updates import QueuedUpdate

_queued_lock = threading.Lock()


class RunningBucket:
    """One bucket of an executor. Only `await_update` is thread-safe: the executor calls the rest from the thread that
    runs the step."""

    def __init__(self, spec: Bucket, placement: Placement, slots: Sequence[Slot], *, pin: bool) -> None:
        self.spec = spec
        self.placement = placement
        self.slots = tuple(slots)
        self.pin = pin
        self.disk: tuple[Path, bool] | None = None
        """The folder for state on disk, and whether what is read there is checked; None without the option."""
        self.whole: tuple[torch.Tensor, ...] | None = None
        """The parameters on the device in bucket order, while they are there."""
        self.update = Update.AFTER_BACKWARD
        """When the hybrid optimizer updates the parameters."""
        self.closes: Verb | None = None
        """Behind what the backward's program neither reads the parameters nor adds to their gradient: their reduce or
        offload, or the first release after it. None where that is not known."""
        self._queued: tuple[QueuedUpdate, ...] = ()
        self._gathered_versions: list[int] = []
        self._offsets_bytes, self._total_bytes = self._layout()
        self._params: Slab | None = None
        self._grads: list[tuple[Slab, list[weakref.ref]]] = []
        """Slabs of gradients, each with the storages of it that were given out."""
        self._totals: dict[int, tuple[Slab, weakref.ref]] = {}
        """By slot, the slab of its sum of gradients, and the storage of it that was given out last."""

    @property
    def is_on_host(self) -> bool:
        """Whether the parameters live on the host."""
        return self.placement.param is Tier.HOST

    @property
    def grad_dtype(self) -> torch.dtype:
        """What gradients are in, on several ranks from their reduce on."""
        name = self.spec.reduce_dtype
        return self.slots[0].param.dtype if name is None else getattr(torch, name)

    @property
    def is_updating(self) -> bool:
        """Whether an update is queued that nobody has waited for."""
        return bool(self._queued)

    def begin_update(self, update: QueuedUpdate, params: Iterable[torch.nn.Parameter]) -> None:
        """Let whoever reads `params` wait for `update`."""
        params = list(params)
        with _queued_lock:
            self._queued = (*self._queued, update)
            for param in params:
                begin_update(param)

    def check_update(self) -> None:
        """Raise what failed in a queued update, if that is known already."""
        if self._queued and all(update.is_done for update in self._queued):
            self.await_update()

    def follow(self, work: Callable[[], None]) -> bool:
        """Let the worker do `work` behind what it does for this bucket, and count as part of that; return False where
        it is done already."""
        queued = self._queued
        return bool(queued) and queued[-1].then(work)

    def await_update(self) -> None:
        """Return when no update is queued; raises what failed in one."""
        while queued := self._queued:
            try:
                for update in queued:
                    update.wait()
            finally:
                with _queued_lock:
                    # Another thread may have settled it already, and the next step may have queued another update.
                    if self._queued is queued and all(update.is_done for update in queued):
                        self._queued = ()
                        for slot in self.slots:
                            end_update(slot.param)

    def is_outdated(self) -> bool:
        """Whether a parameter of a frozen bucket is trained by now."""
        return not self.spec.trainable and any(slot.param.requires_grad for slot in self.slots)

    def move_home(self, device: torch.device) -> None:
        """Move parameters, and their gradients with them, to where the placement says; UnsupportedModel for one that
        was cast."""
        self.await_update()
        for slot in self.slots:
            slot.check_form()
        if self.is_on_host:
            self._move_to_host()
        else:
            for slot in self.slots:
                rehome(slot.param, on_device(slot.own.detach(), device))
            self._params = None
            self.whole = tuple(slot.own.detach() for slot in self.slots)

    def has_drifted(self) -> bool:
        """Whether somebody replaced a parameter's data since it was settled: `model.to(...)`, `param.data = ...`."""
        if self.is_on_host:
            return self._params is None or any(
                slot.own.data_ptr() != self._address + offset
                for slot, offset in zip(self.slots, self._offsets_bytes, strict=True)
            )
        return self.whole is None or any(
            slot.own.data_ptr() != t.data_ptr() for slot, t in zip(self.slots, self.whole, strict=True)
        )

    def flat_home(self) -> torch.Tensor:
        """Return the slab of the parameters as one tensor of bytes."""
        return self._params.tensor(torch.uint8, (self._total_bytes,), 0)

    def cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parameters as views of `flat`, a copy of `flat_home`."""
        views = []
        for slot, offset in zip(self.slots, self._offsets_bytes, strict=True):
            own = slot.own
            piece = flat[offset : offset + slot.own_nbytes].view(own.dtype)
            views.append(piece.as_strided(own.shape, own.stride()))
        return tuple(views)

    def hold(self, copies: tuple[torch.Tensor, ...], versions: list[int]) -> None:
        """Take `copies` as the gathered copy of the parameters as they were at `versions`."""
        self.whole, self._gathered_versions = copies, versions

    def is_whole(self) -> bool:
        """Whether the parameters are on the device, with the values that they have at home."""
        return self.whole is not None and (not self.is_on_host or self._gathered_versions == self.versions())

    def release(self) -> None:
        """Forget the gathered copy; parameters that live on the device stay."""
        if self.is_on_host:
            self.whole = None

    def gradient_room(self) -> tuple[torch.Tensor, ...]:
        """Return host tensors for the gradients, in bucket order.

        The memory of earlier gradients is used again unless somebody still holds one of them.
        """
        # Two take turns when gradients accumulate; making one anew each step would pin and unpin its pages each step.
        free = next((entry for entry in self._grads if all(reference() is None for reference in entry[1])), None)
        ratio = self._ratio(self.grad_dtype)
        if free is None:
            slab = Slab(ratio * self._total_bytes, pin=self.pin)
        else:
            self._grads.remove(free)
            slab = free[0]
        room = self._cut_slab(slab, self.grad_dtype, ratio)
        self._grads.append((slab, [weakref.ref(tensor.untyped_storage()) for tensor in room]))
        return room

    def total_room(self, slot: Slot) -> torch.Tensor:
        """Return memory for an fp32 sum of gradients of the slot's parameter, where it lives; on the host the same one
        again unless somebody still holds it."""
        if not self.is_on_host:
            return torch.empty_like(slot.own, dtype=torch.float32)
        slab, given = self._totals.get(slot.key, (None, None))
        if slab is None or given() is not None:
            slab = Slab(4 * slot.own.numel(), pin=self.pin)
        room = cut_slab(slab, [slot], [0], torch.float32)[0]
        self._totals[slot.key] = (slab, weakref.ref(room.untyped_storage()))
        return room

    def state_room(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        """Return zeroed host tensors shaped like the parameters, for one kind of optimizer state; of `dtype`, which is
        no smaller than the parameters', each at as many elements from the start as its parameter."""
        ratio = self._ratio(dtype)
        return self._cut_slab(Slab(ratio * self._total_bytes, pin=self.pin), dtype, ratio)

    def _ratio(self, dtype: torch.dtype | None) -> int:
        """Return how many times as large as the parameters their elements are in `dtype`."""
        return 1 if dtype is None else dtype.itemsize // self.slots[0].param.dtype.itemsize

    def versions(self) -> list[int]:
        """Return the versions of the parameters in bucket order."""
        return [slot.version for slot in self.slots]

    def _move_to_host(self) -> None:
        slab = Slab(self._total_bytes, pin=self.pin)
        for slot, home in zip(self.slots, self._cut_slab(slab), strict=True):
            home.copy_(slot.own.detach())
            rehome(slot.param, home)
        self._params = slab
        self._address = self.flat_home().data_ptr()
        self.whole = None

    def _layout(self) -> tuple[tuple[int, ...], int]:
        """Return the offset of each parameter in a slab, and the bytes of all."""
        offsets, end = [], 0
        for slot in self.slots:
            offsets.append(end)
            end = aligned_bytes(end + slot.own_nbytes)
        return tuple(offsets), end

    def _cut_slab(self, slab: Slab, dtype: torch.dtype | None = None, ratio: int = 1) -> tuple[torch.Tensor, ...]:
        """Return one tensor per parameter, in `dtype`, which is `ratio` times as large as the parameters'."""
        return cut_slab(slab, self.slots, [ratio * offset for offset in self._offsets_bytes], dtype)


def cut_slab(
    slab: Slab, slots: Sequence[Slot], offsets_bytes: Sequence[int], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Return one tensor per slot, shaped and strided like its parameter, each with its own storage in `slab`; in the
    dtype of the parameter, or in `dtype`."""
    tensors = []
    for slot, offset in zip(slots, offsets_bytes, strict=True):
        own = slot.own
        flat = slab.tensor(dtype or own.dtype, (own.numel(),), offset)
        tensors.append(flat.as_strided(own.shape, own.stride()))
    return tuple(tensors)


def on_device(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `data` in memory of the device's own allocator."""
    if data.device != device:
        return data.to(device)
    from_slab = data.device.type == "cpu" and is_slab_memory(data.data_ptr())
    return torch.empty_like(data, memory_format=torch.preserve_format).copy_(data) if from_slab else data
