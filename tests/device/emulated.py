"""The device of this process that is made of host memory: CUDA over its stand-in, or the second device type.

Its copies run when a policy or a wait says so, its memory is poison when it is free, and its capacity can be set.
"""

import os
from contextlib import AbstractContextManager

from tests.cuda_standin import device as standin

if standin.is_here():
    from tests.cuda_standin.device import (
        EARLY,
        LATE,
        NAME,
        RANDOM,
        capacity,
        num_async_copies,
        num_pending,
        ordered,
        policy,
        start,
    )
else:
    from contextlib import nullcontext as ordered  # the second device type does not look

    from tests.device.fakegpu import (
        EARLY,
        LATE,
        NAME,
        RANDOM,
        capacity,
        num_async_copies,
        num_pending,
        policy,
        start,
    )

__all__ = [
    "EARLY",
    "LATE",
    "NAME",
    "RANDOM",
    "capacity",
    "chosen_policy",
    "num_async_copies",
    "num_pending",
    "ordered",
    "policy",
    "start",
]


def chosen_policy() -> AbstractContextManager[None]:
    """Run copies late, or by the variable EMULATED_POLICY: "early", or the seed of random moments."""
    text = os.environ.get("EMULATED_POLICY", "late")
    if text.isdecimal():
        return policy(RANDOM, int(text))
    return policy({"early": EARLY, "late": LATE}[text])
