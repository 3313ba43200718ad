"""`graph.capture.loss`: the loss region of a Dynamo graph, and its form in chunks."""

import pytest
import torch
from torch import fx
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.compat import storage_key
from elixir_compile.graph.capture.loss import chunk_loss, chunked_cross_entropy, find_loss
from elixir_compile.graph.ops.gather import GATHER
from tests.fx.captures import (
    CLASSES,
    LOSSES,
    TOKENS,
    WIDTH,
    Loss,
    Model,
    dynamo_graph,
    flat,
    halves,
    inputs,
    plain,
    shifted_labels,
    shifted_logits,
    sliced_rows,
)

NUM_CHUNKS = 4


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_found_and_the_graph_left_alone(loss: Loss) -> None:
    gm, _, is_same = dynamo_graph(Model(loss), *inputs())
    region = find_loss(gm)
    assert is_same
    assert region is not None
    assert region.num_classes == CLASSES
    assert region.num_tokens == {"shifted_logits": TOKENS - 2, "sliced_rows": 7}.get(loss.__name__, TOKENS)
    assert region.logits_bytes == TOKENS * CLASSES * (2 if loss.__name__ == "autocast" else 4)
    assert region.source.startswith("captures.py:")
    assert region.name == region.nodes[-1]


@pytest.mark.parametrize("loss", LOSSES)
def test_chunk_loss_removes_all_nodes_of_the_region(loss: Loss) -> None:
    gm, _, _ = dynamo_graph(Model(loss), *inputs())
    region = find_loss(gm)
    chunk_loss(gm, region, NUM_CHUNKS)
    assert len(gm.graph.find_nodes(op="call_function", target=chunked_cross_entropy)) == 1
    assert not {node.name for node in gm.graph.nodes} & set(region.nodes)
    assert find_loss(gm) is None


def test_upcast_logits_count_as_large_as_they_are_read() -> None:
    def upcast(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model.head(hidden).float().view(-1, CLASSES), flat(labels))

    gm, _, _ = dynamo_graph(Model(upcast).to(torch.bfloat16), *inputs(torch.bfloat16))
    assert find_loss(gm).logits_bytes == TOKENS * CLASSES * 4


