"""Search for the plan of a problem. No other room decides anything about a plan."""

from elixir_compile.search.evaluator import Extent, extent_of, extents
from elixir_compile.search.planner import plan
from elixir_compile.search.problem import Problem

__all__ = ["Extent", "Problem", "extent_of", "extents", "plan"]
