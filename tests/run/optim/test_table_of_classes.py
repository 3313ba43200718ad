"""The table of optimizer classes in docs/optimizer.md: each row as the engine and the tests that train have it."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, AdamW, Muon, Optimizer, RMSprop

import elixir_compile as elixir
from elixir_compile.ir import Update
from elixir_compile.optim.hybrid import Hybrid
from tests.run.optim import test_hybrid_classes, test_state_on_disk, test_updates, test_whole_updates
from tests.run.optim.tensor_wise_classes import Came, Lamb, Lars, Prodigy, Shampoo, Soap
from tests.run.optimizers import Lion

SHAPE = (1024, 4096)
DOCS = Path(__file__).parents[3] / "docs" / "optimizer.md"
ROWS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "SGD, momentum": (SGD, {"momentum": 0.9}),
    "Lion": (Lion, {}),
    "RMSprop": (RMSprop, {}),
    "Adagrad": (Adagrad, {}),
    "Muon": (Muon, {}),
    "Adafactor": (Adafactor, {}),
    "SOAP": (Soap, {}),
    "Shampoo": (Shampoo, {}),
    "CAME": (Came, {}),
    "LARS": (Lars, {}),
    "LAMB": (Lamb, {}),
    "LAMB, global norm": (Lamb, {"global_norm": True}),
    "Prodigy": (Prodigy, {}),
    "LBFGS": (LBFGS, {}),
}
QUICK = ("AdamW", "SGD, momentum", "Muon", "Adafactor", "LAMB, global norm")
Case = tuple[str, str, float]
"""Where the state of a trained bucket is, when it is updated, and the share that is streamed."""


def trained(cls: type[Optimizer], options: dict[str, Any]) -> list[Case]:
    """Return under which plans the tests train `cls` against itself, bit by bit."""
    if cls is AdamW:
        on_disk = [(home, update, 0.0) for home, update in map(values_of, test_state_on_disk.COMBINATIONS)]
        return [*map(values_of, test_updates.COMBINATIONS), *on_disk]
    cases = [(other, own, *case) for other, own, *case in map(values_of, test_hybrid_classes.TRAINED)]
    cases += [
        (other, own, "split disk", update, 0.0) for other, own, update, _ in map(values_of, test_state_on_disk.CLASSES)
    ]
    cases += [(other, {}, home, update, share) for other, home, share, update in test_whole_updates.PLACED]
    return [
        (home, update, share)
        for other, own, home, update, share in cases
        if other is cls and options.items() <= own.items()
    ]


def values_of(case: Any) -> Any:
    """Return the values of `case`, one of a parametrized test."""
    return getattr(case, "values", case)


def where(cases: Iterable[Case]) -> str:
    """Return the homes of the state and the times of the updates in `cases` as text."""
    homes = {"device": "device", "split": "host", "host": "host", "split disk": "disk", "host disk": "disk"}
    found = {homes[home] for home, _, share in cases if share < 1} | {"streamed" for *_, share in cases if share}
    times = {str(update) for _, update, _ in cases}
    names = "all" if times == {each.value for each in Update} else ", ".join(f"`{time}`" for time in sorted(times))
    return f"{', '.join(sorted(found))} | {names}"


def row_of(name: str) -> str:
    """Return the row of the class called `name`, as the engine finds it."""
    cls, options = ROWS[name]
    param = torch.nn.Parameter(torch.ones(SHAPE))
    optimizer: Any = elixir.hybrid(cls)([param], **options)
    assert isinstance(optimizer, Hybrid)
    (state,) = optimizer.states_of([param])
    state_bytes = f"{state.state_nbytes / param.numel():.3g}"
    if cls is AdamW:
        return f"| {name} | element-wise | {state_bytes} | {where(trained(cls, options))} |"
    schema = optimizer._updater.rule.known.schema(optimizer.param_groups[0], param.dtype)
    kind = schema.kind.value + ("-wise" if schema.kind.value != "global" else "")
    if kind != "global":
        return f"| {name} | {kind} | {state_bytes} | {where(trained(cls, options))} |"
    op = re.match(r"(aten\.\w+) joins two parameters$", schema.because)
    because = f"`{op[1]}` joins parameters" if op else re.search(r"closure", schema.because) and "needs a closure"
    return f"| {name} | global | {state_bytes if op else 'unknown'} | beside the parameters: {because} | all at once |"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in ROWS]
)
def test_a_row_says_what_the_engine_finds(name: str) -> None:
    assert row_of(name) in DOCS.read_text(encoding="utf-8").splitlines()


def test_the_table_has_no_other_rows() -> None:
    text = DOCS.read_text(encoding="utf-8")
    table = text[text.index("| class | kind |") :].partition("\n\n")[0]
    assert [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]] == list(ROWS)
