"""The arguments of `plan` and `verify`, with what `--help` says of them."""

from pathlib import Path
from typing import Annotated

import typer

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
