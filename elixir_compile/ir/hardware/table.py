"""Data sheets of common machines, with published peak rates. `presets` turns them into profiles with real rates.

Each row names its source; numbers from another source have a comment. Rates of links are for a single direction: a data
sheet with the sum of both directions ("600 GB/s NVLink") is halved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from elixir_compile.base.errors import InvalidProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakShare:
    """The share of a peak rate that matrix products reach within a training step; memory-bound work is priced apart.

    It is the share with which the simulated step of a published run takes the published seconds. So it also has what
    the simulation prices otherwise than that run, and is above 1 on GeForce chips, whose clock is above that of the
    data sheet.
    """

    share: float
    low: float
    """The share of the slowest run that is known."""
    high: float
    """The share of the fastest run that is known, so no published run is faster than a bound with it."""
    source: str
    """The published runs, or why the share is assumed."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.share <= self.high < 2:
            got = (self.low, self.share, self.high)
            raise InvalidProfile("share of the peak", "low, share, high", "rising numbers between 0 and 2", got)

    def __str__(self) -> str:
        return f"{self.share:.0%} of the data sheet ({100 * self.low:.0f}-{100 * self.high:.0f})"


ASSUMED = PeakShare(share=0.5, low=0.35, high=0.8, source="assumed: no published run that was simulated")
"""The share of a chip and dtype about which nothing is known; published matrix products reach 0.5 to 0.95."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A device."""

    memory_mib: int
    """Total memory as `nvidia-smi` prints it: the size in the name less memory for error correction and firmware."""
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    """Dense rates by dtype: of matrix units with sums in float32 for 16 bits, and of plain units without TF32 for
    float32, the default of torch."""
    source: str
    shares: Mapping[str, PeakShare] = field(default_factory=dict)
    """The shares of these rates that training reaches, by dtype; `ASSUMED` for any other dtype."""


_USUAL_SHARE = 0.8
"""Share of a link's rate that software reaches: nccl-tests report 75-80 % of NVLink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A connection of a device, in a single direction."""

    bytes_per_s: float
    source: str
    share: float = _USUAL_SHARE
    """The share of `bytes_per_s` that copies reach."""

    @property
    def reached_bytes_per_s(self) -> float:
        return self.share * self.bytes_per_s

    @property
    def reached_source(self) -> str:
        return f"{self.share:.0%} of {self.source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A host: its processors and memory."""

    cores: int
    memory_bytes: int
    memory_bytes_per_s: float
    source: str
    is_per_device: bool = False
    """True if every device has a host of its own, as on a Grace Hopper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device in its usual host, with their connections."""

    chip: Chip
    board: Board
    lane: Wire
    """Between host memory and a device."""
    peer: Wire
    """Between a device and the others of its node."""
    network: Wire
    """A network adapter."""
    bounces: bool = False
    """True if `peer` copies pass through host memory, because the driver allows no peer access."""
    has_adapter_per_device: bool = True
    has_papers_rates: bool = False
    """True if the Elixir paper measured its rates on this machine."""
    desktop: Board | None = None
    """The board of a desktop with this chip; None if the chip is sold for servers only."""


def _tflops(float32: float, float64: float, half: float, *, has_bfloat16: bool = True) -> Mapping[str, float]:
    """Return the rates by dtype. A chip without units for bfloat16 computes it at the rate of float32."""
    rates = {"float32": float32, "float64": float64, "float16": half}
    rates |= {"bfloat16": half} if has_bfloat16 else {}
    return MappingProxyType({dtype: rate * 1e12 for dtype, rate in rates.items()})


_GB = 10**9
_GIB = 2**30
_SMI = "memory as nvidia-smi prints it"

