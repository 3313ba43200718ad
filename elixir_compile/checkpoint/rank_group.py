"""Run the parts of a save or load on all ranks at once; an error on one rank is raised on all ranks.

```text
  rank 0   make the folder ----+   write own parts ----+   metadata, manifest, rename ----+   done
  rank 1   -                   |   write own parts     |   -                              |   done
                            exchange                exchange                           exchange
```

If a rank dies or is silent, the other ranks raise PeerFailed within the timeout of the process group. A single process
runs the same code and sends nothing.
"""

import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

from torch import nn

from elixir_compile.base.errors import DiskFailed, DiskFull
from elixir_compile.checkpoint.errors import CheckpointCorrupted, CheckpointMismatch, NotACheckpoint, NotSavable
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime.distributed.control import Carried, ControlChannel
from elixir_compile.runtime.distributed.errors import RanksDiffer, ranks_text

_Made = TypeVar("_Made")

checkpoint_lock = threading.Lock()
"""Held during a load or export, and from a snapshot until it is written, so all ranks exchange in the same order."""

_CARRIED: Carried = {
    NotACheckpoint: attrgetter("path", "because"),
    CheckpointCorrupted: attrgetter("path", "file", "key", "because"),
    CheckpointMismatch: attrgetter("path", "what", "differences"),
    NotSavable: attrgetter("path", "key", "kind"),
    DiskFull: attrgetter("path", "label", "needed_bytes", "free_bytes", "because"),
    DiskFailed: attrgetter("path", "operation", "because"),
}
"""The errors that every rank raises with the same class and text, and the facts to build each from."""


class RankGroup:
    """The ranks with parts of one model, which save and load together; this process alone without a mesh."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self.rank = control.rank
        self.num_ranks = len(control.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which writes the files that a checkpoint has once."""
        return self.rank == 0

    def run_on_all(
        self, what: str, act: Callable[[], _Made], text_of: Callable[[_Made], str] = lambda made: ""
    ) -> tuple[_Made, tuple[str, ...]]:
        """Call `act` on every rank; return its result, and `text_of` the result from every rank.

        `what` names the work in errors. If `act` raises on any rank, all ranks raise: an error about the checkpoint
        with its class, any other error as PeerFailed on the ranks that did not fail.
        """
        return self._control.run_on_all_ranks(what, act, text_of, _CARRIED)

    def run_on_first(self, what: str, act: Callable[[], str]) -> str:
        """Call `act` on the first rank only, and return its result on all ranks."""
        _, texts = self.run_on_all(what, act if self.is_first else str, str)
        return texts[0]

    def require_same(self, facts: Sequence[dict[str, object]]) -> None:
        """Raise RanksDiffer unless the `facts` of all ranks are equal."""
        ranks, usual = self._control.ranks, facts[0]
        odd = [place for place, own in enumerate(facts) if own != usual]
        if not odd:
            return
        differences = [
            f"{name}: {value} on {ranks_text(ranks[:1])}, {facts[place].get(name)} on {ranks_text([ranks[place]])}"
            for place in odd
            for name, value in usual.items()
            if facts[place].get(name) != value
        ]
        raise RanksDiffer([ranks[place] for place in odd], differences)


def rank_group_of(model: nn.Module, doing: str) -> RankGroup:
    """Return the group of ranks with parts of `model`; several ranks all call this at once.

    In the main thread, ranks first exchange what each is `doing`. Raises RanksDiffer if a rank trains instead.
    """
    executor = executor_of(model)
    peers = None if executor is None else executor.peers
    if peers is not None and threading.current_thread() is threading.main_thread():
        peers.control.exchange("", "a save, load or export", doing)
    return RankGroup(ControlChannel(None, (0,), 0) if peers is None else peers.checkpoint_control)
