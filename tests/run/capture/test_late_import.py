"""A library that adds methods to loggers after the backend was loaded, as transformers does when it is imported."""

import copy
import functools
import json
import logging

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.compat import trace_past_logging

log = logging.getLogger("tests.late")


class Warns(nn.Module):
    """A layer that warns, by a method that loggers get late."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        log.warning_once("once")
        return self.layer(x).sum()


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_logger_gets_its_method_after_the_backend_was_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_reset: bool
) -> None:
    """Dynamo writes a copy of its settings as JSON after each compilation: torch 2.11 logs an error if that fails."""
    trace_past_logging()

    @functools.lru_cache(None)
    def warning_once(logger: logging.Logger, message: str) -> None:
        logger.warning(message)

    torch._dynamo.reset()
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    if is_reset:
        torch._dynamo.reset()
    model = Warns()
    run = torch.compile(model, backend="elixir", fullgraph=True, options={"inner": "aot_eager", "report": False})
    run(torch.randn(2, 4)).backward()
    assert len(elixir.compilations(model)) == 1
    assert json.dumps(sorted(copy.deepcopy(torch._dynamo.config.ignore_logging_functions))) == "[]"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
