"""Run a plan without tensors."""

from elixir_compile.simulate.engine import play, simulate
from elixir_compile.simulate.exposure import exposed_s, hidden_share
from elixir_compile.simulate.prices import Prices, prices

__all__ = ["Prices", "exposed_s", "hidden_share", "play", "prices", "simulate"]
