"""Short texts between ranks, over gloo on the host: what they agree by, before a plan and before every forward.

```text
  every exchange    one all-gather of 96 bytes per rank   | what 24 | length 8 | the first 64 bytes of the text |
  a longer text     one broadcast, where one rank alone has one
  longer texts      one all-gather of as many bytes per rank as the longest has
```

So texts of 64 bytes cost one collective. That every row says what it is for finds ranks that are out of step: all of
them raise RanksDiffer. Nothing is pickled. A rank that is dead or silent is a PeerFailed within the timeout of the
group.

On the `fake` process group, and for one rank, all other ranks say what this one says: any number of ranks can be
planned for without a cluster.
"""

import json
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.errors import ElixirError
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer, ranks_text

_Made = TypeVar("_Made")

Carried = Mapping[type[ElixirError], Callable[[Any], Sequence[object]]]
"""Errors that are raised on all ranks as they are, each with what gives the facts that make it again, as JSON."""

_ROW = struct.Struct("<24sq64s")
_WHAT_BYTES = 24
_SHORT_BYTES = 64
_NUM_HELD = 16
"""Tensors that are held on to after their exchange. A thread of gloo lets go of them under its lock; where it is the
last to, it waits for the interpreter, which may wait for that lock to begin the next exchange."""

_GROUP_WORDS = ("gloo", "nccl", "timeout", "timed out", "connection", "socket")
"""In what gloo raises, torch 2.11 to 2.13: `[.../gloo/.../pair.cc:553] Connection closed by peer`, `Application timeout
caused pair closure`, `Wait timeout`."""


class ControlChannel:
    """The ranks that agree with each other, and how texts get from each to all."""

    def __init__(self, group: "distributed.ProcessGroup | None", ranks: Sequence[int], rank: int) -> None:
        """`ranks` are the members of `group` as the default group counts them, `rank` the place of this one among them.

        Without `group` nothing is sent: all ranks say the same.
        """
        self.ranks = tuple(ranks)
        self.rank = rank
        self._group = group
        self._held: deque[torch.Tensor] = deque(maxlen=_NUM_HELD)

    @property
    def is_echo(self) -> bool:
        """Whether no other process answers, and all ranks say what this one says."""
        return self._group is None

    def exchange(self, text: str, what: str, doing: str = "") -> tuple[str, ...]:
        """Return the text of every rank, in the order of `ranks`; `what` says in a few words what the texts are.

        Raises PeerFailed where a rank is dead or silent, and, where one exchanges something else, RanksDiffer, which
        tells what each rank is `doing`.
        """
        if self._group is None:
            return (text,) * len(self.ranks)
        data = text.encode(errors="surrogatepass")
        row = _ROW.pack(what.encode()[:_WHAT_BYTES], len(data), data[:_SHORT_BYTES])
        with self.raising_peer_failed(what):
            rows = [_ROW.unpack(found) for found in apart(lambda: self._gathered(row))]
        names = [name.rstrip(bytes(1)).decode(errors="replace") for name, _, _ in rows]
        if len(set(names)) > 1:
            self._require_same(names, self.exchange(doing or f"exchanges {what}", "what each rank does"))
        lengths = [length for _, length, _ in rows]
        long = [place for place, length in enumerate(lengths) if length > _SHORT_BYTES]
        texts = [start for _, _, start in rows]
        if long:
            with self.raising_peer_failed(what):
                texts = apart(lambda: self._whole(texts, data, lengths, long))
        pairs = zip(texts, lengths, strict=True)
        return tuple(found[:length].decode(errors="surrogatepass") for found, length in pairs)

    def run_on_all_ranks(
        self, what: str, make: Callable[[], _Made], text_of: Callable[[_Made], str], carried: Carried
    ) -> tuple[_Made, tuple[str, ...]]:
        """Return what `make` returns, and the text of it from every rank; `what` is as in `exchange`.

        Where it fails on any rank, all raise: an error of a class in `carried` as it is, another as PeerFailed on the
        ranks that did not fail.
        """
        try:
            made = make()
            answer = [text_of(made)]
        except Exception as error:
            facts = carried[type(error)](error) if type(error) in carried else None
            failed = ["", type(error).__name__, str(error), facts]
            with suppress(ElixirError):  # this rank's own error says more than that a peer is gone too
                self.exchange(json.dumps(failed, default=int), what)
            raise
        answers = [json.loads(text) for text in self.exchange(json.dumps(answer), what)]
        for rank, (_, *failed) in zip(self.ranks, answers, strict=True):
            if failed:
                name, message, facts = failed
                kinds = {kind.__name__: kind for kind in carried}
                raise PeerFailed([rank], what, f"{name}: {message}") if facts is None else kinds[name](*facts)
        return made, tuple(text for (text,) in answers)

    def check_same_op(self, name: str, what: str) -> None:
        """Return when every rank is about to exchange `what`, called `name`; RanksDiffer where one exchanges another,
        before anything is mixed up."""
        names = [f"{what}, {found}" for found in self.exchange(name, what, f"exchanges {what}, {name}, in eager code")]
        self._require_same(names, [f"exchanges {found}" for found in names])

    def _whole(self, texts: Sequence[bytes], data: bytes, lengths: Sequence[int], long: Sequence[int]) -> list[bytes]:
        """Return the texts with those at the places `long` whole."""
        if len(long) > 1:
            return self._gathered(data.ljust(max(lengths), b"\0"))
        source = long[0]
        sent = torch.frombuffer(bytearray(data if source == self.rank else lengths[source]), dtype=torch.uint8)
        self._held.append(sent)
        distributed.broadcast(sent, group=self._group, group_src=source)
        return [sent.numpy().tobytes() if place == source else text for place, text in enumerate(texts)]

    def _gathered(self, own: bytes) -> list[bytes]:
        """Return what every rank gave, the same number of bytes on all."""
        gather, _ = compat.flat_collectives()
        given = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = torch.empty(len(self.ranks) * len(own), dtype=torch.uint8, device="cpu")
        self._held += (given, found)
        gather(found, given, group=self._group)
        whole = found.numpy().tobytes()
        return [whole[at : at + len(own)] for at in range(0, len(whole), len(own))]

    def _require_same(self, names: Sequence[str], told: Sequence[str]) -> None:
        """Raise RanksDiffer with what each rank has `told` unless all exchange the same, by `names`; both in the order
        of `ranks`."""
        if len(set(names)) == 1:
            return
        first = names[0]
        odd = tuple(rank for rank, name in zip(self.ranks, names, strict=True) if name != first)
        raise RanksDiffer(odd, [f"{ranks_text([rank])} {own}" for rank, own in zip(self.ranks, told, strict=True)])

    @contextmanager
    def raising_peer_failed(self, what: str) -> Iterator[None]:
        """Raise PeerFailed for what a process group raises in the block, which exchanges `what`; what is raised for
        another reason, as out of memory, passes."""
        began_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not _is_of_group(error):
                raise
            others = tuple(rank for place, rank in enumerate(self.ranks) if place != self.rank)
            raise PeerFailed(others, what, _reason(error), time.monotonic() - began_s) from error