# 8, 16 or 32 GT/s x 16 lanes x 128/130 / 8 bits
_PCIE_3 = Wire(bytes_per_s=15.75e9, source="PCI Express 3.0 specification, x16")
_PCIE_4 = Wire(
    bytes_per_s=31.5e9,
    share=0.79,
    source="PCI Express 4.0 specification, x16; BaM (arXiv 2203.04910) and Elixir measured 25 GB/s",
)
_PCIE_5 = Wire(
    bytes_per_s=63.0e9, share=0.88, source="PCI Express 5.0 specification, x16; 55.6 GB/s in the guide of nvbandwidth"
)
_HDR = Wire(bytes_per_s=25e9, source="200 Gb/s HDR InfiniBand per device, DGX A100 data sheet")
_NDR = Wire(bytes_per_s=50e9, source="400 Gb/s NDR InfiniBand per device, DGX H100 data sheet")
_NDR_GRACE = Wire(bytes_per_s=50e9, source="400 Gb/s NDR InfiniBand per device, GH200 white paper, one ConnectX-7")
_ETHERNET = Wire(bytes_per_s=12.5e9, source="100 Gb/s Ethernet per node: assumed, common in clouds")
_NVLINK_2 = Wire(bytes_per_s=150e9, source="NVLink 2, 6 links of 25 GB/s, V100 data sheet: 300 GB/s both ways")
_NVLINK_3 = Wire(bytes_per_s=300e9, source="NVLink 3, 12 links of 25 GB/s, A100 data sheet: 600 GB/s both ways")
_NVLINK_4 = Wire(bytes_per_s=450e9, source="NVLink 4, 18 links of 25 GB/s, H100 data sheet: 900 GB/s both ways")
_NVLINK_5 = Wire(bytes_per_s=900e9, source="NVLink 5, 18 links of 50 GB/s, DGX B200 data sheet: 1,800 GB/s both ways")
_INFINITY = Wire(
    bytes_per_s=448e9, source="7 Infinity Fabric links of 64 GB/s, AMD Instinct MI300X platform data sheet"
)
_C2C = Wire(bytes_per_s=450e9, source="NVLink-C2C, GH200 data sheet: 900 GB/s both ways")

# DRAM rates are channels x transfers per second x 8 bytes: 16 x 3.2 GT/s x 8 = 409.6 GB/s.
_DGX_A100_320 = Board(
    cores=128,
    memory_bytes=1024 * _GIB,
    memory_bytes_per_s=409.6e9,
    source="DGX A100 320GB data sheet: 2 x EPYC 7742, 1 TB, 16 channels DDR4-3200",
)
_DGX_A100_640 = Board(
    cores=128,
    memory_bytes=2048 * _GIB,
    memory_bytes_per_s=409.6e9,
    source="DGX A100 640GB data sheet: 2 x EPYC 7742, 2 TB, 16 channels DDR4-3200",
)
_DGX_H100 = Board(
    cores=112,
    memory_bytes=2048 * _GIB,
    memory_bytes_per_s=614.4e9,
    source="DGX H100 and H200 data sheets: 2 x Xeon 8480C, 2 TB, 16 channels DDR5-4800",
)
_EPYC_DDR4 = Board(
    cores=64,
    memory_bytes=256 * _GIB,
    memory_bytes_per_s=204.8e9,
    source="AMD EPYC 7003 data sheet, one socket: 8 channels DDR4-3200, 128 lanes PCIe 4; 8 x 32 GiB assumed",
)
_EPYC_DDR5 = Board(
    cores=64,
    memory_bytes=384 * _GIB,
    memory_bytes_per_s=460.8e9,
    source="AMD EPYC 9004 data sheet, one socket: 12 channels DDR5-4800, 128 lanes PCIe 5; 12 x 32 GiB assumed",
)
_DGX_B200 = Board(
    cores=112,
    memory_bytes=2048 * _GIB,
    memory_bytes_per_s=716.8e9,
    source="DGX B200 data sheet: 2 x Xeon 8570, 2 TB; 16 channels DDR5-5600",
)
_CLOUD_MI300X = Board(
    cores=96,
    memory_bytes=1850 * _GIB,
    memory_bytes_per_s=614.4e9,
    source="Azure ND96isr MI300X v5: 96 cores of 2 x Xeon 8480C, 1,850 GiB; 16 channels DDR5-4800",
)
_CLOUD_L40S = Board(
    cores=96,
    memory_bytes=1536 * _GIB,
    memory_bytes_per_s=409.6e9,
    source="AWS g6e.48xlarge: 2 x EPYC 7R13, 1,536 GiB; 16 channels DDR4-3200 of EPYC 7003",
)
_DESKTOP_DDR4 = Board(
    cores=16,
    memory_bytes=64 * _GIB,
    memory_bytes_per_s=51.2e9,
    source="a desktop with 2 channels DDR4-3200, PCIe 4; 16 cores and 64 GiB assumed",
)
_DESKTOP_DDR5 = Board(
    cores=16,
    memory_bytes=64 * _GIB,
    memory_bytes_per_s=83.2e9,
    source="a desktop with 2 channels DDR5-5200, PCIe 5; 16 cores and 64 GiB assumed",
)
_CLOUD_L4 = Board(
    cores=96,
    memory_bytes=768 * _GIB,
    memory_bytes_per_s=409.6e9,
    source="AWS g6.48xlarge: 2 x EPYC 7R13, 768 GiB; 16 channels DDR4-3200 of EPYC 7003",
)
_CLOUD_A10G = Board(
    cores=96,
    memory_bytes=768 * _GIB,
    memory_bytes_per_s=409.6e9,
    source="AWS g5.48xlarge: 2 x EPYC 7R32, 768 GiB; 16 channels DDR4-3200 of EPYC 7002",
)
_CLOUD_T4 = Board(
    cores=48,
    memory_bytes=384 * _GIB,
    memory_bytes_per_s=281.6e9,
    source="AWS g4dn.metal: 2 x Xeon Platinum 8259CL, 384 GiB; 12 channels DDR4-2933",
)
_CLOUD_V100 = Board(
    cores=32,
    memory_bytes=488 * _GIB,
    memory_bytes_per_s=153.6e9,
    source="AWS p3.16xlarge: 2 x Xeon E5-2686 v4, 488 GiB; 8 channels DDR4-2400 of Xeon E5 v4",
)
_CLOUD_V100_32G = Board(
    cores=48,
    memory_bytes=768 * _GIB,
    memory_bytes_per_s=256e9,
    source="AWS p3dn.24xlarge: 2 x Xeon Platinum 8175M, 768 GiB; 12 channels DDR4-2666",
)
_XEON_DDR4 = Board(
    cores=28,
    memory_bytes=256 * _GIB,
    memory_bytes_per_s=153.6e9,
    source="Intel Xeon E5-2680 v4 data sheet, two sockets: 8 channels DDR4-2400, 80 lanes PCIe 3; 8 x 32 GiB assumed",
)
_GRACE = Board(
    cores=72,
    memory_bytes=480 * _GB,
    memory_bytes_per_s=512e9,
    source="GH200 data sheet: 72 cores, 480 GB LPDDR5X, up to 512 GB/s",
    is_per_device=True,
)

