"""Simulate a step of a plan: a record with spans on each lane, and figures of it."""

from elixir_compile.simulate.prediction import (
    critical_path,
    exposed_by_lane,
    exposed_s,
    hidden_share,
    hidden_update_share,
    prediction_of,
)
from elixir_compile.simulate.prices import OpSeconds, Prices, crossing_s, prices
from elixir_compile.simulate.seconds import (
    Cycle,
    Drawing,
    FurtherCall,
    Played,
    RankStep,
    busy_share,
    further_call,
    play,
    simulate,
    simulate_ranks,
)

__all__ = [
    "Cycle",
    "Drawing",
    "FurtherCall",
    "OpSeconds",
    "Played",
    "Prices",
    "RankStep",
    "busy_share",
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
    "simulate_ranks",
]
