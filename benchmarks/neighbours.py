"""The load from other processes: figures from a shared machine count only if other processes are nearly idle."""

import time

import psutil

QUIET_CORES = 0.25
WINDOW_S = 0.1


class Neighbours:
    """Counts cores in use by other processes: the system's counters less this process's own, in ticks of 10 ms."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._seen = self._read()

    def _read(self) -> tuple[float, float]:
        times, own = psutil.cpu_times(), self._process.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        return time.perf_counter(), sum(times[:8]) - idle_s - own.user - own.system

    def busy_cores(self) -> float:
        """Return the mean number of cores in use by other processes since the last call."""
        (then_s, before_s), self._seen = self._seen, self._read()
        now_s, after_s = self._seen
        return (after_s - before_s) / max(now_s - then_s, 1e-3)

    def wait(self, at_most_s: float) -> None:
        """Return once other processes were quiet for `WINDOW_S` seconds, or after `at_most_s` seconds."""
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < at_most_s:
            self.busy_cores()
            time.sleep(WINDOW_S)
            if self.busy_cores() < QUIET_CORES:
                return
