"""The spans of a simulated step, with the labels and bytes that the ledger of a run gives to its own."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Span
from elixir_compile.simulate.traffic import Work


@dataclass(slots=True, kw_only=True)
class Drawing:
    """The spans of the lanes, in the order in which they were issued."""

    graph: str = ""
    """The name of the graph that is simulated."""
    nbytes: Mapping[Work, int] = field(default_factory=dict)
    """See `traffic`."""
    spans: list[Span] = field(default_factory=list)

    def add(
        self, lane: Lane, label: str, start_s: float, end_s: float, *, in_update: bool = False, piece: int = 0
    ) -> None:
        """Add a span; an update belongs to no graph, since it is the optimizer's."""
        self.spans.append(
            Span(
                lane=lane,
                label=label,
                start_s=start_s,
                end_s=end_s,
                graph="" if in_update else self.graph,
                nbytes=self.nbytes.get((lane, label, piece > 0), 0),
                piece=piece,
            )
        )
