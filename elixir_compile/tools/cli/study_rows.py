"""The rows of a study: placements of the training state, each as options of the backend."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from elixir_compile.base.errors import InvalidOption
from elixir_compile.base.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A way to train: where the state is, and when it is updated."""

    name: str
    what: str
    options: Mapping[str, object] = field(default_factory=dict)
    backend: str = "elixir"
    clips: bool = True
    """Whether gradients are clipped by their norm, which an update within the backward cannot be."""
    on_disk: bool = False


def _offloaded(update: str) -> Mapping[str, object]:
    return {"planner": "zero_offload", "update": update}


PLACEMENTS: Mapping[str, Placement] = {
    row.name: row
    for row in (
        Placement(name="device", what="everything on the device", options={"planner": "keep_all"}),
        Placement(
            name="after_backward",
            what="optimizer state on the host, updated within optimizer.step() (ZeRO-Offload)",
            options=_offloaded("after_backward"),
        ),
        Placement(
            name="across_steps",
            what="optimizer state on the host, updated beside the next forward",
            options=_offloaded("across_steps"),
        ),
        Placement(
            name="in_backward",
            what="optimizer state on the host, updated beside the backward, without clipping",
            options=_offloaded("in_backward"),
            clips=False,
        ),
        Placement(
            name="disk",
            what="as much optimizer state on disk as there may be",
            options=_offloaded("across_steps"),
            on_disk=True,
        ),
        Placement(name="plan", what="the plan of a search within the budget", options={"planner": "milp"}),
        Placement(name="inductor", what="torch.compile with its own backend and torch's AdamW", backend="inductor"),
    )
}
"""By name, in the order of the rows."""


def placements_named(names: str | None) -> tuple[Placement, ...]:
    """Return the placements in `names`, separated by commas; all if it is None. Raises InvalidOption for another."""
    if names is None:
        return tuple(PLACEMENTS.values())
    chosen = [name.strip() for name in names.split(",")]
    wrong = next((name for name in chosen if name not in PLACEMENTS), None)
    if wrong is not None:
        raise InvalidOption("placements", wrong, "names of " + ", ".join(PLACEMENTS) + ", separated by commas")
    return tuple(PLACEMENTS[name] for name in dict.fromkeys(chosen))


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget of device memory, as typed."""

    text: str

    @property
    def is_share(self) -> bool:
        """Whether the budget is a percentage."""
        return self.text.endswith("%")

    def nbytes(self, whole_bytes: int) -> int:
        """Return the bytes; a percentage is of `whole_bytes`. Raises InvalidOption if the text is no budget."""
        try:
            return int(self._share() * whole_bytes) if self.is_share else parse_bytes(self.text)
        except ValueError as error:
            raise InvalidOption("budgets", self.text, "percentages such as 60%, or bytes such as 2GiB") from error

    def _share(self) -> float:
        share = float(self.text[:-1]) / 100
        if not 0 < share <= 10:
            raise ValueError(f"{share} is no share of the memory")
        return share


def budgets_named(text: str) -> tuple[Budget, ...]:
    """Return the budgets in `text`, separated by commas. Raises InvalidOption if a part is no budget."""
    budgets = tuple(Budget(part.strip()) for part in text.split(",") if part.strip())
    for budget in budgets:
        budget.nbytes(whole_bytes=1)  # rows of minutes run before the row that has the budget
    return budgets
