"""Checkpoints of moments in fewer bytes: bit for bit in the same form, converted to others, on any number of ranks."""

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import elixir_compile as elixir
from elixir_compile.graph.ops.shards import full, own_part
from elixir_compile.ir import Update
from elixir_compile.optim.disk import DiskState
from elixir_compile.optim.precision import MomentForm, form_of
from tests.run.optim.test_narrow_state import narrow_adamw, rows, steps
from tests.run.processes import spawn
from tests.run.training import Run, assert_same_tensors
from tests.run.updating import eager_run, hybrid_run, small_pieces

pytestmark = pytest.mark.filterwarnings("ignore::elixir_compile.base.errors.NoGraphCaptured")


def state_of(run: Run) -> list[dict[str, torch.Tensor]]:
    return [{name: own_part(value) for name, value in own.items()} for own in states(run.optimizer)]


def states(optimizer: torch.optim.Optimizer, **how: Any) -> list[dict[str, torch.Tensor]]:
    return list(optimizer.state_dict(**how)["state"].values())  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("home", ["host disk", pytest.param("host", marks=pytest.mark.slow)])
@pytest.mark.parametrize("state_dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(state_dtype: str, home: str, tmp_path: Path) -> None:
    optimizer = functools.partial(narrow_adamw, state_dtype=state_dtype)
    disk = {"disk_path": tmp_path} if home.endswith("disk") else {}
    plan = {"home": home, "update": Update.ACROSS_STEPS, "optimizer": optimizer, **disk}
    with small_pieces(), hybrid_run(steps(), rows(1)[0], **plan) as run:
        run.train(rows(2))
        elixir.save(tmp_path / "run", run.model, run.optimizer, step=2)
        run.train(rows(4)[2:])
        with hybrid_run(steps(), rows(1)[0], home="device", update=Update.AFTER_BACKWARD, optimizer=optimizer) as other:
            other.train(rows(1))
            assert elixir.load(tmp_path / "run", other.model, other.optimizer).step == 2
            other.train(rows(4)[2:])
            assert_same_tensors(run.weights, other.weights)
            for own, there in zip(state_of(run), state_of(other), strict=True):
                assert_same_tensors(own, there)
        if home.endswith("disk"):
            assert all(isinstance(state, DiskState) for state in run.optimizer.state.values())
    said = json.loads((tmp_path / "run" / "state.json").read_text())["optimizer"]["moments"]
    assert said == {state_dtype: len(list(run.model.parameters()))}


@pytest.mark.parametrize(
    ("dtype", "optimizer", "moments"),
    [
        (torch.bfloat16, elixir.HybridAdamW, {}),
        (torch.float32, elixir.hybrid(torch.optim.SGD, "bfloat16"), {"bfloat16": 5}),
        (torch.float32, torch.optim.AdamW, {}),
    ],
    ids=["bf16 parameters without masters", "a class", "torch"],
)
def test_a_checkpoint_names_narrower_moments_alone(
    dtype: torch.dtype, optimizer: Any, moments: dict[str, int], tmp_path: Path
) -> None:
    own = eager_run(steps().to(dtype), optimizer, lr=1e-2, **({"momentum": 0.9} if moments else {}))
    own.train(rows(1, dtype))
    elixir.save(tmp_path / "run", own.model, own.optimizer)
    assert json.loads((tmp_path / "run" / "state.json").read_text())["optimizer"]["moments"] == moments


def test_other_forms_load_a_checkpoint(tmp_path: Path) -> None:
    def trained(state_dtype: str) -> Run:
        optimizer = functools.partial(narrow_adamw, state_dtype=state_dtype)
        with hybrid_run(steps(), rows(1)[0], home="device", update=Update.AFTER_BACKWARD, optimizer=optimizer) as run:
            return run.train(rows(2))

    narrow, exact = trained("int8"), trained("float32")
    elixir.save(tmp_path / "run", narrow.model, narrow.optimizer)
    elixir.load(tmp_path / "run", exact.model, exact.optimizer)
    assert {form_of(state) for state in exact.optimizer.state.values()} == {MomentForm.FLOAT32}
    for own, wanted in zip(states(exact.optimizer), states(narrow.optimizer, as_float32=True), strict=True):
        assert_same_tensors(wanted, own)
    elixir.save(tmp_path / "exact", exact.model, exact.optimizer)
    elixir.load(tmp_path / "exact", narrow.model, narrow.optimizer)
    assert {form_of(state) for state in narrow.optimizer.state.values()} == {MomentForm.INT8}
    for own, wanted in zip(states(narrow.optimizer, as_float32=True), states(exact.optimizer), strict=True):
        assert_same_tensors(wanted, own)  # to encode what was decoded loses nothing


def test_a_checkpoint_with_moments_of_no_form_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = eager_run(steps(), functools.partial(narrow_adamw, state_dtype="int8")).train(rows(1))
    monkeypatch.setattr("elixir_compile.checkpoint.run_state._moments", lambda optimizer: {"float8": 5})
    elixir.save(tmp_path / "run", own.model, own.optimizer)
    with pytest.raises(
        elixir.ElixirError, match="moments in float8 in the checkpoint, which this version does not have"
    ):
        elixir.load(tmp_path / "run", own.model, own.optimizer)


class Wide(nn.Module):
    """Rows of whole blocks, and a weight with odd rows; large enough that both are sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.up = nn.Linear(256, 211, bias=False)
        self.down = nn.Linear(211, 257)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def batches_of(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(8, 256, generator=generator) for _ in range(4)]


def training_of(mesh: DeviceMesh | None, state_dtype: str) -> Run:
    model = elixir.prepare(Wide(), mesh=mesh)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2, state_dtype=state_dtype)
    options = {"inner": "aot_eager", "report": False}
    return Run(model=model, compiled=torch.compile(model, backend="elixir", options=options), optimizer=optimizer)


def saves_and_loads(rank: int, world_size: int, folder: str, state_dtype: str) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", list(range(world_size)))

    def own(batches: list[torch.Tensor]) -> list[torch.Tensor]:
        return [batch.chunk(world_size)[rank] for batch in batches]

    first = training_of(mesh, state_dtype).train(own(batches_of(1)[:2]))
    assert {form_of(state) for state in first.optimizer.state.values()} == {MomentForm(state_dtype)}
    elixir.save(f"{folder}/run", first.model, first.optimizer)
    whole = [{name: full(value) for name, value in state.items()} for state in states(first.optimizer, as_float32=True)]
    first.train(own(batches_of(1)[2:]))
    second = training_of(mesh, state_dtype)
    elixir.load(f"{folder}/run", second.model, second.optimizer)
    second.train(own(batches_of(1)[2:]))
    for mine, theirs in zip(states(first.optimizer), states(second.optimizer), strict=True):
        assert_same_tensors(
            {name: own_part(value) for name, value in mine.items()},
            {name: own_part(value) for name, value in theirs.items()},
        )
    if rank == 0:
        alone = training_of(None, state_dtype)
        elixir.load(f"{folder}/run", alone.model, alone.optimizer)
        names = [name for name, _ in alone.model.named_parameters()]
        for name, mine, theirs in zip(names, whole, states(alone.optimizer, as_float32=True), strict=True):
            for moment in ("exp_avg", "exp_avg_sq"):
                apart = (mine[moment] - theirs[moment]).abs().max() / mine[moment].abs().max()
                assert apart <= (0.0 if name == "up.weight" else 0.02), (name, moment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", elixir.RanksApart)  # this model is meant for one rank
            alone.train(batches_of(1)[2:])
    return {"weight": float(full(dict(first.model.named_parameters())["up.weight"].detach()).sum())}


def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    first, second = spawn(saves_and_loads, 2, str(tmp_path), "int8", folder=tmp_path, limit_s=120.0)
    assert first == second
