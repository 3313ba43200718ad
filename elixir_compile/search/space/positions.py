"""The ops of a step and the moments between them in one order.

A reduce needs more bytes than the ops around it: the gradients and the buffer into which they are packed. At that
moment nothing is there that only the op before it reads. So a reduce has a position of its own, behind the op that
completes the gradients; reduces behind the same op come one after another, in the order of buckets.

```text
  op          0    1    2              3    4    5
  position    0    1    2    3    4    5    6    7
                          b1^  ^b0                     op 2 completes the gradients of b0 and b1
```
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from elixir_compile.search.space.facts import Facts


class Positions:
    """The positions of the ops and the reduces of a step."""

    def __init__(self, facts: Facts) -> None:
        num_ops = len(facts.graph.ops)
        reduces = sorted(
            (own.complete, bucket)
            for bucket, own in enumerate(facts.gradients)
            if own is not None and facts.has_moment(bucket)
        )
        completes = np.array([complete for complete, _ in reduces], dtype=np.int64)
        self.moments: Mapping[int, int] = {
            bucket: complete + 1 + place for place, (complete, bucket) in enumerate(reduces)
        }
        """The position of the reduce of each bucket that has one."""
        ops = np.arange(num_ops + 1)
        self._of: list[int] = (ops + np.searchsorted(completes, ops)).tolist()
        self.num = self._of[num_ops]
        # By position: the number of its op, or for a reduce the number of ops more than the op before it.
        self._places = np.sort(np.concatenate([2 * ops[:-1], 2 * completes + 1]))
        self._places = self._places // 2 + num_ops * (self._places % 2)

    def of(self, op: int) -> int:
        """Return the position of op `op`; the number of positions if `op` is the number of ops."""
        return self._of[op]

    def before_reduce(self, bucket: int, complete: int) -> int:
        """Return the last position before the reduce of `bucket`, whose gradients op `complete` completes."""
        return self.moments[bucket] - 1 if bucket in self.moments else self._of[complete]

    def wait(self, bucket: int, op: int) -> int:
        """Return the last position before the wait for the reduce of `bucket`, which comes after op `op`."""
        return max(self._of[op], self.moments.get(bucket, 0))

    def op_of(self, position: int) -> int:
        """Return the op at `position`, or the op before it if a reduce is there."""
        return int(self._places[position]) % (len(self._of) - 1)

    def spread(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `nbytes` by position, along the last axis. The last two axes of `nbytes` have the bytes at each op,
        and those between each op and the next."""
        return nbytes.reshape(*nbytes.shape[:-2], -1)[..., self._places]
