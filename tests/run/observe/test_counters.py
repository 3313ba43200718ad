"""Counters of the machine: what the host tells, and a made-up NVML with wraps, missing figures and errors."""

import logging
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from elixir_compile.tools.measure.memory import GpuCounters, gpu_counters
from elixir_compile.tools.measure.observation import CounterThread, HostCounters

UUID = "GPU-8f6e"
UINT, ULONGLONG = 1, 3
NEVER = ("nvmlDeviceGetPcieThroughput", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")


class NvmlError(Exception):
    """An error of the made-up NVML."""


class Nvml:
    """A made-up `pynvml` with one GPU, whose link has moved `tx` and `rx` bytes."""

    NVMLError = NvmlError
    NVML_SUCCESS = 0
    NVML_FI_DEV_POWER_INSTANT = 186
    NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
    NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2
    NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
    NVML_GPM_METRIC_DRAM_BW_UTIL = 10
    nvmlMemory_v2 = 2  # noqa: N815 - the name of NVML

    def __init__(self, *, kind: int = ULONGLONG) -> None:
        self.tx, self.rx, self.kind = 0, 0, kind
        self.energy_mj = 5000
        self.fails: dict[str, str] = {}
        self.field_error = 0
        self.asked: list[str] = []
        self.is_open = False
        self.has_gpm = False
        self.num_samples = 0
        """GPM samples that were made and not freed."""
        self.clock = 0

    def c_nvmlGpmMetricsGet_t(self) -> Any:  # noqa: N802 - the name of NVML
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)])

    def __getattr__(self, name: str) -> Any:
        """Answer each function of NVML, and note that it was called."""
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*arguments: Any, **_: Any) -> Any:
            self.asked.append(name)
            if name in self.fails:
                raise NvmlError(self.fails[name])
            return self._answer(name, arguments)

        return answer

    def _answer(self, name: str, arguments: Any) -> Any:
        if name in ("nvmlInit", "nvmlShutdown"):
            self.is_open = name == "nvmlInit"
            return None
        if name == "nvmlDeviceGetHandleByUUID":
            if arguments[0] != UUID:
                raise NvmlError("Not Found")
            return "handle"
        if name.startswith("nvmlGpm"):
            return self._gpm(name, arguments)
        if name == "nvmlDeviceGetFieldValues":
            return [self._field(number) for number in arguments[1]]
        return {
            "nvmlDeviceGetCurrPcieLinkGeneration": 4,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetTotalEnergyConsumption": self.energy_mj,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75, memory=10),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=7 << 30),
            "nvmlDeviceGetCurrentClocksEventReasons": 4,
        }[name]

    def _gpm(self, name: str, arguments: Any) -> Any:
        """Answer with percentages that are the time between the samples, plus the number of the metric."""
        self.clock += name == "nvmlGpmSampleGet"
        if name == "nvmlGpmQueryDeviceSupport":
            return SimpleNamespace(isSupportedDevice=int(self.has_gpm))
        if name == "nvmlGpmSampleAlloc":
            self.num_samples += 1
            return SimpleNamespace(at=None)
        if name == "nvmlGpmSampleGet":
            arguments[1].at = self.clock
        elif name == "nvmlGpmSampleFree":
            self.num_samples -= 1
        else:
            asked = arguments[0]
            for metric in asked.metrics[: asked.numMetrics]:
                metric.value = float(asked.sample2.at - asked.sample1.at + metric.metricId)
                metric.nvmlReturn = 3 if metric.metricId == 5 else 0
        return None

    def _field(self, number: int) -> Any:
        value = {186: 350_000, 197: self.tx, 198: self.rx}[number]
        kind = UINT if number == 186 else self.kind
        held = SimpleNamespace(uiVal=value % (1 << 32) if kind == UINT else -1, ullVal=value)
        return SimpleNamespace(
            nvmlReturn=self.field_error if number != 186 else 0, valueType=kind, value=held, fieldId=number
        )


def test_figures_have_units_and_rates_are_of_two_readings() -> None:
    nvml = Nvml()
    gpu = GpuCounters(nvml, UUID)
    first = gpu.read(10.0)
    assert first["link_tx_bytes_per_s"] is None
    nvml.tx, nvml.rx, nvml.energy_mj = 20 << 30, 1 << 30, 6000
    later = gpu.read(10.5)
    assert later == {
        "device_used_bytes": 7 << 30, "device_busy_share": 0.75, "device_power_w": 350.0, "device_energy_j": 6.0,
        "device_clock_reasons": 4, "link_generation": 4, "link_width": 8, "link_most_width": 16,
        "device_sm_share": None, "device_tensor_share": None, "device_dram_share": None,
        "link_tx_bytes_per_s": 40 << 30, "link_rx_bytes_per_s": 2 << 30,
    }  # fmt: skip
    gpu.close()
    assert not nvml.is_open
    assert not set(NEVER) & set(nvml.asked)
    assert nvml.asked.count("nvmlDeviceGetMaxPcieLinkWidth") == 1, "the slot stays what it is"


