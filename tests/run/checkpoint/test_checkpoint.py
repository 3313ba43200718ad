"""A run that is saved and resumed goes on bitwise; saves beside the training, values as JSON, and memory."""

import gc
import json
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Adafactor, Muon

import elixir_compile as elixir
from elixir_compile.checkpoint import dcp
from elixir_compile.checkpoint.run_state import UnsupportedValue, from_plain, tensor_keys, to_plain
from elixir_compile.graph.ops.shards import own_shard
from elixir_compile.ir import Update
from tests.covering import some_slow
from tests.run.checkpointing import Elsewhere, Training, assert_resumed, by_elixir_noisy, eager, everything, other
from tests.run.models import hf_batches, small_gpt2
from tests.run.optim.tensor_wise_classes import Shampoo, Soap
from tests.run.optim.test_whole_updates import STATIC, assert_same_run, expected_of, model_for
from tests.run.optim.test_whole_updates import batches as tower_batches
from tests.run.processes import spawn
from tests.run.ranks_checks import most_resident_bytes
from tests.run.training import Run, assert_same_tensors, by_elixir, by_torch, fused_adamw, hybrid_adamw
from tests.run.updating import (
    controlled_worker,
    hybrid_run,
    in_flight,
    ladder,
    placed,
    rows,
    small_buckets,
    small_pieces,
)

# ----------------------------------------------------------------------------------------------------------------------
# A run that is saved and resumed goes on bitwise as one that was never interrupted.


BATCHES = rows(6)


@pytest.mark.parametrize("num_before", [0, 1], ids=["before the first forward", "after it"])
def test_a_resumed_run_has_the_same_dropout_schedule_and_losses(tmp_path: Path, num_before: int) -> None:
    first = by_elixir_noisy().train(BATCHES[:3])
    first.save(tmp_path / "run", step=3)
    first.train(BATCHES[3:])

    resumed = by_elixir_noisy().train(BATCHES[:num_before])
    torch.manual_seed(99)
    assert resumed.load(tmp_path / "run").step == 3
    assert_resumed(first, resumed.train(BATCHES[3:]), num_steps=3)


@pytest.mark.parametrize("num_before", [0, 1], ids=["before the first forward", "after it"])
@pytest.mark.parametrize(
    ("home", "update", "share"),
    [("device", Update.AFTER_BACKWARD, 0.0), ("split", Update.IN_BACKWARD, 0.5), ("host", Update.ACROSS_STEPS, 0.5)],
)
def test_a_checkpoint_resumes_under_another_plan_and_in_plain_torch(
    tmp_path: Path, home: str, update: Update, share: float, num_before: int
) -> None:
    """From torch alone to a plan, saved with updates in flight, and from there to torch alone."""
    model = ladder()
    expected = eager(model).train(BATCHES)
    eager(model).train(BATCHES[:2]).save(tmp_path / "torch")
    with hybrid_run(other(model), BATCHES[0], home=home, update=update, share=share) as run:
        planned = Training(run).train(BATCHES[:num_before])
        planned.load(tmp_path / "torch")
        planned.train(BATCHES[2:4])
        planned.save(tmp_path / "planned")
        assert_resumed(expected, eager_resumed(tmp_path / "planned"), num_steps=2)
        planned.train(BATCHES[4:])
    assert_resumed(expected, planned, num_steps=4)


