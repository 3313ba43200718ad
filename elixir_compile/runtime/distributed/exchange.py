"""All-gather and reduce-scatter of rows over gloo's point-to-point messages, with one row for each rank.

```text
rank 0    gather   send own -> 1    receive row 1             reduce   send row 1 -> 1    receive into landing
rank 1             send own -> 0    receive row 0                      send row 0 -> 0    receive into landing
                                                                       own row + landing = own part of the sum
```

Gloo's own collectives hold and move more bytes: its reduce-scatter all-reduces a clone of all rows, and its all-gather
receives into a second buffer. On 2 ranks of a CPU, 32 MB of rows took 125 ms and 36 ms by gloo's collectives, and 20 ms
each by messages.

Memory beside the rows: none for a gather. A reduce needs its landing, the size of a row, and with more than 2 ranks
another row during the wait. If ranks have different weights in the mean, the receiver of a row multiplies it by the
weight of its rank.
"""

import itertools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import distributed

Rows = Sequence[torch.Tensor] | torch.Tensor
"""A matrix with a row for each rank, or a sequence of their rows, which may have different lengths. An empty row is not
sent."""
_NUM_TAGS = 2**20
"""Tags repeat after this many exchanges, far more than are ever in flight at once."""
_TAGS: "weakref.WeakKeyDictionary[distributed.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()
"""The counter of exchanges of each group. Two models may use the same group, and no message of an exchange may be taken
for a message of another exchange."""


class Messenger:
    """Sends rows to the other ranks of `group` and receives rows from them.

    All ranks of `group` must start the same exchanges in the same order.
    """

    def __init__(self, group: "distributed.ProcessGroup") -> None:
        self._group = group
        self.rank = group.rank()
        num_ranks = group.size()
        self.others = [(self.rank - step) % num_ranks for step in range(1, num_ranks)]
        """The other ranks in descending order from this rank, so that no two ranks receive from the same rank first."""
        self._tags = _TAGS.setdefault(group, itertools.count())
        self.weights = (1.0,) * num_ranks
        """The weight of each rank's rows in a mean."""

    def new_tag(self) -> int:
        """Return the tag of the next exchange, by which gloo tells the messages of exchanges in flight apart."""
        return next(self._tags) % _NUM_TAGS

    def all_gather(self, rows: Rows, own: torch.Tensor) -> "Exchange":
        """Start filling row i of `rows` with the tensor `own` of rank i."""
        tag = self.new_tag()
        sends = [self.send(own, rank, tag) for rank in reversed(self.others) if own.numel()]
        receipts = [self.receive(rows[rank], rank, tag) for rank in self.others if rows[rank].numel()]
        rows[self.rank].copy_(own)
        return Exchange([*receipts, *sends])

    def reduce_scatter(self, landing: torch.Tensor, rows: Rows) -> "Reduction":
        """Start filling `landing` with the mean over ranks of this rank's row of `rows`, by the current weights."""
        return Reduction(self, landing, rows)

    def send(self, row: torch.Tensor, rank: int, tag: int) -> "distributed.Work":
        """Start sending `row` to `rank`."""
        return self._group.send([row], rank, tag)

    def receive(self, row: torch.Tensor, rank: int, tag: int) -> "distributed.Work":
        """Start receiving `row` from `rank`."""
        return self._group.recv([row], rank, tag)


def messenger_of(group: "distributed.ProcessGroup", device: torch.device) -> Messenger | None:
    """Return a messenger for rows on `device` in `group`, or None if the collectives of `group` are to be used."""
    is_gloo = device.type == "cpu" and "cpu:gloo" in distributed.get_backend_config(group)
    return Messenger(group) if is_gloo else None


class Exchange:
    """The messages of an all-gather in flight."""

    def __init__(self, messages: "list[distributed.Work]") -> None:
        self._messages = messages

    def wait(self) -> None:
        """Wait until all messages have arrived. Raises RuntimeError if a rank is dead or silent."""
        for message in self._messages:
            message.wait()
        self._messages = []


class Reduction(Exchange):
    """A reduce-scatter in flight: receives the rows of the other ranks one after another into its landing."""

    def __init__(self, messenger: Messenger, landing: torch.Tensor, rows: Rows) -> None:
        self._messenger, self._landing, self._own = messenger, landing, rows[messenger.rank]
        self._weights = messenger.weights
        self._tag = messenger.new_tag()
        sent = [rank for rank in reversed(messenger.others) if rows[rank].numel()]
        super().__init__([messenger.send(rows[rank], rank, self._tag) for rank in sent])
        self._receipt = messenger.receive(landing, messenger.others[0], self._tag) if landing.numel() else None

    def wait(self) -> None:
        """Wait until the landing is the mean. Raises RuntimeError if a rank is dead or silent."""
        if self._receipt is None:  # this rank has no part of the sum
            super().wait()
            return
        self._receipt.wait()
        first, *later = self._messenger.others
        scale_by_weight(self._landing, self._weights[first])
        total: torch.Tensor | None = None
        for rank in later:
            # Not in place, because other code may still read `rows` as a gradient.
            total = self._own_added(torch.empty_like(self._landing)) if total is None else total.add_(self._landing)
            self._messenger.receive(self._landing, rank, self._tag).wait()
            scale_by_weight(self._landing, self._weights[rank])
        if total is None:
            self._own_added(self._landing)
        else:
            self._landing.add_(total)
        self._landing.div_(len(self._weights))
        super().wait()

    def _own_added(self, out: torch.Tensor) -> torch.Tensor:
        """Write the landing plus this rank's weighted row to `out`, and return `out`."""
        weight = self._weights[self._messenger.rank]
        if weight == 0.0:  # not multiplied, because the row may hold infinities or NaNs
            return out if out is self._landing else out.copy_(self._landing)
        return torch.add(self._landing, self._own, alpha=weight, out=out)


def scale_by_weight(grads: torch.Tensor, weight: float) -> None:
    """Multiply `grads` by `weight` in place; a weight of 0 also zeroes infinities and NaNs."""
    if weight == 0.0:
        grads.zero_()
    elif weight != 1.0:
        grads.mul_(weight)
