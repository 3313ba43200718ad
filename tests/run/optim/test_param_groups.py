"""Buckets end where param groups do; what they cannot follow is updated by parts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.ir import Update
from tests.run.training import Run, assert_same_tensors, fused_adamw, loss_of
from tests.run.updating import WIDTH, Several, buckets_of, eager_run, hybrid_run, ladder, nan_staging, rows, weights_of

Groups = Callable[[Any], list[dict[str, Any]]]


def decayed_and_not(params: Any) -> list[dict[str, Any]]:
    """Matrices in one group, biases in another, as people do."""
    params = list(params)
    return [
        {"params": [param for param in params if param.ndim > 1], "lr": 0.02},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
    ]


def eager(model: torch.nn.Module, groups: Groups) -> Run:
    return eager_run(model, lambda params: fused_adamw(groups(params)))


def hybrid(groups: Groups, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: elixir.HybridAdamW(groups(params), lr=1e-2, **options)


def names_by_group(run: Run) -> list[set[str]]:
    names = {id(param): name for name, param in run.model.named_parameters()}
    return [{names[id(param)] for param in group["params"]} for group in run.optimizer.param_groups]


@pytest.mark.parametrize("update", list(Update))
def test_buckets_end_at_groups(update: Update) -> None:
    model, batches = ladder(), rows(6)
    expected = eager(model, decayed_and_not).train(batches)
    with (
        nan_staging(),
        hybrid_run(model, batches[0], home="host", update=update, optimizer=hybrid(decayed_and_not)) as run,
    ):
        run.train(batches)
        matrices, biases = names_by_group(run)
        found = {bucket.spec.group: set(bucket.spec.params) for bucket in buckets_of(run)}
        assert all(set(bucket.spec.params) <= (matrices, biases)[bucket.spec.group] for bucket in buckets_of(run))
        assert found.keys() == {0, 1}
        plan = elixir.compilations(run.model)[0].plan
        assert "trainable  group 1  param" in str(plan)
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_a_group_added_after_planning_is_updated() -> None:
    model, batches = ladder(), rows(8)

    def first_half(params: Any) -> list[dict[str, Any]]:
        return [{"params": list(params)[::2]}]

    def train(run: Run) -> Run:
        run.train(batches[:4])
        rest = list(run.model.parameters())[1::2]
        run.optimizer.zero_grad()
        for param in rest:
            param.grad = None
        run.optimizer.add_param_group({"params": rest, "lr": 0.05})
        return run.train(batches[4:])

    expected = train(eager(model, first_half))
    for update in (Update.ACROSS_STEPS, Update.IN_BACKWARD):
        with nan_staging(), hybrid_run(model, batches[0], home="device", update=update) as run:
            run.optimizer = elixir.HybridAdamW(first_half(run.model.parameters()), lr=1e-2)
            train(run)
            assert_same_tensors(weights_of(expected), weights_of(run))


def test_an_optimizer_that_is_made_after_the_first_forward() -> None:
    model, batches = ladder(), rows(5)
    expected = eager(model, decayed_and_not).train(batches)
    with nan_staging(), hybrid_run(model, batches[0], home="host", update=Update.IN_BACKWARD) as run:
        loss_of(run.compiled, batches[0])
        assert {bucket.spec.group for bucket in buckets_of(run)} == {0}
        run.optimizer = elixir.HybridAdamW(decayed_and_not(run.model.parameters()), lr=1e-2)
        run.train(batches)
        assert_same_tensors(weights_of(expected), weights_of(run))


def test_two_optimizers_have_groups_of_their_own() -> None:
    model, batches = ladder(), rows(4)

    def halves(make: Callable[[Any], torch.optim.Optimizer], params: Any) -> Several:
        params = list(params)
        return Several([make(params[:3]), make(params[3:])])

    def plain(params: Any) -> Several:
        return halves(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), params)

    def make(params: Any) -> Several:
        return halves(lambda p: elixir.hybrid(torch.optim.SGD)(p, lr=0.1, momentum=0.5), params)

    expected = eager_run(model, plain).train(batches)
    with hybrid_run(model, batches[0], home="host", update=Update.ACROSS_STEPS, optimizer=make) as run:
        run.train(batches)
        assert [bucket.spec.group for bucket in buckets_of(run)] == [0, 0, 1, 1, 1]
        assert_same_tensors(weights_of(expected), weights_of(run))


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (lambda params: elixir.HybridAdamW(params, amsgrad=True), 3),
        (lambda params: elixir.HybridAdamW(params), 2),
        (lambda params: elixir.hybrid(torch.optim.SGD)(params, momentum=0.9), 1),
        (lambda params: elixir.hybrid(torch.optim.SGD)(params), 0),
    ],
)
def test_the_plan_counts_the_state_that_the_optimizer_keeps(make: Any, copies: int) -> None:
    model, (batch,) = ladder(), rows(1)
    with hybrid_run(model, batch, home="device", update=Update.AFTER_BACKWARD, optimizer=make) as run:
        run.train([batch])
        assert sum(bucket.spec.numel for bucket in buckets_of(run)) == 4 * WIDTH**2 + 3 * WIDTH
        assert all(bucket.spec.state_nbytes == copies * bucket.spec.nbytes for bucket in buckets_of(run))
        state = run.optimizer.state_dict()["state"].values()
        kept = [value for entry in state for value in entry.values() if value.ndim]
        assert sum(value.nbytes for value in kept) == sum(bucket.spec.state_nbytes for bucket in buckets_of(run))
