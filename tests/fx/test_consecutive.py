"""Which values of a graph have slices that can be alone in memory."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from elixir_compile.graph.capture.batch import scattered, walk
from elixir_compile.graph.capture.batch_call import each
from elixir_compile.ir import Phase, StorageId

BATCH, TOKENS, WIDTH = 8, 4, 6


def values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = x + 1  # [B, T, C]
    merged = rows.reshape(BATCH * TOKENS, WIDTH)
    half = (x + 2)[:, :, 1:3]
    turned = (x + 3).transpose(0, 1).contiguous()  # [T, B, C]
    apart = (x + 4).transpose(0, 1).contiguous().view(TOKENS * BATCH, WIDTH)  # takes the rows apart
    shared = torch.arange(WIDTH) * 2
    return merged, half, merged.t(), turned, apart, shared


def test_rows_of_the_batch_that_follow_each_other_are_consecutive():
    graph = make_fx(values, tracing_mode="fake")(torch.randn(BATCH, TOKENS, WIDTH)).graph
    given = {node: each(0) for node in graph.find_nodes(op="placeholder")}
    storages = {node: (StorageId(node.name),) for node in graph.nodes if "val" in node.meta}
    found = scattered(graph, Phase.FORWARD, storages, walk(graph, given, BATCH))
    outputs = [str(node) in found for node in graph.output_node().args[0]]
    assert outputs == [False, False, False, True, True, True]


def test_a_value_that_the_backward_returns_stays_whole():
    graph = make_fx(lambda x: (x * 2,), tracing_mode="fake")(torch.randn(BATCH, WIDTH)).graph
    given = {node: each(0) for node in graph.find_nodes(op="placeholder")}
    storages = {node: (StorageId(node.name),) for node in graph.nodes if "val" in node.meta}
    walked = walk(graph, given, BATCH)
    (returned,) = graph.output_node().args[0]
    assert scattered(graph, Phase.BACKWARD, storages, walked) == {str(returned)}
    assert scattered(graph, Phase.FORWARD, storages, walked) == set()
