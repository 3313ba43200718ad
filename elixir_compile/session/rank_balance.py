"""The seconds in which each rank computes, exchanged once after the first steps.

The step takes as long on every rank, since ranks wait for each other; what a rank computes tells how fast it is.
"""

from collections.abc import Sequence

from elixir_compile.ir import Lane, StepGraph
from elixir_compile.ir.hardware import DeviceProfile
from elixir_compile.ir.record import Span
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.search.joint.balance import balance_line, balanced_rows, fixed_share


class RankBalance:
    """Keeps the seconds of this rank until every rank has its own."""

    def __init__(self) -> None:
        self._own: tuple[int, float, float] | None = None

    @property
    def is_known(self) -> bool:
        """Whether this rank has seconds that it has not exchanged."""
        return self._own is not None

    def note(
        self, spans: Sequence[Span], num_steps: int, graph: StepGraph, device: DeviceProfile, ranks: Ranks
    ) -> None:
        """Keep the seconds of compute in `spans`, recorded in `num_steps` steps of `graph` on `device`."""
        busy_s = sum(span.end_s - span.start_s for span in spans if span.lane is Lane.COMPUTE)
        if busy_s > 0:
            # A rank without rows runs two that count 0.
            rows = ranks.shares[ranks.control.rank].num_rows if ranks.shares else graph.batch
            self._own = (rows, busy_s / num_steps, fixed_share(graph, device))

    def suggested_line(self, ranks: Ranks) -> str | None:
        """Return a line that suggests other rows, if one of `ranks` is slower; all of them, with their seconds known,
        must call this. `ranks` then keep the rows."""
        assert self._own is not None, "`is_known` comes first"
        text = " ".join(f"{number:.9g}" for number in self._own)
        self._own = None
        said = [list(map(float, own.split())) for own in ranks.control.exchange(text, "seconds of ranks")]
        rows, busy_s, fixed = zip(*said, strict=True)
        before = [int(own) for own in rows]
        line = balance_line(before, busy_s, fixed)
        ranks.suggested_rows = () if line is None else balanced_rows(before, busy_s, fixed)
        return line
