"""Measure steps, regions and machines: bytes from the allocators, times and counts from the executors."""

from elixir_compile.runtime.measure.step import measure_step

__all__ = ["measure_step"]
