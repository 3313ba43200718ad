"""Layers of models by name: many written from few, the sizes that were published, and the seconds that a mode
adds."""

import importlib.util
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.errors import UnknownModel, UnsupportedModel
from elixir_compile.base.options import Options, parse_options
from elixir_compile.ir import plan_to_json
from elixir_compile.search import plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.plan import named_cluster, question
from elixir_compile.tools.preview import few_layers, models
from elixir_compile.tools.preview.capture import Capture, capture_step
from elixir_compile.tools.preview.few_layers import Law, capture_model, hide_unlike
from elixir_compile.tools.preview.models import Configured, ModelShape, TextBatch, load_model, model_named, model_names

# ----------------------------------------------------------------------------------------------------------------------
# The step of a model of many layers, written from those of few, is the one that a capture of all layers gives.


transformers = pytest.importorskip("transformers")


LAYERS = 6
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256}
DECODER = {**WIDTHS, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": LAYERS}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "gpt2": {"n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64, "n_layer": LAYERS, **NO_DROPOUT},
    "llama": DECODER,
    "qwen3": DECODER,
    "mixtral": {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    "t5": {
        "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 256, "num_layers": LAYERS,
        "num_decoder_layers": LAYERS, "decoder_start_token_id": 0, "pad_token_id": 0,
    },
    "gemma3_text": {**DECODER, "sliding_window": 16},
}  # fmt: skip


def configured(kind: str, **fields: object) -> Configured:
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **fields})
    class_name = "AutoModelForSeq2SeqLM" if kind == "t5" else "AutoModelForCausalLM"
    return Configured(name=kind, config=config, class_name=class_name, dtype=torch.bfloat16)


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


@dataclass
class Captures:
    """Captures of this file, each made once."""

    made: dict[tuple[object, ...], Capture] = field(default_factory=dict)
    asked: list[int] = field(default_factory=list)
    """Parameters of the models that were captured since the test began."""

    def __call__(
        self, model: nn.Module, inputs: object, *, options: Options | None = None, **kwargs: object
    ) -> Capture:
        shapes = tuple((name, *param.shape) for name, param in model.named_parameters())
        self.asked.append(len(shapes))
        key = shapes, options
        if key not in self.made:
            self.made[key] = capture_step(model, inputs, options=options, **kwargs)
        return self.made[key]


@pytest.fixture(scope="module")
def all_captures() -> Captures:
    return Captures()


@pytest.fixture
def captures(all_captures: Captures, monkeypatch: pytest.MonkeyPatch) -> Captures:
    monkeypatch.setattr(few_layers, "capture_step", all_captures)
    all_captures.asked = []
    return all_captures


