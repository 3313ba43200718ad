"""Updates that the worker runs while the thread that trains captures a graph: bitwise those without a capture."""

import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Adamax, NAdam, Optimizer, RAdam

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.ir import Update
from elixir_compile.runtime.updates import finish_updates
from tests.run.updating import assert_equal, eager_run, hybrid_run, in_flight, ladder, rows


def captured_by_dynamo(inside: Callable[[], None]) -> None:
    """Call `inside` while torch.compile captures a function of nobody's."""

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        inside()
        return gm

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))


def captured_by_export(inside: Callable[[], None]) -> None:
    """Call `inside` while torch.export traces a module."""

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside()
            return x + 1

    torch.export.export(Module(), (torch.ones(3),), strict=False)


@pytest.mark.parametrize("cls", [Adam, Adamax, NAdam, RAdam])
def test_an_update_inside_of_a_capture_gives_the_bits_of_the_class(cls: type[Optimizer]) -> None:
    model, batches = ladder(), rows(4)

    def plain(params: Any) -> Optimizer:
        return cls(params, lr=0.01)

    def hybrid(params: Any) -> Optimizer:
        return elixir.hybrid(cls)(params, lr=0.01)

    expected = eager_run(model, plain).train(batches)
    with hybrid_run(model, batches[0], home="split", update=Update.ACROSS_STEPS, optimizer=hybrid) as run:
        run.train(batches[:1])  # makes the state, for which it waits
        for batch, capture in zip(batches[1:], cycle([captured_by_dynamo, captured_by_export]), strict=False):
            gate = threading.Event()
            line: Any = run.optimizer._updater.line
            line.queue(lambda gate=gate: gate.wait(10) and None, "held")  # what the step queues comes behind it
            run.train([batch])
            assert in_flight(run) == 4

            def inside(gate: threading.Event = gate) -> None:
                gate.set()
                finish_updates()  # waits in the capture, as one does that reads a parameter

            capture(inside)
        assert_equal(expected, run)


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch.compiler.is_compiling() else x - 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_captures_and_torchscript_still_see_the_capture_flag() -> None:
    with compat.outside_captures():
        assert not torch.compiler.is_compiling()
    seen: list[bool] = []
    captured_by_dynamo(lambda: seen.append(torch.compiler.is_compiling()))
    captured_by_export(lambda: seen.append(torch.compiler.is_compiling()))
    assert seen[1]
    assert seen[0] or torch.__version__ < "2.13"  # Dynamo sets the flag since
    assert torch.compile(lambda: torch.compiler.is_compiling(), backend="eager", fullgraph=True)()
    assert not torch.jit.script(scripted)(torch.ones(1)).item()
