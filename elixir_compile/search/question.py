"""The question file beside a saved plan: what the plan answers, as gzipped JSON.

```text
  plan.json                 the decisions, and the fingerprint of the graph
  plan.question.json.gz     the graph with its sizes, the machine, the budgets, measured seconds, the planner
```

With both files a plan is explained, verified and drawn without its model, and the question can be asked again under
another budget. The file is never a pickle, and reading it unpacks a limited number of bytes: a file of 100 KB can
unpack to 100 MB.
"""

import gzip
import math
import zlib
from dataclasses import dataclass, replace
from typing import Any, get_args

from elixir_compile.base.codec import Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan, QuestionFileError
from elixir_compile.base.options import Options, Planner
from elixir_compile.ir.graph import MOST_BYTES
from elixir_compile.search.problem import Problem

QUESTION_FORMAT = 2
MOST_UNPACKED_BYTES = 1 << 25
"""The most bytes of JSON in a question file, 32 MiB. A Llama of 32 layers has about 3 MB, and JSON takes up to 25 times
its bytes when it is read."""
_GZIP = 16 + zlib.MAX_WBITS
"""The value of `wbits` for data with a header of gzip."""
_CHOICES = ("", "fit", "auto")


_OF_PARAMS = {
    "state_nbytes": "state_nbytes",
    "state_dtypes": "state_dtype",
    "sum_nbytes": "sum_nbytes",
    "shards": "shard_numels",
    "reduce_dtypes": "reduce_dtype",
    "groups": "group",
}
"""The mappings of format 1 from the names of parameters, each with the field of `Param` that has its values."""


def _with_params(data: dict[str, Any]) -> None:
    """Turn `data` of format 1, with a mapping for each fact about parameters, into that of format 2, which has `Param`.

    A mapping that is none stays where it is, so that the reader refuses it.
    """
    problem = data.get("problem")
    if not isinstance(problem, dict):
        return
    params: dict[str, dict[str, Any]] = {}
    for former, name in _OF_PARAMS.items():
        if isinstance(problem.get(former), dict):
            for param, value in problem.pop(former).items():
                params.setdefault(param, {})[name] = value
    narrower = problem.get("narrower")
    if isinstance(narrower, dict) and isinstance(narrower.get("nbytes"), dict):
        problem["narrower_dtype"] = problem.pop("narrower").get("dtype")
        for param, nbytes in narrower["nbytes"].items():
            params.setdefault(param, {})["narrower_nbytes"] = [[problem["narrower_dtype"], nbytes]]
    problem["params"] = {name: {"is_trained": "state_nbytes" in facts, **facts} for name, facts in params.items()}


_FORM = Form(what="question", version=QUESTION_FORMAT, error=QuestionFileError, upgrades={1: _with_params})


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A problem with the options of its search."""

    problem: Problem
    planner: str
    """The planner that was asked, as the option `planner` names it."""
    search_timeout_s: float
    micro_batches: str
    """How the search chooses the number of micro-batches: the option `micro_batches` if it is a word, else empty,
    because the problem has the number."""

    def __post_init__(self) -> None:
        problem = self.problem
        if self.planner not in get_args(Planner):
            raise InvalidPlan(f"planner {self.planner!r}: expected one of {', '.join(get_args(Planner))}.")
        if not (math.isfinite(self.search_timeout_s) and self.search_timeout_s > 0):
            raise InvalidPlan(f"a search of {self.search_timeout_s} s; expected a positive number of seconds.")
        if self.micro_batches not in _CHOICES:
            raise InvalidPlan(f"micro_batches {self.micro_batches!r}: expected 'fit', 'auto' or nothing.")
        params = problem.params.values()
        counts = {
            f"problem.params.{name}": min([getattr(param, name) for param in params], default=0)
            for name in ("state_nbytes", "sum_nbytes", "group")
        }
        for name, least in {**counts, "problem.least_alike": problem.least_alike or 0}.items():
            if least < 0:
                raise InvalidPlan(f"{name} holds {least}; expected numbers of 0 or more.")
        rows = (problem.measured.micro_batches, 1 if problem.common_rows is None else problem.common_rows)
        if min(rows) < 1:
            raise InvalidPlan(f"a question about {min(rows)} micro-batches or rows; expected 1 or more.")
        total_bytes = sum(param.state_nbytes + param.sum_nbytes for param in params)
        total_bytes += problem.base_bytes + problem.host_base_bytes + problem.between_bytes + problem.after_bytes
        if total_bytes > MOST_BYTES:
            raise InvalidPlan(f"a question counts {total_bytes} bytes; expected at most {MOST_BYTES}.")

    @property
    def options(self) -> Options:
        """The options that a search of the problem reads, without those that are in the problem already."""
        asked = self.micro_batches or self.problem.micro_batches
        options = Options(planner=self.planner, search_timeout=self.search_timeout_s)  # pyright: ignore[reportArgumentType]
        return replace(options, micro_batches=asked)


def question_of(problem: Problem, options: Options) -> Question:
    """Return `problem` as it is asked under `options`.

    A number of micro-batches that a search chose for `problem` is left open again.
    """
    chooses = options.micro_batches if isinstance(options.micro_batches, str) else ""
    return Question(
        problem=replace(problem, micro_batches=1) if chooses else problem,
        planner=options.planner,
        search_timeout_s=options.search_timeout,
        micro_batches=chooses,
    )


def question_to_bytes(question: Question) -> bytes:
    """Return the content of a question file; equal questions have equal bytes."""
    return gzip.compress(to_json(_FORM, question, indent=None).encode(), compresslevel=6, mtime=0)


def question_from_bytes(content: bytes) -> Question:
    """Return the question in the content of a file.

    Raises QuestionFileError if it is not gzipped JSON of at most `MOST_UNPACKED_BYTES`, and with the wrong field if the
    JSON is not a question.
    """
    return from_json(_FORM, Question, _unpacked(content))


def _unpacked(content: bytes) -> str:
    unpacker = zlib.decompressobj(_GZIP)
    try:
        text = unpacker.decompress(content, MOST_UNPACKED_BYTES)
    except zlib.error as error:
        raise QuestionFileError("the whole file", "a gzip file", str(error)) from error
    if unpacker.unconsumed_tail:
        raise QuestionFileError("the whole file", f"at most {MOST_UNPACKED_BYTES} bytes of JSON", "more")
    if not unpacker.eof or unpacker.unused_data:
        got = f"{len(unpacker.unused_data)} bytes behind its end" if unpacker.eof else "a part of it"
        raise QuestionFileError("the whole file", "a whole gzip file and nothing else", got)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise QuestionFileError("the whole file", "text in UTF-8", f"byte {error.start} that is no UTF-8") from error
