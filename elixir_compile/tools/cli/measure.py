"""`elixir-compile measure`: measure this machine, print its profile, save it, and keep it for later plans."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
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
from elixir_compile.ir.hardware import Cluster, cluster_to_json, fleet_to_json
from elixir_compile.session.machine import forget_own_machine, store_machine
from elixir_compile.tools.measure.machine import measure_fleet, with_disk


def run_measure(*, output: Path | None, as_json: bool, seconds: float, disk_path: Path | None = None) -> int:
    """Measure this machine, print the profile, write it to `output` and to the cache; return the exit code.

    The measurement takes about `seconds`. If `disk_path` is a folder, its disk is measured too. If `as_json`, stdout
    gets the JSON of the profile and nothing else. Under `torchrun` every rank measures and the first rank writes. If
    the ranks differ, it writes a fleet, and each rank keeps its own machine for later plans; no disk is measured then.
    """
    notes = Console(stderr=True)
    columns = (TextColumn("{task.description:<16}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with _ranks() as (device, is_first):
        with Progress(*columns, console=notes, disable=not is_first) as bar:
            task = bar.add_task("measuring", total=1.0)
            fleet = measure_fleet(
                device,
                progress=lambda title, over: bar.update(task, description=title, completed=over),
                seconds=seconds,
            )
        cluster = fleet.as_cluster()
        if cluster is None:
            own = fleet.seen_by(distributed.get_rank())
            _keep(lambda: store_machine(own, device, is_own=True), "", notes)
            if distributed.get_rank():
                return 0
            tables = {f"ranks {', '.join(map(str, ranks))}": fleet.seen_by(ranks[0]) for ranks in fleet.classes()}
            return _show(fleet_to_json(fleet), tables, f"the ranks differ: {fleet.name}", output, as_json, notes)
        if not is_first:
            forget_own_machine(device)
            return 0
        if disk_path is not None:
            try:
                cluster = with_disk(cluster, disk_path)
            except (DiskFailed, DiskFull) as error:
                notes.print(f"the disk was not measured: {error}", soft_wrap=True, highlight=False)
                return 1
        exit_code = _show(cluster_to_json(cluster), {"": cluster}, "", output, as_json, notes)
        _keep(lambda: store_machine(cluster, device), "used by later plans: ", notes)
        return exit_code


def _show(
    text: str, machines: Mapping[str, Cluster], fleet: str, output: Path | None, as_json: bool, notes: Console
) -> int:
    """Print the tables of `machines` under their titles, or their JSON `text`, and write the text to `output`. `fleet`
    is the title of ranks that differ. Return the exit code."""
    if as_json:
        sys.stdout.write(text + "\n")
    else:
        console = Console()
        if fleet:
            console.print(fleet, highlight=False)
        for title, cluster in machines.items():
            if title:
                console.print(title, highlight=False)
            console.print(machine_table(cluster))
    if output is not None:
        try:
            output.write_text(text, encoding="utf-8")
            notes.print(f"{'fleet' if fleet else 'profile'}: {output}", soft_wrap=True, highlight=False)
        except OSError as error:
            notes.print(f"cannot write {output}: {error.strerror}", soft_wrap=True, highlight=False)
            return 1
    return 0


def _keep(store: Callable[[], Path], said: str, notes: Console) -> None:
    """Keep a machine for later plans, and print `said` with its file, if it is not empty."""
    try:
        path = store()
        if said:
            notes.print(f"{said}{path}", soft_wrap=True, highlight=False)
    except OSError as error:  # a read-only home folder must not lose the measurement
        notes.print(f"not kept for later plans, {error.filename}: {error.strerror}", soft_wrap=True, highlight=False)


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
    for form in host.update_forms:
        elements_per_s = host.update_elements_per_s / form.over_fp32
        table.add_row(f"  {form.dtype}, moments in {form.state_dtype}", f"{_count(elements_per_s)}elements/s")
    for dtype, flops_per_s in (host.flops_per_s or {}).items():
        table.add_row(f"matrix products on the host, {dtype}", f"{_count(flops_per_s)}FLOP/s")
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
            table.add_row(name, f"{_count(link.bytes_per_s)}B/s, {format_s(link.latency_s)} latency")
        if link is not None and link.busy_bytes_per_s is not None:
            table.add_row("  while the other direction copies", f"{_count(link.busy_bytes_per_s)}B/s")
    return table


def _count(rate: float) -> str:
    """Return `rate` with a decimal prefix and three digits: `18.1 G`."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate / 1e3:.3g} k"
