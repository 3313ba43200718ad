"""Every test starts with an empty compiler and the same seed."""

import gc
import importlib
import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def no_structured_trace() -> None:
    """Keep torch's structured trace out of pytest's captured log: formatting it takes longer than compiling."""
    logging.getLogger("torch.__trace").propagate = False


@pytest.fixture(autouse=True, scope="session")
def frozen_modules() -> None:
    """Load the compilers, and let no collection look at them again: each took 0.2 s, for 430,000 objects that stay."""
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("scipy.optimize")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what Dynamo compiled and the models of earlier tests, which a measured step would count."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
