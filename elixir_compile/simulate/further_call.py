"""Simulate a call of a step between the first and the last, which alone gather, reduce and update."""

from dataclasses import dataclass, replace

from elixir_compile.cost import Measured
from elixir_compile.hardware import Cluster
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Update
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import GroupRef, RegionRef
from elixir_compile.simulate.engine import actions_of, play_with, player_of


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherCall:
    """The seconds of a call that is neither the first nor the last of its step."""

    step_s: float
    exposed_s: float
    """Seconds in which its regions wait for transfers of activations."""


def further_call(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured) -> FurtherCall:
    """Return the seconds of a call of `plan` that gathers, reduces and updates nothing."""
    player = player_of(graph, replace(plan, update=Update.AFTER_BACKWARD), cluster, measured)
    own = [action for action in actions_of(plan) if isinstance(action[1], RegionRef | GroupRef)]
    step_s = play_with(player, own).step_s
    return FurtherCall(step_s=step_s, exposed_s=max(0.0, step_s - sum(player.run_s.values())))