@pytest.mark.parametrize(
    ("cls", "home"),
    some_slow(
        [(cls, home) for cls in (Muon, Soap, Shampoo, Adafactor) for home in ("split disk", "host")],
        lambda *each: each in {(Soap, "split disk"), (Adafactor, "host")},
    ),
)
def test_state_of_whole_tensors_resumes_under_another_plan_and_in_its_class(
    tmp_path: Path, cls: type[torch.optim.Optimizer], home: str
) -> None:
    """From all on the device to another home, saved with updates in flight, and from there to the class itself."""
    model, each = model_for(cls), tower_batches()
    expected = expected_of(cls)
    options: dict[str, Any] = {"disk_path": tmp_path, "replan": False} | (STATIC if home == "host" else {})
    first = by_elixir(model, optimizer=elixir.hybrid(cls)).train(each[:2])
    elixir.save(tmp_path / "device", first.model, first.optimizer)
    with small_pieces(), small_buckets(lambda plan: placed(plan, home, 0.0, Update.ACROSS_STEPS)):
        run = by_elixir(other(model), optimizer=elixir.hybrid(cls), **options)
        elixir.load(tmp_path / "device", run.model, run.optimizer)
        run.losses = first.losses[:2]
        run.train(each[2:4])
        elixir.save(tmp_path / "away", run.model, run.optimizer)
        plain = by_torch(other(model), optimizer=cls)
        elixir.load(tmp_path / "away", plain.model, plain.optimizer)
        plain.losses = run.losses[:4]
        assert_same_run(expected, plain.train(each[4:]))
        assert_same_run(expected, run.train(each[4:]))


def eager_resumed(path: Path) -> Training:
    resumed = eager(other(ladder()))
    resumed.load(path)
    return resumed.train(BATCHES[4:])


def test_tied_weights_are_saved_once_and_resume_tied(tmp_path: Path) -> None:
    batches = hf_batches(4)
    run = by_elixir(small_gpt2(num_layers=1)).train(batches[:2])
    elixir.save(tmp_path / "gpt2", run.compiled, run.optimizer)
    saved = run.weights
    model_bytes = sum(param.nbytes for param in run.model.parameters())
    tensors_bytes = sum(file.stat().st_size for file in (tmp_path / "gpt2" / "tensors").iterdir())
    assert tensors_bytes < 3 * model_bytes + 4000 * 3 * len(list(run.model.parameters()))

    expected = run.train(batches[2:]).weights
    elixir.load(tmp_path / "gpt2", run.compiled, run.optimizer)
    assert_same_tensors(saved, run.weights)
    run.train(batches[2:])
    assert [loss.item() for loss in run.losses[2:4]] == [loss.item() for loss in run.losses[4:]]
    assert_same_tensors(expected, run.weights)

    plain = other(small_gpt2(num_layers=1))
    elixir.load(tmp_path / "gpt2", plain)
    assert plain.lm_head.weight is plain.transformer.wte.weight
    assert_same_tensors(saved, plain.state_dict())


