"""Saving, restoring, copying and deleting models by the user's own code, and what goes on around a run.

A story is what a user does with runs; it is told twice, to eager PyTorch and to Elixir, and both must end alike.
"""

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from elixir_compile.ir import Update
from elixir_compile.runtime.bucket import live_slab_bytes
from tests.run.habits.habit import habit
from tests.run.habits.stories import BUDGETS
from tests.run.training import Run, assert_same, assert_same_tensors, fused_adamw, hybrid_adamw, on_host, plain_step
from tests.run.updating import Ladder, eager_run, hybrid_run, ladder, rows, weights_of

OFFLOAD = BUDGETS["offload"]
Start = Callable[..., Run]
"""Begins a run of a fresh model, or of the one that is given."""


def start_eager(model: nn.Module | None = None) -> Run:
    own = model or ladder()
    return Run(model=own, compiled=own, optimizer=fused_adamw(own.parameters()))


def start_elixir(budget: Mapping[str, object]) -> Start:
    def start(model: nn.Module | None = None, **options: object) -> Run:
        own = model or ladder()
        options = {"inner": "aot_eager", "report": False, **budget, **options}
        compiled = torch.compile(own, backend="elixir", options=options)
        return Run(model=own, compiled=compiled, optimizer=hybrid_adamw(own.parameters()))

    return start


def assert_ends_alike(story: Callable[..., Run], *args: Any, budget: Mapping[str, object] = OFFLOAD) -> Run:
    """Fail unless `story(start, *args)` ends with the losses and weights of eager PyTorch; return the run of Elixir."""
    torch._dynamo.reset()
    expected, got = (story(start, *args) for start in (start_eager, start_elixir(budget)))
    assert_same(expected, got)
    return got


def spoiled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.125)
    return model


@habit("`torch.save` of both state dicts during a run, resumed in another process", area="Checkpoints")
@pytest.mark.parametrize("other", BUDGETS)
def test_torch_save_resumes_in_fresh_objects(other: str, tmp_path: Path) -> None:
    """Under the same budget or another one, by `torch.load(weights_only=True)`, which allows plain tensors only."""

    def story(start: Start, resume: Start, file: Path) -> Run:
        first = start().train(rows(2))
        torch.save({"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict()}, file)
        first.train(rows(1))  # what is saved does not change any more
        second, found = resume(spoiled(ladder())), torch.load(file, weights_only=True)
        second.model.load_state_dict(found["model"])
        second.optimizer.load_state_dict(found["optimizer"])
        return second.train(rows(4)[2:])

    torch._dynamo.reset()
    expected = story(start_eager, start_eager, tmp_path / "eager.pt")
    assert_same(expected, story(start_elixir(OFFLOAD), start_elixir(BUDGETS[other]), tmp_path / "elixir.pt"))
    # And into eager code, from the file that Elixir wrote.
    third, found = start_eager(spoiled(ladder())), torch.load(tmp_path / "elixir.pt", weights_only=True)
    third.model.load_state_dict(found["model"])
    third.optimizer.load_state_dict(found["optimizer"])
    assert_same(expected, third.train(rows(4)[2:]))


@habit("`safetensors` `save_model`, `load_model`, `save_file(model.state_dict())`", area="Checkpoints")
def test_safetensors_saves_and_loads_a_model_in_mid_run(tmp_path: Path) -> None:
    def story(start: Start, name: str) -> Run:
        run = start().train(rows(2))
        save_model(run.model, str(tmp_path / name))
        save_file(run.model.state_dict(), tmp_path / f"{name}.dict")
        assert_same_tensors(dict(sorted(run.model.state_dict().items())), load_sorted(tmp_path / f"{name}.dict"))
        spoiled(run.model)
        load_model(run.model, str(tmp_path / name))
        return run.train(rows(3)[2:])

    torch._dynamo.reset()
    assert_same(story(start_eager, "eager"), story(start_elixir(OFFLOAD), "elixir"))
    assert_same_tensors(load_sorted(tmp_path / "eager"), load_sorted(tmp_path / "elixir"))


def load_sorted(path: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(path).items()))


@habit("`torch.distributed.checkpoint` `save` and `load` of the state dicts in one process", area="Checkpoints")
@pytest.mark.filterwarnings("ignore:torch.distributed:UserWarning")
def test_the_users_own_distributed_checkpoint_resumes(tmp_path: Path) -> None:
    def story(start: Start, name: str) -> Run:
        run = start().train(rows(2))
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / name)
        run.train(rows(1))
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / name)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        return run.train(rows(4)[2:])

    torch._dynamo.reset()
    assert_same(story(start_eager, "eager"), story(start_elixir(OFFLOAD), "elixir"))


