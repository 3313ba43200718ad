"""The machine of this process: measured, cached and found in order, also within a capture, and what torch says of
CUDA."""

import inspect
import json
import multiprocessing
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from torch import distributed
from torch._inductor import compile_fx
from torch._subclasses import FakeTensorMode
from typer.testing import CliRunner

from elixir_compile.base import process as control_groups
from elixir_compile.base.errors import DiskFailed, ElixirWarning, InvalidOption, ProfileFileError, UnknownHardware
from elixir_compile.base.options import parse_options
from elixir_compile.base.process import num_usable_cores
from elixir_compile.base.units import GIB, MIB
from elixir_compile.compat.platforms import (
    available_host_bytes,
    host,
    host_memory_bytes,
    memory_sizes_bytes,
    num_local_ranks,
)
from elixir_compile.compat.platforms.host import UpdateThreads
from elixir_compile.compat.platforms.platform import CudaPlatform
from elixir_compile.ir.hardware import (
    Cluster,
    cluster_from_json,
    cluster_to_json,
    fleet_of,
    parse_fleet,
    preset,
    profile_for,
)
from elixir_compile.runtime.bucket import is_slab_memory
from elixir_compile.session import machine as session_machine
from elixir_compile.session.machine import (
    cached_machine,
    forget_own_machine,
    machine,
    machine_path,
    named_fleet,
    store_machine,
    with_memory,
)
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.cli.measure import machine_table
from elixir_compile.tools.measure import machine as rates
from elixir_compile.tools.measure.machine import (
    MIN_REPEATS,
    beside,
    copies_of,
    fitted_line,
    measure_machine,
    median_s,
    with_disk,
)
from tests.run.processes import spawn

# ----------------------------------------------------------------------------------------------------------------------
# A measured machine is one that could be, comes back from the cache as it went in, and is found in the right order.


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def measured() -> Cluster:
    return measure_machine(CPU, seconds=1.0)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "cache"))


def remembered() -> Cluster:
    """A profile that cannot be the rough one, with the memory of this machine."""
    rough = profile_for("cpu", *memory_sizes_bytes(CPU), "cpu")
    device = replace(rough.device, launch_s=0.125, source="measured, for a test")
    return Cluster(nodes=(replace(rough.nodes[0], device=device),))


@pytest.mark.usefixtures("empty_cache")
def test_a_measured_cpu_profile_is_plausible(measured: Cluster) -> None:
    device, host = measured.device, measured.host
    assert measured.num_ranks == 1
    assert (device.memory_bytes, host.memory_bytes) == memory_sizes_bytes(CPU)
    assert host.pinned_bytes == host.memory_bytes
    # From a slow laptop to a large server, with the load of other processes.
    assert set(device.flops_per_s) == {"float32", "bfloat16", "float16", "float64"}
    assert 1e9 < device.flops_per_s["float32"] < 1e14
    assert device.flops_per_s["float64"] < 1e13
    for bytes_per_s in (device.memory_bytes_per_s, host.memory_bytes_per_s):
        assert 1e8 < bytes_per_s < 1e13
    for elements_per_s in (device.update_elements_per_s, host.update_elements_per_s):
        assert 1e7 < elements_per_s < 1e11
    assert host.busy_update_elements_per_s is not None
    assert host.busy_update_elements_per_s <= host.update_elements_per_s
    assert {(form.dtype, form.state_dtype) for form in host.update_forms} == {
        (dtype, state_dtype)
        for dtype in ("float32", "bfloat16", "float16")
        for state_dtype in ("float32", "bfloat16", "int8")
        if (dtype, state_dtype) != ("float32", "float32")
    }
    assert all(0.05 < form.over_fp32 < 50 for form in host.update_forms)
    assert host.flops_per_s is not None
    assert set(host.flops_per_s) == {"float32", "bfloat16"}
    assert all(1e8 < flops_per_s < 1e14 for flops_per_s in host.flops_per_s.values())
    assert 1e-8 < device.launch_s < 1e-3
    assert device.source == f"measured, torch {torch.__version__}, num_threads {torch.get_num_threads()}"


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_measured_link_of_a_cpu_hides_nothing(measured: Cluster, direction: str) -> None:
    link = getattr(measured, direction)
    assert 1e7 < link.bytes_per_s < 1e12
    assert 1e-8 < link.latency_s < 1e-2
    assert link.busy_bytes_per_s is not None
    assert link.busy_bytes_per_s <= link.bytes_per_s
    assert not link.overlaps_compute


@pytest.mark.usefixtures("empty_cache")
def test_a_measured_profile_is_text_without_a_date(measured: Cluster) -> None:
    text = cluster_to_json(measured)
    assert cluster_from_json(text) == measured
    rates = measured.device.flops_per_s.values()
    assert all(float(f"{rate:.4g}") == rate for rate in rates)


