"""The parameters of a bucket in training: their home, their gathered copy, and memory for gradients and state.

home DEVICE   param.data is an ordinary device tensor; `gathered` is an alias of it
home HOST     param.data is cut from a slab; a gather copies the slab into one flat device tensor, and `gathered`
              is cut from this tensor
"""

import itertools
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from elixir_compile import compat
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import own_part, rehome, rehome_grad
from elixir_compile.ir import Bucket, Placement, Tier, Update, Verb
from elixir_compile.runtime.awaited import QueuedUpdates
from elixir_compile.runtime.lanes import Event
from elixir_compile.runtime.slab import Slab, aligned_bytes, is_slab_memory


class RunningBucket:
    """A bucket of an executor.

    Only `queued` and `home_read` are used by several threads; the executor calls the methods from the thread of the
    step. It has more than 15 attributes: 4 are set by the plan, and the others belong to one of its memories: home,
    gathered copy, gradients.
    """

    def __init__(self, spec: Bucket, placement: Placement, slots: Sequence[Slot], *, pin: bool) -> None:
        self.spec = spec
        self.placement = placement
        self.slots = tuple(slots)
        self.pin = pin
        self.disk: tuple[Path, bool] | None = None
        """The folder for state on disk, and whether reads are checked by checksums; None if the option is not set."""
        self.gathered: tuple[torch.Tensor, ...] | None = None
        """The parameters on the device, in bucket order; None while no copy of them is there."""
        self.update = Update.AFTER_BACKWARD
        """When the hybrid optimizer updates the parameters."""
        self.closes: Verb | None = None
        """The verb after which the program of the backward neither reads the parameters nor adds to their gradient:
        their reduce or offload, or the first release after it. None if unknown."""
        self.queued = QueuedUpdates(self.slots)
        """The updates on the host for which no thread has waited yet."""
        self.home_read: Event | None = None
        """Past when the last gather has read the home on the host; None if gathers are synchronous. An update on the
        host waits for it before it writes."""
        self._gathered_versions: list[int] = []
        self._offsets_bytes, self._total_bytes = self._layout()
        self._params: Slab | None = None
        self._grads: list[tuple[Slab, list[weakref.ref]]] = []
        """Slabs of gradients, each with its storages that were handed out."""
        self._totals: dict[int, tuple[Slab, weakref.ref]] = {}
        """By slot: the slab of its fp32 sum of gradients, and the storage of this slab that was handed out last."""

    @property
    def is_on_host(self) -> bool:
        """Whether the home of the parameters is the host."""
        return self.placement.param is Tier.HOST

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of gradients; with several ranks, the dtype from their reduce on."""
        name = self.spec.reduce_dtype
        return self.slots[0].param.dtype if name is None else getattr(torch, name)

    def is_outdated(self) -> bool:
        """Whether the bucket was made of frozen parameters and one of them is trained by now."""
        return not self.spec.trainable and any(slot.param.requires_grad for slot in self.slots)

    def move_home(self, device: torch.device) -> None:
        """Move the parameters and their gradients to the home in the placement.

        No update of them is queued. Raises UnsupportedModel if a parameter was cast after its slot was made.
        """
        for slot in self.slots:
            slot.check_form()
        if self.is_on_host:
            self._move_to_host()
        else:
            for slot in self.slots:
                rehome(slot.param, on_device(slot.own.detach(), device))
            self._params = None
            self.gathered = tuple(slot.own.detach() for slot in self.slots)
        self.move_gradients(device)

    def move_gradients(self, device: torch.device) -> None:
        """Move gradients that came along with their parameters to the memory for gradients in the new home."""
        found = ((i, slot.param.grad) for i, slot in enumerate(self.slots))
        grads = [(i, own_part(grad)) for i, grad in found if grad is not None and grad.layout is torch.strided]
        if self.is_on_host:
            moving = [(i, grad) for i, grad in grads if not is_slab_memory(grad.data_ptr())]
            buffers = self.gradient_buffers() if moving else ()
            for i, grad in moving:
                slot, is_sum = self.slots[i], grad.dtype != self.grad_dtype
                home = self.fp32_sum_buffer(slot) if is_sum else buffers[i]
                rehome_grad(slot.param, home.copy_(grad))
        else:
            for i, grad in grads:
                moved = on_device(grad, device)
                if moved is not grad:
                    rehome_grad(self.slots[i].param, moved)

    def has_drifted(self) -> bool:
        """Whether user code replaced the data of a parameter since `move_home`: `model.to(...)`, `param.data = ...`."""
        if self.is_on_host:
            return self._params is None or any(
                has_moved(slot.own, self._address + offset)
                for slot, offset in zip(self.slots, self._offsets_bytes, strict=True)
            )
        return self.gathered is None or any(
            has_moved(slot.own, t.data_ptr()) for slot, t in zip(self.slots, self.gathered, strict=True)
        )

    def flat_home(self) -> torch.Tensor:
        """Return the parameters in their home on the host as a single uint8 tensor, alignment gaps included."""
        assert self._params is not None, "only parameters whose home is the host have a slab"
        return self._params.tensor(torch.uint8, (self._total_bytes,), 0)

    def cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return for each parameter its view of `flat`, which is a copy of `flat_home`."""
        views = []
        for slot, offset in zip(self.slots, self._offsets_bytes, strict=True):
            own = slot.own
            piece = flat[offset : offset + slot.own_nbytes].view(own.dtype)
            views.append(piece.as_strided(own.shape, own.stride()))
        return tuple(views)

    def hold(self, copies: tuple[torch.Tensor, ...], versions: list[int]) -> None:
        """Store `copies` as the gathered copy; `versions` are the versions of the copied parameters."""
        self.gathered, self._gathered_versions = copies, versions

    def current_copy(self) -> tuple[torch.Tensor, ...] | None:
        """Return the parameters on the device if they have the same values as in their home, else None."""
        is_current = self.gathered is not None and (not self.is_on_host or self._gathered_versions == self.versions())
        return self.gathered if is_current else None

    def release(self) -> None:
        """Forget the gathered copy; parameters whose home is the device stay."""
        if self.is_on_host:
            self.gathered = None

    def gradient_buffers(self) -> tuple[torch.Tensor, ...]:
        """Return host tensors for the gradients, in bucket order.

        They share a slab, which is reused as soon as no tensor of it is alive.
        """
        # With gradient accumulation two slabs alternate. A new slab in each step would pin and unpin its pages.
        free = next((entry for entry in self._grads if all(reference() is None for reference in entry[1])), None)
        ratio = self._ratio(self.grad_dtype)
        if free is None:
            slab = Slab(ratio * self._total_bytes, pin=self.pin)
        else:
            self._grads.remove(free)
            slab = free[0]
        buffers = self._cut_slab(slab, self.grad_dtype, ratio)
        self._grads.append((slab, [weakref.ref(tensor.untyped_storage()) for tensor in buffers]))
        return buffers

    def fp32_sum_buffer(self, slot: Slot) -> torch.Tensor:
        """Return an uninitialized fp32 tensor for the sum of the gradients of the slot's parameter, in its home.

        On the host the same memory is reused as soon as no earlier tensor of it is alive.
        """
        if not self.is_on_host:
            return torch.empty_like(slot.own, dtype=torch.float32)
        last = self._totals.get(slot.key)
        slab = last[0] if last is not None and last[1]() is None else Slab(4 * slot.own.numel(), pin=self.pin)
        buffer = cut_slab(slab, [slot], [0], torch.float32)[0]
        self._totals[slot.key] = (slab, weakref.ref(buffer.untyped_storage()))
        return buffer

    def state_buffers(self, dtype: torch.dtype, block: int = 1) -> tuple[torch.Tensor, ...]:
        """Return zeroed host tensors in `dtype` for a statistic of the optimizer, one for each parameter.

        If `block` is 1, they have the shapes of the parameters; else each is flat, with a value for each `block`
        elements. With a value for each element, at least as large as the parameter's, each tensor starts at the same
        element of its slab as its parameter does in the slab of the parameters.
        """
        if block == 1 and dtype.itemsize % self.slots[0].param.dtype.itemsize == 0:
            ratio = self._ratio(dtype)
            return self._cut_slab(Slab(ratio * self._total_bytes, pin=self.pin), dtype, ratio)
        counts = [-(-slot.own.numel() // block) for slot in self.slots]
        ends_bytes = [*itertools.accumulate(aligned_bytes(count * dtype.itemsize) for count in counts)]
        slab, starts_bytes = Slab(ends_bytes[-1], pin=self.pin), [0, *ends_bytes[:-1]]
        if block == 1:
            return cut_slab(slab, self.slots, starts_bytes, dtype)
        return tuple(slab.tensor(dtype, (count,), start) for count, start in zip(counts, starts_bytes, strict=True))

    def _ratio(self, dtype: torch.dtype | None) -> int:
        """Return the element size of `dtype` over the element size of the parameters."""
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
        self.gathered = None

    def _layout(self) -> tuple[tuple[int, ...], int]:
        """Return the offset of each parameter in a slab, and the size of the slab, all in bytes."""
        offsets, end = [], 0
        for slot in self.slots:
            offsets.append(end)
            end = aligned_bytes(end + slot.own_nbytes)
        return tuple(offsets), end

    def _cut_slab(self, slab: Slab, dtype: torch.dtype | None = None, ratio: int = 1) -> tuple[torch.Tensor, ...]:
        """Return a tensor for each parameter, in `dtype` with elements `ratio` times as large as the parameter's."""
        return cut_slab(slab, self.slots, [ratio * offset for offset in self._offsets_bytes], dtype)


def cut_slab(
    slab: Slab, slots: Sequence[Slot], offsets_bytes: Sequence[int], dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Return a tensor for each slot, with the shape and strides of its parameter and a storage of its own in `slab`.

    The tensors have the dtype of their parameter if `dtype` is None.
    """
    tensors = []
    for slot, offset in zip(slots, offsets_bytes, strict=True):
        own = slot.own
        flat = slab.tensor(dtype or own.dtype, (own.numel(),), offset)
        tensors.append(flat.as_strided(own.shape, own.stride()))
    return tuple(tensors)


_KERNEL_ALIGN_BYTES = 16
"""The bytes that Inductor's kernels load at once. It checks the alignment of inputs, but not of parameters."""


def has_moved(own: torch.Tensor, address: int) -> bool:
    """Return whether the values of `own` are no longer those in memory at `address`."""
    return own.data_ptr() != address or compat.is_lazy(own)


def on_device(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `data` on `device`, in memory of torch's allocator: a copy if `data` is elsewhere, in a slab, at an
    address that kernels of an accelerator cannot load from, or if it has a lazy bit."""
    data = compat.settled(data)
    if data.device != device:
        return data.to(device)
    if data.device.type == "cpu":
        must_copy = is_slab_memory(data.data_ptr())
    else:
        must_copy = data.data_ptr() % _KERNEL_ALIGN_BYTES != 0
    return torch.empty_like(data, memory_format=torch.preserve_format).copy_(data) if must_copy else data
