"""The state of a parameter with an fp32 master: as updates keep it, and as state dicts hold it.

kept     `master_low`, the int16 rest of a bfloat16 parameter, or `master`, whole, beside a float16 one
loaded   `master`, whole
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from elixir_compile.ops.masters import REST_DTYPES, REST_NAMES, has_master, take_rest
from elixir_compile.ops.shards import own_part
from elixir_compile.optim.host.fallback import joined, split
from elixir_compile.optim.mixed import start_rest
from elixir_compile.runtime.dense import flat


def with_master(state: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """Return loaded `state` with its `master`, in fp32, as `param` has it: none, whole, or split with `param`.

    `param` becomes the nearest to the master. State without one, of `torch.optim.AdamW`, begins with the parameter.
    """
    found = dict(state)
    master = found.pop("master", None)
    if not has_master(param):
        return found
    home = found["exp_avg"]
    rest = torch.empty_like(own_part(param).detach(), dtype=REST_DTYPES[param.dtype], device=home.device)
    found[REST_NAMES[param.dtype]] = rest
    if master is None:
        start_rest(param, found)
        return found
    master = torch.empty_like(rest, dtype=torch.float32).copy_(master)
    high = torch.empty_like(rest, dtype=param.dtype)
    if rest.dtype == torch.int16:
        split(flat(master), flat(high), flat(rest))
    else:
        rest.copy_(master)
        high.copy_(master)
    take_rest(param)
    with torch.no_grad():
        own_part(param).copy_(high)
    torch.autograd.graph.increment_version(param)
    return found


def with_whole_master(entry: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return the state of one parameter with its master whole."""
    found = dict(entry)
    low = found.pop("master_low", None)
    if low is not None:
        found["master"] = joined(own_part(param).detach().to(low.device), low)
    return found
