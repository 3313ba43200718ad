"""How long one thing takes on a machine: closed forms, never faster for more bytes."""

from elixir_compile.cost.compute import op_s
from elixir_compile.cost.transfer import gather_s, offload_s
from elixir_compile.cost.update import update_s

__all__ = ["gather_s", "offload_s", "op_s", "update_s"]
