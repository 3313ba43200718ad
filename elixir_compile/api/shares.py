"""`elixir_compile.shares(model, sample, batch=64, mesh=mesh)`: who trains how many rows, among ranks that differ.

```text
  sample --capture, on every rank--> graph, of any number of rows
  machine and memory of every rank --exchange--> fleet, budgets
  graph, fleet, budgets --search, equal on every rank--> shares
```
"""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from elixir_compile.api.preview.capture import Capture, Inputs
from elixir_compile.api.preview.few_layers import capture_model
from elixir_compile.api.preview.models import find_described
from elixir_compile.errors import InvalidOption, InvalidPlan, UnsupportedModel
from elixir_compile.hardware import (
    Cluster,
    Fleet,
    cluster_from_json,
    cluster_to_json,
    fleet_of,
    fleet_of_nodes,
    with_devices,
    with_like_seats,
)
from elixir_compile.ir import Kind
from elixir_compile.ir.share import Share
from elixir_compile.options import Options, parse_options
from elixir_compile.problem.machine import (
    device_budget_bytes,
    host_budget_bytes,
    machine,
    named_fleet,
)
from elixir_compile.problem.planning import savings_of
from elixir_compile.runtime.distributed.control import new_control_channel
from elixir_compile.search.shares.choose import Ask, ShareSearch
from elixir_compile.search.shares.offers import Budget, State

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig


def shares(
    model: "nn.Module | Callable[[], nn.Module] | PreTrainedConfig | str",
    sample: Inputs,
    *,
    batch: int,
    mesh: "DeviceMesh | None" = None,
    hardware: "Fleet | Cluster | str | None" = None,
    options: "Mapping[str, object] | Options | None" = None,
) -> tuple[Share, ...]:
    """Return the share of each rank of `mesh` in training `model` on batches of `batch` rows in all.

    Every rank must call this together, before `prepare`; each gets the same shares. The step takes as long as its
    slowest rank, so rows go to ranks by what they can do within their memory: the result has the shortest step of all
    shares. `sample` is a batch of any number of rows from 2 on; only its shapes count, and nothing is run. `model` and
    `sample` are as for `elixir_compile.plan`, and `options` as for the backend: `device_memory` and `host_memory` are
    budgets of each rank.

    `hardware` is the fleet of all ranks: its name, such as `"2 x l4-24g + 1 x a6000-48g"`, the file of `torchrun ...
    elixir-compile measure`, or a value. Without it, each rank says what its own machine is, as measured earlier or
    roughly known, with its free memory. `mesh` may be left out if `hardware` is given: then nothing is exchanged.

    Raises InvalidOption for a batch of fewer than 2 rows, and for a fleet of another size than the mesh;
    UnsupportedModel for a mesh of two axes, and for a model whose batch cannot be divided; and NoFeasibleShares if no
    shares fit the memory of the ranks.

    Example:
        for share in elixir.shares(model, batch, batch=64, hardware="2 x l4-24g + 1 x a6000-48g"):
            print(share.num_rows, "rows in", share.micro_batches, "micro-batches")
    """
    chosen = options if isinstance(options, Options) else parse_options(options)
    fleet = _named(hardware or chosen.hardware)
    if mesh is not None and mesh.ndim > 1:
        raise UnsupportedModel("the mesh", "shares are for one axis; a mesh with copies of each part has two")
    num_ranks = 1 if mesh is None else mesh.size()
    if mesh is None and fleet is None:
        raise InvalidOption("mesh", None, "a mesh of the ranks, or the argument hardware")
    if mesh is not None and fleet is not None and fleet.num_ranks != num_ranks:
        raise InvalidOption("hardware", fleet.name, f"a fleet of {num_ranks} devices")
    capture = capture_model(find_described(model, sample), sample, options=chosen)
    if fleet is None:
        assert mesh is not None
        fleet, budgets = _present(mesh, capture, chosen)
    else:
        budgets = budgets_of(fleet, capture, chosen)
    return search_of(capture, fleet, budgets, batch, chosen).best().shares


