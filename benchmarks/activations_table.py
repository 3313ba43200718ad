"""Turn the figures of `activations.py` into tables in Markdown."""

from pathlib import Path

from elixir_compile.base.units import format_bytes

MB = 1e6
Figures = dict[str, object]


def write_table(path: Path, figures: Figures, claims: dict[str, bool]) -> None:
    """Write a table for each part in `figures` to `path`, then the claims that do not hold."""
    parts = {"budgets": _budgets, "torch": _torch, "floor": _floor, "logits": _logits, "eager": _eager}
    texts = ["GPT-2 124M, batch 4 x 512, fp32, HybridAdamW, on a CPU. MB are 10^6 bytes; seconds are medians."]
    counted = (
        f"{name}: {rounds} measured steps per case, load average {figures['load_averages'][name][-1][0]:.1f} at the end"
        for name, rounds in figures.get("num_rounds", {}).items()
    )
    texts += ["\n".join(f"- {line}" for line in counted)]
    texts += [view(figures[name]) for name, view in parts.items() if name in figures]
    failed = [f"- {claim}" for claim, holds in claims.items() if not holds]
    texts += ["Does not hold:\n\n" + "\n".join(failed)] if failed else [f"All {len(claims)} claims hold."]
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _megabytes(*sizes_bytes: int) -> str:
    return " / ".join(f"{nbytes / MB:.0f}" for nbytes in sizes_bytes)


def _treated(row: Figures) -> list[str]:
    """Return three cells: bytes kept, recomputed, offloaded; parameters and state on the host; chunks of the loss."""
    plan = row["plan"]
    return [
        _megabytes(*(plan["activations_bytes"][saving] for saving in ("keep", "recompute", "offload"))),
        _megabytes(plan["params_on_host_bytes"], plan["state_on_host_bytes"]),
        str(plan["loss_chunks"]),
    ]


def _budgets(part: Figures) -> str:
    head = ["budget", "MB", "peak MB", "planned MB", "off", "step s", "of 100 %", "own s, of 100 %",
            "kept / recomputed / offloaded MB", "host: params / state MB", "loss chunks", "gradients off", "search s",
            "gap"]  # fmt: skip
    rows = []
    for name, row in part["rows"].items():
        if "shortfall" in row:
            rows.append([name, _megabytes(row["budget_bytes"]), row["shortfall"], *[""] * 11])
            continue
        plan = row["plan"]
        rows.append([
            name, f"{row['budget_bytes'] / MB:.1f}", f"{row['peak_bytes'] / MB:.1f}", f"{plan['peak_bytes'] / MB:.1f}",
            f"{plan['peak_bytes'] / row['peak_bytes'] - 1:+.2%}", f"{row['median_s']:.2f}",
            f"{row['ratio']:.3f}", f"{row['own_ratio']:.3f}",
            *_treated(row), f"{row['off']['gradient_off']:.1e}", f"{sum(row['search_s']):.1f}",
            "" if plan["gap"] is None else f"{plan['gap']:.2%}",
        ])  # fmt: skip
    return f"Keeping everything takes {part['keep']['peak_bytes'] / MB:.1f} MB.\n\n" + _table(head, rows)


def _torch(part: Figures) -> str:
    head = ["torch's budget", "who", "peak MB", "step s", "ours / torch's", "own s", "kept / recomputed / offloaded MB",
            "host: params / state MB", "loss chunks"]  # fmt: skip
    rows = []
    for share, cases in part.items():
        for name, row in cases.items():
            if "shortfall" in row:
                rows.append([share, name, row["shortfall"], *[""] * 6])
                continue
            figures = [f"{row['peak_bytes'] / MB:.1f}", f"{row['median_s']:.2f}", f"{row['ratio']:.3f}"]
            figures.append(f"{row['own_ratio']:.3f}")
            rows.append([share, name, *figures, *(_treated(row) if "plan" in row else [""] * 3)])
    return "Against `activation_memory_budget` with torch's fused AdamW, in turn:\n\n" + _table(head, rows)


def _floor(part: Figures) -> str:
    lines = [
        f"- {way}: {row['needed_bytes']} bytes ({format_bytes(row['needed_bytes'])})"
        + (", planned" if row["is_planned"] else ", NOT planned")
        + (", one byte less refused" if row["one_byte_less_needs"] else ", one byte less NOT refused")
        for way, row in part.items()
    ]
    return "The smallest budget:\n\n" + "\n".join(lines)


def _logits(part: Figures) -> str:
    whole, chunked = part["whole"], part["chunked"]
    fall_bytes = whole["peak_bytes"] - chunked.get("peak_bytes", whole["peak_bytes"])
    return (
        f"2,048 tokens, 131072 classes, width 256: {part['logits_bytes'] / MB:.1f} MB of logits. Peak "
        f"{whole['peak_bytes'] / MB:.1f} MB whole, {fall_bytes / MB:.1f} MB less in chunks."
    )


def _eager(part: Figures) -> str:
    off = part.get("off", {})
    return f"Op by op under 60 %: gradients bitwise equal: {off.get('is_bitwise', part.get('shortfall'))}."