@pytest.mark.usefixtures("empty_cache")
def test_progress_names_what_is_measured_and_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float]] = []
    stages = tuple((name, 0.5, lambda device, at_most_s: {"rate": at_most_s}) for name in ("one", "two"))
    monkeypatch.setattr(rates, "_STAGES", stages)
    rates.measure_rates(CPU, 15.0, lambda title, over: told.append((title, over)))
    assert [title for title, _ in told] == ["one", "two"] * 3
    assert [over for _, over in told] == sorted(over for _, over in told)
    assert told[-1][1] == pytest.approx(5 / 6)


@pytest.mark.usefixtures("empty_cache")
def test_rates_are_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter((5.0, 100.0, 4.0))
    monkeypatch.setattr(rates, "_STAGES", (("one", 1.0, lambda device, at_most_s: {"rate": next(found)}),))
    assert rates.measure_rates(CPU, 19.0, lambda title, over: None) == {"rate": 5.0}


@pytest.mark.usefixtures("empty_cache")
def test_the_first_run_does_not_count_and_three_others_do() -> None:
    calls: list[int] = []
    assert median_s(lambda: calls.append(1), CPU, at_most_s=0.0) < 0.1
    assert len(calls) == 1 + MIN_REPEATS


@pytest.mark.usefixtures("empty_cache")
def test_updates_are_measured_with_the_threads_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads: list[int] = []

    def measured(run: Callable[[], object], device: torch.device, at_most_s: float) -> float:
        num_threads.append(torch.get_num_threads())
        return 1.0

    usual = torch.get_num_threads()
    monkeypatch.setattr(rates, "update_threads", lambda device: UpdateThreads(usual + 2, frozenset()))
    monkeypatch.setattr(rates, "median_s", measured)
    monkeypatch.setitem(rates._WIDTHS, "host", 16)
    rates.measure_updates(CPU, 1.0)
    assert num_threads == [usual, *[usual + 2] * (2 + len(rates._FORMS))]
    assert torch.get_num_threads() == usual


@pytest.mark.usefixtures("empty_cache")
def test_load_beside_a_block_has_a_thread_and_raises_its_errors() -> None:
    threads: set[int] = set()
    with beside(lambda: threads.add(threading.get_ident())):
        pass
    assert threads
    assert threading.get_ident() not in threads

    def fails() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), beside(fails):
        pass


@pytest.mark.usefixtures("empty_cache")
def test_copies_carry_every_byte_between_a_slab_and_memory_of_the_device() -> None:
    copies = copies_of(CPU, 3 * MIB)
    arrived, left = copies.h2d(), copies.d2h()
    assert arrived.numel() == left.numel() == 3 * MIB
    assert bool((arrived == 1).all())
    assert bool((left == 2).all())
    assert not is_slab_memory(arrived.data_ptr())
    assert is_slab_memory(left.data_ptr())
    assert copies.h2d().data_ptr() != arrived.data_ptr()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(1e-4, 1e9), (0.0, 5e8)])
def test_a_fitted_line_has_its_latency_and_rate(latency_s: float, bytes_per_s: float) -> None:
    points = [(float(size), latency_s + size / bytes_per_s) for size in (1e4, 1e6, 1e7)]
    assert fitted_line(points) == (pytest.approx(latency_s, abs=1e-12), pytest.approx(bytes_per_s))


@pytest.mark.usefixtures("empty_cache")
def test_noise_gives_no_negative_latency_or_rate() -> None:
    assert fitted_line([(1e4, 1e-9), (1e6, 1e-3), (1e7, 2e-2)])[0] == 0.0
    latency_s, bytes_per_s = fitted_line([(1e4, 2e-3), (1e6, 1e-3), (1e7, 5e-4)])
    assert latency_s >= 0
    assert bytes_per_s > 0


@pytest.mark.usefixtures("empty_cache")
def test_another_quota_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    store_machine(remembered(), CPU)
    assert cached_machine(CPU) is not None
    monkeypatch.setattr(control_groups, "quota_cores", lambda memberships, groups: 1.0)
    assert cached_machine(CPU) is None


@pytest.mark.usefixtures("empty_cache")
def test_free_memory_is_less_than_total_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < available_host_bytes() < host_memory_bytes()
    monkeypatch.setattr(host, "host_memory_bytes", lambda: psutil.Process().memory_info().rss + MIB)
    assert available_host_bytes() < 64 * MIB


@pytest.mark.usefixtures("empty_cache")
def test_the_cache_gives_back_what_was_stored() -> None:
    assert cached_machine(CPU) is None
    path = store_machine(remembered(), CPU)
    assert cached_machine(CPU) == remembered()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.usefixtures("empty_cache")
