"""Dense tensors, which fill their memory whatever their shape and the order of their dimensions."""

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in the order of their memory, as a view."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
