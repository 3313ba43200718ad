"""The result of the fixture `memory_schedule`: a function from a model and a batch to the memory of a training step."""

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.base.options import parse_options
from elixir_compile.ir import Plan, Record
from elixir_compile.ir.hardware import Cluster, cluster_to_json
from elixir_compile.optim.adamw import HybridAdamW
from elixir_compile.runtime.measure import measure_step
from elixir_compile.session.plan_files import save_plan
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.plan import plan_and_problem
from elixir_compile.tools.preview.capture import Inputs
from elixir_compile.tools.testing.step_memory import MemorySchedule

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_NUM_STEPS_BEFORE = 2
"""Steps before the measured one. The first compiles and makes the state of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySchedules:
    """Plan training steps for one test, whose goldens are in the folder `goldens` beside `test_file`."""

    test_file: Path
    writes_goldens: bool = False
    """Whether `assert_matches_golden` writes instead of comparing."""

    def __call__(
        self,
        model: "nn.Module | Callable[[], nn.Module] | PreTrainedConfig | str",
        batch: "Inputs | torch.Tensor",
        *,
        hardware: "Cluster | str | None" = None,
        run: bool = False,
        state_bytes_per_element: int | None = None,
        dynamic: bool = False,
        **options: object,
    ) -> MemorySchedule:
        """Return the memory of a training step of `model` on `batch` with HybridAdamW.

        `model`, `hardware`, `state_bytes_per_element` and `dynamic` are those of `elixir_compile.plan`: the model needs
        no weights and the machine no device. `batch` is a tensor, positional inputs, or inputs by name. `options` are
        those of the backend, such as `device_memory="2GiB"`; plans of earlier runs are not used unless `plan_cache` is
        True.

        If `run`, a copy of `model`, which must be a module with weights, is trained for three steps here under this
        plan, and the last one is measured. The loss is the `loss` of the output, or the sum of its first tensor.

        Raises the errors of `elixir_compile.plan`, and UnsupportedModel for `run` without weights.
        """
        chosen = parse_options({"plan_cache": False, **options})
        inputs = (batch,) if isinstance(batch, torch.Tensor) else batch
        if run and (not isinstance(model, nn.Module) or any(param.is_meta for param in model.parameters())):
            name = model if isinstance(model, str) else type(model).__name__
            raise UnsupportedModel(name, "`run=True` trains it, which needs a module with weights")
        plan, problem = plan_and_problem(
            model,
            inputs,
            options=chosen,
            hardware=hardware,
            state_bytes_per_element=state_bytes_per_element,
            dynamic=dynamic,
        )
        made = MemorySchedule(
            plan=plan,
            graph=problem.graph,
            simulated=simulate(problem.graph, plan, problem.cluster, problem.measured),
            test_file=self.test_file,
            writes_goldens=self.writes_goldens,
            is_named_machine=hardware is not None or chosen.hardware is not None,
        )
        if not run:
            return made
        assert isinstance(model, nn.Module)
        given = {**options, "hardware": hardware or chosen.hardware}
        return replace(made, measured=_measured(model, inputs, plan, given, dynamic=dynamic))


def _measured(model: nn.Module, inputs: Inputs, plan: Plan, options: Mapping[str, object], *, dynamic: bool) -> Record:
    """Return the record of a step of a copy of `model` under `plan`.

    Its peaks are those of the copies of `model` and `inputs` alone: what there was before is subtracted.
    """
    before = measure_step(lambda: None)
    own, inputs = copy.deepcopy((model, inputs))
    with tempfile.TemporaryDirectory() as folder:
        path, machine = Path(folder) / "plan.json", options.get("hardware")
        save_plan(plan, path)
        if isinstance(machine, Cluster):  # the backend takes the path of a profile
            (Path(folder) / "machine.json").write_text(cluster_to_json(machine), encoding="utf-8")
            machine = str(Path(folder) / "machine.json")
        given = {"report": False, "replan": False, **options, "hardware": machine, "plan": str(path)}
        compiled = torch.compile(own, backend="elixir", dynamic=dynamic or None, options=given)  # pyright: ignore
        optimizer = HybridAdamW(own.parameters(), lr=1e-3)

        def step() -> None:
            _loss_of(compiled(**inputs) if isinstance(inputs, Mapping) else compiled(*inputs)).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(_NUM_STEPS_BEFORE):
            step()
        record = measure_step(step)
    return replace(
        record,
        device_peak_bytes=max(0, record.device_peak_bytes - before.device_peak_bytes),
        host_peak_bytes=max(0, record.host_peak_bytes - before.host_peak_bytes),
    )


def _loss_of(output: Any) -> torch.Tensor:
    """Return the loss of the output of a model: its field or key `loss`, or the sum of its first tensor."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        first = next(iter(output.values())) if isinstance(output, Mapping) else output
        loss = first[0] if isinstance(first, tuple | list) else first
    if not isinstance(loss, torch.Tensor):
        raise UnsupportedModel(type(output).__name__, "`run=True` needs a loss: a tensor, or an output with `loss`")
    return loss if loss.dim() == 0 else loss.sum()
