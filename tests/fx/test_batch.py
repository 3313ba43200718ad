"""`graph.capture.batch`: which values of captured steps have slices, which are sums, and which ops take fewer
rows."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from elixir_compile import compat
from elixir_compile.base.options import parse_options
from elixir_compile.graph.capture.batch import scattered, walk
from elixir_compile.graph.capture.captured import SAME, SUM, TOTAL, Walked, each
from elixir_compile.graph.capture.node_facts import tensor_of
from elixir_compile.ir import Batched, Kind, Op, Phase, StepGraph, StorageId
from elixir_compile.tools.preview.capture import capture_step
from tests.covering import covering
from tests.fx.handmade import mixing, traced, walked

# ----------------------------------------------------------------------------------------------------------------------
# `graph.capture.batch_call`: which ops can run on fewer rows if the number of rows is a symbol.


CALL_ROWS, CALL_LENGTH = 8, 5


def walked_symbolic(function: Callable[..., Any], *shape: int) -> tuple[Walked, tuple[fx.Node, ...]]:
    """Return the states of `function` of a tensor with slices and dynamic sizes, and the nodes of its results."""
    graph = make_fx(lambda x: function(x.clone()), tracing_mode="symbolic")(torch.zeros(shape)).graph
    (given,) = graph.find_nodes(op="placeholder")
    results = graph.output_node().args[0]
    batch = tensor_of(given).shape[0]
    assert compat.symbol_of(batch)
    return walk(graph, {given: each(0)}, batch), results if isinstance(results, tuple) else (results,)


def test_sizes_with_the_number_of_rows_are_local_and_other_numbers_are_of_the_whole_batch() -> None:
    def mean(x: torch.Tensor) -> Any:
        flat = x.view(x.shape[0] * x.shape[1], 3)
        return flat, flat / x.numel(), flat * x.shape[0] ** 0.5, flat.sum() / x.shape[0], flat[: flat.shape[0]]

    found, (flat, scaled, rooted, total, taken) = walked_symbolic(mean, CALL_ROWS, CALL_LENGTH, 3)
    assert not found.mixes
    assert [found.states[node] for node in (flat, scaled, rooted, taken)] == [each(0)] * 4
    assert found.states[total] in (SUM, TOTAL)


def test_zeros_of_the_number_of_rows_are_made_at_the_size_of_a_micro_batch() -> None:
    found, _ = walked_symbolic(lambda x: x.sin() + x.new_zeros(x.shape[0], 1), CALL_ROWS, CALL_LENGTH)
    zeros = next(node for node in found.states if str(node.target) == "aten.new_zeros.default")
    assert found.states[zeros] == each(0)
    assert not found.mixes


def test_a_sum_that_is_spread_over_the_rows_is_spread_behind_the_last_micro_batch() -> None:
    found, (spread,) = walked_symbolic(lambda x: x.sum().expand(x.shape[0]) * 2, CALL_ROWS, CALL_LENGTH)
    assert found.states[spread] == TOTAL
    assert not found.mixes


@pytest.mark.parametrize(
    ("function", "shape", "why"),
    [
        (
            lambda x: torch.roll(x, x.shape[0], 1),
            (CALL_ROWS, CALL_LENGTH),
            "its argument shifts is computed from the number of rows",
        ),
        (
            lambda x: x * torch.ones(x.shape[0], x.shape[0], 1),
            (CALL_ROWS, 1, CALL_LENGTH),
            "the number of rows, s, is not only the size of slices in a tensor of [s, s, 1]",
        ),
        (
            lambda x: x.t().contiguous().view(-1),
            (CALL_ROWS, CALL_LENGTH),
            "a reshape of [s, s] to [s*s] takes the slices along dimension 1 apart",
        ),
        (
            lambda x: x + 1,
            (CALL_ROWS, CALL_ROWS),
            "the number of rows, s, is not only the size of slices in a tensor of [s, s]",
        ),
    ],
    ids=["argument", "made of rows by rows", "taken apart", "rows and columns of one symbol"],
)
def test_an_op_that_needs_the_number_of_all_rows_mixes(
    function: Callable[..., Any], shape: tuple[int, ...], why: str
) -> None:
    found, _ = walked_symbolic(function, *shape)
    assert why in [re.sub(r"s\d+", "s", reason) for reason in mixing(found).values()]


def test_numbers_that_stand_in_for_sizes_differ_if_the_sizes_do() -> None:
    graph = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.zeros(6, 7)).graph
    rows, length = tensor_of(next(iter(graph.nodes))).shape
    sizes = [rows, length, rows * length, rows * 7, rows + 1, rows * rows, rows // 2, rows * length + rows]
    assert len({compat.stand_in(size) for size in sizes}) == len(sizes)
    assert compat.stand_in(rows * (length + 1)) == compat.stand_in(rows * length + rows)
    symbol = compat.symbol_of(rows)
    multiples = [size for size in (*sizes, 6) if compat.is_multiple(size, symbol)]
    assert [str(size) for size in multiples] == [str(size) for size in (rows, rows * length, rows * 7)] + [
        str(rows * length + rows)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# `graph.capture.batch`: which values of captured steps have slices, which are sums, and which ops mix the batch.


ROWS, LENGTH, WIDTH, WORDS = 8, 16, 32, 64
INNERS = ["inductor", "aot_eager"]


def step_of(model: nn.Module, *inputs: torch.Tensor, inner: str = "aot_eager", **named: torch.Tensor) -> StepGraph:
    return capture_step(model, named or inputs, device="cpu", options=parse_options({"inner": inner})).graph


def mixing_ops(step: StepGraph) -> list[Op]:
    return [op for op in step.ops if op.mixes]


def batched_of(step: StepGraph, kind: Kind) -> list[Batched]:
    return [storage.batched for storage in step.storages if storage.kind is kind]


def language_model(kind: str) -> nn.Module:
    import transformers

    common: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    layers = {"num_hidden_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 48}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_embd=WIDTH, n_head=2, n_positions=LENGTH, **common)
        return transformers.GPT2LMHeadModel(config)
    common |= {"max_position_embeddings": LENGTH, **layers}
    if kind == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**common))
    config = transformers.LlamaConfig(num_key_value_heads=1, use_cache=False, **common)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(("kind", "inner"), covering(["gpt2", "llama", "bert"], INNERS[::-1]))
def test_a_language_model_divides_but_for_the_mean_of_its_losses(kind: str, inner: str) -> None:
    """Llama's `inv_freq` has as many entries as the batch has rows, and is the same for all."""
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    named: Mapping[str, torch.Tensor] = {"input_ids": ids, "labels": ids.clone()}
    step = step_of(language_model(kind), inner=inner, **named)
    mixed = {(op.target, op.mixes) for op in mixing_ops(step)}
    assert mixed == (set() if inner == "inductor" else {("aten.nll_loss_forward.default", "a mean over the batch")})
    assert step.batch == ROWS
    assert set(batched_of(step, Kind.GRAD)) == {Batched.SUM}
    assert set(batched_of(step, Kind.PARAM)) == {Batched.SAME}
    assert batched_of(step, Kind.INPUT).count(Batched.EACH) == 2
    activation_bytes = ROWS * LENGTH * WIDTH * 4
    large = [s for s in step.storages if s.kind in (Kind.TEMP, Kind.SAVED) and s.nbytes >= activation_bytes]
    assert {storage.batched for storage in large} == {Batched.EACH}
    if kind == "llama":
        assert Batched.SAME in batched_of(step, Kind.INPUT)


