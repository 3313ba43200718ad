"""The ledger in which a collective counts, with the bucket that it is for."""

from contextlib import AbstractContextManager
from typing import NamedTuple

from elixir_compile.ir.kinds import InnerVerb, Lane, Verb
from elixir_compile.ir.schedule import BucketRef, label
from elixir_compile.runtime.ledger import Ledger


class Counted(NamedTuple):
    """The ledger for the counts of collectives, and the bucket in their labels."""

    ledger: Ledger
    bucket: BucketRef

    def span(self, verb: Verb | InnerVerb, nbytes: int) -> AbstractContextManager[object]:
        """Count a collective of `nbytes`; its `reduce` is counted with the sum on compute."""
        return self.ledger.span(Lane.REDUCE, label(verb, self.bucket), nbytes, times=int(verb is not Verb.REDUCE))