def test_ranks_that_differ_keep_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of one host may have equal names: what one rank measured must not be taken for the other."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)

    def as_rank(rank: int) -> None:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)

    machines = [remembered(), slower(remembered(), 2.0)]
    for rank, own in enumerate(machines):
        as_rank(rank)
        store_machine(own, CPU, is_own=True)
    for rank, own in enumerate(machines):
        as_rank(rank)
        assert cached_machine(CPU) == own
    # Measured again, they are equal: the first rank writes the file of all, the others forget theirs.
    as_rank(0)
    path = store_machine(machines[1], CPU)
    as_rank(1)
    assert machine_path(CPU) != path
    forget_own_machine(CPU)
    for rank in (0, 1):
        as_rank(rank)
        assert (machine_path(CPU), cached_machine(CPU)) == (path, machines[1])


def slower(cluster: Cluster, times: float) -> Cluster:
    """Return `cluster` with a device that takes so many times as long to launch."""
    node = cluster.nodes[0]
    device = replace(node.device, launch_s=times * node.device.launch_s)
    return replace(cluster, nodes=(replace(node, device=device),))


@pytest.mark.usefixtures("empty_cache")
def test_another_number_of_threads_is_another_machine() -> None:
    store_machine(remembered(), CPU)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        assert cached_machine(CPU) is None
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("empty_cache")
def test_a_host_with_more_memory_is_the_same_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a virtual machine that grows; the memory is what it is now."""
    store_machine(remembered(), CPU)
    more_bytes = 2 * host_memory_bytes()
    monkeypatch.setattr(host, "host_memory_bytes", lambda: more_bytes)
    found = cached_machine(CPU)
    assert found is not None
    assert (found.host.memory_bytes, found.device.memory_bytes) == (more_bytes, more_bytes)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("content", [b"", b'{"elixir": "machine", "form', b"\xff\xfe", b'{"elixir": "plan"}'])
def test_a_broken_cache_file_is_named_and_ignored(content: bytes) -> None:
    path = machine_path(CPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(ElixirWarning, match=path.name):
        assert machine(CPU) == profile_for("cpu", *memory_sizes_bytes(CPU), "cpu")


@pytest.mark.usefixtures("empty_cache")
def test_memory_is_that_of_now() -> None:
    cluster = with_memory(preset("a100-40g", num_devices=2), 8 * GIB, 4 * GIB)
    assert cluster.num_ranks == 2
    assert cluster.device.memory_bytes == 8 * GIB
    assert cluster.host.memory_bytes == 4 * GIB
    assert cluster.host.pinned_bytes <= 4 * GIB
    assert cluster.host.reserve_bytes < 4 * GIB


@pytest.mark.usefixtures("empty_cache")
def test_hardware_option_goes_before_cache_and_rough_profile(tmp_path: Path) -> None:
    assert machine(CPU) == profile_for("cpu", *memory_sizes_bytes(CPU), "cpu")
    store_machine(remembered(), CPU)
    assert machine(CPU) == remembered()
    assert machine(CPU, "2 x a100-40g") == preset("a100-40g", num_devices=2)
    profile = tmp_path / "machine.json"
    profile.write_text(cluster_to_json(preset("l4-24g")))
    assert machine(CPU, str(profile)) == preset("l4-24g")


@pytest.mark.usefixtures("empty_cache")
def test_hardware_that_is_no_name_and_no_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownHardware, match="a100-40g"):
        machine(CPU, "a100-40gb")
    with pytest.raises(ProfileFileError, match=r"missing\.json"):
        machine(CPU, str(tmp_path / "missing.json"))
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileFileError, match=r"broken\.json"):
        machine(CPU, str(broken))


@pytest.mark.usefixtures("empty_cache")
def test_the_command_prints_the_profile_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Cluster
) -> None:
    monkeypatch.setattr("elixir_compile.tools.cli.measure.measure_fleet", lambda device, **_: fleet_of(measured))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    saved = tmp_path / "machine.json"
    done = CliRunner().invoke(app, ["measure", "-o", str(saved), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["elixir"] == "machine"
    assert cluster_from_json(done.stdout) == cluster_from_json(saved.read_text()) == measured
    assert cached_machine(CPU) == measured
    shown = CliRunner().invoke(app, ["measure"])
    for words in (
        "host to device",
        "Adam on the host",
        "matrix products, float32",
        "while copies run",
        "moments in int8",
    ):
        assert words in shown.stdout


@pytest.mark.usefixtures("empty_cache")
def test_the_command_names_a_file_it_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Cluster
) -> None:
    monkeypatch.setattr("elixir_compile.tools.cli.measure.measure_fleet", lambda device, **_: fleet_of(measured))
    done = CliRunner().invoke(app, ["measure", "-o", str(tmp_path / "missing" / "machine.json")])
    assert done.exit_code == 1
    assert "cannot write" in done.stderr
    assert cached_machine(CPU) == measured


@pytest.mark.usefixtures("empty_cache")
def test_the_command_writes_a_fleet_where_ranks_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first of three ranks, of which one has another device; each rank keeps the machine that it sees."""
    fleet = parse_fleet("2 x l4-24g + 1 x p40-24g")
    monkeypatch.setattr("elixir_compile.tools.cli.measure.measure_fleet", lambda device, **_: fleet)
    monkeypatch.setattr("elixir_compile.tools.cli.measure.distributed.get_rank", lambda: 0)
    saved = tmp_path / "fleet.json"
    done = CliRunner().invoke(app, ["measure", "-o", str(saved)])
    assert done.exit_code == 0
    assert "the ranks differ: 2 x l4-24g + 1 x p40-24g" in done.stdout
    assert "ranks 0, 1" in done.stdout
    assert named_fleet(str(saved)) == fleet
    with pytest.raises(InvalidOption, match="a fleet of 1 devices"):
        machine(CPU, str(saved))


