"""A repeated activation and the gradient of its op are not made by one kernel, which would hold both at once."""

import pytest
import torch
from torch import fx
from torch._inductor import config, metrics
from torch._subclasses import FakeTensorMode

from elixir_compile import compat

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
        run, _ = compat.lower_with_inductor(gm, examples, [0, 1], repeated=repeated)
    assert metrics.generated_kernel_count == num_kernels
    h, product, output = (torch.randn(64, 64) for _ in range(3))
    weight, back = run([h, product, output])
    torch.testing.assert_close(weight, h.sin() @ output)
    torch.testing.assert_close(back, product * h.cos())
