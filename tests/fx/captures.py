"""Captured graphs of tiny models, and of models that end in a projection and a cross-entropy."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import fx, nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.compat import boxed, compile_with_aot_eager, min_cut_partition
from elixir_compile.graph.capture.loss import chunk_loss, find_loss
from elixir_compile.session.model import Compilation

# ----------------------------------------------------------------------------------------------------------------------
# Captured graphs of tiny models: one compiled step, and what it left in its record.


GOLDENS = Path(__file__).parents[1] / "goldens"


class Pair(nn.Module):
    """Two linear layers with a ReLU between; returns the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).sum()


class Shared(nn.Module):
    """One weight used as an embedding and as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).square().mean()


def record_of(model: nn.Module, *inputs: torch.Tensor, **options: object) -> Compilation:
    """Compile one training step of `model`, prepared, and return its record."""
    compiled = torch.compile(
        elixir.prepare(model), backend="elixir", options={"inner": "aot_eager", "report": False, **options}
    )
    compiled(*inputs).backward()
    (record,) = elixir.compilations(compiled)
    return record


def tight(model: Callable[[], nn.Module], *inputs: torch.Tensor, **options: object) -> Compilation:
    """Return the record of a step under the smallest budget that has a plan for the whole batch."""
    with torch.random.fork_rng():
        try:
            record_of(model(), *inputs, device_memory=1, micro_batches=1, **options)
        except elixir.NoFeasiblePlan as error:
            needed_bytes = error.needed_bytes
    torch._dynamo.reset()
    return record_of(model(), *inputs, device_memory=needed_bytes, **options)


def halves_of_torch(model: nn.Module, *inputs: torch.Tensor) -> Sequence[torch.fx.GraphModule]:
    """Return the forward and the backward that torch's own partitioner makes of the same step."""
    halves: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, examples: object, **options: object) -> Callable[..., object]:
        halves.append(gm)
        return boxed(lambda args: gm(*args))

    def backend(gm: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., object]:
        return compile_with_aot_eager(gm, examples, min_cut_partition, keep)

    torch.compile(model, backend=backend)(*inputs).backward()
    return halves


# ----------------------------------------------------------------------------------------------------------------------
# Small models that end in a projection and a cross-entropy, and the graphs that Dynamo makes of them.


TOKENS, CLASSES, WIDTH = 22, 64, 16
"""Tokens of the two sequences that `inputs` makes; with 4 chunks they do not come out even."""

Loss = Callable[["Model", torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """A layer, then what `loss` makes of the hidden states, the model's `head` and the labels."""

    def __init__(self, loss: Loss, *, bias: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.matrix = nn.Parameter(torch.randn(WIDTH, CLASSES) / 4)
        self.smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self, self.body(x).tanh(), labels)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and labels, of which some are -100 and some 3, the indices that are ignored."""
    labels = torch.randint(4, CLASSES, (2, TOKENS // 2))
    labels[0, 2], labels[1, 5] = 3, -100
    return torch.randn(2, TOKENS // 2, WIDTH, dtype=dtype), labels


def flat(labels: torch.Tensor) -> torch.Tensor:
    return labels.reshape(-1)


def plain(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.head(hidden).view(-1, CLASSES), flat(labels))


def by_module(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model.smooth(model.head(hidden).flatten(0, 1), flat(labels))


def smooth_sum(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(hidden).reshape((-1, CLASSES))
    return functional.cross_entropy(logits, flat(labels), reduction="sum", label_smoothing=0.2)


def ignoring(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = flat(labels).clamp(min=3)
    return functional.cross_entropy(model.head(hidden).view(-1, CLASSES), labels, ignore_index=3)


def shifted_labels(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's `ForCausalLMLoss` with `num_items_in_batch`."""
    logits = model.head(hidden).float()
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
    total = functional.cross_entropy(logits.view(-1, CLASSES), labels.to(logits.device), reduction="sum")
    return total / torch.tensor(17.0)


def shifted_logits(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(hidden)[..., :-1, :].contiguous()
    return functional.cross_entropy(logits.view(-1, CLASSES), flat(labels[..., 1:]))


def sliced_rows(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.head(hidden).view(-1, CLASSES)[2:-1:3], flat(labels)[2:-1:3])


def by_product(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ model.head.weight.t()).to(torch.float32)
    return functional.cross_entropy(logits.reshape(-1, CLASSES), flat(labels))


def by_right_operand(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(torch.matmul(hidden, model.matrix).view(-1, CLASSES), flat(labels))


def autocast(model: Model, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(model.head(hidden).view(-1, CLASSES), flat(labels))


LOSSES: Sequence[Loss] = (
    plain,
    by_module,
    smooth_sum,
    ignoring,
    shifted_labels,
    shifted_logits,
    sliced_rows,
    by_product,
    by_right_operand,
    autocast,
)


def dynamo_graph(model: nn.Module, *args: torch.Tensor) -> tuple[fx.GraphModule, list[torch.Tensor], bool]:
    """Return the graph that Dynamo makes of `model`, its inputs, and whether looking for a loss left it as it was."""
    graphs: list[tuple[fx.GraphModule, list[torch.Tensor], bool]] = []

    def backend(gm: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., object]:
        before = str(gm.graph)
        find_loss(gm)
        graphs.append((fx.GraphModule(gm, copy.deepcopy(gm.graph)), examples, str(gm.graph) == before))
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(*args)
    (found,) = graphs
    return found


def halves(
    model: nn.Module, *args: torch.Tensor, num_chunks: int, front_end: Callable = compile_with_aot_eager
) -> list[fx.GraphModule]:
    """Return forward and backward of one step whose loss is computed in chunks; the step is run op by op."""
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, examples: object, **options: object) -> Callable[..., object]:
        found.append(gm)
        return boxed(lambda values: gm(*values))

    torch.compile(model, backend=chunking(num_chunks, front_end, keep), fullgraph=True)(*args).backward()
    return found


def chunking(num_chunks: int, front_end: Callable, lower: Callable) -> Callable[..., object]:
    """Return a backend that splits the loss into `num_chunks`, 0 for a loss that stays whole."""

    def backend(gm: fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., object]:
        if num_chunks:
            region = find_loss(gm)
            assert region is not None
            chunk_loss(gm, region, num_chunks)
        return front_end(gm, examples, min_cut_partition, lower)

    return backend