def apart(work: Callable[[], _Made]) -> _Made:
    """Return what `work`, a collective of gloo, does in a thread of its own.

    Gloo keeps the state of the thread that begins a collective, and its own thread lets go of that under a lock. Under
    the modes in which torch captures a graph, and runs it the first time, that state holds Python objects: gloo's
    thread waits for the interpreter, which the next collective has when it waits for the lock. One of four runs hung.
    """
    done: Future[_Made] = Future()

    def run() -> None:
        try:
            with torch.no_grad():
                done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="elixir talk", daemon=True).start()
    return done.result()


def new_control_channel(ranks: Sequence[int], timeout: timedelta | None = None) -> ControlChannel:
    """Return how `ranks` of the default process group talk; each of them must call this.

    `timeout` is how long a rank waits for another; None: as long as in the default group. Raises PeerFailed where not
    all of them call this in that time.
    """
    members = tuple(sorted(ranks))
    if len(members) == 1:
        return ControlChannel(None, members, 0)
    rank = members.index(distributed.get_rank())
    if distributed.get_backend() == distributed.Backend.FAKE:
        return ControlChannel(None, members, rank)
    began_s = time.monotonic()
    try:
        # Only the members call this, so the others must not be waited for.
        group = distributed.new_group(
            list(members),
            timeout=compat.default_timeout() if timeout is None else timeout,
            backend="gloo",
            use_local_synchronization=True,
            group_desc="elixir_compile",
        )
    except RuntimeError as error:
        others = tuple(other for other in members if other != members[rank])
        because = f"{_reason(error)}. A model for several ranks is prepared on all of them, with the same mesh"
        raise PeerFailed(others, "addresses", because, time.monotonic() - began_s) from error
    return ControlChannel(group, members, rank)


def _is_of_group(error: RuntimeError) -> bool:
    """Whether a process group raised `error`: NCCL and stores have classes for it, gloo has words."""
    if isinstance(error, distributed.DistError):
        return True
    text = str(error).lower()
    return not isinstance(error, torch.OutOfMemoryError) and any(word in text for word in _GROUP_WORDS)


def _reason(error: RuntimeError) -> str:
    """What gloo says, without its source file, its advice and the stack."""
    line = str(error).strip().partition("\n")[0].partition(". This is typically caused by")[0]
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line
