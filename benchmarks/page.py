"""Write `docs/benchmarks.md` from the files in `benchmarks/results`: each figure beside that of a peer.

    python benchmarks/page.py

Nothing is measured and nothing is computed but medians and quartiles of the saved seconds. A comparison that was not
run has an empty row that says why.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Every figure of this page comes from a file of `benchmarks/results`, which also names the machine, the versions and the
commit; `python benchmarks/page.py` writes the page. A ratio is ours over theirs, so below 1 means that ours took less.
It is the median over rounds of one run in which both took turns, with the quartiles in brackets. Peaks are those of
the allocator. MB are 10^6 bytes.

All figures are from a virtual machine with two cores, an AMD EPYC, 24 GiB and no GPU; seconds of others differ, ratios
less so. **No figure is from a GPU.**
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Ours beside a peer, in one setting."""

    setting: str
    peer: str
    ratio: str
    """Ours over theirs: median and quartiles."""
    peaks: str = ""
    """Peak of the device in MB: ours and theirs."""
    hosts: str = ""
    """Memory of the host in MB: ours and theirs."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the row; memory is left out if it was not compared."""
        seconds = (self.setting, self.peer, self.ratio)
        return (*seconds, self.peaks, self.hosts) if self.peaks else seconds


@dataclass(frozen=True, slots=True)
class Section:
    """Comparisons of one benchmark."""

    title: str
    file: str
    """Name of the file of results, without `.json`."""
    command: str
    what: str
    """What the ratio compares."""
    comparisons: Callable[[dict[str, Any]], Iterator[Comparison]]

    def lines(self) -> Iterator[str]:
        """Yield the section in Markdown."""
        figures = read(self.file)
        made = figures["machine"]
        yield from (
            "",
            f"## {self.title}",
            "",
            f"`{self.command}`, torch {made['torch']}, commit {made['commit']}.",
            self.what,
        )
        rows = [comparison.cells for comparison in self.comparisons(figures)]
        head = ("setting", "peer", "ratio", "peak MB, ours / theirs", "host MB, ours / theirs")
        yield from ("", *table(head[: len(rows[0])], rows))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def read(name: str) -> dict[str, Any]:
    """Return the figures of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median of the ratios of all rounds, with quartiles."""
    ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def megabytes(ours: int, theirs: int) -> str:
    """Return two numbers of bytes as a cell."""
    return f"{ours / 1e6:,.0f} / {theirs / 1e6:,.0f}"


