"""Two devices in one process, a thread each or in turn, and a process for each device: each trains as if it were alone.

Each device has copies of its own, its own budget and its own default stream; the clocks of the stand-in see both.
"""

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from tests.cuda_standin import device as standin
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, assert_offloads, assert_same, by_elixir, by_torch, plain_step, tight_bytes

DEVICES = [torch.device("cuda", index) for index in range(2)]
NUM_STEPS = 3


def batches(device: torch.device) -> list[torch.Tensor]:
    return [batch.to(device) for batch in vectors(NUM_STEPS)]


def tight_run(device: torch.device) -> Run:
    """Return a run on `device` in close to the least bytes."""
    model = seeded(Stack).to(device)
    return by_elixir(model, device_memory=tight_bytes(model, batches(device)[0]), plan_cache=False)


def losses_by_torch() -> list[float]:
    return [loss.item() for loss in by_torch(seeded(Stack).to(DEVICES[0])).train(batches(DEVICES[0])).losses]


@pytest.mark.parametrize("kind", [standin.EARLY, standin.LATE, standin.RANDOM])
def test_two_models_train_in_turn_on_two_devices(kind: int) -> None:
    expected = by_torch(seeded(Stack).to(DEVICES[0])).train(batches(DEVICES[0]))
    with standin.policy(kind), standin.ordered():
        runs = [tight_run(device) for device in DEVICES]
        for step in range(NUM_STEPS):
            for run, device in zip(runs, DEVICES, strict=True):
                run.train(batches(device)[step : step + 1])
        for run in runs:
            assert_offloads(run)
            assert_same(expected, run)


def test_a_budget_counts_one_device_alone() -> None:
    runs = [tight_run(device).train(batches(device)) for device in DEVICES]
    for run, device in zip(runs, DEVICES, strict=True):
        before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        with torch.cuda.device(device):
            record = elixir.measure_step(
                lambda run=run, device=device: plain_step(run.compiled, run.optimizer, batches(device)[0]),
                device="cuda",
            )
        (plan,) = [found.plan for found in elixir.compilations(run.model)]
        assert before < record.device_peak_bytes <= plan.budget_bytes


def test_two_threads_train_on_two_devices() -> None:
    expected, runs = losses_by_torch(), [tight_run(device) for device in DEVICES]
    for run, device in zip(runs, DEVICES, strict=True):
        run.train(batches(device)[:1])  # torch compiles one frame at a time
    failed: list[BaseException] = []

    def train(run: Run, device: torch.device) -> None:
        try:
            run.train(batches(device)[1:])
        except BaseException as error:
            failed.append(error)

    with standin.policy(standin.LATE):
        threads = [threading.Thread(target=train, args=pair) for pair in zip(runs, DEVICES, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed
    assert [[loss.item() for loss in run.losses] for run in runs] == [expected] * 2


PROGRAM = """
import sys, torch
from tests.cuda_standin import device as standin
from tests.cuda_standin import on_cuda_devices as tests
standin.start()
device = torch.device("cuda", int(sys.argv[1]))
with standin.policy(standin.LATE), standin.ordered():
    run = tests.tight_run(device).train(tests.batches(device))
tests.assert_offloads(run)
print([loss.item() for loss in run.losses])
"""


@pytest.mark.parametrize("places", [(0, 1), (0, 0)], ids=["a device each", "one device"])
def test_two_processes_train_beside_each_other(places: tuple[int, int]) -> None:
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM, str(place)], **options) for place in places]
    found = [process.communicate(timeout=200) for process in started]
    assert [said for said, _ in found] == [f"{losses_by_torch()}\n"] * 2, found
