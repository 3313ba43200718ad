"""Every public function has an example in its docstring, and each example runs.

An example is the last section of a docstring: the lines behind `Example:`. It may use the names of `names_in_scope`.
"""

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir

HEADING = "\nExample:\n"


def is_called_by_users(name: str) -> bool:
    """Return whether `name` is a function or an optimizer class: neither an error nor the class of a returned value."""
    thing = getattr(elixir, name)
    return not inspect.isclass(thing) or issubclass(thing, torch.optim.Optimizer)


class Net(nn.Module):
    """Two linear layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def names_in_scope() -> dict[str, Any]:
    """Return `batch`, `model`, the model as `compiled`, and its `optimizer`, after one training step."""
    torch.manual_seed(0)
    model, batch = Net(), torch.rand(2, 4)
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "device_memory": "16MiB"})
    optimizer = elixir.HybridAdamW(model.parameters())
    compiled(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    return {
        "torch": torch, "elixir": elixir, "batch": batch, "model": model, "compiled": compiled, "optimizer": optimizer,
    }  # fmt: skip


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the example in an empty folder, and drop compiled code after it."""
    monkeypatch.chdir(tmp_path)
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("name", [name for name in elixir.__all__ if is_called_by_users(name)])
def test_the_example_of_a_public_function_runs(name: str) -> None:
    _, _, example = (inspect.getdoc(getattr(elixir, name)) or "").partition(HEADING)
    code = textwrap.dedent(example)
    assert name in code, f"the docstring of {name} has no example that uses it"
    exec(compile(code, f"the example of {name}", "exec"), {"__name__": "__main__", **names_in_scope()})
