"""What every test needs to know about the machine."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

HERE = Path(__file__).parent

# Let the collector look at young objects every 100,000, not every 700: torch and captures make a million that stay, and
# collections took 7 % of the time of the tests that capture. Before any test, so that imports are spared too. At 20,000
# they still took 2.7 s of 114.
gc.set_threshold(100_000, 20, 20)

# A run finds what the last one found, on a busy machine too; `make fuzz` draws anew.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("new", deadline=None, derandomize=False)
settings.load_profile("same")

# Read when torch is loaded. Threads that spin while they wait make tests ten times slower beside another process.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what the user measured and planned out of the tests, and the tests' files out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELIXIR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_structured_trace() -> None:
    """Keep torch's structured trace out of pytest's captured log: formatting it takes as long as compiling.

    torch formats it if its logger has a handler, and pytest adds one to each logger that does not propagate.
    """
    log = logging.getLogger("torch.__trace")
    log.handlers.clear()
    log.propagate = True


def pytest_collection_finish() -> None:
    """Let no collection, and nothing that looks at all objects, see the 500,000 objects of loaded modules again: each
    measured step of a test does both, which took 0.4 s of it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of tests that take longest first, and skip tests marked `gpu` where torch has no accelerator, and
    `cuda` without CUDA.

    Two processes share the files in this order, so that no process waits long for the other at the end.
    """
    lines = (HERE / "durations.txt").read_text(encoding="utf-8").splitlines()
    seconds_of = {HERE.parent / name: float(seconds) for seconds, name in map(str.split, lines)}
    items.sort(key=lambda item: -seconds_of.get(item.path, 0.0))
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch  # the planning half's tests run without it

    has_accelerator, has_cuda = torch.accelerator.is_available(), torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_accelerator:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
        elif item.get_closest_marker("cuda") and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
