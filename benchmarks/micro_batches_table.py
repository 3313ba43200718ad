"""Turn the figures of `micro_batches.py` into tables in Markdown."""

from pathlib import Path

MB = 1e6
Figures = dict[str, object]
_HEAD = [
    "", "step s", "of the first", "own s, of it", "tokens/s", "peak MB", "host MB", "to the device MB",
    "to the host MB", "gathers", "reduces", "offloads",
]  # fmt: skip


def write_table(path: Path, figures: Figures, claims: dict[str, bool]) -> None:
    """Write a table for each part in `figures` to `path`, then the claims."""
    texts = [
        "A small Llama (6 layers of width 512, 35 M parameters, 16 rows of 128 tokens), for ranks a small GPT-2 (6 "
        "layers of width 512, 8 rows of 128 tokens on each of 2 gloo ranks), fp32 on a CPU with one thread. MB are "
        "10^6 bytes; seconds are medians of steps taken in turn. Columns of transfers are of one step."
    ]
    for name in (name for name in ("whole", "torch", "link", "ranks") if name in figures):
        part = figures[name]
        views = {"link": _link, "ranks": _ranks}
        texts += views[name](part) if name in views else [name, _transfers(part["rows"])]
        before, after = part["load_averages"]
        texts.append(
            f"{name}: {part['num_rounds']} rounds in {part['took_s']:.0f} s; load average {before[0]:.1f} before, "
            f"{after[0]:.1f} after."
        )
    texts.append("\n".join(f"- {'holds' if holds else 'FAILS'}: {claim}" for claim, holds in claims.items()))
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def _link(part: Figures) -> list[str]:
    texts = []
    for ratio, case in part["ratios"].items():
        texts.append(
            f"link, **emulated**: {case['bytes_per_s'] / MB:.0f} MB/s in each direction, on which the parameters "
            f"arrive twice in {ratio} times the seconds that a micro-batch computes; "
            f"budget {case['budget_bytes'] / MB:.1f} MB"
        )
        texts.append(_transfers(case["rows"]))
    return texts


def _ranks(part: Figures) -> list[str]:
    network = f"ranks, network **emulated**: {part['bytes_per_s'] / MB:.0f} MB/s to each rank"
    return ["ranks", _collectives(part["rows"]), network, _collectives(part["on_network"])]


def _transfers(rows: Figures) -> str:
    lines = []
    for name, row in rows.items():
        if "ratio" not in row:
            lines.append([name, row["shortfall"], *[""] * (len(_HEAD) - 2)])
            continue
        counts = row["counts"]
        lines.append([
            name, *_steps(row), f"{row['host_peak_bytes'] / MB:.1f}", *(f"{n / MB:.1f}" for n in row["moved_bytes"]),
            str(counts["gather"]), str(counts["reduce"]), str(counts["offload"]),
        ])  # fmt: skip
    return _table(_HEAD, lines)


def _collectives(rows: Figures) -> str:
    head = [*_HEAD[:6], "collectives", "received MB"]
    lines = []
    for name, row in rows.items():
        if "ratio" in row:
            lines.append([name, *_steps(row), str(row["collectives"]), f"{row['received_bytes'] / MB:.1f}"])
        else:
            lines.append([name, row["shortfall"], *[""] * (len(head) - 2)])
    return _table(head, lines)


def _steps(row: Figures) -> list[str]:
    return [
        f"{row['median_s']:.3f}", f"{row['ratio']:.3f}", f"{row['own_ratio']:.3f}", f"{row['tokens_per_s']:.0f}",
        f"{row['peak_bytes'] / MB:.1f}",
    ]  # fmt: skip


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