class Adapters(nn.Module):
    """A frozen layer beside one that trains, a buffer, a parameter without a use and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(13, 13)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(13, 2, bias=False), nn.Linear(2, 13, bias=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (self.base(x) + self.up(self.down(x))).square().mean()


def adapted(make: object) -> Run:
    torch.manual_seed(5)
    model = Adapters()
    return Run(model=model, compiled=model, optimizer=make([p for p in model.parameters() if p.requires_grad]))


def test_frozen_parameters_and_buffers_come_back(tmp_path: Path) -> None:
    expected = adapted(fused_adamw).train(BATCHES)
    first = adapted(fused_adamw).train(BATCHES[:3])
    elixir.save(tmp_path / "run", first.model, first.optimizer)
    second = adapted(fused_adamw)
    second.model.load_state_dict(other(second.model).state_dict())
    elixir.load(tmp_path / "run", second.model, second.optimizer)
    assert second.model.seen == 3
    second.train(BATCHES[3:])
    assert_same_tensors(expected.weights, second.weights)


def test_param_groups_load_in_another_order_and_with_a_tensor_as_learning_rate(tmp_path: Path) -> None:
    model = ladder()
    names = dict(model.named_parameters())
    groups = [{"params": [names["steps.0.weight"], names["steps.0.bias"]], "lr": torch.tensor(0.5)}]
    rest = [param for name, param in names.items() if not name.startswith("steps.0")]
    first = Run(model=model, compiled=model, optimizer=torch.optim.AdamW([*groups, {"params": rest}], betas=(0.8, 0.9)))
    first.train(BATCHES[:2])
    elixir.save(tmp_path / "run", model, first.optimizer)

    own = other(model)
    names = dict(own.named_parameters())
    groups = [{"params": [names["steps.0.bias"], names["steps.0.weight"]], "lr": torch.tensor(0.1)}]
    rest = [param for name, param in reversed(names.items()) if not name.startswith("steps.0")]
    second = Run(model=own, compiled=own, optimizer=torch.optim.AdamW([*groups, {"params": rest}]))
    elixir.load(tmp_path / "run", own, second.optimizer)
    assert second.optimizer.param_groups[0]["lr"] == 0.5
    assert second.optimizer.param_groups[1]["betas"] == (0.8, 0.9)
    for param, name in ((param, name) for name, param in model.named_parameters()):
        assert_same_tensors(first.optimizer.state[param], second.optimizer.state[names[name]])


def test_random_number_generators_continue_after_a_load(tmp_path: Path) -> None:
    elixir.save(tmp_path / "run", ladder())
    drawn = random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()
    elixir.load(tmp_path / "run", ladder())
    again = random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1), np.random.randn()
    assert drawn == again


def test_extra_comes_back_and_a_model_loads_without_its_optimizer(tmp_path: Path) -> None:
    training = eager(ladder()).train(BATCHES[:1])
    extra = {"epoch": 2, "seen": torch.arange(3), "best": (float("inf"), None), "name": "a"}
    training.save(tmp_path / "run", step=7, extra=extra)
    model = other(ladder())
    loaded = elixir.load(tmp_path / "run", model)
    assert loaded.step == 7
    assert torch.equal(loaded.extra.pop("seen"), torch.arange(3))
    assert loaded.extra == {"epoch": 2, "best": (float("inf"), None), "name": "a"}
    assert loaded.versions["torch"] == torch.__version__
    assert_same_tensors(training.run.weights, model.state_dict())


def test_extra_state_and_state_dict_hooks_of_modules_come_back(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        count = 0

        def get_extra_state(self) -> object:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

        def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"] * 1.0  # a copy, as quantised modules make

    first, second = Counting(3, 3), Counting(3, 3)
    first.count = 4
    elixir.save(tmp_path / "run", first)
    elixir.load(tmp_path / "run", second)
    assert second.count == 4
    assert torch.equal(second.weight, first.weight)


def test_tied_weights_load_into_untied_weights(tmp_path: Path) -> None:
    model, free = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    elixir.save(tmp_path / "run", model)
    elixir.load(tmp_path / "run", free)
    assert_same_tensors(model.state_dict(), free.state_dict())
    elixir.save(tmp_path / "run", other(free))
    with pytest.raises(elixir.CheckpointMismatch, match="tied in the model, two tensors in the checkpoint"):
        elixir.load(tmp_path / "run", model)


def mismatches() -> dict[str, tuple[nn.Module, object, object]]:
    """By what the error says, a model, an optimizer and a scheduler that are not those of the checkpoint."""
    wide, half, less, more = ladder(), ladder().half(), ladder(), ladder()
    wide.steps[1] = nn.Linear(13, 14)
    del less.steps[3]
    more.steps.append(nn.Linear(13, 13))
    same, moved = ladder(), ladder()
    params = list(moved.parameters())
    return {
        "steps.1.weight: float32 of (13, 13) in the checkpoint, float32 of (14, 13) in the model": (wide, None, None),
        "steps.0.weight: float32 of (13, 13) in the checkpoint, float16 of (13, 13)": (half, None, None),
        "steps.3.bias: only in the checkpoint": (less, None, None),
        "steps.4.bias: only in the model": (more, None, None),
        "AdamW with amsgrad": (same, torch.optim.SGD(same.parameters(), lr=1.0), None),
        "1 param groups in the checkpoint, 2 here": (
            moved, torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}]), None,
        ),
        "steps.0.weight: in param group 0 of the checkpoint only": (moved, torch.optim.AdamW(params[1:]), None),
        "StepLR in the checkpoint, ExponentialLR here": (
            same, None, torch.optim.lr_scheduler.ExponentialLR(torch.optim.AdamW(same.parameters()), 0.9),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("said", mismatches())
def test_another_model_optimizer_or_scheduler_is_refused_and_not_changed(tmp_path: Path, said: str) -> None:
    eager(ladder()).train(BATCHES[:1]).save(tmp_path / "run")
    model, optimizer, scheduler = mismatches()[said]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(elixir.CheckpointMismatch) as raised:
        elixir.load(tmp_path / "run", model, optimizer, scheduler)
    assert said in str(raised.value)
    assert "nothing was loaded" in str(raised.value)
    assert_same_tensors(before, model.state_dict())
    assert optimizer is None or not optimizer.state


def test_an_optimizer_or_scheduler_that_was_not_saved_is_not_loaded(tmp_path: Path) -> None:
    elixir.save(tmp_path / "run", ladder())
    training = eager(ladder())
    with pytest.raises(elixir.CheckpointMismatch, match="holds no optimizer"):
        elixir.load(tmp_path / "run", *training.parts)
    with pytest.raises(elixir.CheckpointMismatch, match="holds no scheduler"):
        elixir.load(tmp_path / "run", training.run.model, None, training.scheduler)


def test_a_value_of_an_unsupported_type_is_refused(tmp_path: Path) -> None:
    training = eager(ladder())
    with pytest.raises(elixir.NotSavable, match=r"extra\.data\.1 cannot be saved.*builtins\.object"):
        training.save(tmp_path / "run", extra={"data": [1, object()]})
    with pytest.raises(elixir.UnsupportedModel, match="parameter 0 of param group 0"):
        elixir.save(tmp_path / "run", nn.Linear(2, 2), training.run.optimizer)
    elixir.save(tmp_path / "linear", nn.Linear(2, 2))
    with pytest.raises(elixir.NotPrepared, match="weight is on `meta`"):
        elixir.load(tmp_path / "linear", nn.Linear(2, 2, device="meta"))
    assert not (tmp_path / "run").exists()


def test_a_hybrid_optimizer_loads_a_third_statistic_and_keeps_its_own_flags(tmp_path: Path) -> None:
    """`amsgrad` has a third statistic; the flag `foreach` of the saved optimizer is not loaded."""
    model = ladder()
    first = Run(
        model=model, compiled=model, optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=True)
    )
    first.train(BATCHES[:2])
    elixir.save(tmp_path / "run", model, first.optimizer)
    second = by_elixir(other(model), optimizer=lambda params: hybrid_adamw(params, amsgrad=True))
    elixir.load(tmp_path / "run", second.model, second.optimizer)
    assert second.optimizer.param_groups[0]["fused"]
    assert second.optimizer.param_groups[0]["lr"] == 1e-3
    states = everything(Training(second))
    assert "0.max_exp_avg_sq" in states
    assert_same_tensors(
        {name: value for name, value in everything(Training(first)).items() if name[0].isdigit()},
        {name: value for name, value in states.items() if name[0].isdigit()},
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_lazy_optimizer_state_is_read_when_it_is_written(tmp_path: Path, asynchronous: bool) -> None:
    expected, training = eager(ladder()).train(BATCHES), eager(ladder()).train(BATCHES[:3])
    states = training.run.optimizer.state
    for param in list(states):
        states[param] = Elsewhere(states[param])
    training.save(tmp_path / "run", asynchronous=asynchronous).wait()
    assert [state.num_reads for state in states.values()] == [5] * len(states)  # each moment twice, the step once
    resumed = eager(other(ladder()))
    resumed.load(tmp_path / "run")
    assert_resumed(expected, resumed.train(BATCHES[3:]), num_steps=3)


def test_compiled_submodules_have_the_names_of_uncompiled_submodules(tmp_path: Path) -> None:
    training = eager(ladder()).train(BATCHES[:1])
    training.run.model.steps[1] = torch.compile(training.run.model.steps[1])
    training.save(tmp_path / "run")
    plain = eager(other(ladder()))
    plain.load(tmp_path / "run")
    assert_same_tensors(dict(zip(plain.run.weights, training.run.weights.values(), strict=True)), plain.run.weights)
    training.run.model.load_state_dict(other(training.run.model).state_dict())
    training.load(tmp_path / "run")
    assert_same_tensors(dict(zip(plain.run.weights, training.run.weights.values(), strict=True)), plain.run.weights)
    assert list(elixir.full_state_dict(training.run.model)) == list(plain.run.weights)


# ----------------------------------------------------------------------------------------------------------------------
# A save beside the training holds the moment it was called at, and says what failed.


@contextmanager
def held_writer() -> Iterator[threading.Event]:
    """Yield what lets a save go on that has begun to write."""
    usual, gate = dcp.write, threading.Event()

    def write(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return usual(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "write", write)
        try:
            yield gate
        finally:
            gate.set()


def test_training_during_an_asynchronous_save_does_not_change_the_snapshot(tmp_path: Path) -> None:
    expected = eager(ladder()).train(BATCHES)
    with hybrid_run(ladder(), BATCHES[0], home="host", update=Update.ACROSS_STEPS) as run:
        training = Training(run).train(BATCHES[:3])
        with held_writer() as gate:
            handle = training.save(tmp_path / "run", step=3, asynchronous=True)
            training.train(BATCHES[3:])
            assert not handle.is_done
            assert not (tmp_path / "run").exists()
            gate.set()
            handle.wait()
        assert handle.is_done
        assert_resumed(expected, training, num_steps=6)
    resumed = eager(other(ladder()))
    assert resumed.load(tmp_path / "run").step == 3
    assert_resumed(expected, resumed.train(BATCHES[3:]), num_steps=3)


def test_a_save_waits_for_queued_updates(tmp_path: Path) -> None:
    with (
        controlled_worker() as worker,
        hybrid_run(ladder(), BATCHES[0], home="host", update=Update.ACROSS_STEPS) as run,
    ):
        training = Training(run).train(BATCHES[:2])
        run.optimizer.wait()
        worker.gate.clear()
        loss = run.compiled(BATCHES[2])
        loss.backward()
        run.optimizer.step()
        assert in_flight(run) > 0
        threading.Timer(0.2, worker.gate.set).start()
        elixir.save(tmp_path / "run", *training.parts)
        assert in_flight(run) == 0
        weights = run.weights
    model = other(ladder())
    elixir.load(tmp_path / "run", model)
    assert_same_tensors(weights, model.state_dict())


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    with held_writer() as gate:
        first = elixir.save(tmp_path / "run", ladder(), step=1, asynchronous=True)
        second: list[elixir.SaveHandle] = []
        thread = threading.Thread(target=lambda: second.append(elixir.save(tmp_path / "run", ladder(), step=2)))
        thread.start()
        thread.join(0.2)
        assert not first.is_done
        assert not second
        gate.set()
        thread.join()
    assert first.is_done
    assert second[0].is_done
    assert elixir.load(tmp_path / "run", ladder()).step == 2


def test_wait_raises_the_error_of_a_save_and_the_next_save_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    elixir.save(tmp_path / "run", ladder(), step=1)
    with monkeypatch.context() as patch:

        def failing(*args: Any, **kwargs: Any) -> None:
            raise OSError(5, "Input/output error")

        patch.setattr(dcp, "write", failing)
        handle = elixir.save(tmp_path / "run", ladder(), step=2, asynchronous=True)
        with pytest.raises(elixir.DiskFailed, match="Input/output error"):
            handle.wait()
    assert "was not saved" in caplog.text
    assert elixir.load(tmp_path / "run", ladder()).step == 1
    elixir.save(tmp_path / "run", ladder(), step=3, asynchronous=True).wait()
    assert elixir.load(tmp_path / "run", ladder()).step == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_the_snapshot_takes_snapshot_bytes_and_is_freed_tensor_by_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = eager(ladder()).train(BATCHES[:1])
    left: list[int] = []
    usual = torch.save

    def save(*args: Any, **kwargs: Any) -> None:
        left.append(sum(tensor.untyped_storage().nbytes() for tensor in snapshot))
        usual(*args, **kwargs)

    snapshot: list[torch.Tensor] = []
    sizes: list[int] = []
    write = dcp.write

    def noted(folder: Path, sources: Any, **kwargs: Any) -> Any:
        snapshot.extend(sources.values())
        sizes.extend(tensor.nbytes for tensor in snapshot)
        return write(folder, sources, **kwargs)

    monkeypatch.setattr(dcp, "write", noted)
    monkeypatch.setattr(torch, "save", save)
    before = everything(training)
    handle = training.save(tmp_path / "run", asynchronous=True)
    handle.wait()
    assert handle.snapshot_bytes == left[0]
    assert left == sorted(left, reverse=True)
    assert left[-1] in sizes
    assert_same_tensors(before, everything(training))


# ----------------------------------------------------------------------------------------------------------------------
# Values go to JSON and come back equal, of the same type, with tensors in their places.


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False),
    st.text(), st.binary(max_size=8), st.sampled_from([torch.float32, torch.device("cpu"), torch.device("meta")]),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.just("$"), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=10,
)


def there_and_back(value: Any) -> Any:
    aside: dict[str, Any] = {}
    plain = to_plain(value, "v", aside)
    assert sorted(tensor_keys(plain)) == sorted(aside)
    return from_plain(json.loads(json.dumps(plain, allow_nan=False)), aside)


@settings(max_examples=50)
@given(value=VALUES)
def test_values_come_back_equal_and_with_the_same_types(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_tensors_keep_their_places() -> None:
    first, second = torch.arange(3), torch.tensor(1.5)
    back = there_and_back({"a": [first, (second, float("nan"))], 3: {"b": first}})
    assert back["a"][0] is first
    assert back["a"][1][0] is second
    assert back["a"][1][1] != back["a"][1][1]
    assert back[3]["b"] is first


def test_an_ordered_dict_comes_back_as_a_dict_and_an_unsupported_object_is_named() -> None:
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    with pytest.raises(UnsupportedValue, match="object") as raised:
        to_plain({"a": (1, object())}, "v", {})
    assert raised.value.key == "v.a.1"


def test_a_huge_integer_comes_back() -> None:
    assert there_and_back(10**400) == 10**400


# ----------------------------------------------------------------------------------------------------------------------
# Loading takes no more memory of a process than what it keeps and a tensor on its way.


WIDTH, NUM_LAYERS = 768, 24
TENSOR_BYTES = 4 * WIDTH * WIDTH
MORE_BYTES = 12 * 2**20
"""Python's own, the blocks in which files are compared with their checksums, and pages that are not full."""


