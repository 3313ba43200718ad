"""The shares of the data sheet that presets take, against published tokens per second.

The runs are those of the README of IST-DASLab/llmq at b77d969 and of its folder `benchmarks`: Qwen2.5 in bfloat16,
1,024 tokens per sample, 524,288 per update. Their authors measured them; nothing ran here.

The simulated seconds of a resident step are those of its ops by `ir.cost.op_s`, added up: products, which take
`flops / (share * peak)`, other ops, which take `bytes / rate of the device's memory`, and launches. The figures of the
ops are stored below, so that no model is captured; `tests/run/tools/test_published_steps.py` captures them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import pytest

from elixir_compile.ir.hardware import preset, preset_names
from elixir_compile.ir.hardware.presets import ADAM_BYTES_PER_ELEMENT
from elixir_compile.ir.hardware.table import ASSUMED, MACHINES

SEQ, TOKENS_PER_UPDATE = 1024, 524_288
HEAD = 6 * SEQ
"""FLOPs of the head for each of its parameters and each sample, forward and backward."""


@dataclass(frozen=True)
class Facts:
    """The ops of one forward and backward."""

    parameters: int
    flops: float
    """Of the products of one sample."""
    head_flops: float
    """Those of the head of the model, which is not recomputed."""
    down_share: float
    """The share of the FLOPs of a layer in its last product, which is not recomputed either."""
    fixed_bytes: float
    """What the other ops move, whatever the number of samples is."""
    sample_bytes: float
    """What they move for each sample."""
    launches: int

    def step_s(self, machine: str, share: float, samples: int, *, recomputes: bool) -> float:
        """The seconds of a step with `samples`, with its part of the update."""
        device = preset(machine).device
        assert device.shares is not None
        peak = device.flops_per_s["bfloat16"] / device.shares["bfloat16"].share
        again = (1 - self.down_share) / 3 if recomputes else 0.0
        flops = self.flops + again * (self.flops - self.head_flops)
        moved = self.fixed_bytes + (1 + again) * self.sample_bytes * samples
        moved += ADAM_BYTES_PER_ELEMENT * self.parameters * samples * SEQ / TOKENS_PER_UPDATE
        launches_s = (1 + again) * self.launches * device.launch_s
        return samples * flops / (share * peak) + moved / device.memory_bytes_per_s + launches_s

    def tokens_per_s(self, machine: str, share: float, samples: int, *, recomputes: bool = False) -> float:
        return samples * SEQ / self.step_s(machine, share, samples, recomputes=recomputes)


FACTS = {
    "0.5B": Facts(494_032_768, 3_350_577_807_360, HEAD * 896 * 151_936, 0.29, 2_723_562_548, 6_633_291_888, 1354),
    "1.5B": Facts(1_543_714_304, 10_115_050_635_264, HEAD * 1536 * 151_936, 0.29, 4_668_833_844, 11_774_984_304, 1574),
    "3B": Facts(3_085_938_688, 20_040_854_274_048, HEAD * 2048 * 151_936, 0.29, 6_225_362_996, 18_042_847_344, 2014),
    "7B": Facts(7_615_616_512, 44_913_009_885_184, HEAD * 3584 * 152_064, 0.29, 10_902_384_692, 23_782_752_368, 1574),
    "14B": Facts(14_770_033_664, 89_566_174_248_960, HEAD * 5120 * 152_064, 0.26, 15_576_907_828, 42_820_960_368, 2674),
}


class Row(NamedTuple):
    """A published run, on one device or, for each of several, its part."""

    machine: str
    model: str
    samples: int
    """Of each forward."""
    tokens_per_s: float
    is_recomputed: bool = False


RESIDENT = [
    Row("rtx4090-24g", "0.5B", 16, 40e3),
    Row("rtx4090-24g", "1.5B", 4, 14e3),
    Row("rtx4090-24g", "0.5B", 16, 154e3 / 4),
    Row("rtx4090-24g", "1.5B", 8, 52e3 / 4),
    # LLaMA-Factory on the same device, with kernels of Liger and with checkpoints of layers.
    Row("rtx4090-24g", "0.5B", 128, 30_183, True),
    Row("rtx4090-24g", "1.5B", 16, 9_419, True),
    Row("rtx5090-32g", "0.5B", 8, 55e3),
    Row("rtx5090-32g", "0.5B", 16, 55e3),
    Row("rtx5090-32g", "1.5B", 4, 71.2e3 / 4),
    Row("rtx5090-32g", "1.5B", 8, 17e3, True),
    Row("rtx5090-32g", "3B", 4, 8.2e3, True),
    Row("rtx5090-32g", "3B", 8, 8.6e3, True),
    Row("rtx5090-32g", "3B", 4, 32e3 / 4, True),
    Row("h100-80g", "0.5B", 32, 149e3),
    Row("h100-80g", "1.5B", 32, 59e3),
    Row("h100-80g", "3B", 16, 31e3),
    Row("h100-80g", "7B", 4, 14e3),
    Row("rtxpro6000-96g", "0.5B", 32, 86e3),
    Row("rtxpro6000-96g", "1.5B", 32, 32e3),
    Row("rtxpro6000-96g", "3B", 16, 17e3),
    Row("rtxpro6000-96g", "7B", 8, 8e3),
    Row("rtxpro6000-96g", "0.5B", 32, 673e3 / 8),
    Row("rtxpro6000-96g", "1.5B", 32, 255e3 / 8),
    Row("rtxpro6000-96g", "3B", 16, 135e3 / 8),
    Row("rtxpro6000-96g", "7B", 8, 62e3 / 8),
    Row("l40s-48g", "0.5B", 16, 44e3),
    Row("l40s-48g", "1.5B", 8, 17e3),
    Row("l40s-48g", "3B", 4, 8.9e3),
    Row("l40s-48g", "0.5B", 16, 169e3 / 4),
    Row("l40s-48g", "1.5B", 8, 65e3 / 4),
    Row("l40s-48g", "3B", 8, 35e3 / 4),
]
"""Runs whose state fits the device."""
MOVED = [
    Row("rtx4090-24g", "3B", 4, 7e3),
    Row("rtx4090-24g", "7B", 16, 2.8e3, True),
    Row("rtx4090-24g", "14B", 32, 1.35e3, True),
    Row("rtx4090-24g", "3B", 4, 26e3 / 4),
    Row("rtx4090-24g", "7B", 16, 11e3 / 4, True),
    Row("rtx4090-24g", "14B", 16, 5.2e3 / 4, True),
    Row("rtx5090-32g", "7B", 8, 3.1e3, True),
    Row("rtx5090-32g", "7B", 8, 13.9e3 / 4, True),
    Row("h100-80g", "14B", 8, 6.3e3, True),
    Row("rtxpro6000-96g", "14B", 4, 4e3),
    Row("rtxpro6000-96g", "14B", 4, 30e3 / 8),
    Row("l40s-48g", "7B", 4, 3.9e3),
    Row("l40s-48g", "14B", 16, 1.5e3, True),
]
"""Runs that also move state or activations, so they may take longer than their compute."""
CALIBRATED = [RESIDENT[1], RESIDENT[8], RESIDENT[16], RESIDENT[20], RESIDENT[27]]
"""The run from which the share of its machine is: of resident ones that recompute nothing, that of the largest model,
as its ops other than products take the smallest part of its seconds."""


def tokens_per_s(row: Row, share: float) -> float:
    return FACTS[row.model].tokens_per_s(row.machine, share, row.samples, recomputes=row.is_recomputed)


def named(row: Row) -> str:
    return f"{row.machine} {row.model} {row.tokens_per_s:.0f}"


@pytest.mark.parametrize("row", RESIDENT, ids=named)
def test_a_published_run_is_within_the_range_of_its_chip(row: Row) -> None:
    share = MACHINES[row.machine].chip.shares["bfloat16"]
    assert tokens_per_s(row, share.low) <= row.tokens_per_s <= tokens_per_s(row, share.high)


@pytest.mark.parametrize("row", MOVED, ids=named)
def test_no_published_run_is_faster_than_the_range(row: Row) -> None:
    share = MACHINES[row.machine].chip.shares["bfloat16"]
    assert row.tokens_per_s <= tokens_per_s(row, share.high)


@pytest.mark.parametrize("row", CALIBRATED, ids=named)
def test_the_share_of_a_chip_is_that_of_a_published_run(row: Row) -> None:
    share = MACHINES[row.machine].chip.shares["bfloat16"]
    assert f"Qwen2.5 {row.model}" in share.source
    assert tokens_per_s(row, share.share) == pytest.approx(row.tokens_per_s, rel=0.01)


def test_a_share_without_a_published_run_says_that_it_is_assumed() -> None:
    calibrated = {row.machine for row in CALIBRATED}
    same_chip = {"h200-141g", "gh200", "rtx4090d-24g"}
    for name in preset_names():
        for dtype in MACHINES[name].chip.flops_per_s:
            share = MACHINES[name].chip.shares.get(dtype, ASSUMED)
            is_half = dtype in ("bfloat16", "float16")
            is_known = name in calibrated | same_chip and (is_half or "#" in share.source)
            assert is_known != share.source.startswith("assumed"), (name, dtype)
