"""The blocks of docs/integrations.md run, each with the library that its fence names."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.run.clients.client_runs import tokenizer

PAGE = Path(__file__).parents[3] / "docs" / "integrations.md"
BLOCK = re.compile(r"^```python *(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))
LIBRARIES = ("accelerate", "lightning", "peft", "transformers", "trl")


def test_the_page_has_a_block_for_each_library() -> None:
    assert sorted(BLOCKS) == sorted(("setup", *LIBRARIES))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning:lightning")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_block_runs(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute on two busy cores, all five together."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip(library, reason=f"needs {library}: `pip install elixir-compile[clients]`")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=96, n_positions=64)
    ids = torch.randint(0, 96, (2, 16))
    scope: dict[str, Any] = {
        "model": transformers.GPT2LMHeadModel(config),
        "loader": [{"input_ids": ids, "labels": ids}],
        "tokenizer": tokenizer(),
    }
    for name in ("setup", library):
        exec(compile(BLOCKS[name], f"integrations.md block {name}", "exec"), scope)