def training(rank: int, mesh: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    model = elixir.prepare(model, "cpu", mesh=mesh)
    return model, elixir.HybridAdamW(model.parameters(), lr=1e-3)


def saves(path: Path) -> None:
    model, optimizer = training(9, None)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    elixir.save(path, model, optimizer, step=1)


def loads(rank: int, world_size: int, path: str) -> list[int]:
    """Return the bytes that a load adds at most, and those that it leaves."""
    model, optimizer = training(rank, init_device_mesh("cpu", (world_size,)))
    gc.collect()
    before_bytes = most_resident_bytes(afresh=True)
    assert elixir.load(path, model, optimizer).step == 1
    most_bytes = most_resident_bytes() - before_bytes
    states = optimizer.state_dict()["state"].values()
    kept_bytes = sum(own_shard(value).nbytes for own in states for value in own.values() if value.numel() > 1)
    return [most_bytes, kept_bytes]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel tells no peak since a moment")
def test_ranks_load_a_checkpoint_of_one_process_tensor_by_tensor(tmp_path: Path) -> None:
    saves(tmp_path / "run")
    for most_bytes, kept_bytes in spawn(loads, 2, str(tmp_path / "run"), folder=tmp_path):
        # Two moments of half of each weight; weights are read into themselves.
        assert kept_bytes == 2 * NUM_LAYERS * TENSOR_BYTES // 2
        assert most_bytes < kept_bytes + 2 * TENSOR_BYTES + MORE_BYTES < 3 * NUM_LAYERS * TENSOR_BYTES
