"""Planners that follow a rule, to compare with: same graph, same runtime, so that differences come from the plan.

keep_all        everything on the device, or no plan
zero_offload    parameters on the device, all optimizer state on the host (ZeRO-Offload, Ren et al. 2021)
zero3_offload   everything on the host, gathered for each use and released after it (ZeRO-Infinity, Rajbhandari 2021)
fsdp_offload    all or nothing: as `keep_all` where that fits, else as `zero3_offload` (FSDP's CPUOffload)
elixir          the paper's: one bit decides whether memory left goes to gathered copies or to optimizer state first
                (Elixir, arXiv 2212.05339, section 4)

On several ranks what is on the device is sharded; `keep_all` and `zero_offload` keep gathered copies from forward to
backward, `fsdp_offload` releases them, as FSDP does.
"""

from collections.abc import Callable, Mapping, Sequence

from elixir_compile.hardware.paper import PaperRates, paper_rates
from elixir_compile.search.judge import Evaluator
from elixir_compile.search.levels import Level

Levels = tuple[Level, ...]


def gathers_first(num_ranks: int, rates: PaperRates, *, item_bytes: int = 2, master_bytes: int = 4) -> bool:
    """Return the paper's one bit: whether memory that is left goes to gathered copies before optimizer state.

    Keeping a gathered copy (rCache) saves I seconds per element, holding its optimizer state on the device J:

        I = e_p / c2g + e_p / g2c
        J = n / r_os * (e_o / c2g + I + e_p / g2c + 1 / v_cpu - 1 / v_gpu)

    with e_p and e_o bytes of an element and of its master copy, and r_os bytes of optimizer state per byte of the
    parameter: 7 for Adam in mixed precision.
    """
    to_device, to_host = rates.h2d_bytes_per_s, rates.d2h_bytes_per_s
    gathered_s = item_bytes / to_device + item_bytes / to_host
    update_s = 1 / rates.host_update_elements_per_s - 1 / rates.device_update_elements_per_s
    state_s = num_ranks / 7 * (master_bytes / to_device + gathered_s + item_bytes / to_host + update_s)
    return gathered_s > state_s


def _everywhere(evaluator: Evaluator, wanted: Sequence[Level]) -> Levels:
    """The first of `wanted` that each bucket can have; what is in force where it can have none."""
    return tuple(
        next((level for level in wanted if level in choices), choices[0]) for choices in evaluator.facts.choices
    )


def _keep_all(evaluator: Evaluator) -> Levels:
    return evaluator.facts.start_levels


def _zero_offload(evaluator: Evaluator) -> Levels:
    return _everywhere(evaluator, (Level.STATE_OFF,))


def _zero3_offload(evaluator: Evaluator) -> Levels:
    return evaluator.facts.furthest_levels


def _fsdp_offload(evaluator: Evaluator) -> Levels:
    kept = _everywhere(evaluator, (Level.KEPT_RELEASED, Level.KEPT))
    return kept if evaluator.fits(kept, ahead=0) else evaluator.facts.furthest_levels


def _elixir(evaluator: Evaluator) -> Levels:
    """Fill what is left above the minimum, gathered copies or optimizer state first, in first-use order.

    The paper's search keeps copies in the order that Belady's rule gives for a chain that runs forward and then back:
    with room for k of K equal chunks it loads 2K - k times, which keeping any k from forward to backward does too.
    """
    num_ranks = evaluator.facts.problem.num_shards
    order = (Level.RESIDENT, Level.KEPT)
    if not gathers_first(num_ranks, paper_rates(num_ranks)):
        order = (Level.KEPT, Level.RESIDENT)
    levels = list(evaluator.facts.furthest_levels)
    memory, budget_bytes = evaluator.memory, evaluator.facts.problem.budget_bytes
    # What moves closer takes no more of the host.
    is_exact = num_ranks > 1 and not evaluator.facts.streamed and evaluator.fits(levels, ahead=0)
    own_bytes = memory.own_bytes()
    live_bytes = memory.rest_bytes + sum(own_bytes[i, level] for i, level in enumerate(levels))
    for wanted in order:
        # The last layers are used last and first: their copies wait the shortest.
        for bucket in reversed(range(len(levels))):
            before = levels[bucket]
            if wanted not in evaluator.facts.choices[bucket] or wanted >= before:
                continue
            more_bytes = own_bytes[bucket, wanted] - own_bytes[bucket, before]
            # Never more than what is there: what is too much by this count does not fit.
            if int((live_bytes + more_bytes).max()) > budget_bytes:
                continue
            levels[bucket] = wanted
            if is_exact or evaluator.fits(levels, ahead=0):
                live_bytes = live_bytes + more_bytes
            else:
                levels[bucket] = before
    return tuple(levels)


RULES: Mapping[str, Callable[[Evaluator], Levels]] = {
    "elixir": _elixir,
    "zero3_offload": _zero3_offload,
    "zero_offload": _zero_offload,
    "fsdp_offload": _fsdp_offload,
    "keep_all": _keep_all,
}
