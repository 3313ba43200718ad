"""The share of each rank in a step: its rows of the batch, and its shard of the training state.

```text
  rank   rows   micro-batches   state
  0      5      1               0.5        rows add up to the batch, shards of the state to 1
  1      2      1               0.25
  2      1      1               0.25
```

Shares decide what ranks train; where a rank keeps its shard, on the device, the host or the disk, its plan decides.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elixir_compile.base.codec import LEFT_OUT, Form, from_json, to_json
from elixir_compile.base.errors import InvalidOption, InvalidPlan, PlanFileError

STATE_TOLERANCE = 1e-9
"""How far the shards of the state of all ranks may add up to another number than 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The rows and the shard of the training state of one rank."""

    rank: int
    num_rows: int
    """Rows of the batch that the rank trains; 0 for a rank that only holds its shard of the state."""
    micro_batches: int = 1
    """Micro-batches into which the rank divides its rows, by which its activations were counted."""
    state: float
    """Part of the rows of every sharded parameter, and of its gradient and optimizer state, 0 to 1."""

    def __post_init__(self) -> None:
        if min(self.rank, self.num_rows) < 0 or self.micro_batches < 1:
            raise InvalidPlan(
                f"the share of rank {self.rank} has {self.num_rows} rows in {self.micro_batches} micro-batches; "
                "expected 0 or more rows in 1 or more."
            )
        if not (math.isfinite(self.state) and 0 <= self.state <= 1):
            raise InvalidPlan(f"the share of rank {self.rank} has {self.state} of the state; expected 0 to 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a search found the shares of all ranks: `str` says it in words."""

    step_s: float
    """Seconds of a step: in the simulation of all ranks together, or by the formula of the search if nothing was
    simulated."""
    num_simulated: int = 0
    """Choices of rows whose step was simulated with the plans of all ranks; these shares have the shortest. If it is
    0, they have the shortest step by the formula."""
    is_complete: bool = True
    """Whether all choices were simulated that could be better; False if the time for it was over."""

    def __str__(self) -> str:
        if not self.num_simulated:
            because = "the ranks have no plans" if self.is_complete else "nothing was simulated"
            return f"the shortest by the formula of the search; {because}"
        number = f"{self.num_simulated} choices" if self.num_simulated > 1 else "1 choice"
        found = f"the shortest of {number} in the simulation of all ranks"
        return found if self.is_complete else f"{found}; there was no time for others"


class Shares(tuple[Share, ...]):
    """The shares of all ranks, as a tuple, and how they were found.

    Example:
        shares = elixir.shares(model, batch, batch=64, hardware="2 x l4-24g + 1 x a6000-48g")
        print(shares.outcome.step_s, "s:", shares.outcome)
    """

    outcome: Outcome
    """How the search found them."""

    def __new__(cls, shares: Iterable[Share], outcome: Outcome) -> "Shares":
        """Return `shares` with the `outcome` of their search."""
        found = super().__new__(cls, shares)
        found.outcome = outcome
        return found

    def __getnewargs__(self) -> tuple[tuple[Share, ...], Outcome]:
        return tuple(self), self.outcome


def equal_shares(num_ranks: int, batch: int) -> tuple[Share, ...]:
    """Return shares of equal shards of the state, and of `batch` rows, of which lower ranks get one more if they cannot
    be equal."""
    each, more = divmod(batch, num_ranks)
    return tuple(Share(rank=rank, num_rows=each + (rank < more), state=1 / num_ranks) for rank in range(num_ranks))


def batch_of(shares: Sequence[Share]) -> int:
    """Return the rows of all ranks together."""
    return sum(share.num_rows for share in shares)


def have_equal_shards(shares: Sequence[Share]) -> bool:
    """Return whether all ranks have equal shards of the state; True for no shares."""
    return all(abs(share.state * len(shares) - 1) <= STATE_TOLERANCE * len(shares) for share in shares)


def check_shares(shares: Sequence[Share], num_ranks: int) -> None:
    """Raise InvalidOption unless there is one share for each of `num_ranks` ranks, in order, with at least one row in
    all and shards of the state that sum to 1."""
    expected = f"one per rank of the mesh, {num_ranks}, in the order of ranks"
    if [share.rank for share in shares] != list(range(num_ranks)):
        raise InvalidOption("shares", [share.rank for share in shares], expected)
    if not batch_of(shares):
        raise InvalidOption("shares", [share.num_rows for share in shares], f"{expected}, with rows")
    total = math.fsum(share.state for share in shares)
    if abs(total - 1) > STATE_TOLERANCE:
        raise InvalidOption("shares", [share.state for share in shares], f"{expected}, with state that sums to 1")


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return whole numbers proportional to `weights`, 0 or more, that sum to `total`.

    Each weight gets its part rounded down; the parts with the largest remainders get one more, ties at lower indices.
    Raises ValueError if all weights are 0 and `total` is not.
    """
    whole = math.fsum(weights)
    if whole <= 0:
        if total:
            raise ValueError(f"{total} cannot be divided by the weights {list(weights)}, which are all 0.")
        return (0,) * len(weights)
    parts = [total * weight / whole for weight in weights]
    found = [math.floor(part) for part in parts]
    order = sorted(range(len(parts)), key=lambda index: (found[index] - parts[index], index))
    for index in order[: total - sum(found)]:
        found[index] += 1
    return tuple(found)


def owners_by_size(sizes: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Return for each of `sizes` the rank that owns all of it, so that ranks own bytes as their `weights` say.

    The largest first, each to the rank that is the least full with it, ties to the lower rank: longest processing time
    first (Graham, Bounds on multiprocessing timing anomalies, 1969). With equal weights the fullest rank owns at most
    4/3 of what it would by the best assignment. A rank of weight 0 owns nothing.

    Raises ValueError if all weights are 0.
    """
    ranks = [rank for rank, weight in enumerate(weights) if weight > 0]
    if not ranks:
        raise ValueError(f"nothing can be owned by ranks with the weights {list(weights)}, which are all 0.")
    owned, found = [0] * len(weights), [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owner = min(ranks, key=lambda rank: (owned[rank] + sizes[place]) / weights[rank])
        owned[owner] += sizes[place]
        found[place] = owner
    return tuple(found)


SHARES_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    shares: tuple[Share, ...]
    outcome: Outcome | None = field(default=None, metadata=LEFT_OUT)


_SHARES = Form(what="shares", version=SHARES_FORMAT, error=PlanFileError)


def shares_to_json(shares: Sequence[Share]) -> str:
    """Return the shares of all ranks as JSON, with their outcome if they are `Shares`."""
    outcome = shares.outcome if isinstance(shares, Shares) else None
    return to_json(_SHARES, _Shares(shares=tuple(shares), outcome=outcome))


def shares_from_json(text: str) -> tuple[Share, ...]:
    """Return the shares in `text`, as `Shares` if it has their outcome.

    Raises PlanFileError with the wrong field, as `shares[0].num_rows`.
    """
    found = from_json(_SHARES, _Shares, text)
    return found.shares if found.outcome is None else Shares(found.shares, found.outcome)
