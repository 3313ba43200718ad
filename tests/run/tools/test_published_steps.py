"""The figures of `tests/pure/ir/test_published_rows.py` are those of captured steps, and the step that the simulator
predicts on a preset has the published tokens per second."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from elixir_compile.base.options import parse_options
from elixir_compile.ir import Tier
from elixir_compile.ir.cost import update_s
from elixir_compile.ir.hardware import preset
from elixir_compile.session.cache import plan_for
from elixir_compile.step.as_run import as_run
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.plan import question
from elixir_compile.tools.preview.capture import Capture
from tests.pure.ir.test_published_rows import CALIBRATED, FACTS, SEQ, TOKENS_PER_UPDATE, Row, named

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

SIZES = {
    "0.5B": (896, 24, 14, 2, 4864, 151_936),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936),
    "3B": (2048, 36, 16, 2, 11_008, 151_936),
    "7B": (3584, 28, 28, 4, 18_944, 152_064),
    "14B": (5120, 48, 40, 8, 13_824, 152_064),
}
"""Of the configurations of Qwen2.5: width, layers, heads, heads of keys, width inside of a layer, tokens known."""


def captured(folder: Path, model: str, samples: int) -> Capture:
    width, layers, heads, key_heads, inner, vocabulary = SIZES[model]
    fields = {
        "model_type": "qwen2",
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "tie_word_embeddings": vocabulary == 151_936,
        "max_position_embeddings": 32_768,
    }
    path = folder / f"{model}.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    request = Request(
        model=str(path), batch=samples, seq=SEQ, dtype="bfloat16", recompute=False, hardware=None, ranks=1
    )
    return request.capture()


@pytest.mark.parametrize("model", SIZES)
def test_the_stored_figures_are_those_of_a_captured_step(model: str, tmp_path: Path) -> None:
    facts = FACTS[model]
    moved: dict[int, int] = {}
    for samples in (4, 8):
        capture = captured(tmp_path, model, samples)
        ops = as_run(capture.graph).ops
        assert sum(op.flops for op in ops) == facts.flops * samples
        assert sum(op.times * op.launches for op in ops if op.flops or op.moved_bytes) == facts.launches
        assert sum(param.numel for param in capture.params.values()) == facts.parameters
        moved[samples] = sum(op.moved_bytes for op in ops if not op.flops)
    assert (moved[8] - moved[4]) / 4 == pytest.approx(facts.sample_bytes, rel=1e-3)
    assert 2 * moved[4] - moved[8] == pytest.approx(facts.fixed_bytes, rel=1e-2)
    inner, (width, _, heads, key_heads, inner_width, _) = 3, SIZES[model]
    keys = width * key_heads // heads
    of_layer = 2 * width * width + 2 * width * keys + inner * width * inner_width
    assert width * inner_width / of_layer == pytest.approx(facts.down_share, abs=0.02)


@pytest.mark.parametrize("row", CALIBRATED, ids=named)
def test_a_simulated_resident_step_has_the_published_tokens_per_second(row: Row, tmp_path: Path) -> None:
    """Moments in bfloat16, 4 bytes of state; the update counts once in the published number of tokens."""
    cluster = preset(row.machine)
    options = parse_options({"planner": "keep_all", "device_memory": "200GiB", "plan_cache": False})
    problem, own = question(captured(tmp_path, row.model, row.samples), options, cluster, state_bytes_per_element=4)
    made = plan_for(replace(problem, moves_what_fits=False), own)
    assert {placement.optim for placement in made.placements} == {Tier.DEVICE}
    updates_s = sum(update_s(bucket, Tier.DEVICE, cluster) for bucket in made.buckets)
    tokens = row.samples * SEQ
    step_s = made.prediction.step_s - updates_s * (1 - tokens / TOKENS_PER_UPDATE)
    assert tokens / step_s == pytest.approx(row.tokens_per_s, rel=0.03)
