"""From the option `micro_batches` and a captured step to the number of micro-batches of a problem."""

import warnings

from elixir_compile.base.errors import ElixirWarning, InvalidOption
from elixir_compile.base.options import Options
from elixir_compile.ir import Phase, StepGraph
from elixir_compile.step.recompute import laps_at


def micro_batches_asked(graph: StepGraph, options: Options) -> int:
    """Return the number of micro-batches in which the laps of `graph` run; 1 if the search has to choose.

    Raises InvalidOption if the rows of the batch are not divided by the number that the user asks for. Warns
    ElixirWarning if no lap of a training step can be divided.
    """
    asked = options.micro_batches
    if isinstance(asked, str) or asked == 1 or not any(op.phase is Phase.UPDATE for op in graph.ops):
        return 1
    if graph.batch == 1 and not graph.batch_size:
        _warn_undivided(graph, asked, graph.undivided or "no inputs share a batch of more than one row")
        return 1
    if not graph.batch_size and graph.batch % asked:
        divisors = [str(number) for number in range(1, graph.batch + 1) if graph.batch % number == 0]
        expected = f"a divisor of the batch of {graph.batch}: {', '.join(divisors)}"
        raise InvalidOption("micro_batches", asked, expected)
    if not laps_at(graph, (), asked):
        mixing = next((op for op in graph.ops if op.mixes), None)
        found = "no op reads the batch" if mixing is None else f"{mixing.id} mixes the batch: {mixing.mixes}"
        _warn_undivided(graph, asked, found + (f" ({mixing.source})" if mixing is not None and mixing.source else ""))
        return 1
    return asked


def _warn_undivided(graph: StepGraph, asked: int, why: str) -> None:
    warnings.warn(
        f"{graph.name} runs on the whole batch instead of in {asked} micro-batches: {why}.", ElixirWarning, stacklevel=2
    )
