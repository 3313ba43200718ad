"""What happens to activations between the forward that makes them and the backward that reads them."""

from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan
from elixir_compile.ir.kinds import GroupId, Saving, StorageId
from elixir_compile.ir.words import commented, word, words
from elixir_compile.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Saved activations of one layer and one class, which are treated alike."""

    id: GroupId
    """Layer and class: `h.3.matmul`."""
    storages: tuple[StorageId, ...]
    """In the order in which the forward makes them."""
    nbytes: int
    saving: Saving

    def __post_init__(self) -> None:
        if not self.storages or len(set(self.storages)) != len(self.storages):
            raise InvalidPlan(f"the activations {self.id} must list storages, each once.")
        if self.nbytes < 0:
            raise InvalidPlan(f"the activations {self.id} have {self.nbytes} bytes; expected 0 or more.")

    def __str__(self) -> str:
        line = f"{word(self.id)}  {self.saving}  bytes {self.nbytes}  storages {words(*self.storages)}"
        return commented(line, format_bytes(self.nbytes))