@habit("`torch.save(model.state_dict())` right after `optimizer.step()`, while updates are queued", area="Checkpoints")
def test_what_is_saved_while_an_update_is_queued_is_updated(tmp_path: Path) -> None:
    expected = eager_run(ladder()).train(rows(3))
    with hybrid_run(ladder(), rows(1)[0], home="host", update=Update.ACROSS_STEPS) as run:
        run.train(rows(3))
        torch.save(run.model.state_dict(), tmp_path / "model.pt")
        torch.save(run.optimizer.state_dict(), tmp_path / "optimizer.pt")
        assert_same_tensors(weights_of(expected), torch.load(tmp_path / "model.pt", weights_only=True))
        saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)["state"]
        for index, own in expected.optimizer.state_dict()["state"].items():
            assert_same_tensors(own, {name: saved[index][name] for name in own})


@habit("A checkpoint written by a hook: `optimizer.register_step_post_hook`", area="Checkpoints")
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_hook_behind_the_step_saves_what_the_step_made(budget: str) -> None:
    kept: dict[int, list[dict[str, torch.Tensor]]] = {}

    def story(start: Start) -> Run:
        run = start()
        own = kept.setdefault(len(kept), [])
        run.optimizer.register_step_post_hook(lambda *_: own.append(copy.deepcopy(run.model.state_dict())))
        return run.train(rows(3))

    assert_ends_alike(story, budget=BUDGETS[budget])
    for expected, got in zip(*kept.values(), strict=True):
        assert_same_tensors(expected, got)


@habit("The best model in memory: `copy.deepcopy(model.state_dict())`, restored at the end", area="Checkpoints")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_best_state_dict_is_restored(budget: str) -> None:
    def story(start: Start) -> Run:
        run = start().train(rows(2))
        best = copy.deepcopy(run.model.state_dict())
        run.train(rows(4)[2:])
        run.model.load_state_dict(best)
        run.optimizer.state.clear()
        return run.train(rows(1))

    assert_ends_alike(story, budget=BUDGETS[budget])


@habit("Early stopping: `copy.deepcopy(model)` of the best model is evaluated and loaded back", area="Checkpoints")
def test_the_best_copy_of_a_model_is_evaluated_and_loaded_back() -> None:
    def story(start: Start) -> Run:
        run = start().train(rows(2))
        best = copy.deepcopy(run.model)
        run.train(rows(4)[2:])
        with torch.no_grad():
            run.losses.append(best(rows(1)[0]))
        run.model.load_state_dict(best.state_dict())
        return run.train(rows(1))

    assert_ends_alike(story)


@habit("`model.load_state_dict` of an eager checkpoint, before the first step or between two", area="Checkpoints")
@pytest.mark.parametrize("num_before", [0, 2])
def test_an_eager_checkpoint_is_loaded(num_before: int) -> None:
    trained = eager_run(ladder()).train(rows(3)).model.state_dict()

    def story(start: Start) -> Run:
        run = start().train(rows(num_before))
        run.model.load_state_dict(trained)
        return run.train(rows(2))

    assert_ends_alike(story)


@habit(
    "`compiled.state_dict()` and `compiled.load_state_dict()`, whose keys begin with `_orig_mod.`", area="Checkpoints"
)
def test_the_compiled_wrapper_saves_and_loads() -> None:
    expected = start_eager().train(rows(2))
    saved = copy.deepcopy(expected.model.state_dict())
    expected.train(rows(3)[2:])
    torch._dynamo.reset()
    first = start_elixir(OFFLOAD)().train(rows(2))
    state = copy.deepcopy(first.compiled.state_dict())
    assert_same_tensors({f"_orig_mod.{name}": value for name, value in saved.items()}, state)
    spoiled(first.model)
    first.compiled.load_state_dict(state)
    assert_same(expected, first.train(rows(3)[2:]))
    assert on_host(first)


@habit("`swa_utils.AveragedModel(model)` updated after each step and saved beside the model", area="Checkpoints")
@pytest.mark.parametrize("budget", BUDGETS)
def test_an_average_of_the_weights_is_saved_beside(budget: str, tmp_path: Path) -> None:
    saved = []

    def story(start: Start) -> Run:
        run = start()
        average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for batch in rows(3):
            run.train([batch])
            average.update_parameters(run.model)
        torch.save(average.state_dict(), tmp_path / f"{len(saved)}.pt")
        saved.append(torch.load(tmp_path / f"{len(saved)}.pt", weights_only=True))
        with torch.no_grad():
            run.losses.append(average(rows(1)[0]))
        return run

    assert_ends_alike(story, budget=BUDGETS[budget])
    assert_same_tensors(*saved)


