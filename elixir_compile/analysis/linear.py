"""Sequences that are linear in the number of layers: learned from two of them, written for any number of layers.

A line is a sequence of records. Those of `n` and of `n + 1` layers agree but for blocks that one layer adds, and a
number in them, as the 37 of `fwd.mul_37`, is `a + b * repeat + c * layers`:

    2 layers    embed  A B  norm  loss  norm'  C D
    3 layers    embed  A B  A B  norm  loss  norm'  C D  C D          blocks A B and C D, each again for each layer

A block may begin in the middle of a layer and end in the middle of the next one, and a layer may add several blocks:
GPT-2 divides by the saved deviations of all its norms one after another at the end of the forward.

`learned` proves nothing: whoever uses it writes the line of another number of layers and compares.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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


Line = Sequence[Record]


def record(fixed: Sequence[object], *names: str) -> Record:
    """Return the record of `names`, of which numbers are told apart, and of `fixed`."""
    pieces = _DIGITS.split("\0".join(names))
    return Record(tuple(fixed), tuple(pieces[::2]), tuple(int(digits) for digits in pieces[1::2]))


def names_of(entry: Record) -> list[str]:
    """Return the names that `record` made `entry` of; a number loses its leading zeros."""
    pieces = [entry.text[0]]
    for number, text in zip(entry.numbers, entry.text[1:], strict=True):
        pieces += (str(number), text)
    return "".join(pieces).split("\0")


@dataclass(frozen=True, slots=True)
class _Block:
    """What one more layer adds."""

    at: int
    """Index behind the block, in the line of more layers."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """How a line grows with the layers."""

    line: tuple[Record, ...]
    """Of as many layers as the longer of the two lines that the law was learned from."""
    slopes: tuple[tuple[int, ...], ...]
    """What one more layer adds to each number of `line` where it stands."""
    blocks: tuple[_Block, ...]

    def at(self, more: int) -> list[Record]:
        """Return the line of `more` layers than `line` has, down to 2 fewer."""
        written: list[Record] = []
        done = 0
        for block in self.blocks:
            written += self._moved(done, block.at + min(more, 0) * block.length, more)
            for number in range(1, more + 1):
                span = range(block.at - block.length, block.at)
                written += [self._repeated(index, block.length, number, more) for index in span]
            done = block.at
        return written + self._moved(done, len(self.line), more)

    def is_steady(self) -> bool:
        """Return whether, of blocks that `line` has three or more times, the numbers grow alike from each to the next.

        What a layer before those adds in part may have numbers of its own.
        """
        kinds = _numbered(self.line)[0]
        for block in self.blocks:
            begin, length = block.at - block.length, block.length
            while begin >= length and kinds[begin - length : begin] == kinds[begin : begin + length]:
                begin -= length
            grown = [self._grown(index, length) for index in range(begin + length, block.at)]
            if grown[length:] != grown[:-length]:
                return False
        return True

    def _grown(self, index: int, length: int) -> tuple[int, ...]:
        """Return how much larger the numbers of the record at `index` are than those of its like `length` before."""
        return _minus(self.line[index], self.line[index - length])

    def _moved(self, begin: int, end: int, more: int) -> list[Record]:
        pairs = zip(self.line[begin:end], self.slopes[begin:end], strict=True)
        return [_plus(entry, slopes, more) if any(slopes) else entry for entry, slopes in pairs]

    def _repeated(self, index: int, length: int, number: int, more: int) -> Record:
        """Return the record at `index` of a block as it is `number` blocks later, of a line of `more` layers."""
        here = self.line[index]
        numbers = zip(here.numbers, self._grown(index, length), self.slopes[index], strict=True)
        return replace(here, numbers=tuple(now + number * grown + more * slope for now, grown, slope in numbers))


def _plus(entry: Record, slopes: Sequence[int], times: int) -> Record:
    numbers = zip(entry.numbers, slopes, strict=True)
    return replace(entry, numbers=tuple(number + times * slope for number, slope in numbers))


def learned(fewer: Line, more: Line) -> Law | None:
    """Return how the line of one layer `more` follows from that of `fewer`; None if it does not follow by blocks that
    stand behind their like."""
    blocks = _blocks(*_numbered(fewer, more))
    if blocks is None:
        return None
    slopes: list[tuple[int, ...]] = []
    for (begin, end), removed in zip(_between(blocks, len(more)), range(len(blocks) + 1), strict=True):
        shift = sum(block.length for block in blocks[:removed])
        for index in range(begin, end):
            slopes.append(_minus(more[index], fewer[index - shift]))
        if removed < len(blocks):
            length = blocks[removed].length
            slopes += slopes[-length:]
    return Law(line=tuple(more), slopes=tuple(slopes), blocks=tuple(blocks))


def _minus(one: Record, other: Record) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one.numbers, other.numbers, strict=True))


def _between(blocks: Sequence[_Block], length: int) -> list[tuple[int, int]]:
    """Return the spans of a line of `length` that lie before, between and behind `blocks`."""
    ends = [0, *(block.at for block in blocks), length]
    lengths = [*(block.length for block in blocks), 0]
    return [(begin, end - own) for (begin, end), own in zip(pairwise(ends), lengths, strict=True)]


def _numbered(*lines: Line) -> list[list[int]]:
    """Return each line with a number for each record, equal for records that differ in their numbers alone."""
    known: dict[tuple[object, ...], int] = {}
    return [[known.setdefault((entry.fixed, entry.text), len(known)) for entry in line] for line in lines]


def _blocks(fewer: Sequence[int], more: Sequence[int]) -> list[_Block] | None:
    """Return blocks of `more`, each equal to what stands before it, without which it is `fewer`; None if there are
    none such."""
    found: list[tuple[_Block, int, int]] = []  # a block, how far `fewer` is read before it, and what else to try
    at, done, shortest = 0, 0, 1  # records read of `fewer`; of `more`; the first length to try
    for _ in range(_MOST_TRIES):
        if shortest == 1:
            while at < len(fewer) and done < len(more) and fewer[at] == more[done]:
                at, done = at + 1, done + 1
            if at == len(fewer) and done == len(more):
                return [block for block, _, _ in found]
        length = _block_length(fewer, more, at, done, shortest)
        if length is not None:
            found.append((_Block(done + length, length), at, length + 1))
            done, shortest = done + length, 1
        elif found:
            block, at, shortest = found.pop()
            done = block.at - block.length
        else:
            return None
    return None


def _block_length(fewer: Sequence[int], more: Sequence[int], at: int, done: int, shortest: int) -> int | None:
    """Return the length, `shortest` or more, of a block of `more` that stands at `done` behind its like, with `fewer`
    going on from `at` behind it; None if there is none."""
    longest = min(done, (len(more) - done) - (len(fewer) - at))
    for length in range(shortest, longest + 1):
        goes_on = more[done + length : done + length + 1] == fewer[at : at + 1]
        if goes_on and more[done : done + length] == more[done - length : done]:
            return length
    return None
