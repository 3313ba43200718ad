"""Counters of a GPU by NVML, the module `pynvml`: memory, power, energy, and bytes over the PCIe link.

Only calls that take less than a millisecond and need no privilege are made. NVML's `nvmlDeviceGetPcieThroughput` blocks
for 21 ms in each direction and its lists of processes take 4.5 ms, so neither is asked.
"""

import importlib
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger("elixir_compile")

_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
"""Bytes per second of one PCIe lane in one direction, by generation."""
_WRAP = {1: 1 << 32}
"""By NVML's type of a value, the number at which a counter starts again: 2^32 for an unsigned int."""


_METRICS = {
    "device_sm_share": "NVML_GPM_METRIC_SM_UTIL",
    "device_tensor_share": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "device_dram_share": "NVML_GPM_METRIC_DRAM_BW_UTIL",
}
"""Exact means between two samples on Hopper and newer, with NVML's names: shares of the time in which multiprocessors
and tensor cores work, and of the rate of the device's memory."""


class _Metrics:
    """NVML's GPM figures of a GPU, as means since the reading before."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        """Raises an `NVMLError`, or AttributeError with an old `pynvml`, if the GPU has none."""
        self._nvml = nvml
        self._handle = handle
        self._samples: list[Any] = []
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise AttributeError("the GPU has no GPM, which begins with Hopper")
        for _ in range(2):
            self._samples.append(nvml.nvmlGpmSampleAlloc())
        nvml.nvmlGpmSampleGet(handle, self._samples[0])

    def close(self) -> None:
        """Free the samples."""
        while self._samples:
            self._nvml.nvmlGpmSampleFree(self._samples.pop())

    def read(self) -> dict[str, float | None]:
        """Return the figures since the last call; raises an `NVMLError` if the driver stops to tell them."""
        nvml, (before, now) = self._nvml, self._samples
        nvml.nvmlGpmSampleGet(self._handle, now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(_METRICS)
        asked.sample1, asked.sample2 = before, now
        for place, name in enumerate(_METRICS.values()):
            asked.metrics[place].metricId = getattr(nvml, name)
        nvml.nvmlGpmMetricsGet(asked)
        self._samples = [now, before]
        known = [asked.metrics[place] for place in range(len(_METRICS))]
        return {
            name: metric.value / 100 if metric.nvmlReturn == nvml.NVML_SUCCESS else None
            for name, metric in zip(_METRICS, known, strict=True)
        }


class GpuCounters:
    """The counters of one GPU; all calls must come from one thread."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """Use `nvml`, the module `pynvml`, for the GPU with `uuid`. Raises its `NVMLError` if there is none."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._is_missing: set[str] = set()
        self._most_width: float | None = None
        self._metrics: _Metrics | None = None
        self._linked: dict[str, tuple[float, int]] = {}
        """By direction, the time and the value of the last reading of the counter of bytes."""

    def close(self) -> None:
        """End the use of NVML."""
        if self._metrics is not None:
            self._metrics.close()
        self._nvml.nvmlShutdown()

    def read(self, now_s: float) -> dict[str, float | None]:
        """Return the figures at `now_s`, None for each that the GPU does not tell."""
        ask, nvml = self._ask, self._nvml
        generation = ask("link_generation", lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(self._handle))
        width = ask("link_width", lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(self._handle))
        energy_mj = ask("device_energy_j", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        busy_percent = ask("device_busy_share", lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
        if self._most_width is None:  # it does not change
            self._most_width = ask("link_most_width", lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(self._handle))
        found: dict[str, float | None] = {
            "device_used_bytes": ask("device_used_bytes", self._used_bytes),
            "device_busy_share": None if busy_percent is None else busy_percent / 100,
            "device_energy_j": None if energy_mj is None else energy_mj / 1e3,
            "device_clock_reasons": ask(
                "device_clock_reasons", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle)
            ),
            "link_generation": generation,
            "link_width": width,
            "link_most_width": self._most_width,
        }
        most_per_s = _LANE_BYTES_PER_S.get(int(generation or 0), max(_LANE_BYTES_PER_S.values())) * (width or 16)
        return found | self._fields(now_s, most_per_s) | self._means()

    def _means(self) -> dict[str, float | None]:
        """Return the GPM figures since the last reading; None for each in the first, and if the GPU has none."""
        if self._metrics is None:
            self._metrics = self._ask("GPM figures", lambda: _Metrics(self._nvml, self._handle))
            return dict.fromkeys(_METRICS)
        return self._ask("GPM figures", self._metrics.read) or dict.fromkeys(_METRICS)

    def _used_bytes(self) -> float:
        # The first version of the call also counts the bytes that the driver reserves for itself.
        return self._nvml.nvmlDeviceGetMemoryInfo(self._handle, version=self._nvml.nvmlMemory_v2).used

    def _fields(self, now_s: float, most_per_s: float) -> dict[str, float | None]:
        """Return power and the rates of the link, of one call; `most_per_s` is the rate that the link cannot exceed."""
        nvml = self._nvml
        power = nvml.NVML_FI_DEV_POWER_INSTANT
        directions = {
            "link_tx_bytes_per_s": nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,
            "link_rx_bytes_per_s": nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,
        }
        names = {"device_power_w": power, **directions}
        values = self._ask("fields", lambda: nvml.nvmlDeviceGetFieldValues(self._handle, list(names.values())))
        found: dict[str, float | None] = dict.fromkeys(names)
        for name, value in zip(names, () if values is None else values, strict=False):
            if value.nvmlReturn != nvml.NVML_SUCCESS:
                self._note_missing(name, f"error {value.nvmlReturn}")
            elif name in directions:
                found[name] = self._rate(name, now_s, _number(value), _WRAP.get(value.valueType), most_per_s)
            else:
                found[name] = _number(value) / 1e3
        return found

    def _rate(self, name: str, now_s: float, count: int, wrap: int | None, most_per_s: float) -> float | None:
        """Return bytes per second since the last reading; None for the first, and if the counter may have passed
        `wrap` more than once since."""
        before, self._linked[name] = self._linked.get(name), (now_s, count)
        if before is None or now_s <= before[0]:
            return None
        seconds_s, moved_bytes = now_s - before[0], count - before[1]
        if wrap is not None:
            if seconds_s * most_per_s >= wrap:
                return None
            moved_bytes %= wrap
        return moved_bytes / seconds_s if moved_bytes >= 0 else None

    def _ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return the answer of NVML; None if the GPU or its driver does not support the question."""
        if name in self._is_missing:
            return None
        try:
            return question()
        except (self._nvml.NVMLError, AttributeError) as error:  # an old `pynvml` lacks a function
            self._note_missing(name, str(error))
            return None

    def _note_missing(self, name: str, why: str) -> None:
        if name not in self._is_missing:
            self._is_missing.add(name)
            log.info("NVML tells no %s of this GPU: %s", name, why)


def _number(value: Any) -> int:
    """Return the content of a field value of NVML, a union of types."""
    member = {1: "uiVal", 2: "ulVal", 3: "ullVal"}.get(value.valueType, "ullVal")
    return int(getattr(value.value, member))


def gpu_counters(uuid: str) -> GpuCounters | None:
    """Return the counters of the GPU with `uuid`; None, with one line in the log, if NVML does not tell of it."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        log.info("no counters of the device: %s", error)
        return None
    try:
        return GpuCounters(nvml, uuid)
    except nvml.NVMLError as error:
        log.info("no counters of the device: NVML says %s", error)
        return None
