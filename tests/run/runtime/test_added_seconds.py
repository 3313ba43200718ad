"""What `search.profiles` says that a layer adds is never more than what it adds: else no path is a lower bound."""

import pytest
import torch

from elixir_compile.base.options import Options
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.tools.plan import named_cluster, question
from elixir_compile.tools.preview.capture import capture_step

transformers = pytest.importorskip("transformers")


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