def test_exact_shares_are_means_between_two_readings_until_the_driver_stops_to_tell_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    nvml = Nvml()
    nvml.has_gpm = True
    gpu = GpuCounters(nvml, UUID)

    def shares(now_s: float) -> list[float | None]:
        found = gpu.read(now_s)
        return [found[name] for name in ("device_sm_share", "device_tensor_share", "device_dram_share")]

    assert shares(0.0) == [None] * 3, "a mean needs two samples"
    for second in (1.0, 2.0):
        assert shares(second) == [0.03, None, 0.11]
    nvml.fails = {"nvmlGpmSampleGet": "Unknown Error"}
    assert shares(3.0) == [None] * 3
    assert [line for line in caplog.messages if "GPM" in line] == [
        "NVML tells no GPM figures of this GPU: Unknown Error"
    ]
    gpu.read(4.0)
    gpu.close()
    assert (nvml.num_samples, nvml.is_open) == (0, False)


def test_a_counter_of_32_bits_may_wrap_once_and_is_unknown_if_it_may_wrap_twice() -> None:
    nvml = Nvml(kind=UINT)
    nvml.tx = (1 << 32) - 1000
    gpu = GpuCounters(nvml, UUID)
    gpu.read(0.0)
    nvml.tx += 3000
    # 8 lanes of generation 4 move at most 15.8 GB/s: 2^32 bytes in 0.273 s.
    assert gpu.read(0.1)["link_tx_bytes_per_s"] == pytest.approx(3000 / 0.1)
    nvml.tx += 3000
    assert gpu.read(0.4)["link_tx_bytes_per_s"] is None
    nvml.tx += 3000
    assert gpu.read(0.5)["link_tx_bytes_per_s"] == pytest.approx(3000 / 0.1), "the next reading is known again"


def test_what_is_not_supported_is_none_with_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    nvml = Nvml()
    nvml.fails = {"nvmlDeviceGetTotalEnergyConsumption": "Not Supported"}
    nvml.field_error = 3
    gpu = GpuCounters(nvml, UUID)
    for second in range(3):
        found = gpu.read(float(second))
        assert found["device_energy_j"] is found["link_tx_bytes_per_s"] is found["link_rx_bytes_per_s"] is None
        assert found["device_power_w"] == 350.0
    assert nvml.asked.count("nvmlDeviceGetTotalEnergyConsumption") == 1, "what failed once is not asked again"
    assert sum("device_energy_j" in line for line in caplog.messages) == 1
    assert sum("link_tx" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("fault", ["no library", "no driver", "no such device"])
def test_without_nvml_there_is_one_line_and_no_figure(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    nvml = Nvml()
    if fault == "no driver":
        nvml.fails = {"nvmlInit": "Driver Not Loaded"}
    monkeypatch.setitem(sys.modules, "pynvml", None if fault == "no library" else nvml)
    assert gpu_counters("GPU-other" if fault == "no such device" else UUID) is None
    assert len(caplog.messages) == 1
    assert "no counters of the device" in caplog.messages[0]


def test_the_thread_samples_until_it_is_stopped_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    known: list[str] = []
    before = threading.active_count()
    began_s = time.perf_counter()
    thread = CounterThread(200.0, lambda: known[0] if known else None)
    while not thread.between(began_s, time.perf_counter()):
        time.sleep(0.005)
    known.append(UUID)  # the device of the model is known once it has run
    while thread.mean("device_busy_share", began_s, time.perf_counter()) is None:
        time.sleep(0.005)
    time.sleep(0.03)
    nvml.energy_mj += 4000
    time.sleep(0.05)
    thread.stop()
    assert threading.active_count() == before
    assert not nvml.is_open
    counters = thread.between(began_s, time.perf_counter())
    assert counters is not None
    assert counters.values["device_busy_share"][0] is None
    assert counters.values["device_busy_share"][-1] == 0.75
    assert counters.values["process_rss_bytes"][-1]
    assert thread.mean("device_busy_share", began_s, time.perf_counter()) == 0.75
    energies_j = zip(counters.at_s, counters.values["device_energy_j"], strict=True)
    known_s = [began_s + at_s for at_s, energy_j in energies_j if energy_j is not None]
    assert thread.difference("device_energy_j", known_s[1], known_s[-1]) == pytest.approx(4.0)
    assert thread.difference("device_energy_j", known_s[1], time.perf_counter()) is None, "no sample is later"


def test_an_error_in_the_thread_ends_the_counters_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: HostCounters) -> Any:
        raise KeyError("mine")

    monkeypatch.setattr(HostCounters, "read", fail)
    thread = CounterThread(5.0, lambda: None)
    thread.stop()
    assert thread.between(0.0, time.perf_counter()) is None
    assert any("no more counters" in line for line in caplog.messages)


def test_the_host_tells_bytes_and_seconds() -> None:
    found = HostCounters().read()
    assert found["process_rss_bytes"] > 1 << 20
    assert found["process_cpu_s"] > 0
    assert found["host_slab_bytes"] is not None
