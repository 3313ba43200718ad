"""Every test starts with an empty compiler and the same seed."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what Dynamo compiled, before and after."""
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    torch.compiler.reset()