def num_tensors(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("kind", "inner"),
    [
        pytest.param("gpt2", "inductor", marks=pytest.mark.slow),
        pytest.param("llama", "inductor", marks=pytest.mark.slow),
        pytest.param("qwen3", "inductor", marks=pytest.mark.slow),
        pytest.param("mixtral", "inductor", marks=pytest.mark.slow),
        pytest.param("t5", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_step_from_few_layers_equals_the_capture_of_all_layers(kind: str, inner: str, captures: Captures) -> None:
    model, options = configured(kind), parse_options({"inner": inner})
    written = capture_model(model, inputs(), options=options, least_layers=LAYERS)
    assert captures.asked == [num_tensors(model.model(few)) for few in (2, 3, 4)]
    captured = captures(model.model(), inputs(), options=options)
    assert str(written.graph) == str(captured.graph)
    assert written == captured


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("hardware", [pytest.param("rtx4090-24g", marks=pytest.mark.slow), "8 x h100-80g"])
def test_plans_are_equal_byte_for_byte(hardware: str, captures: Captures) -> None:
    options = parse_options({"inner": "inductor"})
    cluster = named_cluster(hardware)
    assert cluster is not None
    written = capture_model(configured("gpt2"), inputs(), options=options, least_layers=LAYERS)
    whole = captures(configured("gpt2").model(), inputs(), options=options)
    tight = replace(options, device_memory=sum(storage.nbytes for storage in whole.graph.storages) // 2)
    first, second = (plan_to_json(plan(each.problem(cluster, tight), "greedy")) for each in (written, whole))
    assert first == second


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_wrong_step_from_few_layers_is_detected_and_not_used(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = Law._repeated
    monkeypatch.setattr(Law, "_repeated", lambda self, block, number, more: write(self, block, number, more)[::-1])
    model, options = configured("gpt2"), parse_options({"inner": "inductor"})
    with caplog.at_level(logging.INFO, "elixir_compile"):
        got = capture_model(model, inputs(), options=options, least_layers=LAYERS)
    assert "gpt2 is captured with all its layers" in caplog.text
    assert "not linear in the number of its layers" in caplog.text
    assert got is captures(model.model(), inputs(), options=options)


class Asked(Exception):  # noqa: N818 - no error
    """Raised in place of a capture."""


def asked_first(model: Configured, monkeypatch: pytest.MonkeyPatch, **options: int) -> int:
    """Return how many tensors of parameters the model has that is captured first."""
    asked: list[int] = []

    def capture(model: nn.Module, *args: object, **kwargs: object) -> Capture:
        asked.append(num_tensors(model))
        raise Asked

    monkeypatch.setattr(few_layers, "capture_step", capture)
    with pytest.raises(Asked):
        capture_model(model, inputs(), **options)
    return asked[0]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_layers_that_differ_by_the_configuration_are_all_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    gemma = configured("gemma3_text")
    assert asked_first(gemma, monkeypatch, least_layers=LAYERS) == num_tensors(gemma.model())
    llama = configured("llama")
    assert asked_first(llama, monkeypatch, least_layers=LAYERS) == num_tensors(llama.model(2))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_all_layers_of_a_model_of_few_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_first(configured("llama"), monkeypatch) == num_tensors(configured("llama").model())


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_stacks_of_different_depth_are_captured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    t5 = configured("t5", num_decoder_layers=LAYERS + 1)
    assert asked_first(t5, monkeypatch, least_layers=LAYERS) == num_tensors(t5.model())


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_command_line_captures_few_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few: list[int] = []

    def capture(model: nn.Module, *args: object, **kwargs: object) -> Capture:
        few.append(len(model.get_submodule("model.layers")))
        raise Asked

    monkeypatch.setattr(few_layers, "capture_step", capture)
    config = {"model_type": "llama", **DECODER, "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("llama-7b", str(tmp_path)):
        request = Request(model=name, batch=2, seq=16, dtype="bfloat16", recompute=False, hardware=None, ranks=1)
        with pytest.raises(Asked):
            request.capture()
    assert few == [2, 2]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_plan_captures_few_layers_of_a_configuration(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    depth = {name: 32 for name in ("num_hidden_layers", "num_layers", "num_decoder_layers") if name in CONFIGS[kind]}
    asked: list[tuple[int, torch.dtype]] = []

    def capture(model: nn.Module, *args: object, **kwargs: object) -> Capture:
        asked.append((num_tensors(model), next(model.parameters()).dtype))
        raise Asked

    monkeypatch.setattr(few_layers, "capture_step", capture)
    for dtype in (torch.float32, torch.bfloat16):
        config = configured(kind, **depth).config
        config.dtype = dtype
        with pytest.raises(Asked):
            elixir.plan(config, inputs(), hardware="a100-40g")
    fewest = num_tensors(configured(kind).model(2))
    assert asked == [(fewest, torch.float32), (fewest, torch.bfloat16)]


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_plan_knows_the_names_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def capture(model: nn.Module, *args: object, **kwargs: object) -> Capture:
        asked.append(len(model.get_submodule("model.layers")))
        raise Asked

    monkeypatch.setattr(few_layers, "capture_step", capture)
    with pytest.raises(Asked):
        elixir.plan("llama-7b", inputs(), hardware="a100-40g")
    assert asked == [2]
    with pytest.raises(UnknownModel, match="llama-7b"):
        elixir.plan("llama-7", inputs(), hardware="a100-40g")


class Layer(nn.Module):
    def __init__(self, number: int, width: int = 8) -> None:
        super().__init__()
        self.number = number
        self.scale = 1.0
        self.linear = nn.Linear(8, width)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer(number) for number in range(layers))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_attributes_that_differ_between_layers_are_hidden() -> None:
    few, whole = Stack(3), Stack(9)
    whole.layers[5].scale = 2.0
    hide_unlike(few, whole, few_layers=3, layers=9)
    middle = vars(few.layers[1])
    assert "number" not in middle
    assert "scale" not in middle
    assert vars(few.layers[0])["number"] == 0
    assert vars(few.layers[0])["scale"] == 1.0


def wider(model: Stack) -> None:
    model.layers[5] = Layer(5, width=16)


def of_another_class(model: Stack) -> None:
    model.layers[5].linear = nn.Identity()


def with_more(model: Stack) -> None:
    model.layers[5].norm = nn.LayerNorm(8)


def with_a_flag(model: Stack) -> None:
    model.layers[5].is_special = True


def with_shared_weights(model: Stack) -> None:
    model.layers[5].linear.weight = model.layers[6].linear.weight


def frozen(model: Stack) -> None:
    model.layers[5].linear.weight.requires_grad_(False)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("change", [wider, of_another_class, with_more, with_a_flag, with_shared_weights, frozen])
def test_a_model_with_a_layer_that_differs_is_not_one_of_few_layers(change: Callable[[Stack], None]) -> None:
    whole = Stack(9)
    hide_unlike(Stack(4), whole, few_layers=4, layers=9)
    change(whole)
    with pytest.raises(UnsupportedModel):
        hide_unlike(Stack(4), whole, few_layers=4, layers=9)


# ----------------------------------------------------------------------------------------------------------------------
# Models by name have the sizes that were published, and read what they are trained on.


PAPER = {"gpt2-4b", "gpt2-10b", "gpt2-15b", "gpt2-20b"}
"""Their sources give hidden sizes and layers, and no totals: those in `models` are what they add up to."""


def with_layers(shape: ModelShape, count: int) -> ModelShape:
    """Return the shape with so many layers, of each kind that it has."""
    return replace(shape, fields={**shape.fields, **dict.fromkeys(shape.layer_fields, count)})


def num_parameters(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the parameters of a model made for `shape`, shared ones once."""
    monkeypatch.setattr(models, "model_named", lambda name: shape)
    model, _ = load_model(shape.name, TextBatch(batch=2, seq=8, dtype=torch.bfloat16))
    assert {param.device.type for param in model.parameters()} == {"meta"}
    return sum(param.numel() for param in model.parameters())


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", model_names())
def test_a_named_shape_has_the_published_number_of_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are alike: models of one and of two say what one of all layers has, which would take seconds to make."""
    shape = model_named(name)
    one, two = (num_parameters(with_layers(shape, count), monkeypatch) for count in (1, 2))
    count = shape.fields[shape.layer_fields[0]]
    assert isinstance(count, int)
    total = one + (count - 1) * (two - one)
    assert total == pytest.approx(shape.num_parameters, rel=1e-3 if name in PAPER else 0.01)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_names_ignore_case_and_unknown_names_suggest_the_nearest() -> None:
    assert {model_named(name.upper()).name for name in model_names()} == set(model_names())
    for wrong, right in {"qwen3-8": "qwen3-8b", "gemma3-27b": "gemma-3-27b", "mixtral-8x7": "mixtral-8x7b"}.items():
        with pytest.raises(UnknownModel, match=f"Did you mean '?{right}"):
            model_named(wrong)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize(
    "name", [pytest.param("qwen3-0.6b", marks=pytest.mark.slow), "gemma-3-4b", "bert-large", "t5-3b", "vit-g"]
)
def test_a_step_of_each_kind_of_model_is_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = with_layers(models.model_named(name), 1)
    monkeypatch.setattr(models, "model_named", lambda name: shape)
    capture = capture_step(*load_model(name, TextBatch(batch=2, seq=16, dtype=torch.bfloat16)))
    assert any(op.phase.value == "backward" for op in capture.graph.ops)


# ----------------------------------------------------------------------------------------------------------------------
# What `search.profiles` says that a layer adds is never more than what it adds: else no path is a lower bound.


def configurations() -> list[transformers.PretrainedConfig]:
    """Layers whose neighbours are not alike: embeddings before the first, a norm behind the last."""
    return [
        transformers.GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=512, attn_pdrop=0.0, resid_pdrop=0.0),
        transformers.LlamaConfig(
            hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=512
        ),
    ]


@pytest.mark.parametrize(
    "config",
    [pytest.param(each, marks=[pytest.mark.slow] * (each.model_type == "llama")) for each in configurations()],
    ids=lambda config: config.model_type,
)
def test_no_mode_of_a_layer_says_more_seconds_than_it_adds(config: object) -> None:
    config.use_cache = False  # pyright: ignore[reportAttributeAccessIssue]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    ids = torch.empty(8, 512, dtype=torch.int64, device="meta")
    capture = capture_step(model.train(), {"input_ids": ids, "labels": ids})
    problem, _ = question(capture, Options(), named_cluster("a100-80g"), state_bytes_per_element=12)
    evaluator = Evaluator(gather_facts(problem))
    facts = evaluator.facts
    kept_s = evaluator.prices.before_s[facts.num_run]
    num_added = 0
    for number, (layer, own) in enumerate(zip(facts.layers, evaluator.profiles, strict=True)):
        depths = {mode.depth: i for i, mode in reversed(list(enumerate(layer.modes))) if not mode.away}
        for mode in depths.values():
            alone = evaluator.at([mode * (i == number) for i in range(len(facts.layers))])
            adds_s = alone.prices.before_s[alone.facts.num_run] - kept_s
            says_s = sum(seconds for _, seconds in own[mode].added_s)
            assert says_s <= adds_s + 1e-9 * kept_s, f"{layer.name} mode {mode}"
            num_added += says_s > 0
    assert num_added > 6