def search_of(capture: Capture, fleet: Fleet, budgets: Sequence[Budget], batch: int, options: Options) -> ShareSearch:
    """Return the search for the shares of `fleet` in training the step of `capture` on `batch` rows.

    Raises InvalidOption for a batch of fewer than 2 rows, and UnsupportedModel if the graph does not say what belongs
    to the rows of its batch.
    """
    graph = capture.graph
    grads = capture.grad_bytes(options)
    params = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.PARAM)
    state = State(
        num_elements=sum(capture.numels.values()),
        nbytes=params + sum(grads.values()) + sum(capture.state_nbytes().values()),
    )
    try:
        return ShareSearch(
            Ask(
                graph=graph,
                fleet=fleet,
                budgets=tuple(budgets),
                state=state,
                batch=batch,
                savings=savings_of(options),
            )
        )
    except InvalidPlan as error:
        raise UnsupportedModel(graph.name, str(error)) from error


def budgets_of(fleet: Fleet, capture: Capture, options: Options) -> tuple[Budget, ...]:
    """Return the memory of each rank of `fleet`: that of the profile less its reserve, or as `options` say.

    The ranks of a host share its memory equally.
    """
    found: list[Budget] = []
    for rank in range(fleet.num_ranks):
        seen = fleet.seen_by(rank)
        device_bytes = seen.device.memory_bytes - seen.device.reserve_bytes
        host_bytes = (seen.host.memory_bytes - seen.host.reserve_bytes) // seen.num_local_ranks
        device_bytes = device_bytes if options.device_memory is None else options.device_memory
        host_bytes = host_bytes if options.host_memory is None else options.host_memory
        found.append(Budget(device_bytes=device_bytes - capture.base_bytes, host_bytes=host_bytes))
    return tuple(found)


def _named(hardware: "Fleet | Cluster | str | None") -> Fleet | None:
    if hardware is None or isinstance(hardware, Fleet):
        return hardware
    if isinstance(hardware, Cluster):
        return fleet_of(hardware)
    fleet = named_fleet(hardware)
    if fleet is not None:
        return fleet

    return fleet_of(machine(torch.device("cpu"), hardware))


def _present(mesh: "DeviceMesh", capture: Capture, options: Options) -> tuple[Fleet, tuple[Budget, ...]]:
    """Return the fleet that the ranks of `mesh` are, and the memory of each; every rank says its own."""
    cluster = machine(capture.device)
    control = new_control_channel(mesh.mesh.flatten().tolist())
    hosts = control.exchange(platform.node(), "names of hosts", "asks for shares")
    num_here = hosts.count(hosts[control.rank])
    device_bytes = device_budget_bytes(options, cluster, capture.device, capture.held_bytes)
    host_bytes = host_budget_bytes(options)
    if options.host_memory is None:
        host_bytes //= num_here
    num_nodes = len(set(hosts))
    links = with_devices(cluster.alone(), num_here, num_nodes) if cluster.num_ranks != len(hosts) else cluster
    said = control.exchange(
        json.dumps([cluster_to_json(links), device_bytes - capture.base_bytes, host_bytes]),
        "machines of the ranks",
        "asks for shares",
    )
    clusters = [cluster_from_json(text) for text, _, _ in map(json.loads, said)]
    found = [link for each in clusters if (link := each.collective) is not None]
    slowest = min(found, key=lambda link: link.bytes_per_s, default=None)
    numbers = [sorted(set(hosts), key=hosts.index).index(host) for host in hosts]
    fleet = with_like_seats(fleet_of_nodes([each.nodes[0] for each in clusters], numbers, slowest))
    own = [Budget(device_bytes=device, host_bytes=host) for _, device, host in map(json.loads, said)]
    # Free memory differs a little between equal ranks: a class has that of its rank with the least.
    for ranks in fleet.classes():
        least = Budget(
            device_bytes=min(own[rank].device_bytes for rank in ranks),
            host_bytes=min(own[rank].host_bytes for rank in ranks),
        )
        for rank in ranks:
            own[rank] = least if own[rank].device_bytes <= 1.1 * least.device_bytes else own[rank]
    return fleet, tuple(own)
