"""What holds the step time at the optimum of the bound, in words."""

from elixir_compile.search.program import Program, Vector

_FULL = 1 - 1e-3


def binding(program: Program, x: Vector) -> tuple[str, ...]:
    """Return the rows that are full at x, in words, each once."""
    facts, live_bytes = program.evaluator.facts, program.live_bytes(x)
    labels = _longest_labels(program, x)
    fullest = int(live_bytes.argmax())
    if live_bytes[fullest] >= facts.problem.budget_bytes * _FULL:
        op = facts.graph.ops[program.memory.highest_op(fullest)]
        labels.append(f"device memory is full at {op.id}")
    host = program.host_row
    if host.values @ x[host.columns] >= host.limit * _FULL:
        labels.append("host memory is full")
    return tuple(dict.fromkeys(labels))


def _longest_labels(program: Program, x: Vector) -> list[str]:
    """How the longest path of each phase divides over its lanes; one through several stands for them."""
    sides = [max((phase.longest(x) for phase in side), key=lambda path: path.seconds) for side in program.phases]
    if any(phase.longest_s(x) >= program.lower_s(x) for phase in program.whole):
        return ["step: host memory is busy"]
    across = max((phase.longest(x) for phase in program.across), key=lambda path: path.seconds, default=None)
    if across is None or across.seconds <= sum(sides[number].seconds for number in program.spanned):
        return [side.label for side in sides]
    names = " and ".join(side[0].name for number, side in enumerate(program.phases) if number in program.spanned)
    rest = [side.label for number, side in enumerate(sides) if number not in program.spanned]
    return [f"{names}: {across.label.partition(': ')[2]}", *rest]
