"""`elixir-compile measure`: measure this machine, print its profile, save it, and keep it for later plans."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import distributed

from elixir_compile.base.errors import DiskFailed, DiskFull
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.compat.platforms import accelerator, accelerator_type, platform_of
from elixir_compile.ir.hardware import Cluster, Fleet, Link, cluster_to_json, fleet_to_json
from elixir_compile.session.machine import forget_own_machine, store_machine
from elixir_compile.tools.measure.machine import measure_fleet, with_disk


def run_measure(*, output: Path | None, as_json: bool, seconds: float, disk_path: Path | None = None) -> int:
    """Measure this machine, print the profile, write it to `output` and to the cache; return the exit code.

    The measurement takes about `seconds`. If `disk_path` is a folder, its disk is measured too. If `as_json`, stdout
    gets the JSON of the profile and nothing else. Under `torchrun` every rank measures and the first rank writes. If
    the ranks differ, it writes a fleet, and each rank keeps its own machine for later plans; no disk is measured then.
    """
    notes = Console(stderr=True)
    with _ranks() as (device, is_first):
        with _progress_bar(notes, is_shown=is_first) as progress:
            fleet = measure_fleet(device, progress=progress, seconds=seconds)
        cluster = fleet.as_cluster()
        if cluster is None:
            return _store_fleet(fleet, device, output, as_json, notes)
        if not is_first:
            forget_own_machine(device)
            return 0
        if disk_path is not None:
            try:
                cluster = with_disk(cluster, disk_path)
            except (DiskFailed, DiskFull) as error:
                notes.print(f"the disk was not measured: {error}", soft_wrap=True, highlight=False)
                return 1
        return _print_and_store(cluster, device, output, as_json, notes)


def _store_fleet(fleet: Fleet, device: torch.device, output: Path | None, as_json: bool, notes: Console) -> int:
    """Keep the machine of this rank; on the first rank, print the machine of each class and write `fleet`. Return the
    exit code."""
    rank = distributed.get_rank()
    exit_code = 0
    try:
        store_machine(fleet.seen_by(rank), device, is_own=True)
    except OSError as error:
        notes.print(f"not kept for later plans, {error.filename}: {error.strerror}", soft_wrap=True, highlight=False)
    if rank:
        return exit_code
    text = fleet_to_json(fleet)
    if as_json:
        sys.stdout.write(text + "\n")
    else:
        console = Console()
        console.print(f"the ranks differ: {fleet.name}", highlight=False)
        for ranks in fleet.classes():
            console.print(f"ranks {', '.join(map(str, ranks))}", highlight=False)
            console.print(machine_table(fleet.seen_by(ranks[0])))
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
            notes.print(f"fleet: {output}", soft_wrap=True, highlight=False)
        except OSError as error:
            notes.print(f"cannot write {output}: {error.strerror}", soft_wrap=True, highlight=False)
            exit_code = 1
    return exit_code


def _print_and_store(cluster: Cluster, device: torch.device, output: Path | None, as_json: bool, notes: Console) -> int:
    text = cluster_to_json(cluster)
    if as_json:
        sys.stdout.write(text + "\n")
    else:
        Console().print(machine_table(cluster))
    exit_code = 0
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
            notes.print(f"profile: {output}", soft_wrap=True, highlight=False)
        except OSError as error:
            notes.print(f"cannot write {output}: {error.strerror}", soft_wrap=True, highlight=False)
            exit_code = 1
    try:
        notes.print(f"used by later plans: {store_machine(cluster, device)}", soft_wrap=True, highlight=False)
    except OSError as error:  # a read-only home folder must not lose the measurement
        notes.print(f"not kept for later plans, {error.filename}: {error.strerror}", soft_wrap=True, highlight=False)
    return exit_code


@contextmanager
def _ranks() -> Iterator[tuple[torch.device, bool]]:
    """Yield (device of this process, whether it is the first rank).

    If `torchrun` started several processes, a process group exists during the block.
    """
    kind = accelerator_type()
    device = accelerator() or torch.device("cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device, True
        return
    if kind is not None:
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        platform_of(device).make_current(device)
    distributed.init_process_group("gloo" if kind is None else distributed.get_default_backend_for_device(kind))
    try:
        yield device, distributed.get_rank() == 0
    finally:
        distributed.destroy_process_group()


@contextmanager
def _progress_bar(notes: Console, *, is_shown: bool) -> Iterator[Callable[[str, float], None]]:
    columns = (TextColumn("{task.description:<16}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, disable=not is_shown) as bar:
        task = bar.add_task("measuring", total=1.0)
        yield lambda title, over: bar.update(task, description=title, completed=over)


def machine_table(cluster: Cluster) -> Table:
    """Return the figures of `cluster` as a table with two columns: figure, value."""
    table = Table(title=cluster.name, show_header=False, title_justify="left")
    table.add_column("what")
    table.add_column("how much", justify="right")
    device, host = cluster.device, cluster.host
    table.add_row(
        "device memory", f"{format_bytes(device.memory_bytes)}, {format_bytes(device.reserve_bytes)} reserved"
    )
    for dtype, flops_per_s in device.flops_per_s.items():
        table.add_row(f"matrix products, {dtype}", f"{_count(flops_per_s)}FLOP/s")
    table.add_row("pointwise kernels", f"{_count(device.memory_bytes_per_s)}B/s")
    table.add_row("launch of one op", format_s(device.launch_s))
    table.add_row("Adam on the device", f"{_count(device.update_elements_per_s)}elements/s")
    table.add_section()
    table.add_row("host memory", f"{format_bytes(host.memory_bytes)}, {format_bytes(host.pinned_bytes)} pinned at most")
    table.add_row("host cores", str(host.cores))
    table.add_row("host DRAM", f"{_count(host.memory_bytes_per_s)}B/s")
    table.add_row("Adam on the host", f"{_count(host.update_elements_per_s)}elements/s")
    if host.busy_update_elements_per_s is not None:
        table.add_row("  while copies run", f"{_count(host.busy_update_elements_per_s)}elements/s")
    if host.disk_read_bytes_per_s is not None and host.disk_write_bytes_per_s is not None:
        rates = f"{_count(host.disk_read_bytes_per_s)}B/s read, {_count(host.disk_write_bytes_per_s)}B/s written"
        table.add_row("disk", rates)
    table.add_section()
    links = (
        ("host to device", cluster.h2d),
        ("device to host", cluster.d2h),
        ("between devices", cluster.nodes[0].peer),
        ("between nodes", cluster.network),
    )
    for name, link in links:
        if link is not None:
            _add_link(table, name, link)
    return table


def _add_link(table: Table, name: str, link: Link) -> None:
    table.add_row(name, f"{_count(link.bytes_per_s)}B/s, {format_s(link.latency_s)} latency")
    if link.busy_bytes_per_s is not None:
        table.add_row("  while the other direction copies", f"{_count(link.busy_bytes_per_s)}B/s")


def _count(rate: float) -> str:
    """Return `rate` with a decimal prefix and three digits: `18.1 G`."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate / 1e3:.3g} k"
