"""`elixir-compile`: the arguments of every command. A command is run by a module that is imported when it runs, so
`--version` and `--help` never load torch.
"""

import functools
import gc
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from elixir_compile.base.process import collector_off
from elixir_compile.base.version import __version__

if TYPE_CHECKING:
    from elixir_compile.tools.doctor import Diagnosis

# ----------------------------------------------------------------------------------------------------------------------
# The arguments of `plan`, some of which other commands take too, with their texts in `--help`.


BATCH = Annotated[int, typer.Option(min=1, help="Samples per device and step.")]
OWN_BATCH = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Samples per device and forward, by default 8; with --stages per step, by default 8 per micro-batch.",
    ),
]
SEQ = Annotated[int, typer.Option(min=1, help="Tokens per sample; refused if the model has fewer positions.")]
DTYPE = Annotated[str, typer.Option(help="Dtype of parameters and compute: float32, bfloat16, float16 or float64.")]
RECOMPUTE = Annotated[bool, typer.Option("--recompute/--no-recompute", help="Recompute activations layer by layer.")]
HARDWARE = Annotated[str | None, typer.Option(help='"4 x a100-40g", "2 x l4-24g + 1 x p40-24g" or a profile.')]
RANKS = Annotated[int, typer.Option(min=1, help="Total number of devices of the hardware.")]
PARAM_DTYPE = Annotated[
    str | None,
    typer.Option(help="Cast fp32 parameters to bfloat16 or float16, with an fp32 master; with --dtype float32."),
]
DISK_PATH = Annotated[
    Path | None, typer.Option(help="Folder for state and parameters on disk; any name with --hardware.")
]
UPDATE = Annotated[
    str | None, typer.Option(help="auto, in_backward, after_backward or across_steps: when HybridAdamW updates.")
]
ACTIVATIONS = Annotated[
    str | None, typer.Option(help="Treatment of saved activations: any, keep, recompute or offload.")
]
POLICY = Annotated[
    str | None, typer.Option(help="auto: the search places; static: it keeps the fractions --shard-param-frac, ...")
]
FRAC = Annotated[float | None, typer.Option(help="With --placement-policy static: a fraction, as in Gemini.")]
STATE_BYTES = Annotated[
    list[int] | None,
    typer.Option(min=0, help="Optimizer bytes per element; 12: fp32 master weights and moments. --tune takes several."),
]
OPTIMIZER = Annotated[
    str | None,
    typer.Option(help="The optimizer class: muon, or module.Class. What it refuses, and by default all: HybridAdamW."),
]
LARGEST_BATCH = Annotated[bool, typer.Option("--largest-batch", help="Plan the largest batch that fits whole.")]
TUNE = Annotated[
    bool, typer.Option("--tune", help="Find the batch, accumulation and micro-batches with the most tokens per second.")
]
TOKENS = Annotated[
    str | None, typer.Option(help="With --tune: tokens of an optimizer step on all devices: 524288, 500k or 0.5M.")
]
ACCUMULATE = Annotated[
    bool, typer.Option("--accumulate", help="Count gradients that stay between micro-batches of a step.")
]
STAGES = Annotated[
    int | None, typer.Option(min=1, help="Cut the model into stages of a pipeline that runs --micro-batches.")
]
SCHEDULE = Annotated[
    str | None, typer.Option(help="With --stages, of torch: gpipe, 1f1b, interleaved-1f1b or looped-bfs.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
MODEL = "gpt2-4b, llama-7b, ...; path.py:function; or a Hugging Face config file or folder."
DEVICE_MEMORY = Annotated[str | None, typer.Option(help="Budget on the device: 36GiB.")]
HOST_MEMORY = Annotated[str | None, typer.Option(help="Budget on the host, per device: 200GiB.")]
MICRO_BATCHES = Annotated[
    str | None, typer.Option(help="Micro-batches of each layer: fit, auto, or a number that divides the batch.")
]
PLANNER = Annotated[str | None, typer.Option(help="milp, greedy, or a rule; for a fleet: cephalo.")]
OUTPUT = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the plan to this file, and its question beside it.")
]

# ----------------------------------------------------------------------------------------------------------------------
# A command is declared by a function without a body: its arguments, their defaults, and its docstring for `--help`.


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train models that do not fit.")
Declared = TypeVar("Declared", bound=Callable[..., None])


# Torch reads all three variables when it is imported. Waiting OpenMP threads spin by default: on a busy machine a step
# then takes ten times longer (3.4 s in place of 0.3 s on two cores), on a quiet machine it gains nothing. The profiler
# behind `measure_step` logs its start and stop to stderr.
_WAITS = {"OMP_WAIT_POLICY": "PASSIVE"}
_IS_QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _command(
    runs: str, environ: Mapping[str, str] = MappingProxyType({}), *, is_frozen: bool = False
) -> Callable[[Declared], Declared]:
    """Make a command of a declaration: `runs` is `module:function` below this folder, a function of the same arguments
    that returns the exit code.

    `environ` are variables that are set before the module is imported, unless they are set already. If the process
    `is_frozen`, later collections skip the objects that the imports have made.
    """

    def declare(declared: Declared) -> Declared:
        @functools.wraps(declared)
        def run(**typed: Any) -> None:
            for name, value in environ.items():
                os.environ.setdefault(name, value)
            module, _, function = runs.partition(":")
            with collector_off() if is_frozen else nullcontext():
                found = getattr(importlib.import_module(f"elixir_compile.tools.cli.{module}"), function)
                if is_frozen:
                    gc.freeze()
            raise typer.Exit(code=found(**typed))

        app.command()(run)
        return declared

    return declare


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"elixir-compile {__version__}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train models that do not fit."""


@_command("demo:run_demo", _WAITS | _IS_QUIET)
def demo(
    text: Annotated[
        Path | None, typer.Option(help="Train on this file or folder instead of Python's standard library.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Training steps per run.")] = 20,
) -> None:
    """Train a byte-level GPT twice, without a budget and in half the memory, and compare.

    Exits with 1 if the losses differ or the measured peak exceeds the budget.
    """


@_command("measure:run_measure", _WAITS)
def measure(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile's JSON and nothing else.")] = False,
    seconds: Annotated[float, typer.Option(min=1.0, max=60.0, help="About how long to measure.")] = 30.0,
    disk_path: Annotated[Path | None, typer.Option(help="Also measure the disk that this folder is on.")] = None,
) -> None:
    """Measure this machine: copies, optimizer updates, matrix products, memory. Later plans use the profile."""


@_command("main:run_doctor", _WAITS)
def doctor(
    disk_path: Annotated[Path | None, typer.Option(help="Also try the disk that this folder is on.")] = None,
    as_json: JSON = False,
) -> None:
    """Look for faults of this machine that make training fail or slow. Exits with 1 if a finding is bad."""


def run_doctor(*, disk_path: Path | None, as_json: bool) -> int:
    """Print the findings of the checks on this machine and return the exit code: 1 if a finding is bad.

    If `disk_path` is a folder, its disk is tried too. If `as_json`, stdout gets a JSON object and nothing else. The
    checks are imported here: they need no torch, and other commands need no checks.
    """
    from elixir_compile.tools.doctor import Verdict, diagnose, this_system

    found = diagnose(this_system(disk_path))
    is_bad = any(finding.verdict is Verdict.BAD for finding in found)
    if as_json:
        typer.echo(json.dumps({"is_bad": is_bad, "checks": [asdict(finding) for finding in found]}, indent=1))
    else:
        for line in diagnosis_lines(found):
            typer.echo(line)
    return int(is_bad)


def diagnosis_lines(found: "Sequence[Diagnosis]") -> list[str]:
    """Return a line for each finding, a line below it that repairs or explains it, and the count of the verdicts."""
    from elixir_compile.tools.doctor import Verdict

    colors = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BAD: "red", Verdict.UNKNOWN: "cyan"}
    lines: list[str] = []
    title_width = max(len(finding.title) for finding in found)
    for finding in found:
        verdict = typer.style(f"{finding.verdict:<7}", fg=colors[finding.verdict])
        lines.append(f"{verdict}  {finding.code}  {finding.title:<{title_width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<{title_width + 16}}{finding.fix}")
    counts = Counter(finding.verdict for finding in found)
    return [*lines, ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)]


