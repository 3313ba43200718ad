"""Two values are not there at once because Inductor made them, or called their kernels, together."""

import pytest
import torch
from torch import fx
from torch._inductor import config, metrics
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from elixir_compile import compat
from elixir_compile.runtime.measure import peak_bytes

aten = torch.ops.aten


def region() -> fx.GraphModule:
    """Return the backward of a product of `sin(h)`: the activation again for the weight, then the gradient of `h`."""
    graph = fx.Graph()
    with FakeTensorMode():
        h, made = torch.empty(64, 64), torch.empty(64, 64)
    values = {"h": h, "from_product": made, "from_output": made}
    nodes = {name: graph.placeholder(name) for name in values}
    again = graph.create_node("call_function", aten.sin.default, (nodes["h"],), name="re_sin")
    weight = graph.call_function(aten.mm.default, (again, nodes["from_output"]))
    slope = graph.call_function(aten.cos.default, (nodes["h"],))
    back = graph.call_function(aten.mul.Tensor, (nodes["from_product"], slope))
    graph.output((weight, back))
    for node in graph.nodes:
        node.meta["val"] = values.get(node.name, h)
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(("repeated", "num_kernels"), [((), 1), (("re_sin",), 2)])
def test_a_repeated_op_shares_no_kernel_with_a_gradient(repeated: tuple[str, ...], num_kernels: int) -> None:
    gm = region()
    examples = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    metrics.reset()
    with config.patch(force_disable_caches=True):
        run, _ = compat.lower_with_inductor(gm, examples, [0, 1], compat.Kernels(), repeated=repeated)
    assert metrics.generated_kernel_count == num_kernels
    h, product, output = (torch.randn(64, 64) for _ in range(3))
    weight, back = run([h, product, output])
    torch.testing.assert_close(weight, h.sin() @ output)
    torch.testing.assert_close(back, product * h.cos())


def test_a_value_is_freed_between_two_kernels_if_it_dies_there() -> None:
    with FakeTensorMode():
        fakes = torch.empty(512, 512), torch.empty(512, 1)
    graph = fx.Graph()
    large, column = (graph.placeholder(name) for name in ("large", "column"))
    row = graph.call_function(aten.sum.dim_IntList, (large, [0]))
    spread = graph.call_function(aten.add.Tensor, (row, column))
    graph.output((spread,))
    for node, value in zip(graph.nodes, (*fakes, torch.empty(512, device="meta"), fakes[0]), strict=False):
        node.meta["val"] = value
    with config.patch(force_disable_caches=True):
        run, _ = compat.lower_with_inductor(fx.GraphModule(torch.nn.Module(), graph), fakes, [0], compat.Kernels())
    column = torch.randn(512, 1)
    # Without `acc_events` torch 2.11 warns of events that are dropped between cycles.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        box = [torch.ones(512, 512), column]
        (spread,) = run(box)
    torch.testing.assert_close(spread, 512 + column.expand(512, 512))
    one_bytes = 4 * 512 * 512
    assert one_bytes <= peak_bytes({}, (), compat.cpu_allocations(profiler)) < 1.1 * one_bytes


def test_dead_memory_is_freed_and_not_kept_for_reuse() -> None:
    """A small product, a large one, a small one; each is gone before the next. Inductor would keep the memory of the
    first for the third, as an input that died since seems to leave room for it."""
    sizes = {"left": 256, "right": 256, "other": 256, "large": 512}
    graph = fx.Graph()
    nodes = {name: graph.placeholder(name) for name in sizes}
    with FakeTensorMode():
        for name, size in sizes.items():
            nodes[name].meta["val"] = torch.empty(size, size)
        sums = []
        for one, two in (("left", "right"), ("large", "large"), ("left", "other")):
            product = graph.call_function(aten.mm.default, (nodes[one], nodes[two]))
            product.meta["val"] = nodes[one].meta["val"]
            sums.append(graph.call_function(aten.sum.dim_IntList, (product, [0])))
            sums[-1].meta["val"] = torch.empty(sizes[one])
    graph.output(tuple(sums))
    fakes = [node.meta["val"] for node in nodes.values()]
    with config.patch(force_disable_caches=True):
        run, _ = compat.lower_with_inductor(
            fx.GraphModule(torch.nn.Module(), graph), fakes, [0, 1, 2], compat.Kernels()
        )
    left, right, other, large = (torch.randn(size, size) for size in sizes.values())
    # Without `acc_events` torch 2.11 warns of events that are dropped between cycles.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        box = [left, right, other, large]
        found = run(box)
    for got, product in zip(found, (left @ right, large @ large, left @ other), strict=True):
        torch.testing.assert_close(got, product.sum(0), rtol=1e-4, atol=1e-3)
    large_bytes = 4 * 512 * 512
    assert large_bytes <= peak_bytes({}, (), compat.cpu_allocations(profiler)) < 1.1 * large_bytes