class Convolutions(nn.Module):
    """A convolution, a batch norm over the batch, and the mean of the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.norm(self.conv(x)).relu().mean((2, 3))), y)


@pytest.mark.parametrize("inner", INNERS)
def test_a_batch_norm_has_the_statistics_of_the_whole_batch(inner: str) -> None:
    inputs = torch.zeros(ROWS, 3, 6, 6), torch.zeros(ROWS, dtype=torch.long)
    step = step_of(Convolutions(), *inputs, inner=inner)
    written = [("aten.copy_.default", "it writes one of its inputs")] * 3
    statistics = "statistics over the batch"
    expected = {
        "inductor": [
            ("aten.var_mean.correction", "a variance over the batch"),
            *written,
            ("aten.mul.Tensor", "a sum over the batch meets rows of it"),
        ],
        "aot_eager": [
            ("aten._native_batch_norm_legit_functional.default", statistics),
            ("aten.nll_loss_forward.default", "a mean over the batch"),
            *written,
            ("aten.native_batch_norm_backward.default", statistics),
        ],
    }
    assert [(op.target, op.mixes) for op in mixing_ops(step)] == expected[inner]
    conv = [op for op in step.ops if op.target == "aten.convolution.default"]
    storages = {storage.id: storage for storage in step.storages}
    assert [storages[op.writes[0]].batched for op in conv] == [Batched.EACH]


class Scaled(nn.Module):
    """A linear layer whose results are scaled by a buffer with an entry for each of its 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(ROWS, ROWS)
        self.register_buffer("scale", torch.ones(ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).square().sum()


def test_a_buffer_with_as_many_entries_as_the_batch_has_rows_is_the_same_for_all() -> None:
    step = step_of(Scaled(), torch.zeros(ROWS, ROWS))
    assert sorted(batched_of(step, Kind.INPUT)) == [Batched.EACH, Batched.SAME]
    assert mixing_ops(step) == []


class Masked(nn.Module):
    """Attention with a mask of the caller, of as many positions as the batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) + mask).softmax(-1)
        return (self.out(weights @ v).squeeze(-1).sum(-1) - y).square().sum()


def test_a_mask_with_as_many_positions_as_the_batch_has_rows_is_the_same_for_all() -> None:
    step = step_of(Masked(), torch.zeros(ROWS, ROWS, WIDTH), torch.zeros(ROWS, ROWS), torch.zeros(ROWS))
    assert batched_of(step, Kind.INPUT) == [Batched.EACH, Batched.SAME, Batched.EACH]
    assert mixing_ops(step) == []


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_dynamic_batch_is_divided_as_a_constant_batch_is(inner: str) -> None:
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    named = {"input_ids": ids, "labels": ids.clone()}
    options = parse_options({"inner": inner})
    step = capture_step(language_model("llama"), named, device="cpu", options=options, dynamic=True).graph
    mixed = {(op.target, op.mixes) for op in mixing_ops(step)}
    assert mixed == (set() if inner == "inductor" else {("aten.nll_loss_forward.default", "a mean over the batch")})
    assert (step.batch, dict(step.symbols)) == (ROWS, {step.batch_size: ROWS})
    assert set(batched_of(step, Kind.GRAD)) == {Batched.SUM}
    activation_bytes = ROWS * LENGTH * WIDTH * 4
    large = [s for s in step.storages if s.kind in (Kind.TEMP, Kind.SAVED) and s.nbytes >= activation_bytes]
    assert {storage.batched for storage in large} == {Batched.EACH}


def test_views_of_one_storage_have_their_slices_where_they_are() -> None:
    """Queries, keys and values are views of one product; so are transposed ones, whose slices moved."""

    def attend(x: torch.Tensor, w: torch.Tensor) -> Any:
        q, k, v = torch.mm(x, w).view(ROWS, 4, 2, 9).split(3, -1)
        return q.transpose(1, 2), k.permute(1, 2, 0, 3), v.select(1, 0)

    graph = traced(attend, [torch.zeros(ROWS * 4, 5), torch.zeros(5, 18)])
    found = walked(graph, [each(0), SAME], ROWS)
    results = graph.output_node().args[0]
    assert [found.states[node] for node in results] == [each(0), each(2), each(0)]
    assert not found.mixes


def test_a_view_that_takes_slices_apart_is_taken_of_a_whole_result() -> None:
    """`[T, B]` to `[T * B]`: the view itself computes nothing, so the op that it is a view of mixes the batch."""

    def merge(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).t().contiguous().view(-1)
        return y.sin() + y

    found = walked(traced(merge, [torch.zeros(ROWS, 3)]), [each(0)], ROWS)
    why = "a reshape of [3, 8] to [24] takes the slices along dimension 1 apart"
    assert mixing(found) == {"aten.clone.default": why}


def test_a_view_of_an_input_is_taken_of_the_whole_input() -> None:
    found = walked(traced(lambda x: x, [torch.zeros(3)]), [SAME], ROWS)
    assert not found.mixes

    class Merge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.t().reshape(-1) * self.scale).sum() + (x * self.scale).sum()

    assert mixing_ops(step_of(Merge(), torch.zeros(ROWS, 1))) == []


def test_a_total_is_computed_behind_the_sums_and_may_not_meet_rows() -> None:
    def mean(x: torch.Tensor) -> Any:
        total = x.sum()
        loss = total / (x > 0).sum()
        return total, loss, x * loss, x * 2 + total

    graph = traced(mean, [torch.zeros(ROWS, 3)])
    found = walked(graph, [each(0)], ROWS)
    total, loss, scaled, added = graph.output_node().args[0]
    assert (found.states[total], found.states[loss]) == (SUM, TOTAL)
    # Behind the first op that mixes, all sums are complete, so the second one divides.
    assert found.mixes == {scaled: "a sum over the batch meets rows of it"}
    assert (found.states[scaled], found.states[added]) == (each(0), each(0))


def test_a_sum_stays_a_sum_where_zeros_are_chosen_or_filled() -> None:
    """As in the gradient of an embedding, which drops that of padding. What is added to a value other than zeros would
    count once per micro-batch."""

    def table(x: torch.Tensor, index: torch.Tensor, base: torch.Tensor) -> Any:
        total = x.sum(0)
        kept, other = torch.where(index > 0, total, 0.0), torch.where(index > 0, total, base)
        filled = torch.zeros(ROWS).index_put([index], kept, accumulate=True)
        return kept, filled, other, base.index_put([index], total, accumulate=True)

    inputs = torch.randn(ROWS, 3), torch.tensor([0, 2, 1]), torch.randn(3)
    graph = traced(table, inputs)
    found = walked(graph, [each(0), SAME, SAME], ROWS)
    assert [found.states[node] for node in graph.output_node().args[0]] == [SUM, SUM, TOTAL, TOTAL]
    assert not found.mixes


def test_what_all_rows_read_in_slices_is_never_whole() -> None:
    """A mask of zeros and a value computed from it exist for one micro-batch at a time."""

    def mask(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        full = torch.full(x.shape, 2.0) * row
        return torch.where(x > 0, x, full.exp())

    graph = traced(mask, [torch.zeros(ROWS, 3), torch.zeros(3)])
    found = walked(graph, [each(0), SAME], ROWS)
    by_target = {str(node.target): found.states[node] for node in graph.nodes if node.op == "call_function"}
    assert by_target["aten.full.default"] == by_target["aten.exp.default"] == each(0)
    assert not found.mixes
    assert not found.narrowed


def test_zeros_of_an_earlier_region_are_still_zeros() -> None:
    """A region reads as an input what an earlier region has made; the marks of nodes come with it."""

    def add(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(3).index_put([index], x, accumulate=True)

    graph = traced(add, [torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS)])
    assert not walked(graph, [each(0), each(0)], ROWS).mixes
    zeros = next(node for node in graph.nodes if str(node.target) == "aten.zeros.default")
    with graph.inserting_before(next(iter(graph.nodes))):
        given = graph.placeholder("zeros")
    given.meta = dict(zeros.meta)
    zeros.replace_all_uses_with(given)
    assert not walked(graph, [SAME, each(0), each(0)], ROWS).mixes
    given.meta = {"val": zeros.meta["val"]}
    assert (
        "it adds rows of the batch to a value other than zeros"
        in mixing(walked(graph, [SAME, each(0), each(0)], ROWS)).values()
    )


def test_a_value_read_whole_and_in_slices_by_one_op_mixes() -> None:
    graph = traced(lambda x, w: torch.addmm(w, x, w), [torch.zeros(ROWS, ROWS), torch.zeros(ROWS, ROWS)])
    found = walked(graph, [each(0), SAME], ROWS)
    assert mixing(found) == {"aten.addmm.default": "it reads clone_1 whole and in slices of the batch"}


# ----------------------------------------------------------------------------------------------------------------------
# Which values of a graph have slices that can be alone in memory.


BATCH, TOKENS, CONSECUTIVE_WIDTH = 8, 4, 6


def values(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = x + 1  # [B, T, C]
    merged = rows.reshape(BATCH * TOKENS, CONSECUTIVE_WIDTH)
    half = (x + 2)[:, :, 1:3]
    turned = (x + 3).transpose(0, 1).contiguous()  # [T, B, C]
    apart = (x + 4).transpose(0, 1).contiguous().view(TOKENS * BATCH, CONSECUTIVE_WIDTH)  # takes the rows apart
    shared = torch.arange(CONSECUTIVE_WIDTH) * 2
    return merged, half, merged.t(), turned, apart, shared


def test_rows_of_the_batch_that_follow_each_other_are_consecutive():
    graph = make_fx(values, tracing_mode="fake")(torch.randn(BATCH, TOKENS, CONSECUTIVE_WIDTH)).graph
    given = {node: each(0) for node in graph.find_nodes(op="placeholder")}
    storages = {node: (StorageId(node.name),) for node in graph.nodes if "val" in node.meta}
    found = scattered(graph, Phase.FORWARD, storages, walk(graph, given, BATCH))
    outputs = [str(node) in found for node in graph.output_node().args[0]]
    assert outputs == [False, False, False, True, True, True]


def test_a_value_that_the_backward_returns_stays_whole():
    graph = make_fx(lambda x: (x * 2,), tracing_mode="fake")(torch.randn(BATCH, CONSECUTIVE_WIDTH)).graph
    given = {node: each(0) for node in graph.find_nodes(op="placeholder")}
    storages = {node: (StorageId(node.name),) for node in graph.nodes if "val" in node.meta}
    walked = walk(graph, given, BATCH)
    (returned,) = graph.output_node().args[0]
    assert scattered(graph, Phase.BACKWARD, storages, walked) == {str(returned)}
    assert scattered(graph, Phase.FORWARD, storages, walked) == set()
