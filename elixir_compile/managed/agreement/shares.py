"""The shares of all ranks at `prepare`: every rank must have the same ones; gradients count by their rows."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Sequence

from elixir_compile.errors import ElixirWarning, UnsupportedModel
from elixir_compile.ir.share import Share, batch_of, check_shares, shares_to_json
from elixir_compile.runtime.distributed.errors import RanksDiffer
from elixir_compile.runtime.distributed.ranks import Ranks

_NONE = "none"


def share_out(ranks: Ranks, shares: Sequence[Share]) -> None:
    """Let `ranks` have `shares`, and weight the gradients of each by its rows; nothing changes if all have none.

    Raises RanksDiffer if ranks have different shares, InvalidOption if the shares do not fit the ranks, and
    UnsupportedModel for a mesh of two axes.
    """
    own = hashlib.sha256(shares_to_json(tuple(shares)).encode()).hexdigest()[:16] if shares else _NONE
    said = ranks.control.exchange(own, "shares of the ranks", "prepares its model")
    if len(set(said)) > 1:
        usual, _ = Counter(said).most_common(1)[0]
        others = [rank for rank, text in zip(ranks.control.ranks, said, strict=True) if text != usual]
        names = {text: f"shares {text}" if text != _NONE else "no shares" for text in said}
        pairs = zip(ranks.control.ranks, said, strict=True)
        raise RanksDiffer(others, [f"rank {rank} prepares its model with {names[text]}" for rank, text in pairs])
    if not shares:
        return
    check_shares(shares, ranks.num_ranks)
    if ranks.num_copies > 1:
        raise UnsupportedModel("the mesh", "shares are for one axis; a mesh with copies of each part has two")
    ranks.shares = tuple(shares)
    ranks.weigh_by([share.num_rows for share in shares])


def warn_of_other_rows(ranks: Ranks, num_rows: int) -> None:
    """Warn if a step of this rank has `num_rows` rows, and its share has another number; a share of no rows may have
    any, because they count 0.

    The gradients count by the rows of the share until `weigh` is called.
    """
    if not ranks.shares or num_rows <= 1:
        return
    share = ranks.shares[ranks.control.rank]
    if share.num_rows not in (0, num_rows):
        warnings.warn(
            f"a batch of {num_rows} rows on rank {share.rank}, whose share is {share.num_rows} of "
            f"{batch_of(ranks.shares)}. Its gradients count as those of {share.num_rows} rows: call "
            f"`elixir_compile.weigh(model, {num_rows})` on every rank, each with its rows, before such a backward.",
            ElixirWarning,
            stacklevel=2,
        )
