"""Train models larger than the device: `torch.compile(model, backend="elixir", options={"device_memory": "20GiB"})`."""

import importlib
from typing import TYPE_CHECKING

from elixir_compile.base.version import __version__ as __version__
from elixir_compile.base.version import know_former_names

if TYPE_CHECKING:
    from elixir_compile.checkpoint.loading import Checkpoint as Checkpoint
    from elixir_compile.checkpoint.loading import export as export
    from elixir_compile.checkpoint.loading import full_state_dict as full_state_dict
    from elixir_compile.checkpoint.loading import load as load
    from elixir_compile.checkpoint.saving import SaveHandle as SaveHandle
    from elixir_compile.checkpoint.saving import save as save
    from elixir_compile.ir import Plan as Plan
    from elixir_compile.ir import Record as Record
    from elixir_compile.ir.pipeline import PipelinePlan as PipelinePlan
    from elixir_compile.ir.share import Share as Share
    from elixir_compile.ir.share import Shares as Shares
    from elixir_compile.optim.adamw import HybridAdamW as HybridAdamW
    from elixir_compile.optim.adamw import hybrid as hybrid
    from elixir_compile.runtime.measure import measure_step as measure_step
    from elixir_compile.session.model import Compilation as Compilation
    from elixir_compile.session.plan_files import load_plan as load_plan
    from elixir_compile.session.plan_files import save_plan as save_plan
    from elixir_compile.session.prepare import ShareSampler as ShareSampler
    from elixir_compile.session.prepare import compilations as compilations
    from elixir_compile.session.prepare import mean_loss as mean_loss
    from elixir_compile.session.prepare import prepare as prepare
    from elixir_compile.session.prepare import suggested_shares as suggested_shares
    from elixir_compile.session.prepare import weigh as weigh
    from elixir_compile.tools.observe import Study as Study
    from elixir_compile.tools.observe import observe as observe
    from elixir_compile.tools.observed import StepSummary as StepSummary
    from elixir_compile.tools.plan import plan as plan
    from elixir_compile.tools.plan import plan_stages as plan_stages
    from elixir_compile.tools.plan import shares as shares
    from elixir_compile.tools.report.diff import diff as diff
    from elixir_compile.tools.report.explain import explain as explain

know_former_names()

_HOME: dict[str, str] = {
    "Checkpoint": "checkpoint.loading",
    "Compilation": "session.model",
    "HybridAdamW": "optim.adamw",
    "PipelinePlan": "ir.pipeline",
    "Plan": "ir",
    "Record": "ir",
    "SaveHandle": "checkpoint.saving",
    "Share": "ir.share",
    "ShareSampler": "session.prepare",
    "Shares": "ir.share",
    "StepSummary": "tools.observed",
    "Study": "tools.observe",
    "compilations": "session.prepare",
    "diff": "tools.report.diff",
    "explain": "tools.report.explain",
    "export": "checkpoint.loading",
    "full_state_dict": "checkpoint.loading",
    "hybrid": "optim.adamw",
    "load": "checkpoint.loading",
    "load_plan": "session.plan_files",
    "mean_loss": "session.prepare",
    "measure_step": "runtime.measure",
    "observe": "tools.observe",
    "plan": "tools.plan",
    "plan_stages": "tools.plan",
    "prepare": "session.prepare",
    "save": "checkpoint.saving",
    "save_plan": "session.plan_files",
    "shares": "tools.plan",
    "suggested_shares": "session.prepare",
    "weigh": "session.prepare",
}
_ERRORS = (
    "ActivationsGone",
    "ContradictingFractions",
    "DiskCorrupted",
    "DiskFailed",
    "DiskFull",
    "ElixirError",
    "ElixirWarning",
    "FrozenChanged",
    "FrozenFileChanged",
    "GradientsChanged",
    "IllegalSchedule",
    "IncompleteStep",
    "InvalidOption",
    "InvalidPlan",
    "InvalidProfile",
    "MasterIgnored",
    "NestedMeasurement",
    "NoFeasiblePlan",
    "NoFeasibleShares",
    "NoFeasibleStages",
    "NoGraphCaptured",
    "NotPrepared",
    "OptimizerNotTensorWise",
    "OptimizerTooEarly",
    "OutOfDeviceMemory",
    "ParameterReplaced",
    "PlanFileError",
    "PlanMismatch",
    "ProfileFileError",
    "QuestionFileError",
    "RanksApart",
    "StaleParameters",
    "StateNotApart",
    "TooManyForwards",
    "TraceFileError",
    "UnforeseenState",
    "UnknownHardware",
    "UnknownModel",
    "UnknownOption",
    "UnknownSchedule",
    "UnknownSubject",
    "UnsupportedBackward",
    "UnsupportedDevice",
    "UnsupportedModel",
    "UnsupportedWrapper",
    "WrongDtype",
)
_CHECKPOINT_ERRORS = ("CheckpointCorrupted", "CheckpointMismatch", "NotACheckpoint", "NotSavable")
_HOME |= dict.fromkeys(_ERRORS, "base.errors") | dict.fromkeys(_CHECKPOINT_ERRORS, "checkpoint.errors")
_HOME |= dict.fromkeys(("OverflowUnseen", "PeerFailed", "RanksDiffer"), "runtime.distributed.errors")

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]  the imports above tell a type checker


def __getattr__(name: str) -> object:
    """Import public names on first use, so importing a planning submodule does not load torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
