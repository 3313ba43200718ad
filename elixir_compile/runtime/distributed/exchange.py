"""All-gather and reduce-scatter of rows, one row per rank, over gloo's point-to-point messages.

```text
rank 0    gather   send own -> 1    receive row 1             reduce   send row 1 -> 1    receive into landing
rank 1             send own -> 0    receive row 0                      send row 0 -> 0    receive into landing
                                                                       own row + landing = own part of the sum
```

Gloo's own collectives hold and move more: its reduce-scatter all-reduces a clone of all rows, its all-gather receives
into a second buffer. On 2 ranks of one CPU, 32 MB of rows took 125 ms and 36 ms by them and 20 ms each by messages.

Memory beside the rows: none for a gather; for a reduce its landing, one row, and of more than 2 ranks one row more
while it is waited for. Where rows do not count once each in the mean, whoever receives one scales it.
"""

import itertools
import weakref
from collections.abc import Iterator

import torch
from torch import distributed

_NUM_TAGS = 2**20
"""Far more exchanges than are ever under way at once; a tag is used again after as many."""
_TAGS: "weakref.WeakKeyDictionary[distributed.ProcessGroup, Iterator[int]]" = weakref.WeakKeyDictionary()
"""The numbers of the exchanges of each group: two models may be on one, and no message is to be taken for another's."""


class Messenger:
    """The place `rank` of this process in `group`, whose ranks all begin the same exchanges in the same order."""

    def __init__(self, group: "distributed.ProcessGroup") -> None:
        self._group = group
        self.rank = group.rank()
        num_ranks = group.size()
        self.others = [(self.rank - step) % num_ranks for step in range(1, num_ranks)]
        """The other ranks, from the one before this backwards, so that no two ranks begin with the same."""
        self._tags = _TAGS.setdefault(group, itertools.count())
        self.weights = (1.0,) * num_ranks
        """How often the rows of each rank count in a mean."""

    def new_tag(self) -> int:
        """Return the number of the next exchange: messages of one are not taken for those of another."""
        return next(self._tags) % _NUM_TAGS

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> "Exchange":
        """Start filling each of `rows` with the `own` of its rank."""
        tag = self.new_tag()
        sends = [self.send(own, rank, tag) for rank in reversed(self.others)]
        receipts = [self.receive(rows[rank], rank, tag) for rank in self.others]
        rows[self.rank].copy_(own)
        return Exchange([*receipts, *sends])

    def reduce_scatter(self, landing: torch.Tensor, rows: torch.Tensor) -> "Reduction":
        """Start filling `landing` with the mean over ranks of this rank's row of `rows`, by the weights as they are."""
        return Reduction(self, landing, rows)

    def send(self, row: torch.Tensor, rank: int, tag: int) -> "distributed.Work":
        """Start sending `row` to `rank`."""
        return self._group.send([row], rank, tag)

    def receive(self, row: torch.Tensor, rank: int, tag: int) -> "distributed.Work":
        """Start filling `row` with what `rank` sends."""
        return self._group.recv([row], rank, tag)


def messenger_of(group: "distributed.ProcessGroup", device: torch.device) -> Messenger | None:
    """Return what exchanges rows of `device` in `group` better than its own collectives do, None where nothing does."""
    is_gloo = device.type == "cpu" and "cpu:gloo" in distributed.get_backend_config(group)
    return Messenger(group) if is_gloo else None


class Exchange:
    """Messages under way."""

    def __init__(self, messages: "list[distributed.Work]") -> None:
        self._messages = messages

    def wait(self) -> None:
        """Return when all messages arrived; RuntimeError where a rank is dead or silent."""
        for message in self._messages:
            message.wait()
        self._messages = []


class Reduction(Exchange):
    """The rows of other ranks, received one after another into one landing."""

    def __init__(self, messenger: Messenger, landing: torch.Tensor, rows: torch.Tensor) -> None:
        self._messenger, self._landing, self._own = messenger, landing, rows[messenger.rank]
        self._weights = messenger.weights
        self._tag = messenger.new_tag()
        super().__init__([messenger.send(rows[rank], rank, self._tag) for rank in reversed(messenger.others)])
        self._receipt = messenger.receive(landing, messenger.others[0], self._tag)

    def wait(self) -> None:
        """Return when the landing is the mean; RuntimeError where a rank is dead or silent."""
        self._receipt.wait()
        first, *later = self._messenger.others
        weigh_in(self._landing, self._weights[first])
        total: torch.Tensor | None = None
        for rank in later:
            # Not in place: `rows` may be a gradient that something else reads.
            total = self._own_added(torch.empty_like(self._landing)) if total is None else total.add_(self._landing)
            self._messenger.receive(self._landing, rank, self._tag).wait()
            weigh_in(self._landing, self._weights[rank])
        if total is None:
            self._own_added(self._landing)
        else:
            self._landing.add_(total)
        self._landing.div_(len(self._weights))
        super().wait()

    def _own_added(self, out: torch.Tensor) -> torch.Tensor:
        """Let `out` be the landing and what this rank's own row counts, and return it."""
        weight = self._weights[self._messenger.rank]
        if weight == 0.0:  # the row may hold what is not finite
            return out if out is self._landing else out.copy_(self._landing)
        return torch.add(self._landing, self._own, alpha=weight, out=out)


def weigh_in(grads: torch.Tensor, weight: float) -> None:
    """Let `grads` be what they count in a mean: `weight` times, and zero for none, also what is not finite."""
    if weight == 0.0:
        grads.zero_()
    elif weight != 1.0:
        grads.mul_(weight)