def rank_measures(rank: int, file: str) -> Cluster:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest has it; this process is a new one
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        return measure_machine(CPU, seconds=1.0)
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="gloo over a file")
def test_two_ranks_share_a_profile_with_a_link_between_them(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2, mp_context=spawn) as pool:
        first, second = pool.map(rank_measures, (0, 1), (str(tmp_path / "group"),) * 2)
    assert first == second
    assert first.num_ranks == first.num_local_ranks == 2
    assert first.collective is not None
    assert 1e6 < first.collective.bytes_per_s < 1e12
    assert 0 <= first.collective.latency_s < 1.0


@pytest.mark.usefixtures("empty_cache")
def test_the_disk_is_measured_where_a_folder_is_given(tmp_path: Path) -> None:
    rough = remembered()
    found = with_disk(rough, tmp_path, nbytes=8 * MIB)
    assert list(tmp_path.glob("elixir-disk*")) == []
    rates = (found.host.disk_read_bytes_per_s, found.host.disk_write_bytes_per_s)
    assert all(rate is not None and 1e6 < rate < 1e12 for rate in rates)
    assert cluster_from_json(cluster_to_json(found)) == found
    shown = Console(width=200)
    with shown.capture() as captured:
        shown.print(machine_table(found))
    assert "B/s written" in captured.get()
    with pytest.raises(DiskFailed, match="new folder failed"):
        with_disk(rough, tmp_path / "not-mounted")


# ----------------------------------------------------------------------------------------------------------------------
# Functions that ask the machine answer the same while torch traces with fake tensors.


QUESTIONS: dict[str, Callable[[], object]] = {
    "memory sizes": lambda: memory_sizes_bytes(CPU),
    "cores": num_usable_cores,
    "ranks": num_local_ranks,
    "path of the measured machine": lambda: session_machine.machine_path(CPU),
    "machine": lambda: session_machine.machine(CPU),
    "workspaces": lambda: session_machine.library_bytes.__wrapped__(CPU),
    "host budget": lambda: session_machine.host_budget_bytes(parse_options({"host_memory": "2GiB"})),
    "device budget": lambda: session_machine.device_budget_bytes(
        parse_options({"device_memory": "2GiB"}), session_machine.machine(CPU), CPU, 0
    ),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_the_same_inside_a_capture(name: str) -> None:
    ask = QUESTIONS[name]
    before = ask()
    with FakeTensorMode():
        assert ask() == before


# ----------------------------------------------------------------------------------------------------------------------
# What Elixir asks of torch for CUDA is there in this version, also where torch has no CUDA; its advice is no error.


ADVICE = {
    "torch._inductor.compile_fx": (
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider setting "
        "`torch.set_float32_matmul_precision('high')` for better performance."
    ),
    "torch.autograd.graph": (
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context... "
        "(Triggered internally at /pytorch/aten/src/ATen/cuda/CublasHandlePool.cpp:180.)"
    ),
}


def advise(rank: int, world_size: int) -> None:
    """Warn as torch does on a GPU: in its first fp32 compilation, and in the first backward of a process."""
    for module, text in ADVICE.items():
        warnings.warn_explicit(text, UserWarning, "file.py", 1, module=module)


def test_advice_of_torch_is_no_error_in_a_test() -> None:
    assert "TensorFloat32 tensor cores" in inspect.getsource(compile_fx)
    advise(0, 1)
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", UserWarning, stacklevel=1)


def test_advice_of_torch_is_no_error_in_a_process_of_a_test(tmp_path: Path) -> None:
    assert spawn(advise, 1, folder=tmp_path) == [None]


def test_the_functions_that_cuda_must_have_are_there() -> None:
    assert [name for name in CudaPlatform.needed if not callable(getattr(torch.cuda, name, None))] == []


def test_a_torch_that_keeps_its_workspaces_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    CudaPlatform("cuda").drop_workspaces()
