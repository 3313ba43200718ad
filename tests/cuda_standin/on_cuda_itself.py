"""The stand-in behaves as CUDA does: late copies, events, torch's allocator, freed memory, threads, errors by name."""

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.compat.platforms import platform_of
from tests.cuda_standin import device as standin
from tests.cuda_standin.build import ROOT
from tests.cuda_standin.run import CANNOT
from tests.cuda_standin.runs import CANNOT_RUN, MOMENTS
from tests.run.models import Stack, seeded
from tests.run.training import by_elixir

DEVICE = torch.device("cuda", 0)
OTHER = torch.device("cuda", 1)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty_device() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def test_what_is_said_not_to_run_is_there() -> None:
    names = [*CANNOT, *(name for names in CANNOT_RUN.values() for name in names), *MOMENTS]
    for path, _, test in (name.partition("::") for name in names):
        assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), f"{path} has no {test}"
    page = (ROOT / "docs/accelerators.md").read_text(encoding="utf-8")
    assert f"\n{sum(map(len, CANNOT_RUN.values()))} tests that cannot run" in page
    assert f"| `moments` | {len(MOMENTS)} small ones" in page


def test_torch_sees_two_devices_of_a_kind_that_it_has_kernels_for() -> None:
    assert torch.cuda.is_available()
    assert (torch.cuda.device_count(), torch.cuda.get_device_capability()) == (2, (9, 0))
    assert torch.cuda.get_device_properties(1).total_memory == standin.start().standin_capacity(1)


@pytest.mark.parametrize("kind", [standin.LATE, standin.EARLY])
def test_a_copy_from_pinned_memory_is_late_and_an_event_orders_it(kind: int) -> None:
    source, target, stream = torch.ones(64).pin_memory(), torch.zeros(64, device=DEVICE), torch.Stream(DEVICE)
    with standin.policy(kind), standin.ordered():
        stream.wait_stream(torch.accelerator.current_stream(DEVICE))
        with stream:
            target.copy_(source, non_blocking=True)
        assert (standin.num_pending() > 0) == (kind == standin.LATE)
        done = stream.record_event()
        torch.accelerator.current_stream(DEVICE).wait_event(done)
        assert target.sum().item() == 64


def races_of(kind: int, *, waits: bool, reads_on_host: bool) -> int:
    """Copy to the host on a stream of its own, use what was copied, and return the number of races."""
    source = torch.ones(64, device=DEVICE)
    target, stream = torch.zeros(64).pin_memory(), torch.Stream(DEVICE)
    torch.cuda.synchronize()
    before = standin.count("races")
    with standin.policy(kind):
        with stream:
            target.copy_(source, non_blocking=True)
        if waits:
            stream.synchronize()
        if reads_on_host:
            target.sum()
        else:
            source.add_(1)
        torch.cuda.synchronize()
    return standin.count("races") - before


