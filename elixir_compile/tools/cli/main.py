"""`elixir-compile`: the arguments of every command. Each command has a module, imported when the command runs."""

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from elixir_compile.base.process import collector_off
from elixir_compile.base.version import __version__
from elixir_compile.tools.cli.study_command import study

# ----------------------------------------------------------------------------------------------------------------------
# The arguments of `plan` and `verify`, with what `--help` says of them.


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
    Path | None, typer.Option(help="Folder for optimizer state on disk; any name if the machine is elsewhere.")
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
CHECKED_MODEL = Annotated[str | None, typer.Option(help=f"Capture this model and check against it: {MODEL}")]

AS_TYPED = (
    "device_memory",
    "host_memory",
    "disk_path",
    "param_dtype",
    "update",
    "micro_batches",
    "activations",
    "planner",
    "placement_policy",
    "shard_param_frac",
    "offload_optim_frac",
    "offload_param_frac",
    "search_timeout",
)
"""The arguments of `plan` that are options of the backend as they are typed."""


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile`: the arguments of every command. Each command has a module, imported when the command runs.
#
# So `--version` and `--help` never load torch.


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train models that do not fit.")


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


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option(help="Train on this file or folder instead of Python's standard library.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Training steps per run.")] = 20,
) -> None:
    """Train a byte-level GPT twice, without a budget and in half the memory, and compare.

    Exits with 1 if the losses differ or the measured peak exceeds the budget.
    """
    # Torch reads all three variables when it is imported. Waiting OpenMP threads spin by default: on a busy machine a
    # step then takes ten times longer (3.4 s in place of 0.3 s on two cores), on a quiet machine it gains nothing. The
    # profiler behind `measure_step` logs its start and stop to stderr.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from elixir_compile.tools.cli.demo import run_demo

    raise typer.Exit(code=run_demo(text=text, num_steps=steps))


@app.command()
def measure(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the profile to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile's JSON and nothing else.")] = False,
    seconds: Annotated[float, typer.Option(min=1.0, max=60.0, help="About how long to measure.")] = 30.0,
    disk_path: Annotated[Path | None, typer.Option(help="Also measure the disk that this folder is on.")] = None,
) -> None:
    """Measure this machine: copies, optimizer updates, matrix products, memory. Later plans use the profile."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `demo`
    from elixir_compile.tools.cli.measure import run_measure

    raise typer.Exit(code=run_measure(output=output, as_json=as_json, seconds=seconds, disk_path=disk_path))


@app.command()
def doctor(
    disk_path: Annotated[Path | None, typer.Option(help="Also try the disk that this folder is on.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Look for faults of this machine that make training fail or slow. Exits with 1 if a finding is bad."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `demo`
    from elixir_compile.tools.cli.doctor import run_doctor

    raise typer.Exit(code=run_doctor(disk_path=disk_path, as_json=as_json))


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help="A saved plan.")],
    subject: Annotated[
        str, typer.Argument(help="A bucket (b3), region (fwd.2), parameter or module (layers.3); else the whole plan.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Print the decisions of a saved plan with their reasons, costs and rejected options.

    With the question file that `plan -o` writes beside the plan, also the bytes at the peak and what is recomputed.
    """
    from elixir_compile.tools.cli.report import run_explain

    raise typer.Exit(code=run_explain(plan=plan, subject=subject, as_json=as_json))


@app.command()
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
    dark: Annotated[bool, typer.Option("--dark", help="The picture for a dark ground; pages have both.")] = False,
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
    from elixir_compile.tools.cli.report import run_report

    raise typer.Exit(
        code=run_report(
            source=source,
            others=others or (),
            output=output,
            figure=figure,
            is_dark=dark,
            curve=curve,
            as_json=as_json,
        )
    )


app.command()(study)


@app.command()
def trace(
    folder: Annotated[Path, typer.Argument(help="The folder of an observed run.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file; else trace.json.gz in the folder.")
    ] = None,
) -> None:
    """Write the recorded steps of an observed run as a file for Perfetto, the planned step beside the measured ones.

    The folder is that of `elixir_compile.observe(model, folder)`, or of the option `trace`.
    """
    from elixir_compile.tools.cli.report import run_trace

    raise typer.Exit(code=run_trace(folder=folder, output=output))


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A saved plan.")],
    second: Annotated[Path, typer.Argument(help="Another plan, or the record of a measured step.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Print the differences of two plans, or each figure of a plan beside a measured step."""
    from elixir_compile.tools.cli.report import run_diff

    raise typer.Exit(code=run_diff(first=first, second=second, as_json=as_json))


@app.command()
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
    typed = locals()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `demo`
    with collector_off():
        from elixir_compile.tools.cli.asked import run_asked
        from elixir_compile.tools.cli.plan import Request

        gc.freeze()  # later collections skip the objects of the imports

    options = {name: typed[name] for name in AS_TYPED} | {"accumulate": accumulate or None}
    if micro_batches and micro_batches.isdecimal():
        options["micro_batches"] = int(micro_batches)
    request = Request(
        model=model, batch=batch or 8, seq=seq, dtype=dtype, recompute=recompute, hardware=hardware, ranks=ranks,
        options=options,
    )  # fmt: skip
    raise typer.Exit(code=run_asked(request, typed))


@app.command()
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
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `demo`
    with collector_off():
        from elixir_compile.tools.cli.plan import Request, run_verify

        gc.freeze()

    request = None
    if model is not None:
        request = Request(
            model=model, batch=batch, seq=seq, dtype=dtype, recompute=recompute, hardware=hardware, ranks=ranks,
            options={"param_dtype": param_dtype},
        )  # fmt: skip
    raise typer.Exit(code=run_verify(plan, request, as_json=as_json))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that `elixir_compile.save` wrote.")],
    out: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    as_json: JSON = False,
) -> None:
    """Write the model of a checkpoint as a safetensors file with Hugging Face's keys, a tensor at a time."""
    from elixir_compile.tools.cli.export import run_export

    raise typer.Exit(code=run_export(checkpoint=checkpoint, out=out, as_json=as_json))


def main() -> None:
    """Run the command line. Only the result of a command goes to stdout; all other output goes to stderr."""
    # Libraries may print from C to file descriptor 1, which would break the output of `--json`.
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", encoding=sys.stdout.encoding, buffering=1)
    app()
