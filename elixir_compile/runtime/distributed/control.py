"""Let the ranks that run one model agree before they act, by short texts over gloo, and raise on all of them if one
fails or differs.
"""

import json
import os
import platform
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import distributed

from elixir_compile import compat
from elixir_compile.base.errors import ElixirError
from elixir_compile.runtime.distributed.errors import PeerFailed, RanksDiffer, ranks_text

# ----------------------------------------------------------------------------------------------------------------------
# The control channel: short texts between ranks over gloo, by which they agree before a plan and before each forward.
#
#   every exchange         one all-gather of 96 bytes per rank   | purpose 24 | length 8 | first 64 bytes of the text |
#   if one text is longer      then a broadcast from its rank
#   if several are longer      then an all-gather, with the length of the longest text for each rank
#
# So texts of up to 64 bytes cost a single collective. Every row carries the purpose of its exchange. If the purposes
# differ, the ranks are out of step, and all of them raise RanksDiffer. Nothing is pickled. If a rank is dead or silent,
# the others raise PeerFailed within the timeout of the group.
#
# For one rank, and on the `fake` process group, every other rank is taken to send the text of this rank, so plans for
# any number of ranks can be made without a cluster.


_Made = TypeVar("_Made")

Carried = Mapping[type[Exception], Callable[[Any], Sequence[object]]]
"""Error classes that all ranks raise with their facts, each with a function from an error to its facts for JSON. The
facts are the arguments of the class."""

_ROW = struct.Struct("<24sq64s")
_WHAT_BYTES = 24
_SHORT_BYTES = 64
_NUM_HELD = 16
"""How many tensors stay alive after their exchange. A thread of gloo drops its reference to them under gloo's lock. If
that reference is the last, the thread waits for the interpreter, while the next exchange, which has the interpreter,
may wait for the lock."""

_GROUP_WORDS = ("gloo", "nccl", "timeout", "timed out", "connection", "socket")
"""Words in the errors of gloo, torch 2.11 to 2.13: `[.../gloo/.../pair.cc:553] Connection closed by peer`, `Application
timeout caused pair closure`, `Wait timeout`."""


class ControlChannel:
    """Exchanges short texts between `ranks`, of which this process is number `rank`."""

    def __init__(self, group: "distributed.ProcessGroup | None", ranks: Sequence[int], rank: int) -> None:
        """`ranks` are the members of `group`, numbered as in the default group; `rank` is the index of this process in
        `ranks`.

        If `group` is None nothing is sent, and every rank is taken to send the text of this rank.
        """
        self.ranks = tuple(ranks)
        self.rank = rank
        self._group = group
        self._thread = OwnThread()
        self._held: deque[torch.Tensor] = deque(maxlen=_NUM_HELD)

    @property
    def is_echo(self) -> bool:
        """Whether nothing is sent, and every rank is taken to send the text of this rank."""
        return self._group is None

    def exchange(self, text: str, what: str, doing: str = "") -> tuple[str, ...]:
        """Send `text` and return the text of every rank, in the order of `ranks`; all ranks must call this at once.

        `what` is the purpose of the exchange in a few words (its first 24 bytes count); `doing` describes in an error
        the activity of this rank.

        Raises PeerFailed if a rank is dead or silent. Raises RanksDiffer, with the `doing` of each rank, if a rank
        exchanges for another purpose.
        """
        if self._group is None:
            return (text,) * len(self.ranks)
        data = text.encode(errors="surrogatepass")
        row = _ROW.pack(what.encode()[:_WHAT_BYTES], len(data), data[:_SHORT_BYTES])
        with self.raising_peer_failed(what):
            rows = [_ROW.unpack(found) for found in self._thread.run(lambda: self._gathered(row))]
        names = [name.rstrip(bytes(1)).decode(errors="replace") for name, _, _ in rows]
        if len(set(names)) > 1:
            self.require_same(names, doing or f"exchanges {what}")
        lengths = [length for _, length, _ in rows]
        long = [place for place, length in enumerate(lengths) if length > _SHORT_BYTES]
        texts = [start for _, _, start in rows]
        if long:
            with self.raising_peer_failed(what):
                texts = self._thread.run(lambda: self._completed(texts, data, lengths, long))
        pairs = zip(texts, lengths, strict=True)
        return tuple(found[:length].decode(errors="surrogatepass") for found, length in pairs)

    def run_on_all_ranks(
        self, what: str, make: Callable[[], _Made], text_of: Callable[[_Made], str], carried: Carried
    ) -> tuple[_Made, tuple[str, ...]]:
        """Call `make` on every rank; return its value on this rank, and `text_of` the value of each rank.

        If `make` raises an exception on any rank, all ranks raise. An error of a class in `carried` is raised on all
        ranks as it is; for any other exception, the other ranks raise PeerFailed. `what` is as in `exchange`.
        """
        try:
            made = make()
            answer = [text_of(made)]
        except Exception as error:
            facts = carried[type(error)](error) if type(error) in carried else None
            failed = ["", type(error).__name__, str(error), facts]
            with suppress(ElixirError):  # this rank's own error tells the user more than an error of the exchange
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
        """Wait until every rank is about to exchange the tensor `name`, which is `what`: "a gradient", "a parameter".

        Raises RanksDiffer, before any tensor is sent, if a rank is about to exchange another tensor.
        """
        names = [f"{what}, {found}" for found in self.exchange(name, what, f"exchanges {what}, {name}, in eager code")]
        if len(set(names)) > 1:
            self._raise_differ(names, [f"exchanges {found}" for found in names])

    def _completed(
        self, texts: Sequence[bytes], data: bytes, lengths: Sequence[int], long: Sequence[int]
    ) -> list[bytes]:
        """Return `texts` with the complete texts at the places `long`, of which `texts` has the first bytes only."""
        if len(long) > 1:
            return self._gathered(data.ljust(max(lengths), b"\0"))
        source = long[0]
        sent = torch.frombuffer(bytearray(data if source == self.rank else lengths[source]), dtype=torch.uint8)
        self._held.append(sent)
        distributed.broadcast(sent, group=self._group, group_src=source)
        return [sent.numpy().tobytes() if place == source else text for place, text in enumerate(texts)]

    def _gathered(self, own: bytes) -> list[bytes]:
        """All-gather `own`, which has the same number of bytes on every rank, and return the bytes of each rank."""
        gather, _ = compat.flat_collectives()
        given = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = torch.empty(len(self.ranks) * len(own), dtype=torch.uint8, device="cpu")
        self._held += (given, found)
        gather(found, given, group=self._group)
        rows = found.numpy().tobytes()
        return [rows[at : at + len(own)] for at in range(0, len(rows), len(own))]

    def require_same(self, names: Sequence[str], doing: str, fix: str = "") -> None:
        """Raise RanksDiffer on all ranks unless all `names`, which every rank has from an exchange, are equal.

        The error has the `doing` of each rank, and `fix`, if it is given, in place of the usual advice.
        """
        if len(set(names)) > 1:
            self._raise_differ(names, self.exchange(doing, "what each rank does"), fix)

    def _raise_differ(self, names: Sequence[str], doings: Sequence[str], fix: str = "") -> None:
        """Raise RanksDiffer with the `doings` of the ranks, which have different `names`; both in order of `ranks`."""
        first = names[0]
        odd = tuple(rank for rank, name in zip(self.ranks, names, strict=True) if name != first)
        raise RanksDiffer(
            odd, [f"{ranks_text([rank])} {doing}" for rank, doing in zip(self.ranks, doings, strict=True)], fix
        )

    @contextmanager
    def raising_peer_failed(self, what: str) -> Iterator[None]:
        """Turn an error of a process group in the block, which exchanges `what`, into PeerFailed.

        NCCL and stores raise DistError, gloo a RuntimeError with known words. Other exceptions, such as out of memory,
        pass unchanged.
        """
        began_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            is_known = any(word in str(error).lower() for word in _GROUP_WORDS)
            if not isinstance(error, distributed.DistError) and (
                isinstance(error, torch.OutOfMemoryError) or not is_known
            ):
                raise
            others = tuple(rank for place, rank in enumerate(self.ranks) if place != self.rank)
            raise PeerFailed(others, what, _reason(error), time.monotonic() - began_s) from error


