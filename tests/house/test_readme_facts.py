"""What the README and docs/compatibility.md say is what the package does."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from torch import nn

import elixir_compile as elixir
from elixir_compile.base.errors import InvalidOption
from elixir_compile.base.options import Options, parse_options
from elixir_compile.graph.capture.modules import unmanaged_reason
from elixir_compile.ir import Placement, Saving, Tier
from elixir_compile.ir.cost import disk_both_ways_s, disk_s
from elixir_compile.ir.hardware import preset
from elixir_compile.ir.hardware.presets import MACHINES
from elixir_compile.step.bucket_bytes import bucket_host_bytes
from elixir_compile.tools.cli.main import app
from tests.pure.step.test_bytes import BUCKET
from tests.run.habits.table import PAGE, page_text

# ----------------------------------------------------------------------------------------------------------------------
# What the README says of commands, machines and limits is what the package does.


ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIMITS = README.partition("## What it cannot do yet")[2].partition("\n## ")[0]
COMMANDS = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]  a group has them


def test_the_commands_of_the_table_take_json_and_the_others_are_named_below_it() -> None:
    listed = set(re.findall(r"^\| `elixir-compile (\w+)", README, re.MULTILINE))
    with_json = {name for name, command in COMMANDS.items() if any("--json" in param.opts for param in command.params)}
    assert listed == with_json
    assert COMMANDS.keys() - with_json == {"demo", "trace"}
    assert "`elixir-compile trace`" in README
    assert "`demo` is the run above" in README


def test_all_machines_with_names_are_listed() -> None:
    (names,) = re.findall(r"These machines have names:\s+`([^`]+)`", README)
    assert names.split() == sorted(MACHINES)


class Coded(nn.Parameter):
    """As bitsandbytes' `Int8Params`, a parameter of codes that torch cannot take apart, with scales beside it."""


def in_subclass() -> nn.Module:
    module = nn.Module()
    codes = torch.Tensor._make_subclass(Coded, torch.zeros(4, dtype=torch.uint8), False)
    module.register_parameter("weight", codes)
    return module


def is_refused(options: dict[str, object]) -> bool:
    with pytest.raises(InvalidOption):
        parse_options(options)
    return True


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def gradients_stay_on_the_host() -> bool:
    """Return whether the host holds the gradients of parameters on disk, and no more of them."""
    home = Placement(bucket=BUCKET.id, param=Tier.DISK, optim=Tier.DISK, resident=True)
    return bucket_host_bytes(BUCKET, home) == BUCKET.shard_grad_nbytes() > 0


def gain_nothing_on_disk() -> bool:
    """Return whether gradients and activations of Llama 3 8B cost what the README says, in bytes and seconds of the
    disk, and whether a byte of state costs as much as one of gradients."""
    cluster = preset("rtx4090-24g")
    grad_bytes, num_in_layer = 2 * 8_030_261_248, 218_112_000
    said = f"{grad_bytes / 2**30:.1f} GiB of the host and take {disk_both_ways_s(grad_bytes, cluster):.0f} s of a"
    state = replace(BUCKET, state_nbytes=BUCKET.nbytes)
    costs_alike = disk_s(state, cluster) == disk_both_ways_s(BUCKET.nbytes, cluster)
    # Of a token: what attention and the gated layer of width 14,336 save at least, and the flops of the matrices.
    kept_bytes = 2 * (4 * 4096 + 2 * 1024 + 3 * 14336)
    again_s = 2 * num_in_layer / cluster.device.flops_per_s["bfloat16"]
    return said in " ".join(LIMITS.split()) and costs_alike and 40 * again_s < disk_both_ways_s(kept_bytes, cluster)


def has_no_option(*words: str) -> bool:
    return not any(word in name for name in Options.__dataclass_fields__ for word in words)


def reaches_its_weight(backend: str) -> bool:
    """Return whether `autograd.grad` finds the weight of a prepared model that `backend` compiles."""
    torch.compiler.reset()
    model = elixir.prepare(nn.Linear(2, 2))
    loss = torch.compile(model, backend=backend)(torch.ones(1, 2)).sum()
    (found,) = torch.autograd.grad(loss, [model.weight], allow_unused=True)
    return found is not None


HOLDS: dict[str, Callable[[], bool]] = {
    "GPUs other than one H200": lambda: "## What a GPU has shown" in page("accelerators.md"),
    "Sequence and context parallelism": lambda: has_no_option("sequence", "context"),
    "Experts over ranks": lambda: has_no_option("expert"),
    "Weights of bitsandbytes in 8 bits": lambda: unmanaged_reason(in_subclass(), "weight") is not None,
    "fp8 compute": lambda: is_refused({"param_dtype": "float8"}),
    "CUDA graphs": lambda: has_no_option("graph"),
    "Planned generation": lambda: has_no_option("generat", "cache_len"),
    "Windows and macOS": lambda: "Operating System :: Microsoft" not in (ROOT / "pyproject.toml").read_text(),
    "Single activations": lambda: has_no_option("tensor"),
    "One budget for models of several threads or ranks": lambda: "- Models of other threads" in page("memory.md"),
    "Gradients and activations on disk": lambda: (
        "disk" not in [*Saving] and gradients_stay_on_the_host() and gain_nothing_on_disk()
    ),
    "Writes through `module.weight.data` of a parameter on the host, on an accelerator,": lambda: (
        "is lost, and nothing notices it" in page("accelerators.md")
    ),
    "`autograd.grad` beside another backend": lambda: not reaches_its_weight("eager"),
    "Gradients of gradients": lambda: (
        '| refused, `UnsupportedBackward`: "... create_graph=True' in page("compatibility.md")
    ),
    "`GradScaler` on CUDA with fp32 gradients on the host": lambda: "GradScaler" in page("mixed-precision.md"),
    "Machines that were not measured": lambda: "data sheet" in preset("a100-40g").device.source,
}
"""The subjects of the list, each with what shows that it is a limit still. A limit that is gone fails here."""


def test_the_list_of_limits_has_the_subjects_that_are_limits() -> None:
    assert re.findall(r"^- \*\*(.+?)\.?\*\*", LIMITS, re.MULTILINE) == list(HOLDS)


@pytest.mark.parametrize("subject", HOLDS)
def test_each_limit_is_one_still(subject: str) -> None:
    assert HOLDS[subject]()


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_no_limit_is_the_subject_of_a_page(name: str) -> None:
    """A page says how something is done, so its title is no limit."""
    title = page(name).partition("\n")[0].removeprefix("# ").lower()
    said = {"ranks that differ": "unequal ranks"}
    assert all(said.get(title, title) != subject.lower() for subject in HOLDS)


def test_the_modes_of_torch_compile_are_refused() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="elixir", mode="reduce-overhead")
    with pytest.raises((InvalidOption, RuntimeError), match="mode"):
        compiled(torch.ones(1, 2))


# ----------------------------------------------------------------------------------------------------------------------
# docs/compatibility.md says what the tests of habits prove.


def test_the_compatibility_page_is_generated_from_the_habits() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(), "run `python -m tests.run.habits.table`"
