"""The shares of all ranks at `prepare` and later: every rank must have the same ones; gradients count by their rows."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from elixir_compile.base.errors import ElixirWarning, InvalidOption, UnsupportedModel
from elixir_compile.ir.share import STATE_TOLERANCE, Share, batch_of, check_shares, equal_shares, shares_to_json
from elixir_compile.runtime.distributed.errors import RanksDiffer
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.executor import Executor

_NONE = "none"
_SAME_BATCH = (
    "Ranks along a tensor axis have the same rows. Give each of them the same batch, by the rank along the data axis "
    "alone, and call `weigh` with its number of samples."
)


def share_out(ranks: Ranks, shares: Sequence[Share]) -> None:
    """Let `ranks` have `shares`, and weight the gradients of each by its rows; nothing changes if all have none.

    Raises RanksDiffer if ranks have different shares, InvalidOption if the shares do not fit the ranks, and
    UnsupportedModel for a mesh of two axes.
    """
    _require_same(ranks, _digest(shares) if shares else _NONE, "prepares its model with")
    if not shares:
        return
    check_shares(shares, ranks.num_ranks)
    _require_one_axis(ranks)
    ranks.shares = tuple(shares)
    ranks.weigh_by([share.num_rows for share in shares])


def require_same_shares(ranks: Ranks, shares: Sequence[Share], when: str) -> None:
    """Raise RanksDiffer on all ranks unless all of `ranks` are about to take `shares`, and `when`, in words, is equal.
    Every rank must call this together."""
    _require_same(ranks, f"{_digest(shares)} {when}", "takes")


def take_rows(ranks: Ranks, shares: Sequence[Share]) -> None:
    """Let `ranks` have the rows of `shares` from the next step on, and weight the gradients of each by them.

    All ranks must have been found to take the same. Raises InvalidOption if the shares do not fit the ranks, or have
    other parts of the state than the ranks own, and UnsupportedModel for a mesh of two axes.
    """
    check_shares(shares, ranks.num_ranks)
    own = ranks.state or (1 / ranks.num_ranks,) * ranks.num_ranks
    if any(abs(share.state - part) > STATE_TOLERANCE for share, part in zip(shares, own, strict=True)):
        expected = f"the parts of the state that the ranks own, {list(own)}: only rows change while a model trains"
        raise InvalidOption("shares", [share.state for share in shares], expected)
    _require_one_axis(ranks)
    ranks.shares, ranks.suggested_rows = tuple(shares), ()
    ranks.warned_rows.clear()
    ranks.weigh_by([share.num_rows for share in shares])


def weigh_batches(executor: Executor, num_samples: int) -> None:
    """Weight the gradients of this rank by `num_samples`, so that means over ranks are means over samples from now on.

    Every rank must call this at the same point. Raises PeerFailed if a rank does not, ValueError if no rank has
    samples, and RanksDiffer if ranks along a tensor axis, which have the same batch, give different numbers.
    """
    if executor.peers is None:
        return
    control = executor.peers.control
    samples = [int(text) for text in control.exchange(str(num_samples), "samples of a batch", "weighs its batch")]
    if executor.tensor_axis is not None:
        of_rank = dict(zip(control.ranks, samples, strict=True))
        for ranks in executor.tensor_axis.rank_groups:
            odd = [rank for rank in ranks if of_rank[rank] != of_rank[ranks[0]]]
            if odd:
                said = [f"rank {rank} weighs its batch by {of_rank[rank]} samples" for rank in ranks]
                raise RanksDiffer(odd, said, _SAME_BATCH)
    if executor.ranks is not None:
        executor.ranks.weigh_by(samples)


def suggested_shares(ranks: Ranks) -> tuple[Share, ...]:
    """Return the shares of `ranks` with the rows that were suggested; empty if none were."""
    rows = ranks.suggested_rows
    own = ranks.shares or equal_shares(ranks.num_ranks, sum(rows)) if rows else ()
    return tuple(
        replace(share, num_rows=count, micro_batches=share.micro_batches if count % share.micro_batches == 0 else 1)
        for share, count in zip(own, rows, strict=True)
    )


def _require_one_axis(ranks: Ranks) -> None:
    if ranks.num_copies > 1:
        raise UnsupportedModel("the mesh", "shares are for one axis; a mesh with copies of each part has two")
    if ranks.tensor_axis is not None:
        because = (
            f"shares are for one axis, and a tensor axis of {ranks.tensor_axis.num_ranks} ranks is beside it. Give "
        )
        raise UnsupportedModel("the mesh", f"{because}all ranks along the data axis as many rows, and no `shares`")


def _digest(shares: Sequence[Share]) -> str:
    return hashlib.sha256(shares_to_json(tuple(shares)).encode()).hexdigest()[:16]


def _require_same(ranks: Ranks, own: str, doing: str) -> None:
    """Raise RanksDiffer unless `own` is equal on all ranks; `doing` says what this rank does with its shares."""
    said = ranks.control.exchange(own, "shares of the ranks", f"{doing} shares")
    if len(set(said)) > 1:
        usual, _ = Counter(said).most_common(1)[0]
        others = [rank for rank, text in zip(ranks.control.ranks, said, strict=True) if text != usual]
        names = {text: f"shares {text}" if text != _NONE else "no shares" for text in said}
        pairs = zip(ranks.control.ranks, said, strict=True)
        raise RanksDiffer(others, [f"rank {rank} {doing} {names[text]}" for rank, text in pairs])


def warn_of_other_rows(ranks: Ranks, num_rows: int) -> None:
    """Warn, once for each number, if a step of this rank has `num_rows` rows, and its share has another number; a share
    of no rows may have any, because they count 0.

    The gradients count by the rows of the share until `weigh` is called.
    """
    share = ranks.shares[ranks.control.rank]
    if num_rows <= 1 or share.num_rows in (0, num_rows) or num_rows in ranks.warned_rows:
        return
    ranks.warned_rows.add(num_rows)
    warnings.warn(
        f"a batch of {num_rows} rows on rank {share.rank}, whose share is {share.num_rows} of "
        f"{batch_of(ranks.shares)}. Its gradients count as those of {share.num_rows} rows: call "
        f"`elixir_compile.weigh(model, {num_rows})` on every rank, each with its rows, before such a backward.",
        ElixirWarning,
        stacklevel=2,
    )
