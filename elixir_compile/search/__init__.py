"""Search for the plan of a problem. No other package decides anything about a plan."""

from elixir_compile.search.limits import Extent, extent_of, extents
from elixir_compile.search.planner import plan
from elixir_compile.search.problem import NarrowerState, Problem

__all__ = ["Extent", "NarrowerState", "Problem", "extent_of", "extents", "plan"]
