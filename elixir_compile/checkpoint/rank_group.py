"""Steps that every rank takes at once: what fails on one is raised on all of them, in that step.

```text
  rank 0   make the folder ----+   write own parts ----+   metadata, manifest, rename ----+   done
  rank 1   -                   |   write own parts     |   -                              |   done
                            exchange                exchange                           exchange
```

A rank that dies or is silent is a PeerFailed on the others, within the timeout of the process group. One process alone
takes the same steps, and nothing is sent.
"""

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

from torch import nn

from elixir_compile.capture.modules import executor_of
from elixir_compile.checkpoint.errors import CheckpointCorrupted, CheckpointMismatch, NotACheckpoint, NotSavable
from elixir_compile.errors import DiskFailed, DiskFull
from elixir_compile.runtime.distributed.control import Carried, ControlChannel
from elixir_compile.runtime.distributed.errors import RanksDiffer, ranks_text

_Made = TypeVar("_Made")

turn = threading.Lock()
"""Held from a snapshot until it is written, and during a load: whatever ranks exchange, they do in the same order."""

_CARRIED: Carried = {
    NotACheckpoint: attrgetter("path", "because"),
    CheckpointCorrupted: attrgetter("path", "file", "key", "because"),
    CheckpointMismatch: attrgetter("path", "what", "differences"),
    NotSavable: attrgetter("path", "key", "kind"),
    DiskFull: attrgetter("path", "label", "needed_bytes", "free_bytes", "because"),
    DiskFailed: attrgetter("path", "operation", "because"),
}
"""Errors that are about the checkpoint, so they are the same on every rank, and the facts they are made of."""


class RankGroup:
    """The ranks that save or load one model; this process alone where there are no others."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self.rank = control.rank
        self.num_ranks = len(control.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that does what only one does."""
        return self.rank == 0

    def step(
        self, what: str, act: Callable[[], _Made], text_of: Callable[[_Made], str] = lambda made: ""
    ) -> tuple[_Made, tuple[str, ...]]:
        """Return what `act` returns, and the text of it from every rank.

        Where it fails on any rank, all of them raise: an error of the checkpoint as it is, another as PeerFailed on
        the ranks that did not fail.
        """
        return self._control.run_on_all_ranks(what, act, text_of, _CARRIED)

    def first(self, what: str, act: Callable[[], str]) -> str:
        """Let the first rank alone `act`, and return on all ranks what that returned."""
        _, texts = self.step(what, act if self.is_first else str, str)
        return texts[0]

    def require_same(self, facts: Sequence[dict[str, object]]) -> None:
        """Raise RanksDiffer unless the `facts` of all ranks are equal."""
        ranks, usual = self._control.ranks, facts[0]
        odd = [place for place, own in enumerate(facts) if own != usual]
        if not odd:
            return
        told = [
            f"{name}: {value} on {ranks_text(ranks[:1])}, {facts[place].get(name)} on {ranks_text([ranks[place]])}"
            for place in odd
            for name, value in usual.items()
            if facts[place].get(name) != value
        ]
        raise RanksDiffer([ranks[place] for place in odd], told)


def rank_group_of(model: nn.Module, doing: str) -> RankGroup:
    """Return the ranks that have `model`; all of them must ask at once, where there are several.

    In the main thread, where training is, RanksDiffer where one goes on with that; it tells what this rank is `doing`.
    """
    executor = executor_of(model)
    ranks = None if executor is None else executor.ranks
    if ranks is not None and threading.current_thread() is threading.main_thread():
        ranks.control.exchange("", "a save, load or export", doing)
    return RankGroup(ControlChannel(None, (0,), 0) if ranks is None else ranks.checkpoint_control)
