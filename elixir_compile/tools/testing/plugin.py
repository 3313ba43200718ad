"""The pytest plugin: the fixture `memory_schedule` and the option `--elixir-update`.

pytest imports this module at the start of every run, with or without tests of memory. So it imports neither torch nor
any other part of the package; the fixture does.
"""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from elixir_compile.tools.testing.fixture import MemorySchedules

UPDATE_OPTION = "--elixir-update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes goldens."""
    group = parser.getgroup("elixir", "memory of training steps")
    group.addoption(
        UPDATE_OPTION,
        action="store_true",
        help="let assert_matches_golden write its golden instead of comparing with it",
    )


@pytest.fixture
def memory_schedule(request: pytest.FixtureRequest) -> "MemorySchedules":
    """Return a function that plans the training step of a model: `memory_schedule(model, batch, hardware=...)`.

    See `MemorySchedules` for its arguments and `MemorySchedule` for its result.
    """
    from elixir_compile.tools.testing.fixture import MemorySchedules

    return MemorySchedules(test_file=request.path, writes_goldens=bool(request.config.getoption(UPDATE_OPTION)))
