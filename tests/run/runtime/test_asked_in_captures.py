"""Functions that ask the machine answer the same while torch traces with fake tensors."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from elixir_compile.base.options import parse_options
from elixir_compile.base.process import num_usable_cores
from elixir_compile.compat.platforms import memory_sizes_bytes, num_local_ranks
from elixir_compile.session import machine

CPU = torch.device("cpu")
QUESTIONS: dict[str, Callable[[], object]] = {
    "memory sizes": lambda: memory_sizes_bytes(CPU),
    "cores": num_usable_cores,
    "ranks": num_local_ranks,
    "path of the measured machine": lambda: machine.machine_path(CPU),
    "machine": lambda: machine.machine(CPU),
    "workspaces": lambda: machine.library_bytes.__wrapped__(CPU),
    "host budget": lambda: machine.host_budget_bytes(parse_options({"host_memory": "2GiB"})),
    "device budget": lambda: machine.device_budget_bytes(
        parse_options({"device_memory": "2GiB"}), machine.machine(CPU), CPU, 0
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_the_same_inside_a_capture(name: str) -> None:
    ask = QUESTIONS[name]
    before = ask()
    with FakeTensorMode():
        assert ask() == before
