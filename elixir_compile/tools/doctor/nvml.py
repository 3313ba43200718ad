"""Ask NVML, by the module `pynvml`, for the state of a GPU."""

import importlib
from collections.abc import Mapping
from typing import Any

from elixir_compile.tools.doctor.values import GpuState

_SLOWED_BY = {
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwThermalSlowdown": "heat",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "the power supply",
}
_CAPPED_BY = {
    "nvmlClocksEventReasonApplicationsClocksSetting": "application clocks",
    "nvmlClocksEventReasonSwPowerCap": "the power limit",
}


class Gpu:
    """A GPU as NVML knows it. NVML stays initialised until `close`."""

    def __init__(self, nvml: Any, address: str) -> None:
        """Initialise `nvml`, the module `pynvml`; raises its `NVMLError` if it knows no GPU at the PCI `address`."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByPciBusId(address)

    def close(self) -> None:
        """End the use of NVML."""
        self._nvml.nvmlShutdown()

    def used_bytes(self) -> int | None:
        """Return the bytes that processes hold on the GPU; None if it does not tell."""
        # The first version of the call also counts the bytes that the driver reserves for itself.
        found = self._ask("nvmlDeviceGetMemoryInfo", version=self._nvml.nvmlMemory_v2)
        return None if found is None else int(found.used)

    def state(self, others_bytes: int | None) -> GpuState:
        """Return the state now, called while a copy runs, because idle links and idle clocks are slow.

        `others_bytes` are the bytes that other processes hold.
        """
        reasons = int(self._ask("nvmlDeviceGetCurrentClocksEventReasons") or 0)
        mig = self._ask("nvmlDeviceGetMigMode")
        return GpuState(
            link=self._link("Curr"),
            most_link=self._link("Max"),
            slowed_by=self._texts(reasons, _SLOWED_BY),
            capped_by=self._texts(reasons, _CAPPED_BY),
            is_mig=mig is not None and bool(mig[0]),
            others_bytes=others_bytes,
        )

    def _link(self, which: str) -> tuple[int, int] | None:
        """Return generation and lanes of the PCIe link; `which` is `Curr` or `Max`, as in the names of NVML."""
        generation, width = (self._ask(f"nvmlDeviceGet{which}PcieLink{figure}") for figure in ("Generation", "Width"))
        return None if generation is None or width is None else (int(generation), int(width))

    def _texts(self, reasons: int, texts: Mapping[str, str]) -> tuple[str, ...]:
        """Return the text of each reason whose bit is set in `reasons`, each text once."""
        found = (text for name, text in texts.items() if reasons & getattr(self._nvml, name))
        return tuple(dict.fromkeys(found))

    def _ask(self, function: str, **arguments: Any) -> Any:
        """Return the result of a call of NVML; None if the GPU or its driver does not support the question."""
        try:
            return getattr(self._nvml, function)(self._handle, **arguments)
        except self._nvml.NVMLError:
            return None


def gpu_at(address: str) -> Gpu | str:
    """Return the GPU at the PCI `address`, or the reason why NVML does not tell about it."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError as error:
        return f"NVML cannot be asked: {error}"
    try:
        return Gpu(nvml, address)
    except nvml.NVMLError as error:
        return f"NVML does not answer: {error}"
