"""Tests of the memory of training steps: the pytest fixture `memory_schedule`, and the value that it returns.

pytest loads `elixir_compile.tools.testing.plugin` in every run on a machine where the package is installed, so this
package and the plugin load nothing heavy until a test asks for the fixture.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elixir_compile.tools.testing.fixture import MemorySchedules as MemorySchedules
    from elixir_compile.tools.testing.step_memory import MemorySchedule as MemorySchedule

__all__ = ["MemorySchedule", "MemorySchedules"]  # pyright: ignore[reportUnsupportedDunderAll]  imported on first use


def __getattr__(name: str) -> object:
    """Import public names on first use."""
    if name == "MemorySchedule":
        from elixir_compile.tools.testing.step_memory import MemorySchedule

        return MemorySchedule
    if name == "MemorySchedules":
        from elixir_compile.tools.testing.fixture import MemorySchedules

        return MemorySchedules
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
