"""The ranks that run one model together: they agree on plans, call the roll before steps, and save together."""

import platform
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from elixir_compile.runtime.distributed.control import ControlChannel, new_control_channel


class Peers:
    """The processes `ranks`, numbered as in the default process group, which have parts of one model.

    All of them must make this at the same point.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.control = new_control_channel(ranks)
        """The control channel for training."""

    @property
    def num_ranks(self) -> int:
        """The number of all ranks."""
        return len(self.control.ranks)

    @cached_property
    def checkpoint_control(self) -> ControlChannel:
        """The control channel for checkpoints, separate because training continues during a save.

        All ranks must read this for the first time at the same point.
        """
        return new_control_channel(self.control.ranks)

    @cached_property
    def num_local(self) -> int:
        """The largest number of ranks on a host, told apart by host name.

        All ranks must read this for the first time at the same point.
        """
        names = self.control.exchange(platform.node(), "names of hosts", "is about to run its first graph")
        return max(Counter(names).values())
