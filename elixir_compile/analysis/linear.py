"""Sequences that are linear in the number of layers: learned from two of them, written for any number of layers.

A line is a sequence of records. Those of `n` and of `n + 1` layers agree but for blocks that one layer adds, and a
number in them, as the 37 of `fwd.mul_37`, is `a + b * repeat + c * layers`:

    2 layers    embed  A B  norm  loss  norm'  C D
    3 layers    embed  A B  A B  norm  loss  norm'  C D  C D          blocks A B and C D, each again for each layer

A block may begin in the middle of a layer and end in the middle of the next one, and a layer may add several blocks:
GPT-2 divides by the saved deviations of all its norms one after another at the end of the forward.

`learned` makes a law of two lines, and `proved` compares what it writes with three.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_DIGITS = re.compile(r"(\d+)")
_MOST_TRIES = 10_000
"""Block lengths that are tried before a line counts as not linear; GPT-2 needs about ten."""


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of a line."""

    fixed: tuple[Any, ...]
    """What does not depend on the number of layers."""
    text: tuple[str, ...] = ()
    """The text between `numbers`, one piece more than there are numbers; empty if there are none."""
    numbers: tuple[int, ...] = ()
    """What may depend on the number of layers."""
    is_sized: bool = False
    """Whether the last of `numbers` is a size. Sizes tell records apart: one that grows with the layers does so only
    in a record that no other is like."""


Line = Sequence[Record]


def record(fixed: Sequence[object], *names: str) -> Record:
    """Return the record of `names`, of which numbers are told apart, and of `fixed`."""
    pieces = _DIGITS.split("\0".join(names))
    return Record(tuple(fixed), tuple(pieces[::2]), tuple(int(digits) for digits in pieces[1::2]))


def sized(entry: Record, size: int) -> Record:
    """Return `entry`, a record of names, with a size."""
    return Record(entry.fixed, (*entry.text, ""), (*entry.numbers, size), is_sized=True)


def names_of(entry: Record) -> list[str]:
    """Return the names that `record` made `entry` of, the last one with its size, if it has one, behind it; a number
    loses its leading zeros."""
    pieces = [entry.text[0]]
    for number, text in zip(entry.numbers, entry.text[1:], strict=True):
        pieces += (str(number), text)
    return "".join(pieces).split("\0")


@dataclass(frozen=True, slots=True)
class _Block:
    """What one more layer adds."""

    at: int
    """Index behind the block in the line of its law."""
    grown: tuple[tuple[int, ...], ...]
    """How much larger the numbers of each record are than those of its like in the block before."""

    @property
    def length(self) -> int:
        return len(self.grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """How a line grows with the layers."""

    line: tuple[Record, ...]
    """The line of the number of layers from which others are counted."""
    slopes: tuple[tuple[int, ...], ...]
    """What one more layer adds to each number of `line`."""
    blocks: tuple[_Block, ...]

    def at(self, more: int) -> list[Record]:
        """Return the line of `more` layers than `line` has; a negative number takes so many of each block away."""
        written: list[Record] = []
        done = 0
        for block in self.blocks:
            written += self._moved(done, block.at + min(more, 0) * block.length, more)
            for number in range(1, more + 1):
                written += self._repeated(block, number, more)
            done = block.at
        return written + self._moved(done, len(self.line), more)

    def on(self, line: Line, fewer: int) -> "Law | None":
        """Return this law on `line`, of so many layers `fewer`; None if `line` does not have each block once."""
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
        """Return whether the numbers of each block grow as the law says also between the blocks that `line` has."""
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
        """Return `block` as it is `number` blocks later in the line of `more` layers."""
        moved = self._moved(block.at - block.length, block.at, more)
        return [_plus(entry, grown, number) for entry, grown in zip(moved, block.grown, strict=True)]


def proved(fewest: Line, fewer: Line, more: Line) -> Law | None:
    """Return the law of three lines, each of one layer more than the one before it, on the last of them; None if they
    do not follow one law.

    `fewest` may lack a block, as two layers that each differ from those between them have none.
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
    """Return how the line of one layer `more` follows from that of `fewer`; None if it does not follow by blocks that
    stand behind their like. It holds for these two lines, and is a guess for others, see `proved`."""
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


def _minus(one: Record, other: Record) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one.numbers, other.numbers, strict=True))


def _kinds(*lines: Line) -> list[list[tuple[Any, ...]]]:
    """Return what is equal for records of `lines` that differ in their numbers alone."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for line in lines:
        counts |= Counter((entry.fixed, entry.text) for entry in line if entry.is_sized)

    def kind(entry: Record) -> tuple[Any, ...]:
        is_alone = counts[entry.fixed, entry.text] < 2
        return (entry.fixed, entry.text) if is_alone else (entry.fixed, entry.text, entry.numbers[-1])

    return [[kind(entry) for entry in line] for line in lines]


def _spans(fewer: Line, more: Line) -> list[tuple[int, int]] | None:
    """Return spans of `more`, each like what stands before it, without which it is like `fewer`; None if there are
    none such."""
    known: dict[tuple[Any, ...], int] = {}
    few, many = ([known.setdefault(kind, len(known)) for kind in kinds] for kinds in _kinds(fewer, more))
    found: list[tuple[int, int, int]] = []  # where a span begins and ends, and how far `fewer` is read before it
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
    """Return the least length, `shortest` or more, of a span of `many` from `done` on that is like what stands before
    it, with `few` going on from `at` behind it; None if there is none."""
    longest = min(done, (len(many) - done) - (len(few) - at))
    for length in range(shortest, longest + 1):
        goes_on = many[done + length : done + length + 1] == few[at : at + 1]
        if goes_on and many[done : done + length] == many[done - length : done]:
            return length
    return None