@pytest.mark.parametrize("reads_on_host", [True, False])
@pytest.mark.parametrize("kind", [standin.LATE, standin.EARLY])
def test_an_access_without_a_wait_is_a_race_whenever_the_copy_runs(
    kind: int, reads_on_host: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert races_of(kind, waits=True, reads_on_host=reads_on_host) == 0
    assert races_of(kind, waits=False, reads_on_host=reads_on_host) > 0
    who, what = ("the host", "sum") if reads_on_host else ("stream 0", "add_")
    assert f"race: aten::{what} on {who} " in capfd.readouterr().err


def test_memory_without_an_owner_is_poison_and_its_late_reader_a_race() -> None:
    source, stream = torch.ones(4096, device=DEVICE), torch.Stream(DEVICE)
    target = torch.zeros(4096).pin_memory()
    torch.cuda.synchronize()
    before = standin.count("races")
    with standin.policy(standin.LATE):
        with stream:
            target.copy_(source, non_blocking=True)
        del source  # without `record_stream`
        torch.cuda.current_stream().synchronize()
        stream.synchronize()
    assert target.isnan().all()
    assert standin.count("races") > before


def test_record_stream_keeps_memory_until_the_stream_is_through() -> None:
    source, stream = torch.ones(4096, device=DEVICE), torch.Stream(DEVICE)
    target = torch.zeros(4096).pin_memory()
    torch.cuda.synchronize()
    with standin.policy(standin.LATE), standin.ordered():
        with stream:
            target.copy_(source, non_blocking=True)
        source.record_stream(stream)
        del source
        stream.synchronize()
        assert target.eq(1).all()
        torch.cuda.empty_cache()


def test_new_memory_is_poison() -> None:
    first = torch.empty(1000, device=DEVICE)
    assert first.isnan().all()
    first.fill_(1)
    place = first.data_ptr()
    del first
    again = torch.empty(1000, device=DEVICE)
    assert again.data_ptr() == place
    assert again.isnan().all()


def test_the_allocator_reserves_retries_and_runs_out_as_on_a_gpu() -> None:
    before = torch.cuda.memory_stats()["num_alloc_retries"]
    reserved_bytes = torch.cuda.memory_reserved()
    with standin.capacity(torch.cuda.memory_reserved() + 40 * MIB):
        blocks = [torch.empty(10 * MIB, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 10\.00 MiB"):
            torch.empty(10 * MIB, dtype=torch.uint8, device=DEVICE)
        del blocks[1], blocks[2]  # 20 MiB are free, in two segments
        whole = torch.empty(20 * MIB, dtype=torch.uint8, device=DEVICE)
        assert torch.cuda.memory_stats()["num_alloc_retries"] > before
        assert whole.numel() == 20 * MIB
        assert torch.cuda.memory_reserved() == reserved_bytes + 40 * MIB


def test_freed_memory_is_not_there_any_more() -> None:
    program = (
        "import ctypes, torch; place = torch.empty(32 << 20, device='cuda').data_ptr(); torch.cuda.empty_cache(); "
        "print('freed', flush=True); ctypes.c_char.from_address(place).value"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("freed\n", -11), done.stderr


def test_products_take_the_workspaces_of_cublas_once_for_each_thread() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    matrix = torch.ones(8, 8, device=DEVICE)
    for _ in range(2):
        matrix @ matrix
    first = torch.cuda.memory_allocated() - before
    assert first >= 32 * MIB
    thread = threading.Thread(target=lambda: matrix @ matrix)
    thread.start()
    thread.join()
    assert torch.cuda.memory_allocated() - before >= first
    torch._C._cuda_clearCublasWorkspaces()


def budget_of_a_preview() -> int:
    model, batch = seeded(Stack, 16).to(DEVICE), torch.ones(2, 16, device=DEVICE)
    return elixir.plan(model, [batch], options={"plan_cache": False}).budget_bytes


def budget_of_a_step() -> int:
    run = by_elixir(seeded(Stack, 16).to(DEVICE), plan_cache=False).train([torch.ones(2, 16, device=DEVICE)])
    return elixir.compilations(run.model)[0].plan.budget_bytes


@pytest.mark.parametrize("ask", [budget_of_a_preview, budget_of_a_step])
def test_no_default_budget_is_lower_for_workspaces_that_are_there(ask: Callable[[], int]) -> None:
    """Every plan counts those of two threads, 66 MiB, whether or not products have taken them already."""
    platform_of(DEVICE).drop_workspaces()
    before_bytes = ask()

    def multiply() -> None:
        matrix = torch.ones(8, 8, device=DEVICE)
        torch.addmm(matrix[0], matrix, matrix)

    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    multiply()
    gc.collect()
    assert ask() == before_bytes


@pytest.mark.parametrize("kind", [standin.LATE, standin.RANDOM])
def test_random_numbers_follow_the_seed_of_the_device(kind: int) -> None:
    with standin.policy(kind):
        torch.cuda.manual_seed(3)
        first, second = torch.rand(8, device=DEVICE), torch.rand(8, device=DEVICE)
        torch.cuda.manual_seed(3)
        assert torch.equal(torch.rand(8, device=DEVICE), first)
        assert not torch.equal(first, second)


def test_an_op_that_only_cuda_has_is_an_error_with_its_name() -> None:
    values = torch.ones(4, 8, 6, 6, device=DEVICE)
    with pytest.raises(NotImplementedError, match="no kernel for aten::_cudnn_init_dropout_state"):
        torch._cudnn_init_dropout_state(0.1, True, 3, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(RuntimeError, match="same device"):
        values + torch.ones(6)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_kernel_of_cuda_that_is_reached_is_an_error_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    """Sparse tensors have kernels of their own, which nothing replaces."""
    places, values = torch.zeros(1, 2, dtype=torch.long, device=DEVICE), torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="the CUDA stand-in has no kernels"):
        torch.sparse_coo_tensor(places, values, (3,)).coalesce()
    assert "cuda stand-in: no kernel " in capfd.readouterr().err


def test_a_process_that_this_one_starts_has_the_devices_too() -> None:
    program = "import torch; print(torch.ones(2, device='cuda').sum().item())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "2.0\n"


def test_segments_expand_within_the_capacity() -> None:
    program = (
        "import torch; a = torch.ones(8 << 20, device='cuda'); b = torch.ones(8 << 20, device='cuda'); "
        "n = len(torch.cuda.memory_snapshot()); del a, b; c = torch.ones(16 << 20, device='cuda'); "
        "print(n, c.sum().item(), torch.cuda.memory_reserved() >> 20)"
    )
    variables = {**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=variables, check=False)
    # The allocator maps 20 MiB at a time for large tensors, and 2 for small ones.
    assert done.stdout == f"1 {float(16 << 20)} 82\n", done.stderr
