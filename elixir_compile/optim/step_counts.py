"""How many steps a counter of an optimizer state has counted, without waiting for the device that holds it.

A counter on a device is read once; whoever counts on notes the number. A counter that somebody else has written since
has another version, and is read again. A write through `.data` raises no version, and is not noticed.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

_known = WeakTensorKeyDictionary()
"""By counter on a device, its version and its number."""


def num_steps(counter: torch.Tensor | float) -> int:
    """Return the number of steps in `counter`, a number or a tensor of one element."""
    if not isinstance(counter, torch.Tensor) or counter.device.type == "cpu":
        return int(counter)
    known = _known.get(counter)
    if known is not None and known[0] == counter._version:
        return known[1]
    number = int(counter)
    note_num_steps(counter, number)
    return number


def note_num_steps(counter: object, number: int) -> None:
    """Remember that `counter` has counted `number` steps."""
    if isinstance(counter, torch.Tensor) and counter.device.type != "cpu":
        _known[counter] = (counter._version, number)
