"""What tests of other libraries share: a small model, its data, and the settings under which everything moves."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of

OPTIONS: Mapping[str, Any] = {"inner": "aot_eager", "planner": "zero3_offload", "report": False, "replan": False}
"""All parameters, gradients and optimizer state live on the host, so every step gathers and offloads."""
NUM_WORDS, LENGTH = 128, 16
WORDS = ["the", "red", "fox", "saw", "a", "blue", "bird", "and", "sang", "to", "it", "about", "old", "rain"]


def rows(num_rows: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return rows of tokens as a data set of language models, always the same."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, NUM_WORDS, (num_rows, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of a model now."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def eager_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW whose bits are those of `hybrid_adamw`."""
    return torch.optim.AdamW(trained(model), lr=1e-2, fused=True)


def hybrid_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return elixir.HybridAdamW(trained(model), lr=1e-2)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    """Compile `model` in place with the backend of this package, and return it."""
    model.compile(backend="elixir", options={**OPTIONS, **options})
    return model


def own_copy(model: nn.Module) -> nn.Module:
    """Return a copy that another run may train, with an empty compiler."""
    torch._dynamo.reset()
    return copy.deepcopy(model)


def assert_moved(model: nn.Module, num_graphs: int = 1) -> None:
    """Fail unless `model` was captured in `num_graphs` graphs for training, and its parameters came from the host."""
    made = elixir.compilations(model)
    assert len(made) == num_graphs, [one.plan.name for one in made]
    counts = executor_of(model).ledger.counts
    assert counts["gather"] > 0
    assert counts["offload"] > 0


def assert_equal(expected: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> None:
    """Fail unless both have bitwise equal tensors under the same names."""
    assert list(expected) == list(got)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


def losses(log: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the losses in the log of a Trainer."""
    return [entry["loss"] for entry in log if "loss" in entry]


def tokenizer() -> Any:
    """Return a tokenizer of whole words, made here: nothing is fetched."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *dict.fromkeys(WORDS)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
