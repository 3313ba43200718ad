"""Frozen parameters on disk: read from the file that they were loaded from, or from a file of their own."""

import ctypes
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.ir import Lane, Tier
from elixir_compile.runtime.disk_params import file_ranges
from elixir_compile.session.machine import library_bytes
from tests.run.frozen_checks import frozen_spans
from tests.run.processes import apart
from tests.run.training import Run, by_elixir, by_torch, plain_step, same_losses

load_file, save_file = (getattr(pytest.importorskip("safetensors.torch"), name) for name in ("load_file", "save_file"))
ROWS, WIDTH, LAYERS = 1 << 18, 64, 8
TABLE_BYTES = ROWS * WIDTH
DEVICE_BYTES = (64 << 20) + library_bytes(torch.get_default_device())
OPTIONS = {"device_memory": DEVICE_BYTES, "host_memory": "72MiB", "plan_cache": False, "replan": False}
"""The host has room for the buffers of gathers, 66 MiB, and for none of the tables of 16 MiB."""


class Looked(nn.Module):
    """A frozen table of codes, of which a step reads a few rows, and a trained scale beside it."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.empty(ROWS, WIDTH, dtype=torch.int8).random_(-127, 128)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.codes[(x * ROWS / 8).abs().long().clamp(max=ROWS - 1)[:, 0]]
        return torch.tanh(x + rows.float() * self.scale)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Looked() for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def wanted(model: nn.Module) -> list[torch.Tensor]:
    return by_torch(model, backend="aot_eager").train(batches(), step).losses


@pytest.fixture
def checkpoint(model: nn.Module, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    return path


def batches(num: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(num)]


def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    return plain_step(lambda x: compiled(x).square().sum(), optimizer, batch)


def from_file(model: nn.Module, path: Path, **options: Any) -> Run:
    """Return a run of `model` whose frozen parameters are views of the mapped file `path`."""
    run = by_elixir(model, **OPTIONS, **options)
    values = load_file(path)
    for name, param in run.model.named_parameters():
        if not param.requires_grad:
            param.data = values[name]
    return run


def homes(run: Run) -> list[Tier]:
    plan = elixir.compilations(run.model)[-1].plan
    assert plan is not None
    assert plan.prediction.host_peak_bytes <= 72 << 20
    return [plan.placement(bucket.id).param for bucket in plan.buckets if not bucket.trainable]


def reads_of(run: Run) -> tuple[int, int, int]:
    """Measure a step; return the bytes that are read, that are gathered, and that come back of frozen buckets."""
    (batch,) = batches(1)
    record = elixir.measure_step(lambda: step(run.compiled, run.optimizer, batch))
    plan = elixir.compilations(run.model)[-1].plan
    assert plan is not None
    own = frozen_spans(record, plan.buckets)
    disk, h2d, d2h = (sum(s.nbytes for s in own if s.lane is lane) for lane in (Lane.DISK, Lane.H2D, Lane.D2H))
    return disk, h2d, d2h


def test_frozen_parameters_are_read_from_the_file_that_they_were_loaded_from(
    model: nn.Module, wanted: list[torch.Tensor], checkpoint: Path
) -> None:
    run = from_file(model, checkpoint).train(batches(), step)
    assert same_losses(map(float, wanted), map(float, run.losses))
    assert Tier.DISK in homes(run)
    params = [param for param in run.model.parameters() if not param.requires_grad]
    assert all(own is not None and own.path == str(checkpoint) for own in file_ranges(params))
    num_tables = homes(run).count(Tier.DISK)
    disk_bytes, h2d_bytes, d2h_bytes = reads_of(run)
    assert h2d_bytes >= num_tables * TABLE_BYTES
    assert h2d_bytes % TABLE_BYTES == d2h_bytes == 0
    pages = h2d_bytes // TABLE_BYTES * 4096
    assert h2d_bytes <= disk_bytes <= h2d_bytes + 2 * pages  # whole pages, of a range that begins anywhere


def test_frozen_parameters_in_no_file_get_one_of_their_own(
    model: nn.Module, wanted: list[torch.Tensor], tmp_path: Path
) -> None:
    run = by_elixir(model, **OPTIONS, disk_path=tmp_path, disk_check=True).train(batches(), step)
    assert same_losses(map(float, wanted), map(float, run.losses))
    assert Tier.DISK in homes(run)
    for name, value in model.state_dict().items():
        assert not name.endswith("codes") or torch.equal(run.model.state_dict()[name], value)
    with torch.no_grad():  # between two steps, a user may write to them
        for own in (run.model, model):
            dict(own.named_parameters())["0.codes"].neg_()
    try:
        again = by_torch(model, backend="aot_eager")
        again.model.load_state_dict(run.model.state_dict())
        (batch,) = batches(1)
        assert torch.equal(run.compiled(batch), again.compiled(batch))
    finally:
        with torch.no_grad():
            dict(model.named_parameters())["0.codes"].neg_()


def test_a_failed_read_is_an_error_and_the_next_step_is_right(
    model: nn.Module, wanted: list[torch.Tensor], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = from_file(model, checkpoint).train(batches(1), step)
    read, left = os.preadv, [3]

    def failing(fd: int, buffers: Any, offset: int) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(elixir.DiskFailed, match=r"model\.safetensors"):
            run.train(batches()[1:2], step)
    run.train(batches()[1:], step)
    assert same_losses(map(float, wanted), map(float, run.losses))


@pytest.mark.slow
def test_short_reads_give_the_same_bytes(
    model: nn.Module, wanted: list[torch.Tensor], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def short(fd: int, buffers: Any, offset: int) -> int:
        return read(fd, [memoryview(buffers[0])[: 1 << 20]], offset)

    monkeypatch.setattr(os, "preadv", short)
    losses = from_file(model, checkpoint).train(batches(2), step).losses
    assert same_losses(map(float, wanted[:2]), map(float, losses))


@pytest.mark.parametrize("fault", ["written", pytest.param("truncated", marks=pytest.mark.slow)])
def test_a_file_that_somebody_changes_is_an_error(model: nn.Module, checkpoint: Path, fault: str) -> None:
    run = from_file(model, checkpoint).train(batches(1), step)
    with checkpoint.open("r+b") as file:
        if fault == "written":
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        else:
            file.truncate(checkpoint.stat().st_size - 1)
    with pytest.raises(elixir.FrozenFileChanged, match="load the model again"):
        run.train(batches(1), step)


@pytest.mark.slow
def test_a_file_that_gets_another_name_or_is_replaced_is_read_on(
    model: nn.Module, wanted: list[torch.Tensor], checkpoint: Path
) -> None:
    run = from_file(model, checkpoint).train(batches(1), step)
    other = checkpoint.with_name("other")
    other.write_bytes(b"another model")
    other.replace(checkpoint)
    run.train(batches()[1:], step)
    assert same_losses(map(float, wanted), map(float, run.losses))


@pytest.mark.slow
def test_a_write_to_a_parameter_in_a_file_needs_a_folder(model: nn.Module, checkpoint: Path) -> None:
    run = from_file(model, checkpoint).train(batches(1), step)
    with torch.no_grad():
        for param in run.model.parameters():
            if not param.requires_grad:
                param.neg_()
    with pytest.raises(elixir.InvalidOption, match="disk_path"):
        run.train(batches(1), step)


class Wide(Looked):
    """The same with a table of floats, which may have been trained before."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(ROWS // 4, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.codes[(x * 100).abs().long()[:, 0]] * self.scale)


