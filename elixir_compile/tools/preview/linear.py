"""Learn how a sequence grows with the number of layers of a model, and write it for any number of layers.

A line is a sequence of records. Lines of `n` and of `n + 1` layers are equal except for blocks repeated by the added
layer, and for numbers in the records, as the 37 of `fwd.mul_37`, which are `a + b * repeat + c * layers`:

    2 layers    embed  A B  norm  loss  norm'  C D
    3 layers    embed  A B  A B  norm  loss  norm'  C D  C D          blocks A B and C D, repeated for each layer

A block may begin in the middle of a layer and end in the middle of the next one, and a layer may add several blocks:
at the end of its forward, GPT-2 divides by the saved deviations of all its norms.

`learned` finds a law from two lines. `proved` checks the law on three lines.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_DIGITS = re.compile(r"(\d+)")
_MOST_TRIES = 10_000
"""The most block lengths to try before a line counts as not linear; GPT-2 needs about ten."""


@dataclass(frozen=True, slots=True)
class Record:
    """An entry of a line: fixed values, and names with numbers in them."""

    fixed: tuple[Any, ...]
    """Values independent of the number of layers."""
    text: tuple[str, ...] = ()
    """The pieces of text around `numbers`, from before the first to after the last."""
    numbers: tuple[int, ...] = ()
    """Numbers depending, perhaps, on the number of layers."""
    is_sized: bool = False
    """If True, the last of `numbers` is a size. Records with different sizes are different, so a size may grow with the
    layers only if no other record of the line is equal but for its numbers."""


Line = Sequence[Record]


def record(fixed: Sequence[object], *names: str) -> Record:
    """Return the record of `fixed` and `names`, with the numbers in the names split off."""
    pieces = _DIGITS.split("\0".join(names))
    return Record(tuple(fixed), tuple(pieces[::2]), tuple(int(digits) for digits in pieces[1::2]))


def sized(entry: Record, size: int) -> Record:
    """Return `entry` with `size` as its last number."""
    return Record(entry.fixed, (*entry.text, ""), (*entry.numbers, size), is_sized=True)


def names_of(entry: Record) -> list[str]:
    """Return the names of `entry`. Numbers lose their leading zeros, and a size is appended to the last name."""
    pieces = [entry.text[0]]
    for number, text in zip(entry.numbers, entry.text[1:], strict=True):
        pieces += (str(number), text)
    return "".join(pieces).split("\0")


@dataclass(frozen=True, slots=True)
class _Block:
    """Records added by each further layer."""

    at: int
    """Index after the last block of its kind in the line of the law."""
    grown: tuple[tuple[int, ...], ...]
    """For each record, the difference of its numbers to those in the block before."""

    @property
    def length(self) -> int:
        return len(self.grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The growth of a line with the number of layers."""

    line: tuple[Record, ...]
    """The line for the number of layers from which others are counted."""
    slopes: tuple[tuple[int, ...], ...]
    """For each record, the increase of its numbers by a further layer."""
    blocks: tuple[_Block, ...]

    def at(self, more: int) -> list[Record]:
        """Return the line for `more` layers than `line` has; a negative number removes as many of each block."""
        written: list[Record] = []
        done = 0
        for block in self.blocks:
            written += self._moved(done, block.at + min(more, 0) * block.length, more)
            for number in range(1, more + 1):
                written += self._repeated(block, number, more)
            done = block.at
        return written + self._moved(done, len(self.line), more)

    def on(self, line: Line, fewer: int) -> "Law | None":
        """Return this law for `line`, which has `fewer` layers less; None if `line` lacks one of the blocks."""
        slopes: list[tuple[int, ...]] = []
        blocks: list[_Block] = []
        kinds, others = _kinds(self.line, line)
        done = 0
        for block in self.blocks:
            slopes += self.slopes[done : block.at - fewer * block.length]
            done = block.at
            blocks.append(replace(block, at=len(slopes)))
            begin = len(slopes) - block.length
            if begin < 0 or others[begin : len(slopes)] != kinds[done - block.length : done]:
                return None
        slopes += self.slopes[done:]
        return Law(line=tuple(line), slopes=tuple(slopes), blocks=tuple(blocks)) if len(slopes) == len(line) else None

    def is_steady(self) -> bool:
        """Return whether the numbers also grow by the law between the blocks within `line`."""
        (kinds,) = _kinds(self.line)
        for block in self.blocks:
            length, begin = block.length, block.at - block.length
            while begin >= length and kinds[begin - length : begin] == kinds[begin : begin + length]:
                if block.grown != tuple(self._grown(index, length) for index in range(begin, begin + length)):
                    return False
                begin -= length
        return True

    def _grown(self, index: int, length: int) -> tuple[int, ...]:
        return _minus(self.line[index], self.line[index - length])

    def _moved(self, begin: int, end: int, more: int) -> list[Record]:
        pairs = zip(self.line[begin:end], self.slopes[begin:end], strict=True)
        return [_plus(entry, slopes, more) for entry, slopes in pairs]

    def _repeated(self, block: _Block, number: int, more: int) -> list[Record]:
        """Return the records of `block`, `number` blocks later, in the line for `more` layers."""
        moved = self._moved(block.at - block.length, block.at, more)
        return [_plus(entry, grown, number) for entry, grown in zip(moved, block.grown, strict=True)]


