"""Derive the captures of a model for many batches from the captures for three of them.

All numbers in the captured step of a batch are `a + b * rows`: bytes and flops. The smallest batch above one row and
the largest are captured, and the law between them is proved on a third. If a number does not follow the law, each batch
is captured. A batch of one row is always captured, because torch treats sizes of 1 as constants.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.base.options import Options
from elixir_compile.ir import Op, StepGraph, Storage
from elixir_compile.ir.graph import LossRegion
from elixir_compile.search.joint.loss import possible_chunks
from elixir_compile.tools.preview.capture import Capture

log = logging.getLogger("elixir_compile")
_FEWEST = 4
"""So many batches above one row are worth a law; fewer are captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Law:
    """The numbers of captures with `near` and with `far` rows."""

    near_rows: int
    near: Capture
    far_rows: int
    far: Capture

    def at(self, rows: int, options: Options) -> Capture | None:
        """Return the capture for `rows`; None if the captures differ in more than numbers, or a number is no whole
        number there."""
        near, far = self.near, self.far
        try:
            chunks = near.chunks or far.chunks
            if near.chunks is not None and far.chunks is not None:
                region = self._region(near.chunks.region, far.chunks.region, rows)
                chunks = possible_chunks(region, options)
            elif chunks is not None:
                return None  # the loss of the smaller batch has too few logits
            made = replace(
                far,
                graph=self._graph(near.graph, far.graph, rows),
                base_bytes=self._number(near.base_bytes, far.base_bytes, rows),
                chunks=chunks,
            )
        except _NotLinearError:
            return None
        fixed = {"graph": far.graph, "base_bytes": 0, "chunks": None}
        return made if replace(near, **fixed) == replace(far, **fixed) else None

    def _number(self, near: int, far: int, rows: int) -> int:
        grown, rest = divmod((far - near) * (rows - self.near_rows), self.far_rows - self.near_rows)
        if rest or near + grown < 0:
            raise _NotLinearError
        return near + grown

    def _graph(self, near: StepGraph, far: StepGraph, rows: int) -> StepGraph:
        if len(near.ops) != len(far.ops) or len(near.storages) != len(far.storages):
            raise _NotLinearError
        made = replace(
            far,
            ops=tuple(self._op(*pair, rows) for pair in zip(near.ops, far.ops, strict=True)),
            storages=tuple(self._storage(*pair, rows) for pair in zip(near.storages, far.storages, strict=True)),
            batch=self._number(near.batch, far.batch, rows),
        )
        if (near.name, near.outputs, near.aliases, near.symbols) != (far.name, far.outputs, far.aliases, far.symbols):
            raise _NotLinearError
        return made

    def _op(self, near: Op, far: Op, rows: int) -> Op:
        flops = self._number(near.flops, far.flops, rows)
        moved_bytes = self._number(near.moved_bytes, far.moved_bytes, rows)
        made = replace(far, flops=flops, moved_bytes=moved_bytes)
        if replace(near, flops=flops, moved_bytes=moved_bytes) != made:
            raise _NotLinearError
        return made

    def _storage(self, near: Storage, far: Storage, rows: int) -> Storage:
        nbytes = self._number(near.nbytes, far.nbytes, rows)
        made = replace(far, nbytes=nbytes)
        if replace(near, nbytes=nbytes) != made:
            raise _NotLinearError
        return made

    def _region(self, near: LossRegion, far: LossRegion, rows: int) -> LossRegion:
        num_tokens = self._number(near.num_tokens, far.num_tokens, rows)
        logits_bytes = self._number(near.logits_bytes, far.logits_bytes, rows)
        made = replace(far, num_tokens=num_tokens, logits_bytes=logits_bytes)
        if replace(near, num_tokens=num_tokens, logits_bytes=logits_bytes) != made:
            raise _NotLinearError
        return made


class _NotLinearError(Exception):
    """Two captures differ in more than numbers, or a number is no whole number at the rows in between."""


@dataclass(slots=True, kw_only=True)
class BatchCaptures:
    """The captures of a model for several batches, each made or derived when it is first asked for."""

    capture: Callable[[int], Capture]
    """Captures the step of a batch of so many rows."""
    rows: Sequence[int]
    """All batches that may be asked for."""
    options: Options
    _made: dict[int, Capture] = field(default_factory=dict)
    _derived: dict[int, Capture] = field(default_factory=dict)
    _law: _Law | None = None
    _is_tried: bool = False

    def at(self, rows: int) -> Capture:
        """Return the capture for `rows`, which are made or derived."""
        if rows not in self._made and rows not in self._derived:
            law = self._proved() if rows > 1 else None
            derived = None if law is None else law.at(rows, self.options)
            if derived is None:
                return self.made(rows)
            self._derived[rows] = derived
        return self._made.get(rows) or self._derived[rows]

    def made(self, rows: int) -> Capture:
        """Return the capture for `rows`, which is not derived."""
        if rows not in self._made:
            self._made[rows] = self.capture(rows)
        return self._made[rows]

    def is_as_derived(self, rows: int) -> bool:
        """Return whether the capture of `rows` is the derived one, or was never derived; if not, drop all that are
        derived."""
        if rows not in self._derived or self.made(rows) == self._derived[rows]:
            return True
        log.info("the capture of %d rows is not as derived from other batches", rows)
        self._law, self._derived = None, {}
        return False

    def _proved(self) -> _Law | None:
        """Return the law of the batches above one row, or None if there is none or they are few."""
        if self._is_tried:
            return self._law
        self._is_tried = True
        above = sorted(rows for rows in self.rows if rows > 1)
        if len(above) < _FEWEST:
            return None
        near_rows, middle_rows, far_rows = above[0], above[len(above) // 2], above[-1]
        law = _Law(near_rows=near_rows, near=self.made(near_rows), far_rows=far_rows, far=self.made(far_rows))
        if law.at(middle_rows, self.options) == self.made(middle_rows):
            self._law = law
        else:
            log.info("the step is not linear in the rows of the batch")
        return self._law
