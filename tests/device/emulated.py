"""The device of this process that is made of host memory: CUDA over its stand-in, or the second device type.

Its copies run when a policy or a wait says so, its memory is poison when it is free, and its capacity can be set.
"""

import os
from contextlib import AbstractContextManager

from tests.cuda_standin import device as standin
from tests.device import fakegpu

_here = standin if standin.is_here() else fakegpu
NAME, EARLY, LATE, RANDOM = _here.NAME, _here.EARLY, _here.LATE, _here.RANDOM
start, capacity, policy, ordered = _here.start, _here.capacity, _here.policy, _here.ordered
num_async_copies, num_pending = _here.num_async_copies, _here.num_pending


def chosen_policy() -> AbstractContextManager[None]:
    """Run copies late, or by the variable EMULATED_POLICY."""
    return policy_named(os.environ.get("EMULATED_POLICY", "late"))


def policy_named(text: str) -> AbstractContextManager[None]:
    """Run copies by `text`: "early", "late", or the seed of random moments."""
    if text.isdecimal():
        return policy(RANDOM, int(text))
    return policy({"early": EARLY, "late": LATE}[text])
