"""The states of the random number generators of this process: Python's, torch's, CUDA's and numpy's."""

import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from elixir_compile.errors import ElixirWarning


def random_state() -> dict[str, Any]:
    """Return the states by generator; CUDA's only if CUDA was used, numpy's only if numpy was imported."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        state["numpy"] = [keys.tolist(), *rest]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to `state`. Warns if `state` has more CUDA devices than this machine."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    cuda_states = state.get("cuda", [])
    num_devices = torch.cuda.device_count()
    if len(cuda_states) > num_devices:
        warnings.warn(
            ElixirWarning(
                f"the checkpoint has random states of {len(cuda_states)} CUDA devices, and this machine has "
                f"{num_devices}: dropout continues with other random numbers."
            ),
            stacklevel=3,
        )
    for index, cuda_state in enumerate(cuda_states[:num_devices]):
        torch.cuda.set_rng_state(cuda_state, index)
    if "numpy" in state:
        import numpy as np  # only if the process that saved had imported numpy

        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