@pytest.mark.slow
def test_state_of_an_earlier_run_of_a_frozen_parameter_needs_no_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = nn.Sequential(*(Wide() for _ in range(LAYERS))), tmp_path / "model.safetensors"
    save_file(model.state_dict(), path)
    old = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.ones(ROWS // 4, WIDTH),
        "exp_avg_sq": torch.ones(ROWS // 4, WIDTH),
    }
    expected, run = by_torch(model, backend="aot_eager"), from_file(model, path)
    for own in (expected, run):
        state = own.optimizer.state_dict()
        own.optimizer.load_state_dict({**state, "state": {0: {name: value.clone() for name, value in old.items()}}})
        own.train(batches(), step)
    assert all(map(torch.equal, run.losses, expected.losses))
    assert Tier.DISK in homes(run)
    kept = run.optimizer.state_dict()["state"][0]
    assert all(torch.equal(kept[name], value) for name, value in old.items())


@pytest.mark.slow
def test_without_frozen_files_the_host_is_too_small_and_a_folder_gets_files_of_its_own(
    model: nn.Module, wanted: list[torch.Tensor], checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(elixir.NoFeasiblePlan, match="disk_path"):
        from_file(model, checkpoint, frozen_files=False).train(batches(1), step)
    run = from_file(model, checkpoint, frozen_files=False, disk_path=str(tmp_path)).train(batches(), step)
    ranges = file_ranges(param for param in run.model.parameters() if not param.requires_grad)
    for own, home in zip(ranges, homes(run), strict=True):
        assert (own is not None and own.path != str(checkpoint)) is (home is Tier.DISK)
    assert Tier.DISK in homes(run)
    assert same_losses(map(float, wanted), map(float, run.losses))


def test_ranges_of_files_are_those_of_tensors(checkpoint: Path) -> None:
    values = load_file(checkpoint)
    text = checkpoint.read_bytes()
    for value, own in zip(values.values(), file_ranges(values.values()), strict=True):
        assert own is not None
        assert text[own.start_bytes : own.start_bytes + own.nbytes] == value.numpy().tobytes()
    assert file_ranges([torch.zeros(4), next(iter(values.values())).clone()]) == [None, None]


NUM_MANY = 18
"""Tables whose 288 MiB are four times a `host_memory` of 72 MiB."""


def anonymous_bytes() -> int:
    """Return the bytes of memory of this process that is no file's, without what is garbage."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the first step has freed stays with the C library otherwise
    return present_anonymous_bytes()


def present_anonymous_bytes() -> int:
    """Return the same with garbage, as fast as a thread may ask."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def give_back_what_is_freed() -> None:
    """Let this process give each large block of memory back when it is freed, so that a peak counts what is in use.

    Otherwise the C library raises the size from which a block is a mapping of its own once such a block is freed, and
    keeps freed blocks for later ones: in the second forward of a model with layers of 16 MiB it held 82 MiB of freed
    memory beside 169 MiB in use, by `mallinfo2`, and 2 MiB with the size fixed.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, 1 << 17)


_MMAP_THRESHOLD = -3
"""The number of `M_MMAP_THRESHOLD` in glibc's `malloc.h`."""


def bytes_in_training(path: str, host_memory: str) -> tuple[int, int, bool]:
    """Train many tables from the file `path`; return anonymous bytes, planned bytes on the host, and whether any table
    is on disk."""
    with torch.device("meta"):
        model = nn.Sequential(*(Looked() for _ in range(NUM_MANY)))
    model.load_state_dict(load_file(path), assign=True)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("codes"))
    options = {**OPTIONS, "inner": "aot_eager", "host_memory": host_memory}
    compiled = torch.compile(elixir.prepare(model), backend="elixir", options=options)
    optimizer = elixir.HybridAdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    for batch in batches():
        step(compiled, optimizer, batch)
    plan = elixir.compilations(compiled)[-1].plan
    assert plan is not None
    is_any_on_disk = any(placement.param is Tier.DISK for placement in plan.placements)
    return anonymous_bytes(), plan.prediction.host_peak_bytes, is_any_on_disk


@pytest.mark.slow
def test_frozen_weights_of_four_times_the_host_memory_take_no_anonymous_memory(tmp_path: Path) -> None:
    path = str(tmp_path / "many.safetensors")
    save_file(nn.Sequential(*(Looked() for _ in range(NUM_MANY))).state_dict(), path)
    from_disk, planned_from_disk, is_on_disk = apart(bytes_in_training, path, "72MiB")
    in_memory, planned_in_memory, is_in_file = apart(bytes_in_training, path, "1GiB")
    assert (is_on_disk, is_in_file) == (True, False)
    assert 4 * planned_from_disk <= NUM_MANY * TABLE_BYTES * 1.05
    assert in_memory - from_disk >= 0.98 * (planned_in_memory - planned_from_disk)