_LLMQ = "README of IST-DASLab/llmq at b77d969"


def _shares(half: PeakShare, float32: PeakShare | None = None) -> Mapping[str, PeakShare]:
    """Return the shares of both dtypes of 16 bits, and of float32 if it is known."""
    found = {"float16": half, "bfloat16": half}
    return MappingProxyType(found if float32 is None else {**found, "float32": float32})


_A100_SHARES = _shares(
    PeakShare(
        share=0.64,
        low=0.49,
        high=0.87,
        source="assumed: Megatron-LM (arXiv 2104.04473 and later) has 0.44-0.58 of the peak in whole steps, of which a "
        "tenth is taken to be other work; the fastest product in ml-engineering by S. Bekman has 0.87",
    )
)
_H100_SHARES = _shares(
    PeakShare(
        share=0.73,
        low=0.55,
        high=0.8,
        source=f"Qwen2.5 7B, {_LLMQ}: 0.5B to 7B have 0.73-0.78; low by what other software reaches of it on an RTX "
        "4090",
    )
)
_RTX_4090_SHARES = _shares(
    PeakShare(
        share=1.08,
        low=0.78,
        high=1.17,
        source=f"Qwen2.5 1.5B, {_LLMQ}: 0.5B to 7B have 0.95-1.15, with LLaMA-Factory 0.8-1.0",
    ),
    PeakShare(share=0.65, low=0.6, high=0.67, source="50-55 of 82.6 TFLOP/s: mli/transformers-benchmarks #4"),
)
_A100_FLOPS = _tflops(19.5, 9.7, 312)
_H100_FLOPS = _tflops(67, 34, 989)
_A100_40G = Chip(
    memory_mib=40960,
    memory_bytes_per_s=1555e9,
    flops_per_s=_A100_FLOPS,
    source=f"NVIDIA A100 SXM 40GB data sheet; {_SMI}",
    shares=_A100_SHARES,
)
_A100_80G = Chip(
    memory_mib=81920,
    memory_bytes_per_s=2039e9,
    flops_per_s=_A100_FLOPS,
    source=f"NVIDIA A100 SXM 80GB data sheet; {_SMI}",
    shares=_A100_SHARES,
)
_H100_80G = Chip(
    memory_mib=81559,
    memory_bytes_per_s=3350e9,
    flops_per_s=_H100_FLOPS,
    source=f"NVIDIA H100 SXM data sheet, half of the rates with sparsity; {_SMI}",
    shares=_H100_SHARES,
)
_H100_PCIE_80G = Chip(
    memory_mib=81559,
    memory_bytes_per_s=2000e9,
    flops_per_s=_tflops(51, 26, 756),
    source=f"NVIDIA H100 PCIe data sheet, half of the rates with sparsity; {_SMI}",
)
_H100_NVL_94G = Chip(
    memory_mib=95830,
    memory_bytes_per_s=3900e9,
    flops_per_s=_tflops(60, 30, 835),
    source=f"NVIDIA H100 NVL data sheet, half of the rates with sparsity; {_SMI}",
)
_H200_141G = Chip(
    memory_mib=143771,
    memory_bytes_per_s=4800e9,
    flops_per_s=_H100_FLOPS,
    source=f"NVIDIA H200 SXM data sheet, half of the rates with sparsity; {_SMI}",
    shares=_H100_SHARES,
)
_GH200 = Chip(
    memory_mib=97871,
    memory_bytes_per_s=4000e9,
    flops_per_s=_H100_FLOPS,
    source=f"NVIDIA GH200 data sheet, 96 GB HBM3, half of the rates with sparsity; {_SMI}",
    shares=_H100_SHARES,
)
# The white papers of GeForce chips give float64 as 1/64 of float32.
_RTX_3090 = Chip(
    memory_mib=24576,
    memory_bytes_per_s=936e9,
    flops_per_s=_tflops(35.6, 35.6 / 64, 71),
    source=f"NVIDIA Ampere GA102 white paper, GeForce RTX 3090; {_SMI}",
)
_RTX_4090 = Chip(
    memory_mib=24564,
    memory_bytes_per_s=1008e9,
    flops_per_s=_tflops(82.6, 82.6 / 64, 165.2),
    source=f"NVIDIA Ada white paper, GeForce RTX 4090; {_SMI}",
    shares=_RTX_4090_SHARES,
)
# Of the 16,384 lanes of an RTX 4090, at the same clock, this chip has 14,592.
_RTX_4090D = Chip(
    memory_mib=24564,
    memory_bytes_per_s=1008e9,
    flops_per_s=_tflops(73.5, 73.5 / 64, 147.1),
    source=f"NVIDIA GeForce RTX 4090 D specifications, rates as those of the RTX 4090 by lanes; {_SMI}",
    shares=_RTX_4090_SHARES,
)
_RTX_5090 = Chip(
    memory_mib=32607,
    memory_bytes_per_s=1792e9,
    flops_per_s=_tflops(104.8, 104.8 / 64, 209.5),
    source=f"NVIDIA RTX Blackwell white paper, GeForce RTX 5090; {_SMI}",
    shares=_shares(
        PeakShare(
            share=1.02,
            low=0.73,
            high=1.22,
            source=f"Qwen2.5 1.5B on four, {_LLMQ}: 0.5B and 1.5B have 1.02-1.19; low as for an RTX 4090",
        ),
        PeakShare(
            share=0.65, low=0.61, high=0.67, source="65-69 of 104.8 TFLOP/s: zzc0721/torch-performance-test-data #15"
        ),
    ),
)
_RTX_PRO_6000 = Chip(
    memory_mib=97887,
    memory_bytes_per_s=1597e9,
    flops_per_s=_tflops(120, 120 / 64, 504),
    source=f"NVIDIA RTX PRO 6000 Blackwell Server Edition data sheet; the rate of 16 bits as in the {_LLMQ}; {_SMI}",
    shares=_shares(
        PeakShare(
            share=0.82,
            low=0.62,
            high=0.97,
            source=f"Qwen2.5 7B, {_LLMQ}: 0.5B to 7B have 0.79-0.95; low as for an H100",
        )
    ),
)
_B200_180G = Chip(
    memory_mib=183359,
    memory_bytes_per_s=8000e9,
    flops_per_s=_tflops(75, 37, 2250),
    source=f"NVIDIA HGX B200 data sheet, an eighth of the board; {_SMI}",
    shares=_shares(
        PeakShare(
            share=0.5,
            low=0.32,
            high=0.78,
            source="assumed: ml-engineering by S. Bekman has 0.32-0.38 with ZeRO-3 and 64K tokens, 0.78 of a product",
        )
    ),
)
_MI300X_192G = Chip(
    memory_mib=196592,
    memory_bytes_per_s=5300e9,
    flops_per_s=_tflops(163.4, 81.7, 1307),
    source="AMD Instinct MI300X data sheet, vector rates of float32 and float64; memory as amd-smi prints it",
    shares=_shares(
        PeakShare(
            share=0.45,
            low=0.25,
            high=0.6,
            source="assumed: products in ml-engineering by S. Bekman have 0.51-0.60; an H100 trains at nine tenths",
        )
    ),
)
_L40S = Chip(
    memory_mib=46068,
    memory_bytes_per_s=864e9,
    flops_per_s=_tflops(91.6, 91.6 / 64, 362),
    source=f"NVIDIA L40S data sheet, half of the rates with sparsity, float64 as 1/64 of float32; {_SMI}",
    shares=_shares(
        PeakShare(
            share=0.64,
            low=0.48,
            high=0.68,
            source=f"Qwen2.5 3B, {_LLMQ}: 0.5B to 3B have 0.60-0.66; low as for an H100",
        )
    ),
)
_L4 = Chip(
    memory_mib=23034,
    memory_bytes_per_s=300e9,
    flops_per_s=_tflops(30.3, 30.3 / 64, 121),
    source=f"NVIDIA L4 data sheet, half of the rates with sparsity, float64 as 1/64 of float32; {_SMI}",
)
# The data sheets of the following chips give dense rates.
_A6000 = Chip(
    memory_mib=49140,
    memory_bytes_per_s=768e9,
    flops_per_s=_tflops(38.7, 38.7 / 64, 154.8),
    source=f"NVIDIA RTX A6000 data sheet, half of the rates with sparsity, float64 as 1/64 of float32; {_SMI}",
)
_A10G = Chip(
    memory_mib=23028,
    memory_bytes_per_s=600e9,
    flops_per_s=_tflops(35, 35 / 64, 70),
    source=f"NVIDIA A10G data sheet, float64 as 1/64 of float32; {_SMI}",
)
_P40 = Chip(
    memory_mib=23040,
    memory_bytes_per_s=346e9,
    # Pascal GP102 computes float16 at 1/64 and float64 at 1/32 of float32.
    flops_per_s=_tflops(12, 12 / 32, 12 / 64, has_bfloat16=False),
    source=f"NVIDIA Tesla P40 data sheet; float16 and float64 by CUDA's table of throughput for capability 6.1; {_SMI}",
)
_P100_16G = Chip(
    memory_mib=16384,
    memory_bytes_per_s=732e9,
    flops_per_s=_tflops(9.3, 4.7, 18.7, has_bfloat16=False),
    source=f"NVIDIA Tesla P100 PCIe 16GB data sheet; {_SMI}",
)
_T4 = Chip(
    memory_mib=15360,
    memory_bytes_per_s=320e9,
    flops_per_s=_tflops(8.1, 8.1 / 32, 65, has_bfloat16=False),
    source=f"NVIDIA T4 data sheet, float64 as 1/32 of float32; {_SMI}",
)
_V100_FLOPS = _tflops(15.7, 7.8, 125, has_bfloat16=False)
_V100_16G = Chip(
    memory_mib=16384,
    memory_bytes_per_s=900e9,
    flops_per_s=_V100_FLOPS,
    source=f"NVIDIA V100 SXM2 16GB data sheet; {_SMI}",
)
_V100_32G = Chip(
    memory_mib=32768,
    memory_bytes_per_s=900e9,
    flops_per_s=_V100_FLOPS,
    source=f"NVIDIA V100 SXM2 32GB data sheet; {_SMI}",
)


