"""Simulate a step of a plan: a record with spans on each lane, and figures of it."""

from elixir_compile.simulate.drawing import Drawing
from elixir_compile.simulate.engine import Cycle, Played, play, simulate
from elixir_compile.simulate.further_call import FurtherCall, further_call
from elixir_compile.simulate.prediction import (
    critical_path,
    exposed_by_lane,
    exposed_s,
    hidden_share,
    hidden_update_share,
    prediction_of,
)
from elixir_compile.simulate.prices import OpSeconds, Prices, crossing_s, prices

__all__ = [
    "Cycle",
    "Drawing",
    "FurtherCall",
    "OpSeconds",
    "Played",
    "Prices",
    "critical_path",
    "crossing_s",
    "exposed_by_lane",
    "exposed_s",
    "further_call",
    "hidden_share",
    "hidden_update_share",
    "play",
    "prediction_of",
    "prices",
    "simulate",
]