@_command("report:run_explain")
def explain(
    plan: Annotated[Path, typer.Argument(help="A saved plan.")],
    subject: Annotated[
        str, typer.Argument(help="A bucket (b3), region (fwd.2), parameter or module (layers.3); else the whole plan.")
    ] = "",
    as_json: JSON = False,
) -> None:
    """Print the decisions of a saved plan with their reasons, costs and rejected options.

    With the question file that `plan -o` writes beside the plan, also the bytes at the peak and what is recomputed.
    """


@_command("report:run_report")
def report(
    source: Annotated[
        Path, typer.Argument(help="A saved plan with its question file, or the folder of an observed run or a study.")
    ],
    others: Annotated[
        list[Path] | None,
        typer.Argument(help="Beside a plan: a second plan, a record, or both. Beside a run: other runs."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file; else beside the plan or in the folder.")
    ] = None,
    figure: Annotated[str | None, typer.Option(help="Write one picture as SVG: memory, lanes, step or curve.")] = None,
    is_dark: Annotated[bool, typer.Option("--dark", help="The picture for a dark ground; pages have both.")] = False,
    curve: Annotated[
        int | None, typer.Option(min=2, max=50, help="Search plans under so many device budgets, and draw their steps.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the data of the page and write no file.")] = False,
) -> None:
    """Write a plan, an observed run or a study as one page of HTML.

    Of a plan: memory and lanes over the step, layers with reasons, the certificate. Of a run, in addition: the seconds
    of its steps, its losses, and what was measured. The page needs no network. Its charts need the extra `report` of
    this package.
    """


@_command("study:run_study")
def study(
    model: Annotated[str, typer.Argument(help="gpt2-124m, ...; path.py:function; or a Hugging Face config file.")],
    placements: Annotated[
        str | None,
        typer.Option(help="Rows to run: device,after_backward,across_steps,in_backward,disk,plan,inductor; else all."),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Device budgets of the row plan: bytes, or percent of the peak of the row device.")
    ] = "60%",
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 2,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 256,
    dtype: Annotated[str, typer.Option(help="Dtype of parameters and compute.")] = "float32",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps that are timed in each row.")] = 8,
    hardware: Annotated[
        str | None, typer.Option(help="Simulate the rows on this machine instead of running them here.")
    ] = None,
    disk_path: Annotated[Path | None, typer.Option(help="Folder for the state of the row disk.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for study.json and study.html.")] = Path(
        "study"
    ),
    as_json: JSON = False,
) -> None:
    """Train a model under several placements of its state, and show their steps side by side.

    Each row is a process of its own with the same seed and batches: everything on the device, state on the host with
    its update at three times, state on disk, the plan of a search, and torch.compile alone.
    """


@_command("report:run_trace")
def trace(
    folder: Annotated[Path, typer.Argument(help="The folder of an observed run.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file; else trace.json.gz in the folder.")
    ] = None,
) -> None:
    """Write the recorded steps of an observed run as a file for Perfetto, the planned step beside the measured ones.

    The folder is that of `elixir_compile.observe(model, folder)`, or of the option `trace`.
    """


@_command("report:run_diff")
def diff(
    first: Annotated[Path, typer.Argument(help="A saved plan.")],
    second: Annotated[Path, typer.Argument(help="Another plan, or the record of a measured step.")],
    as_json: JSON = False,
) -> None:
    """Print the differences of two plans, or each figure of a plan beside a measured step."""


@_command("shares:run_asked", _WAITS, is_frozen=True)
def plan(
    model: Annotated[str, typer.Argument(help=MODEL)],
    hardware: HARDWARE = None,
    ranks: RANKS = 1,
    batch: OWN_BATCH = None,
    seq: SEQ = 1024,
    dtype: DTYPE = "bfloat16",
    recompute: RECOMPUTE = False,
    device_memory: DEVICE_MEMORY = None,
    host_memory: HOST_MEMORY = None,
    disk_path: DISK_PATH = None,
    param_dtype: PARAM_DTYPE = None,
    update: UPDATE = None,
    micro_batches: MICRO_BATCHES = None,
    activations: ACTIVATIONS = None,
    accumulate: ACCUMULATE = False,
    planner: PLANNER = None,
    placement_policy: POLICY = None,
    shard_param_frac: FRAC = None,
    offload_optim_frac: FRAC = None,
    offload_param_frac: FRAC = None,
    search_timeout: Annotated[float | None, typer.Option(help="Seconds to search at most.")] = None,
    optimizer: OPTIMIZER = None,
    state_bytes: STATE_BYTES = None,
    largest_batch: LARGEST_BATCH = False,
    tune: TUNE = False,
    tokens_per_step: TOKENS = None,
    stages: STAGES = None,
    schedule: SCHEDULE = None,
    output: OUTPUT = None,
    as_json: JSON = False,
) -> None:
    """Plan the training of MODEL on this or any other machine. Exits with 2 if no plan fits."""


@_command("plan:run_verify", _WAITS, is_frozen=True)
def verify(
    plan: Annotated[Path, typer.Argument(help="A saved plan.")],
    model: Annotated[str | None, typer.Option(help=f"Capture this model and check against it: {MODEL}")] = None,
    hardware: HARDWARE = None,
    ranks: RANKS = 1,
    batch: BATCH = 8,
    seq: SEQ = 1024,
    dtype: DTYPE = "bfloat16",
    recompute: RECOMPUTE = False,
    param_dtype: PARAM_DTYPE = None,
    as_json: JSON = False,
) -> None:
    """Check the file of a saved plan, and that the plan is legal for the step in the question file beside it.

    With --model, the step of this model takes the place of the question file.
    """


@_command("report:run_export")
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that `elixir_compile.save` wrote.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    as_json: JSON = False,
) -> None:
    """Write the model of a checkpoint as a safetensors file with Hugging Face's keys, a tensor at a time."""


def main() -> None:
    """Run the command line. Only the result of a command goes to stdout; all other output goes to stderr."""
    # Libraries may print from C to file descriptor 1, which would break the output of `--json`.
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, buffering=1)
    app()
