"""Micro-batches that cannot be: refused, or run on the whole batch with a warning that says why."""

import warnings
from dataclasses import replace

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.errors import IllegalSchedule, InvalidOption
from elixir_compile.ir import fingerprint
from elixir_compile.step import verify
from tests.run.micro_batches.stepping import Rows, batch_of, compiled


@pytest.mark.parametrize("value", [0, -2, True, 2.5, "8"])
def test_a_value_that_is_no_number_of_micro_batches_is_refused(value: object):
    with pytest.raises(InvalidOption, match=r'option micro_batches: got .*, expected "fit", "auto" or a number'):
        compiled(Rows(), value)(*batch_of(4))


def test_a_number_that_does_not_divide_the_batch_is_refused_with_its_divisors():
    with pytest.raises(InvalidOption, match="expected a divisor of the batch of 16: 1, 2, 4, 8, 16"):
        compiled(Rows(), 6)(*batch_of(16))


def test_evaluation_gives_the_loss_of_the_whole_batch_and_warns_of_nothing():
    model = Rows()
    step = compiled(model, 2)
    step(*batch_of(8)).backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        loss = step(*batch_of(8))
        torch.testing.assert_close(loss, model(*batch_of(8)))


def test_a_plan_that_divides_what_mixes_the_batch_is_illegal():
    model, batch = Rows(), batch_of(8)
    step = compiled(model, 2)
    step(*batch).backward()
    compilation = elixir.compilations(step)[-1]
    plan, graph = compilation.plan, compilation.graph
    verify(graph, plan)
    odd = replace(plan, regions=tuple(replace(region, micro_batches=3) for region in plan.regions))
    with pytest.raises(IllegalSchedule, match=r"fwd\.0 runs in 3 micro-batches, but the batch of 8 rows is not"):
        verify(graph, odd)
    first = plan.regions[0].first
    ops = tuple(replace(op, mixes="a test says so", source="x.py:1") if op.id == first else op for op in graph.ops)
    mixing = replace(graph, ops=ops)
    with pytest.raises(IllegalSchedule, match=r"fwd\.0 runs in 2 micro-batches, but .* mixes them: a test says so"):
        verify(mixing, replace(plan, graph=fingerprint(mixing)))
