"""The errors of several ranks; their place in the tree of `elixir_compile.base.errors`:

```text
ElixirError
└── _RanksError        (RuntimeError)   ranks that cannot go on together
    ├── PeerFailed                      a rank died, does not answer, or reported a failure
    ├── RanksDiffer                     ranks call different things, or differ in model or options
    └── OverflowUnseen                  a rank would take a step that other ranks skip
```
"""

# ruff: noqa: N818 - as in `elixir_compile.base.errors`

from collections.abc import Sequence
from itertools import pairwise

from elixir_compile.base.errors import ElixirError
from elixir_compile.base.units import format_s

_MOST_SHOWN = 8
"""Differences that the text of an error lists."""


class _RanksError(ElixirError, RuntimeError):
    """The ranks cannot go on together; `ranks` are at fault, numbered as in the default process group."""

    ranks: Sequence[int]


class PeerFailed(_RanksError):
    """A rank among `ranks` failed during the exchange `during`.

    If `waited_s` is None the rank reported its failure, and `because` is the message of its exception. Otherwise the
    rank had died or not answered after `waited_s` seconds, and `because` is the message of the process group.
    """

    during: str
    because: str
    waited_s: float | None = None

    def __str__(self) -> str:
        because = self.because.rstrip(".")
        if self.waited_s is None:
            return (
                f"{ranks_text(self.ranks)} failed during the exchange of {self.during}: {because}. All ranks stop with "
                "it. Look at its own output, then start all ranks again."
            )
        one_of = "" if len(self.ranks) == 1 else "one of "
        return (
            f"no answer from {one_of}{ranks_text(self.ranks)} in {format_s(self.waited_s)} during the exchange of "
            f"{self.during}: {because}. It died, hangs or is late, or does something else: all ranks must call the "
            "model, its backward, the optimizer and saves equally often and in the same order. Look at its output, "
            "then start all ranks again; if it was only late, raise the timeout of the process group, "
            "init_process_group(timeout=...)."
        )


class RanksDiffer(_RanksError):
    """`ranks` act differently from the other ranks; `differences` holds one sentence for each difference.

    `fix` is the advice of the message, if another than the usual one helps.
    """

    differences: Sequence[str]
    fix: str = ""

    def __str__(self) -> str:
        verb = "does" if len(self.ranks) == 1 else "do"
        more = len(self.differences) - _MOST_SHOWN
        listed = "".join(f"\n  {difference}" for difference in self.differences[:_MOST_SHOWN])
        rest = f"\n  and {more} more" if more > 0 else ""
        fix = self.fix or (
            "Build the same model with the same options on all ranks, and call the model, its backward, the optimizer "
            "and saves in the same order on all of them."
        )
        return (
            f"all ranks must do the same, and {ranks_text(self.ranks)} {verb} not do what the others do:"
            f"{listed}{rest}\n{fix}"
        )


class OverflowUnseen(_RanksError):
    """A gradient overflowed on another rank, and GradScaler on this rank, `ranks`, has not seen it."""

    def __str__(self) -> str:
        return (
            f"a gradient overflowed on another rank, and GradScaler on {ranks_text(self.ranks)} would take the step "
            "that the other rank skips. Do not call `scaler.unscale_`: `optimizer.clip_grad_norm_(1.0, grad_scale="
            "scaler.get_scale())` clips scaled gradients."
        )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `ranks` in words: `rank 3`, `ranks 0-2, 5`."""
    found = sorted(set(ranks))
    starts = [found[0], *(later for earlier, later in pairwise(found) if later != earlier + 1)] if found else []
    ends = [*(earlier for earlier, later in pairwise(found) if later != earlier + 1), found[-1]] if found else []
    spans = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(spans)}"