def returned(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    logits = model.head(hidden)
    return functional.cross_entropy(logits.view(-1, CLASSES), flat(labels)), logits


def used_twice(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    logits = model.head(hidden).view(-1, CLASSES)
    return functional.cross_entropy(logits, flat(labels)) + logits.logsumexp(1).square().mean()


def class_weights(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    weight = model.matrix[0].detach().abs()
    return functional.cross_entropy(model.head(hidden).view(-1, CLASSES), flat(labels), weight)


def probabilities(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    targets = functional.one_hot(flat(labels).clamp(min=0), CLASSES).float()
    return functional.cross_entropy(model.head(hidden).view(-1, CLASSES), targets)


def one_per_token(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    return functional.cross_entropy(model.head(hidden).view(-1, CLASSES), flat(labels), reduction="none").sum()


def scaled(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    return functional.cross_entropy((model.head(hidden) * 0.5).view(-1, CLASSES), flat(labels))


def capped(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    return functional.cross_entropy(model.head(hidden).tanh().view(-1, CLASSES), flat(labels))


def classes_in_the_middle(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    return functional.cross_entropy(model.head(hidden).transpose(1, 2), labels)


def classes_cut_off(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    logits = model.head(hidden)[..., : CLASSES - 1]
    return functional.cross_entropy(logits.reshape(-1, CLASSES - 1), flat(labels).clamp(max=CLASSES - 2))


def picked_tokens(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    picked = torch.tensor([3, 1, 4])
    return functional.cross_entropy(model.head(hidden).view(-1, CLASSES)[picked], flat(labels)[picked])


def downcast(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    return functional.cross_entropy(model.head(hidden).to(torch.bfloat16).view(-1, CLASSES), flat(labels))


def without_gradient(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    with torch.no_grad():
        logits = model.head(hidden)
    return functional.cross_entropy(logits.view(-1, CLASSES), flat(labels)) + hidden.sum()


def overwritten(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    logits = model.head(hidden)
    hidden.mul_(2)
    return functional.cross_entropy(logits.view(-1, CLASSES), flat(labels))


def overwritten_by_a_function(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    logits = model.head(hidden)
    torch.relu_(hidden)
    return functional.cross_entropy(logits.view(-1, CLASSES), flat(labels))


def overwritten_by_position(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    logits = model.head(hidden)
    functional.relu(hidden, True)
    return functional.cross_entropy(logits.view(-1, CLASSES), flat(labels))


def no_projection(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> object:
    return functional.cross_entropy(hidden.view(-1, hidden.shape[-1]), flat(labels) % hidden.shape[-1])


@pytest.mark.parametrize(
    "loss",
    [
        returned,
        used_twice,
        class_weights,
        probabilities,
        one_per_token,
        scaled,
        capped,
        classes_in_the_middle,
        classes_cut_off,
        picked_tokens,
        downcast,
        without_gradient,
        overwritten,
        overwritten_by_a_function,
        overwritten_by_position,
        no_projection,
    ],
)
def test_losses_that_chunks_would_change_are_not_found(loss: Loss) -> None:
    x, labels = inputs()
    gm, _, _ = dynamo_graph(Model(loss), x, labels.clamp(min=0))
    assert len(gm.graph.find_nodes(op="call_function", target=functional.cross_entropy)) == 1
    assert find_loss(gm) is None


def test_of_two_losses_the_larger_is_found() -> None:
    def both(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        few = functional.cross_entropy(model.head(hidden[:, :3]).view(-1, CLASSES), flat(labels[:, :3]))
        return few + plain(model, hidden, labels)

    gm, _, _ = dynamo_graph(Model(both), *inputs())
    assert find_loss(gm).num_tokens == TOKENS


def test_a_region_of_another_graph_is_refused() -> None:
    gm, _, _ = dynamo_graph(Model(plain), *inputs())
    region = find_loss(gm)
    with pytest.raises(ValueError, match="0 chunks"):
        chunk_loss(gm, region, 0)
    chunk_loss(gm, region, 2)
    with pytest.raises(ValueError, match=region.name):
        chunk_loss(gm, region, 2)


def test_the_weight_is_read_through_its_gather() -> None:
    gm, _, _ = dynamo_graph(elixir.prepare(Model(plain)), *inputs())
    chunk_loss(gm, find_loss(gm), NUM_CHUNKS)
    (chunked,) = gm.graph.find_nodes(op="call_function", target=chunked_cross_entropy)
    assert [node.target for node in chunked.args[1:3]] == [GATHER, GATHER]


def logits_of(half: fx.GraphModule) -> dict[fx.Node, torch.Tensor]:
    """Return the values of `half` that have a row or column of all classes for each of several tokens."""
    values = {node: node.meta.get("val") for node in half.graph.nodes}
    return {
        node: value
        for node, value in values.items()
        if isinstance(value, torch.Tensor) and value.ndim == 2 and CLASSES in value.shape
        if WIDTH not in value.shape and 1 not in value.shape
    }


def most_logits_at_once(half: fx.GraphModule) -> int:
    """Return how many storages of logits are live at once where most are."""
    nodes, logits = list(half.graph.nodes), logits_of(half)
    last = {source: index for index, node in enumerate(nodes) for source in node.all_input_nodes}
    live: dict[fx.Node, int] = {}
    most = 0
    for index, node in enumerate(nodes):
        if node in logits:
            live[node] = storage_key(logits[node])
        most = max(most, len(set(live.values())))
        live = {kept: key for kept, key in live.items() if last[kept] > index}
    return most


@pytest.mark.parametrize("loss", LOSSES)
def test_no_graph_holds_all_logits_and_chunks_die_in_turn(loss: Loss) -> None:
    for half in halves(Model(loss), *inputs(), num_chunks=NUM_CHUNKS):
        sizes = {value.numel() // CLASSES for value in logits_of(half).values()}
        assert sizes == ({2} if loss is sliced_rows else {5} if loss is shifted_logits else {5, 6})
        assert most_logits_at_once(half) == 2  # what an op reads and what it makes


@pytest.mark.parametrize("loss", [plain, shifted_labels])
def test_a_dynamic_number_of_tokens_is_split_when_the_graph_runs(loss: Loss) -> None:
    x, labels = inputs()
    for value in (x, labels):
        torch._dynamo.mark_dynamic(value, 0)
    gm, _, _ = dynamo_graph(Model(loss), x, labels)
    assert find_loss(gm).num_tokens == TOKENS
    torch.compiler.reset()
    for half in halves(Model(loss), x, labels, num_chunks=NUM_CHUNKS):
        assert all(isinstance(value.numel(), torch.SymInt) for value in logits_of(half).values())
        assert most_logits_at_once(half) == 2


def test_logits_are_not_saved_even_if_smaller_than_their_inputs() -> None:
    def few_classes(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(hidden, model.head.weight[:4])
        return functional.cross_entropy(logits.view(-1, 4), flat(labels) % 4)

    forward, backward = halves(Model(few_classes), *inputs(), num_chunks=NUM_CHUNKS)
    saved = [node.meta["val"] for node in forward.graph.output_node().args[0][1:] if isinstance(node, fx.Node)]
    assert not [value for value in saved if value.ndim == 2 and 4 in value.shape and value.shape[-1] != 16]
    products = [node for node in backward.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) >= 2 * NUM_CHUNKS