class OwnThread:
    """A thread for collectives of gloo, started by the first one and kept for all later ones.

    Gloo stores the thread-local state of the thread that starts a collective, and a thread of gloo frees this state
    under a lock. While torch captures a graph or runs it for the first time, the state holds Python objects, so gloo's
    thread waits for the interpreter; the next collective has the interpreter and waits for the lock. One of four runs
    hung.

    The thread ends with this object. A forked child starts a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] | None = None
        self._process = 0
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], _Made]) -> _Made:
        """Run `work` on the thread, after the work of earlier calls, and return its result.

        Called on the thread itself, by a finalizer or by other work, run `work` at once.
        """
        if self._thread is threading.current_thread():
            return work()
        done: Future[_Made] = Future()
        with self._lock:
            if self._jobs is None or self._process != os.getpid():
                self._jobs, self._process = SimpleQueue(), os.getpid()
                self._thread = threading.Thread(target=_run_all, args=(self._jobs,), name="elixir control", daemon=True)
                self._thread.start()
                # Not at exit: other functions that run then may still exchange.
                weakref.finalize(self, self._jobs.put, None).atexit = False
            jobs = self._jobs
        jobs.put((work, done))
        return done.result()


def _run_all(jobs: "SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]") -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            work, done = job
            try:
                done.set_result(work())
            except BaseException as error:  # `run` raises it
                done.set_exception(error)
            del job, work, done  # an idle thread holds no tensors


def new_control_channel(ranks: Sequence[int], timeout: timedelta | None = None) -> ControlChannel:
    """Return the control channel of `ranks`, numbered as in the default process group; each of them must call this.

    `timeout` is the longest wait for another rank; None: the timeout of the default group. Raises PeerFailed if a rank
    does not call this within the timeout.
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
    assert isinstance(group, distributed.ProcessGroup), "this process is a member"
    return ControlChannel(group, members, rank)


def _reason(error: RuntimeError) -> str:
    """Return the first line of `error` without gloo's source file and advice, and without the stack."""
    line = str(error).strip().partition("\n")[0].partition(". This is typically caused by")[0]
    return line.partition("] ")[2] if line.startswith("[") and "] " in line else line


# ----------------------------------------------------------------------------------------------------------------------
# The ranks that run one model together: they agree on plans, call the roll before steps, and save together.


class Peers:
    """The processes `ranks`, numbered as in the default process group, which have shards of one model.

    All of them must make this at the same point.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.control = new_control_channel(ranks)
        """The control channel for training."""

    @property
    def num_ranks(self) -> int:
        """The number of all ranks."""
        return len(self.control.ranks)

    @cached_property
    def checkpoint_control(self) -> ControlChannel:
        """The control channel for checkpoints, separate because training continues during a save.

        All ranks must read this for the first time at the same point.
        """
        return new_control_channel(self.control.ranks)

    @cached_property
    def num_local(self) -> int:
        """The largest number of ranks on a host, told apart by host name.

        All ranks must read this for the first time at the same point.
        """
        names = self.control.exchange(platform.node(), "names of hosts", "is about to run its first graph")
        return max(Counter(names).values())