def in_turn(setting: str, peer: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Comparison:
    """Return the comparison of two rows that were measured in turn."""
    host = "host_bytes" if "host_bytes" in ours else "host_peak_bytes"
    return Comparison(
        setting=setting,
        peer=peer,
        ratio=paired(ours["wall_s"], theirs["wall_s"]),
        peaks=megabytes(ours["peak_bytes"], theirs["peak_bytes"]),
        hosts=megabytes(ours[host], theirs[host]),
    )


def overhead(figures: dict[str, Any]) -> Iterator[Comparison]:
    """Yield the step without a budget beside Inductor."""
    seconds = figures["seconds"]
    ratio = paired(seconds["elixir"], seconds["inductor"])
    yield Comparison(setting="GPT-2 124M, 2 x 256 tokens, fp32", peer="torch.compile", ratio=ratio)


def first_steps(figures: dict[str, Any]) -> Iterator[Comparison]:
    """Yield the CPU seconds of the first two steps beside torch.compile."""
    models = {"mlp": "200 layers", "llama": "Llama of 16 layers", "gpt2": "GPT-2 124M"}
    for case in figures["cases"].values():
        budget = case["device_memory"] or "no budget"
        yield Comparison(
            setting=f"{models[case['model']]}, {budget}",
            peer=f"torch.compile, {case['inner']}",
            ratio=f"{case['ratio']:.2f}",
        )


def activations(figures: dict[str, Any]) -> Iterator[Comparison]:
    """Yield steps at the peak that torch's partitioner needs for each of its budgets."""
    for budget, rows in figures["torch"].items():
        peer = f"`activation_memory_budget={budget}`"
        yield in_turn("GPT-2 124M, 4 x 512 tokens, fp32", peer, rows["any"], rows["torch"])


def micro_batches(figures: dict[str, Any]) -> Iterator[Comparison]:
    """Yield divided steps beside loops over micro-batches."""
    rows = figures["torch"]["rows"]
    yield in_turn(
        "Llama of 35 M, 16 x 128 tokens in 8",
        "`torch.utils.checkpoint` in a loop",
        rows["divided by 8"],
        rows["checkpoint"],
    )
    rows = figures["ranks"]["rows"]
    peer = "FSDP2 in a loop, one reduction"
    yield in_turn("GPT-2 of 6 layers, 2 gloo ranks, in 4", peer, rows["divided by 4"], rows["FSDP2, loop of 4"])
    rows, rate = figures["ranks"]["on_network"], figures["ranks"]["bytes_per_s"] / 1e6
    setting = f"the same behind an **emulated** network of {rate:.0f} MB/s"
    yield in_turn(setting, peer, rows["divided by 4"], rows["FSDP2, loop of 4"])


def ranks(figures: dict[str, Any]) -> Iterator[Comparison]:
    """Yield training on two ranks beside FSDP2."""
    setting = "GPT-2 124M, 2 gloo ranks, 2 x 256 tokens each"
    device, host = figures["device"]["rows"], figures["host"]["rows"]
    yield in_turn(setting, "FSDP2, compiled", device["ours"], device["FSDP2, compiled"])
    yield in_turn(setting, "FSDP2, compiled, with `CPUOffloadPolicy`", host["ours"], host["FSDP2, compiled"])


def emulated_skew(figures: dict[str, Any]) -> Iterator[Comparison]:
    """Yield shares beside equal rows if one rank is slower."""
    runs, rows = figures["runs"], "/".join(map(str, figures["rows"]))
    setting = f"2 gloo ranks, the second **emulated** as three times slower, 16 rows as {rows}"
    yield Comparison(setting=setting, peer="equal rows", ratio=paired(*(runs[name]["wall_s"] for name in RUNS)))


RUNS = ("shares", "equal rows")


def host_updates(figures: dict[str, Any]) -> Iterator[Comparison]:
    """Yield an update on the host beside those of others. The file has ratios of rates: theirs are inverted here."""
    names = {"mixed: C": "bf16, fp32 master", "split: C": "bf16, split master", "fp32: fused op": "fp32"}
    peers = {
        "DeepSpeed: scale, adam, cast": "DeepSpeedCPUAdam",
        "cast, torch fused, cast": "torch, fused, with casts",
        "fp32: torch.optim.AdamW(fused=True)": "`torch.optim.AdamW(fused=True)`",
    }
    for run in figures["figures"]:
        for ratio in run["ratios"]:
            if ratio["of"] in peers:
                low, middle, high = 1 / ratio["q75"], 1 / ratio["median"], 1 / ratio["q25"]
                setting = f"{names[ratio['pass']]}, threads: {run['num_threads']}"
                yield Comparison(
                    setting=setting, peer=peers[ratio["of"]], ratio=f"{middle:.2f} [{low:.2f}, {high:.2f}]"
                )
    yield Comparison(setting="any", peer="torchao's `CPUOffloadOptimizer`", ratio="not run: it needs CUDA")


SECTIONS = (
    Section("A step without a budget", "overhead_cpu", "python benchmarks/overhead.py", "Seconds of a step.", overhead),
    Section(
        "The first two steps", "first_step_cpu", "python benchmarks/first_step.py",
        "CPU seconds of both steps and of all processes that they start, with empty caches; one run each.", first_steps,
    ),
    Section(
        "At the same peak: activations", "activations_cpu", "python benchmarks/activations.py",
        "Seconds of a step whose budget is the peak that torch's partitioner needs.", activations,
    ),
    Section(
        "At the same peak: micro-batches", "micro_batches_cpu", "python benchmarks/micro_batches.py",
        "Seconds of a step over all micro-batches, at the peak of the loop.", micro_batches,
    ),
    Section(
        "Two ranks", "ranks_cpu", "python benchmarks/ranks.py",
        "Seconds of a step of one rank, at the peak of the peer.", ranks,
    ),
    Section(
        "Ranks that differ, emulated", "emulated_skew_cpu", "python benchmarks/emulated_skew.py",
        "Seconds of a step of both ranks; the slower rank runs each region three times.", emulated_skew,
    ),
    Section(
        "Updates on the host", "optimizer_pass_cpu", "python benchmarks/optimizer_pass.py",
        "Seconds of an update of 100 M parameters.", host_updates,
    ),
)  # fmt: skip


def observing(file: str = "observe_cpu") -> Iterator[str]:
    """Yield the section of what observing a run costs; without the file of results it has empty cells."""
    levels = {"off": "", "summary": "of every step", "full": "of every step, memory events aside"}
    rows = [(level, what, "not run", "") for level, what in levels.items()]
    said = "`python benchmarks/observe.py`."
    if (RESULTS / f"{file}.json").exists():
        figures = read(file)
        made = figures["machine"]
        said = f"`python benchmarks/observe.py`, torch {made['torch']}, commit {made['commit']}."
        ratios, quartiles = figures["ratios"], figures["quartiles"]
        between = {level: f" [{low:.4f}, {high:.4f}]" for level, (low, _, high) in quartiles.items()}
        cells = {level: f"{ratio:.4f}{between.get(level, '')}" for level, ratio in ratios.items()}
        rows = [(level, what, cells[level], f"{figures['limits'][level]}") for level, what in levels.items()]
    yield from ("", "## Observing a run", "", said)
    yield "Seconds of a step over those of the same step without observation, in turn; `off` is the time of its calls."
    yield from ("", *table(("level", "of", "ratio", "goal"), rows))


def predictions() -> Iterator[str]:
    """Yield the section of predictions: planned figures beside measured ones."""
    figures = read("fidelity_cpu")
    rows = []
    for row in figures["rows"]:
        budget = "none" if row["share"] is None else f"{row['share']} %"
        ratios = (1 + row["before"][name] for name in ("peak_off", "step_off"))
        rows.append((row["model"], budget, *(f"{ratio:.3f}" for ratio in ratios)))
    yield from ("", "## Planned and measured", "", "`python benchmarks/fidelity.py`.", figures["note"], "")
    yield from table(("model", "budget", "peak: planned over measured", "step: planned over measured"), rows)


def against_rules() -> Iterator[str]:
    """Yield the section of rules: their steps over those of plans of the search, on the clock, the worst first."""
    rows = [
        (1 / found["ratio"], *(1 / limit for limit in reversed(found["ratio_quartiles"])), row, rule)
        for row in read("fidelity_cpu")["rows"]
        for rule, found in row.get("rules", {}).items()
        if "ratio" in found
    ]
    rows.sort(key=lambda row: row[0])
    yield from (
        "",
        "## Against simple rules",
        "",
        "`python benchmarks/fidelity.py`, in the run of the table above: the step of a rule over that of the chosen",
        "plan, in turn, the worst for us first. A rule that does not fit, or has the plan of the search, has no row.",
        "",
    )
    cells = [
        (row["model"], f"{row['share']} %", rule, f"{median:.3f} [{low:.3f}, {high:.3f}]")
        for median, low, _, high, row, rule in rows
    ]
    yield from table(("model", "budget", "rule", "rule over plan"), cells)


def gaps() -> Iterator[str]:
    """Yield the section of the planner: how far plans are from their bound."""
    figures = read("planner_full")
    rows = [row for row in figures["rows"] if row["gap"] is not None]
    columns = {
        "gap to the bound on every plan, %": [100 * row["gap"] for row in rows],
        "CPU seconds of the search": [row["cpu_s"] for row in rows],
        "step of the fastest rule planner over ours": [
            min(row["rules"].values()) / row["step_s"] for row in rows if row["rules"]
        ],
    }
    yield from (
        "",
        "## Plans",
        "",
        f"`python benchmarks/planner_full.py`: {len(rows)} plans for GPUs that are not here, so their steps are",
    )
    yield "**simulated**. [All rows](../benchmarks/results/planner_full.md). They are older than the simulator in which"
    yield "the host begins when its last gradient has come: [some of them since](how-the-planner-chooses.md#measured),"
    yield "and than the shares of the data sheet that presets take: every chip computed at half of it."
    yield ""
    quartiles = {
        name: (min(values), *statistics.quantiles(values, n=4), max(values)) for name, values in columns.items()
    }
    rows = [(name, *(f"{value:.2f}" for value in values)) for name, values in quartiles.items()]
    yield from table(("figure", "least", "1/4", "1/2", "3/4", "most"), rows)


def growth() -> Iterator[str]:
    """Yield the section of growth: the seconds of planning by layers and by ranks."""
    figures = read("growth")
    yield from (
        "",
        "## Seconds of planning",
        "",
        "`python benchmarks/growth.py`, for `h100-80g`, 4,096 tokens on each rank. They grow with the layers to the",
        f"power of {figures['by_layers']:.2f}, and with the ranks, from 8 on, to the power of "
        f"{figures['by_ranks']:.2f}.",
        "",
    )
    cells = [
        (row["model"], str(row["layers"]), f"{row['ranks']:,}", f"{row['cpu_s']:.1f}", f"{row['gap']:.1%}")
        for row in figures["rows"]
    ]
    yield from table(("model", "layers", "ranks", "CPU seconds", "gap to the bound"), cells)


RULES = {"even": "equal rows", "by_speed": "rows by speed", "cephalo": "the rows of Cephalo's program"}


def fleets() -> Iterator[str]:
    """Yield the section of mixed fleets: the shares of the planner beside those of rules."""
    rows = read("unequal_ranks")["rows"]
    yield from (
        "",
        "## Mixed fleets",
        "",
        f"`python benchmarks/unequal_ranks.py`: {len(rows)} trainings on fleets of 4 to 64 GPUs that are not here, so",
        "steps are **simulated**: ours over that of other rows. [All rows](../benchmarks/results/unequal_ranks.md).",
        "",
    )
    found: list[tuple[str, ...]] = []
    for rule, name in RULES.items():
        ratios = [row["ours"]["step_s"] / row[rule]["step_s"] for row in rows if row["ours"] and row[rule]]
        found.append((name, *(f"{value:.2f}" for value in (min(ratios), statistics.median(ratios), max(ratios)))))
    yield from table(("peer", "least", "median", "most"), found)


KINDS = {"sleep": "sleep", "eager": "multiply matrices", "elixir": "multiply matrices, compiled by this backend"}


def pipelines() -> Iterator[str]:
    """Yield the section of pipelines: simulated steps and bubbles beside measured ones, over an emulated link."""
    figures = read("pipeline_cpu")
    link, num = figures["link"], figures["micro_batches"]
    message_ms = 1e3 * (link["latency_s"] + link["message_bytes"] / link["bytes_per_s"])
    yield from (
        "",
        "## Pipelines",
        "",
        f"`python benchmarks/pipeline.py`: two gloo ranks run torch's schedules with {num} micro-batches over an",
        f"**emulated** link, on which a message takes {message_ms:.0f} ms. The simulation gets the seconds of stages",
        "in the step before. Other processes on both cores change compute from step to step, but not sleep.",
        "",
    )
    rows: list[tuple[str, ...]] = []
    for kind, found in figures["kinds"].items():
        for schedule, own in found.items():
            medians = (statistics.median(own["step_s"]), statistics.median(own["bubble"]))
            cells = (
                f"{medians[0]:.2f} s",
                f"{own['step_ratio']:.3f}",
                f"{medians[1]:.0%}",
                f"{own['bubble_ratio']:.3f}",
            )
            rows.append((KINDS[kind], schedule, *cells))
    names = ("stages", "schedule", "step", "simulated over measured", "bubble", "simulated over measured")
    yield from table(names, rows)


def page() -> str:
    """Return the page in Markdown."""
    sections = [line for section in SECTIONS for line in section.lines()]
    rest = (*observing(), *predictions(), *against_rules(), *pipelines(), *gaps(), *growth(), *fleets())
    return "\n".join([HEAD.rstrip(), *sections, *rest]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
