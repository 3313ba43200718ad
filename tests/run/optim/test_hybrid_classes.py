"""`hybrid(cls)` against `cls` itself with the same flags, bitwise: losses, weights and state."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, NAdam, Optimizer, RMSprop, Rprop

import elixir_compile as elixir
from elixir_compile.ir import Tier, Update
from tests.run import optimizers as users
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_same, assert_same_tensors, by_elixir, by_torch
from tests.run.updating import (
    accumulate,
    assert_equal,
    buckets_of,
    closure_step,
    eager_run,
    flat_state,
    hybrid_run,
    in_flight,
    ladder,
    nan_staging,
    rows,
)

Make = Callable[[Any], Optimizer]


def both(cls: type[Optimizer], **options: Any) -> tuple[Make, Make]:
    """Return what makes the optimizer of torch and its hybrid."""
    return lambda params: cls(params, **options), lambda params: elixir.hybrid(cls)(params, **options)


@pytest.mark.parametrize(
    ("cls", "options", "home", "update", "share"),
    [
        (SGD, {"lr": 0.1}, "host", "in_backward", 0.0),
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "host", "across_steps", 0.0),
        (SGD, {"lr": 0.1, "momentum": 0.9, "fused": True, "maximize": True}, "host", "after_backward", 0.5),
        (Adam, {"foreach": False}, "split", "across_steps", 0.5),
        (Adam, {"amsgrad": True, "lr": torch.tensor(0.01)}, "host", "in_backward", 0.0),
        (Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, "host", "across_steps", 0.25),
        (RMSprop, {"centered": True, "momentum": 0.5}, "split", "in_backward", 0.0),
        (NAdam, {}, "device", "across_steps", 0.0),
        (Rprop, {}, "host", "after_backward", 1.0),
        (users.Lion, {}, "host", "across_steps", 0.5),
        (users.Lion, {}, "device", "in_backward", 0.0),
    ],
)
def test_bitwise_equal_to_the_class(
    cls: type[Optimizer], options: dict[str, Any], home: str, update: str, share: float
) -> None:
    model, batches = ladder(), rows(6)
    plain, hybrid = both(cls, **options)
    expected = eager_run(model, plain).train(batches)
    plan = {"home": home, "update": Update(update), "share": share}
    with nan_staging(), hybrid_run(model, batches[0], optimizer=hybrid, **plan) as run:
        run.train(batches)
        if home != "device" and share == 0:
            assert all(bucket.placement.update is Tier.HOST for bucket in buckets_of(run))
            assert in_flight(run) == (0 if update == "after_backward" else 4)
        assert_equal(expected, run)


def test_host_state_is_in_slabs_and_loads_in_both_directions() -> None:
    model, batches = ladder(), rows(6)
    plain, hybrid = both(SGD, lr=0.1, momentum=0.9)
    expected = eager_run(model, plain).train(batches)
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, optimizer=hybrid) as run:
        run.train(batches[:2])
        buffers = run.optimizer._updater.placer.buffers
        for bucket in buckets_of(run):
            for slot in bucket.slots:
                buffer = run.optimizer.state[slot.param]["momentum_buffer"]
                assert buffer.data_ptr() == buffers.buffer(bucket, "momentum_buffer", slot.param).data_ptr()
        middle = eager_run(model, plain)
        middle.model.load_state_dict(run.model.state_dict())
        middle.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        middle.train(batches[2:4])
        run.train(batches[5:])  # to be overwritten
        run.model.load_state_dict(middle.model.state_dict())
        run.optimizer.load_state_dict(copy.deepcopy(middle.optimizer.state_dict()))
        run.losses = expected.losses[:4]
        assert_equal(expected, run.train(batches[4:]))


def test_copies_and_pickles_continue() -> None:
    model, batches = seeded(Stack), vectors(4)
    plain, hybrid = both(Adam, lr=0.01)
    expected = by_torch(model, optimizer=plain).train(batches)
    run = by_elixir(model, optimizer=hybrid).train(batches[:2])
    copied, pickled = copy.deepcopy(run.optimizer), pickle.loads(pickle.dumps(run.optimizer))
    for other in (copied, pickled):
        assert type(other) is elixir.hybrid(Adam)
        assert_same_tensors(flat_state(run.optimizer), flat_state(other))
    copied.wait()
    assert_same(expected, run.train(batches[2:]))


class Named(elixir.hybrid(SGD)):
    """A subclass that a user wrote."""


def test_a_subclass_of_a_hybrid_class_pickles() -> None:
    optimizer = Named([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    assert type(pickle.loads(pickle.dumps(optimizer))) is Named


def test_accumulation_of_a_class() -> None:
    model, batches = ladder(), rows(16)
    plain, hybrid = both(SGD, lr=0.1, momentum=0.9)
    expected = accumulate(eager_run(model, plain), batches, 8)
    with hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD, optimizer=hybrid) as run:
        assert_equal(expected, accumulate(run, batches, 8))


def test_a_class_that_is_not_elementwise_keeps_state_beside_params() -> None:
    model, batches = seeded(Stack), vectors(3)
    plain, hybrid = both(torch.optim.LBFGS, lr=0.1, max_iter=3)

    expected = by_torch(model, optimizer=plain).train(batches, closure_step)
    with pytest.warns(elixir.ElixirWarning, match="HybridLBFGS is not element-wise: .*closure"):
        run = by_elixir(model, optimizer=hybrid).train(batches, closure_step)
    assert_same(expected, run)
    for plan in (record.plan for record in elixir.compilations(run.model)):
        assert all(placement.optim is placement.param for placement in plan.placements)
