"""A batch sampler for ranks that train unequal numbers of rows.

```text
  epoch      3 1 7 0 | 5 2 6 4        one permutation for all ranks, from the seed and the epoch
  batch 0    3 1 7 0                  the batch that one process would have
  rank 0     3 1                      rows 0 and 1, by its share of 2 rows of 4
  rank 1         7
  rank 2           0
```

So the rows of all ranks together are the batch of one process, in its order, whatever the shares are: a run that goes
on with other shares, or on other ranks, continues with the same data. A rank whose share has no rows gets the first two
of the batch, which count 0: it has to run a step, because every rank takes part in every collective.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import distributed, nn
from torch.utils.data import Sampler

from elixir_compile.base.errors import InvalidOption
from elixir_compile.ir.share import Share, batch_of, check_shares, largest_remainder
from elixir_compile.session.prepare import prepared_model
from elixir_compile.session.rank_facts import require_same_shares, take_rows

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