def proved(fewest: Line, fewer: Line, more: Line) -> Law | None:
    """Return the law of three lines with `n`, `n + 1` and `n + 2` layers, based on the last; None if there is no law.

    `fewest` may lack a block: if the first and the last layer differ from the layers between, two layers have no block.
    """
    law = learned(fewer, more)
    if law is None or not law.is_steady() or law.at(-1) != list(fewer) or law.at(-2) != list(fewest):
        return None
    below, lowest = law.on(fewer, 1), law.on(fewest, 2)
    if below is None or below.at(1) != list(more):
        return None
    if lowest is not None and (lowest.at(1), lowest.at(2)) != (list(fewer), list(more)):
        return None
    return law


def _plus(entry: Record, slopes: Sequence[int], times: int) -> Record:
    if not any(slopes):
        return entry
    numbers = zip(entry.numbers, slopes, strict=True)
    grown = tuple(number + times * slope for number, slope in numbers)
    return Record(entry.fixed, entry.text, grown, entry.is_sized)


def learned(fewer: Line, more: Line) -> Law | None:
    """Return the law by which the line `more` follows from `fewer`, which has a layer less.

    None if `more` is not `fewer` with blocks repeated. The law holds for these lines and is a guess for others; see
    `proved`.
    """
    spans = _spans(fewer, more)
    if spans is None:
        return None
    slopes: list[tuple[int, ...]] = []
    blocks: list[_Block] = []
    removed = 0
    for begin, end in spans:
        slopes += [_minus(more[index], fewer[index - removed]) for index in range(len(slopes), begin)]
        length = end - begin
        slopes += slopes[-length:]
        blocks.append(_Block(end, tuple(_minus(more[i], more[i - length]) for i in range(begin, end))))
        removed += length
    slopes += [_minus(more[index], fewer[index - removed]) for index in range(len(slopes), len(more))]
    return Law(line=tuple(more), slopes=tuple(slopes), blocks=tuple(blocks))


def _minus(entry: Record, other: Record) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(entry.numbers, other.numbers, strict=True))


def _kinds(*lines: Line) -> list[list[tuple[Any, ...]]]:
    """Return for each record of `lines` a key, equal for records with the same text and other numbers."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for line in lines:
        counts |= Counter((entry.fixed, entry.text) for entry in line if entry.is_sized)

    def kind(entry: Record) -> tuple[Any, ...]:
        is_alone = counts[entry.fixed, entry.text] < 2
        return (entry.fixed, entry.text) if is_alone else (entry.fixed, entry.text, entry.numbers[-1])

    return [[kind(entry) for entry in line] for line in lines]


def _spans(fewer: Line, more: Line) -> list[tuple[int, int]] | None:
    """Return the spans of `more` that repeat the records before them and whose removal gives `fewer`; None if there are
    none."""
    known: dict[tuple[Any, ...], int] = {}
    few, many = ([known.setdefault(kind, len(known)) for kind in kinds] for kinds in _kinds(fewer, more))
    found: list[tuple[int, int, int]] = []  # begin and end of a span, and the records of `fewer` read before it
    at, done, shortest = 0, 0, 1  # records read of `fewer`; of `more`; the first length to try
    for _ in range(_MOST_TRIES):
        if shortest == 1:
            while at < len(few) and done < len(many) and few[at] == many[done]:
                at, done = at + 1, done + 1
            if at == len(few) and done == len(many):
                return [(begin, end) for begin, end, _ in found]
        length = _span_length(few, many, at, done, shortest)
        if length is not None:
            found.append((done, done + length, at))
            done, shortest = done + length, 1
        elif found:
            done, end, at = found.pop()
            shortest = end - done + 1
        else:
            return None
    return None


def _span_length(few: Sequence[int], many: Sequence[int], at: int, done: int, shortest: int) -> int | None:
    """Return the smallest length of a span of `many` at `done` that repeats the records before it.

    After the span, `many` must go on as `few` does at `at`. None if no length from `shortest` on will do.
    """
    longest = min(done, (len(many) - done) - (len(few) - at))
    for length in range(shortest, longest + 1):
        goes_on = many[done + length : done + length + 1] == few[at : at + 1]
        if goes_on and many[done : done + length] == many[done - length : done]:
            return length
    return None