def _dgx_a100(chip: Chip, board: Board) -> Machine:
    return Machine(chip=chip, board=board, lane=_PCIE_4, peer=_NVLINK_3, network=_HDR, has_papers_rates=True)


def _pcie(chip: Chip, board: Board, lane: Wire) -> Machine:
    """Return a machine whose devices reach each other over PCI Express, with a network adapter for all of them."""
    return Machine(chip=chip, board=board, lane=lane, peer=lane, network=_ETHERNET, has_adapter_per_device=False)


def _cloud_v100(chip: Chip, board: Board) -> Machine:
    return Machine(
        chip=chip, board=board, lane=_PCIE_3, peer=_NVLINK_2, network=_ETHERNET, has_adapter_per_device=False
    )


def _geforce(chip: Chip, board: Board, lane: Wire, desktop: Board) -> Machine:
    """Return a machine whose devices have no peer access, as a server; with few bytes of host memory, a `desktop`."""
    return Machine(
        chip=chip,
        board=board,
        lane=lane,
        peer=lane,
        network=_ETHERNET,
        bounces=True,
        has_adapter_per_device=False,
        desktop=desktop,
    )


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
        "a100-40g": _dgx_a100(_A100_40G, _DGX_A100_320),
        "a100-80g": _dgx_a100(_A100_80G, _DGX_A100_640),
        "a10g-24g": _pcie(_A10G, _CLOUD_A10G, _PCIE_4),
        "a6000-48g": _pcie(_A6000, _EPYC_DDR4, _PCIE_4),
        "b200-180g": Machine(chip=_B200_180G, board=_DGX_B200, lane=_PCIE_5, peer=_NVLINK_5, network=_NDR),
        "gh200": Machine(chip=_GH200, board=_GRACE, lane=_C2C, peer=_NVLINK_4, network=_NDR_GRACE),
        "h100-80g": Machine(chip=_H100_80G, board=_DGX_H100, lane=_PCIE_5, peer=_NVLINK_4, network=_NDR),
        "h100nvl-94g": _pcie(_H100_NVL_94G, _EPYC_DDR5, _PCIE_5),
        "h100pcie-80g": _pcie(_H100_PCIE_80G, _EPYC_DDR5, _PCIE_5),
        "h200-141g": Machine(chip=_H200_141G, board=_DGX_H100, lane=_PCIE_5, peer=_NVLINK_4, network=_NDR),
        "l4-24g": _pcie(_L4, _CLOUD_L4, _PCIE_4),
        "l40s-48g": _pcie(_L40S, _CLOUD_L40S, _PCIE_4),
        "mi300x-192g": Machine(chip=_MI300X_192G, board=_CLOUD_MI300X, lane=_PCIE_5, peer=_INFINITY, network=_NDR),
        "p100-16g": _pcie(_P100_16G, _XEON_DDR4, _PCIE_3),
        "p40-24g": _pcie(_P40, _XEON_DDR4, _PCIE_3),
        "rtx3090-24g": _geforce(_RTX_3090, _EPYC_DDR4, _PCIE_4, _DESKTOP_DDR4),
        "rtx4090-24g": _geforce(_RTX_4090, _EPYC_DDR4, _PCIE_4, _DESKTOP_DDR4),
        "rtx4090d-24g": _geforce(_RTX_4090D, _EPYC_DDR4, _PCIE_4, _DESKTOP_DDR4),
        "rtx5090-32g": _geforce(_RTX_5090, _EPYC_DDR5, _PCIE_5, _DESKTOP_DDR5),
        "rtxpro6000-96g": _pcie(_RTX_PRO_6000, _EPYC_DDR5, _PCIE_5),
        "t4-16g": _pcie(_T4, _CLOUD_T4, _PCIE_3),
        "v100-16g": _cloud_v100(_V100_16G, _CLOUD_V100),
        "v100-32g": _cloud_v100(_V100_32G, _CLOUD_V100_32G),
    }
)
"""In alphabetical order."""