def left_of(storages: list[Any]) -> tuple[int, int]:
    """Return how many of `storages`, by weak references, and how many bytes of slabs there are, once the thread of the
    updates is through with the last step."""
    for _ in range(20):
        gc.collect()
        num_left = sum(storage() is not None for storage in storages)
        if not num_left:
            break
        time.sleep(0.1)
    return num_left, live_slab_bytes()


@habit("A loop that makes, trains and deletes models, as in a search for hyperparameters", area="Training loops")
def test_trials_in_a_loop_train_as_eager_and_are_freed() -> None:
    def story(start: Start, left: list[object]) -> Run:
        losses = []
        for trial in range(5):
            run = start(ladder())
            run.optimizer.param_groups[0]["lr"] = 10.0 ** -(trial + 1)
            losses += run.train(rows(2)).losses
            if trial < 4:
                found = [weakref.ref(param.untyped_storage()) for param in run.model.parameters()]
                del run
                left.append(left_of(found))
        run.losses = losses
        return run

    left: list[object] = []
    gc.collect()
    slab_bytes = live_slab_bytes()
    run = assert_ends_alike(story, left)
    assert left == [(0, slab_bytes)] * 8
    assert on_host(run)


@habit("Two models of one class, trained in alternating steps", area="Training loops")
@pytest.mark.parametrize("budget", BUDGETS)
def test_two_models_train_in_turn(budget: str) -> None:
    def story(start: Start) -> Run:
        first, second = start(), start(spoiled(ladder()))
        for batch in rows(3):
            first.train([batch])
            second.train([batch])
        first.losses += [*second.losses, *(param.sum() for param in second.model.parameters())]
        return first

    assert_ends_alike(story, budget=BUDGETS[budget])


@habit("One model compiled twice with different options", area="Training loops")
def test_a_model_compiled_twice_with_other_options_trains_by_both() -> None:
    def story(start: Start) -> Run:
        run = start()
        again = run.compiled
        if run.compiled is not run.model:
            again = torch.compile(run.model, backend="elixir", options={"inner": "aot_eager", "report": False})
        for compiled, batch in zip([run.compiled, again, run.compiled, again], rows(4), strict=True):
            run.losses.append(plain_step(compiled, run.optimizer, batch).detach())
        return run

    assert_ends_alike(story)


@habit("`torch._dynamo.reset()` between two steps", area="Training loops")
@pytest.mark.parametrize("budget", BUDGETS)
def test_training_goes_on_after_dynamo_was_reset(budget: str) -> None:
    def story(start: Start) -> Run:
        run = start().train(rows(2))
        torch._dynamo.reset()
        return run.train(rows(4)[2:])

    assert_ends_alike(story, budget=BUDGETS[budget])


@habit("A `DataLoader` with workers forked during training", area="Training loops")
def test_workers_of_a_data_loader_are_forked_in_mid_run() -> None:
    data = TensorDataset(torch.cat(rows(4)))

    def train(run: Run) -> Run:
        for _ in range(2):  # the workers of the second epoch are forked behind steps
            for (batch,) in DataLoader(data, batch_size=5, num_workers=2):
                run.train([batch])
        return run

    expected = train(eager_run(ladder()))
    with hybrid_run(ladder(), rows(1)[0], home="host", update=Update.ACROSS_STEPS) as run:
        assert_same(expected, train(run))


@habit("Training in a thread other than the main thread", area="Training loops")
def test_a_thread_compiles_and_trains() -> None:
    def story(start: Start) -> Run:
        found: list[Run] = []
        thread = threading.Thread(target=lambda: found.append(start().train(rows(3))))
        thread.start()
        thread.join()
        return found[0].train(rows(1))  # and the main thread goes on

    assert_ends_alike(story)


INTERRUPTED: set[str] = set()
"""In which half of the next step the user presses Ctrl-C."""


@torch.library.custom_op("elixir_habits::passes", mutates_args=())
def passes(x: torch.Tensor, half: str) -> torch.Tensor:
    if half in INTERRUPTED:
        INTERRUPTED.clear()
        raise KeyboardInterrupt
    return x.clone()


passes.register_fake(lambda x, half: torch.empty_like(x))
passes.register_autograd(lambda ctx, grad: (passes(grad, "backward"), None))


class Interruptible(Ladder):
    """The ladder with an op in the middle that is interrupted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = passes(torch.tanh(step(x)), "forward")
        return x.square().mean()


@habit("Ctrl-C in a forward or a backward, then the loop continues", area="Training loops")
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_training_goes_on_after_an_interrupt(half: str) -> None:
    def story(start: Start) -> Run:
        torch.manual_seed(7)
        run = start(Interruptible()).train(rows(2))
        INTERRUPTED.add(half)
        with pytest.raises(KeyboardInterrupt):
            run.train(rows(1))
        run.optimizer.zero_grad()
        return run.train(rows(4)[2:])

    assert_ends_alike(story)
