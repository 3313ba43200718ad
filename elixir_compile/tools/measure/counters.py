"""Read counters of the machine beside a run: one thread, a few times per second.

```text
  process   resident bytes, CPU seconds, page faults, slabs      psutil, getrusage
  group     bytes of the control group                           memory.current
  device    memory, power, energy, link                          NVML, if there is a GPU
```

Figures that the machine does not tell are None.
"""

import bisect
import logging
import resource
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from elixir_compile.base.control_groups import GROUPS, MEMBERSHIPS, group_folders, text_of
from elixir_compile.runtime.slab import live_slab_bytes
from elixir_compile.tools.measure.nvml import GpuCounters, gpu_counters
from elixir_compile.tools.study.observed import Counters

log = logging.getLogger("elixir_compile")

_MOST_SAMPLES = 4096
"""The most samples that are kept, 13 minutes at 5 per second; at least half of them are."""
Sample = tuple[float, Mapping[str, float | None]]


class HostCounters:
    """The counters of this process and of its control group."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._group_file = _group_file()

    def read(self) -> dict[str, float | None]:
        """Return the figures now; seconds and counts are those since the process began."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        group = "" if self._group_file is None else text_of(self._group_file)
        return {
            "process_rss_bytes": self._process.memory_info().rss,
            "process_cpu_s": usage.ru_utime + usage.ru_stime,
            "process_num_major_faults": usage.ru_majflt,
            "process_num_forced_switches": usage.ru_nivcsw,
            "host_slab_bytes": live_slab_bytes(),
            "group_memory_bytes": int(group) if group.isdecimal() else None,
        }


def _group_file() -> Path | None:
    names = {1: "memory.usage_in_bytes", 2: "memory.current"}
    found = (folder / names[version] for folder, version in group_folders(MEMBERSHIPS, GROUPS, "memory"))
    return next((path for path in found if path.is_file()), None)


class _Samples:
    """The last samples in order of their times. One thread adds, others read.

    Each step of an observed run asks for the samples of its time, so these are found by bisection: after 13 minutes a
    look at each of them took 0.4 ms.
    """

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add a sample later than all others; drop the oldest half if there are too many."""
        self._samples.append(sample)
        if len(self._samples) > _MOST_SAMPLES:
            self._samples = self._samples[_MOST_SAMPLES // 2 :]  # a new list: a reader keeps the one that it reads

    def between(self, start_s: float, end_s: float) -> Sequence[Sample]:
        """Return the samples from `start_s` to `end_s`."""
        samples = self._samples
        first = bisect.bisect_left(samples, start_s, key=_time_of)
        return samples[first : bisect.bisect_right(samples, end_s, lo=first, key=_time_of)]

    def around(self, time_s: float) -> tuple[Sample, Sample] | None:
        """Return the last sample before `time_s` and the first that is not; None if there is none on one side."""
        samples = self._samples
        after = bisect.bisect_left(samples, time_s, key=_time_of)
        return None if after in (0, len(samples)) else (samples[after - 1], samples[after])


def _time_of(sample: Sample) -> float:
    return sample[0]


class CounterThread:
    """A thread that samples the counters of this process, and of a GPU if there is one, until `stop`."""

    def __init__(self, per_s: float, uuid: Callable[[], str | None]) -> None:
        """`uuid` returns the number of the GPU; it is asked on the thread, before each sample until it knows one."""
        self._period_s = 1 / per_s
        self._uuid = uuid
        self._samples = _Samples()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="elixir counters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample, and end the thread."""
        self._ends.set()
        self._thread.join()

    def between(self, start_s: float, end_s: float) -> Counters | None:
        """Return the samples from `start_s` to `end_s` of `time.perf_counter`, with times counted from `start_s`; None
        if there are none."""
        found = self._samples.between(start_s, end_s)
        if not found:
            return None
        names = sorted({name for _, values in found for name in values})
        columns = {name: tuple(values.get(name) for _, values in found) for name in names}
        return Counters(at_s=tuple(at_s - start_s for at_s, _ in found), values=columns)

    def difference(self, name: str, start_s: float, end_s: float) -> float | None:
        """Return by how much the counter `name` grew between two times, on a line between its samples; None if it is
        not known at one of them."""
        first, last = (self._at(name, time_s) for time_s in (start_s, end_s))
        return None if first is None or last is None else last - first

    def mean(self, name: str, start_s: float, end_s: float) -> float | None:
        """Return the mean of the samples of `name` between two times; None if there is none."""
        found = (values.get(name) for _, values in self._samples.between(start_s, end_s))
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else None

    def _at(self, name: str, time_s: float) -> float | None:
        around = self._samples.around(time_s)
        if around is None:
            return None
        (before_s, before), (after_s, later) = around
        first, last = before.get(name), later.get(name)
        if first is None or last is None:
            return None
        return first + (last - first) * (time_s - before_s) / (after_s - before_s)

    def _work(self) -> None:
        host = HostCounters()
        gpu: GpuCounters | None = None
        is_looked_for = False
        try:
            while True:
                is_last = self._ends.is_set()
                if not is_looked_for and (uuid := self._uuid()) is not None:
                    is_looked_for, gpu = True, gpu_counters(uuid)
                now_s = time.perf_counter()
                self._samples.add((now_s, host.read() | ({} if gpu is None else gpu.read(now_s))))
                if is_last:
                    return
                self._ends.wait(self._period_s)
        except Exception:  # a counter must not end the training that it looks at
            log.exception("no more counters of the machine are read")
        finally:
            if gpu is not None:
                gpu.close()
