"""Streamed updates: in pieces, with masters, with random delays, in the planned order, over slabs side by side."""

import copy
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, NAdam, Optimizer

import elixir_compile as elixir
from elixir_compile.base.units import GIB, MIB
from elixir_compile.ir import Lane, Span, Update, Verb
from elixir_compile.ir.bucket import streamed_bytes
from elixir_compile.ir.cost import MOST_STREAMED_ROOM_BYTES, streamed_rooms
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.ir.plan import Plan
from elixir_compile.optim import adamw_rule, streaming
from elixir_compile.optim.host.passes import coalesce
from elixir_compile.runtime.bucket import Slab, aligned_bytes, flat
from elixir_compile.runtime.lanes import Plain
from elixir_compile.step.seconds import simulate
from tests.run import optimizers as users
from tests.run.optim.test_mixed_precision import ADAM, BF16, FP16, mixed_run, state_of
from tests.run.training import Run, assert_same_tensors, loss_of, plain_step
from tests.run.updating import (
    assert_equal,
    buckets_of,
    controlled_worker,
    eager_run,
    hybrid_run,
    ladder,
    nan_staging,
    random_delay,
    rows,
    small_pieces,
    weights_of,
)

# ----------------------------------------------------------------------------------------------------------------------
# State of 16-bit parameters that lives on the host and is streamed to the device for its update, masters and all.


def trained(dtype: torch.dtype, num_streamed: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    """Return weights and state after clipped steps; `num_streamed` of the four buckets are streamed."""
    batches = [batch.to(dtype) for batch in rows(5)]
    adam = {**ADAM, "amsgrad": True}
    with mixed_run(ladder(), batches[0], dtype=dtype, adam=adam, share=num_streamed / 4, **options) as run:

        def step(compiled: Callable[..., Any], optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
            loss = loss_of(compiled, batch)
            loss.backward()
            optimizer.clip_grad_norm_(1e-2)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run.train(batches[:1], step)
        homes = addresses_of(run.optimizer)
        run.train(batches[1:], step)
        assert [bucket.placement.streamed for bucket in buckets_of(run)] == [
            number < num_streamed for number in range(4)
        ]
        assert addresses_of(run.optimizer) == homes
        state = {f"{name}.{kind}": value for name, entry in state_of(run).items() for kind, value in entry.items()}
        assert {name.rsplit(".", 1)[1] for name in state} >= {"master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        return {**run.weights, **state}


def addresses_of(optimizer: Any) -> list[int]:
    """Return where each statistic is."""
    entries: list[Mapping[str, torch.Tensor]] = list(optimizer.state.values())
    return [value.data_ptr() for entry in entries for name, value in entry.items() if name != "step"]


@pytest.mark.parametrize(
    ("dtype", "num_streamed", "home", "update"),
    [
        (BF16, 1, "host", Update.AFTER_BACKWARD),
        (BF16, 3, "split", Update.ACROSS_STEPS),
        (FP16, 2, "host", Update.ACROSS_STEPS),
        (FP16, 4, "split", Update.AFTER_BACKWARD),
    ],
)
def test_streaming_changes_no_bit(dtype: torch.dtype, num_streamed: int, home: str, update: Update) -> None:
    expected = trained(dtype)
    assert_same_tensors(expected, trained(dtype, num_streamed, home=home, update=update))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_streamed_masters_match_masters_on_the_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block by block, the last one short: streamed as where the state lives."""
    num_updates = 0

    def as_on_device(rule: adamw_rule.AdamWRule, updates: list[tuple[Any, ...]], group: Mapping[str, Any]) -> None:
        nonlocal num_updates
        rule._on_device(updates, group)
        num_updates += len(updates)

    on_host = trained(dtype)
    monkeypatch.setattr(adamw_rule, "BLOCK", 64)
    monkeypatch.setattr(adamw_rule.AdamWRule, "_on_host", as_on_device)
    expected = trained(dtype)
    assert num_updates == 5 * 7
    assert_same_tensors(expected, trained(dtype, 4, home="host", update=Update.ACROSS_STEPS))
    assert num_updates == 2 * 5 * 7
    for name, value in on_host.items():
        # The kernels round differently, by an ulp in fp32, which may move a 16-bit parameter to its neighbour.
        tolerance = {"rtol": 1e-4, "atol": 1e-7} if value.dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
        torch.testing.assert_close(expected[name], value, **tolerance)


# ----------------------------------------------------------------------------------------------------------------------
# Streamed updates in pieces: the bits of whole tensors, in no more memory than the plan counts, on three lanes.


def use_small_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut buckets of a few hundred elements into pieces: three rooms of 496 bytes, cuts at each 16 elements."""
    monkeypatch.setattr(streaming, "streamed_rooms", lambda nbytes: (3, min(nbytes, 496)))
    monkeypatch.setattr(streaming, "CUT_NUMEL", 16)
    monkeypatch.setattr(streaming, "CUT_NUMEL", 16)


ADAMW = {"fused": True, "amsgrad": True, "lr": 0.01}
CASES: list[Any] = [
    (torch.optim.AdamW, ADAMW, "host"),
    (SGD, {"lr": 0.1, "momentum": 0.9}, "split"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (torch.optim.AdamW, ADAMW, "split"),
            (SGD, {"lr": 0.1, "momentum": 0.9}, "host"),
            (Adam, {"fused": True}, "host"),
            (NAdam, {}, "split"),
            (users.Lion, {}, "host"),
        )
    ),
]


@pytest.mark.parametrize(("cls", "options", "home"), CASES)
def test_pieces_give_the_bits_of_whole_tensors(
    cls: type[Optimizer], options: dict[str, Any], home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_small_rooms(monkeypatch)
    num_pieces: list[int] = []
    pass_ = streaming.Stream._pass

    def counted(self: streaming.Stream, segments: Any, *args: Any, **kwargs: Any) -> None:
        num_pieces.append(len(segments))
        pass_(self, segments, *args, **kwargs)

    monkeypatch.setattr(streaming.Stream, "_pass", counted)
    model, batches = ladder(), rows(4)
    expected = eager_run(model, lambda params: cls(params, **options)).train(batches)
    plan = {"home": home, "update": Update.ACROSS_STEPS, "share": 1.0}
    hybrid: Any = elixir.hybrid(cls)
    with nan_staging(), hybrid_run(model, batches[0], optimizer=lambda p: hybrid(p, **options), **plan) as run:
        assert_equal(expected, run.train(batches))
    assert len(num_pieces) >= 2 * 4 * 3, "several pieces for each bucket with a bias in 4 steps"


def trained_equally(cls: type[Optimizer], home: str, num_steps: int, **options: Any) -> None:
    model, batches = ladder(), rows(num_steps)
    expected = eager_run(model, lambda params: cls(params, **options)).train(batches)
    hybrid: Any = elixir.hybrid(cls)
    plan = {"home": home, "update": Update.ACROSS_STEPS, "share": 1.0}
    with nan_staging(), hybrid_run(model, batches[0], optimizer=lambda p: hybrid(p, **options), **plan) as run:
        assert_equal(expected, run.train(batches))


def test_a_statistic_that_begins_late_begins_in_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_rooms(monkeypatch)
    trained_equally(users.LateAverage, "host", 6)


class Noted(users.Lion):
    """Keeps entries that are no tensors, one of them nothing and one that a step changes in place."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(param, group)
        state = self.state[param]
        state["nothing"] = None
        state["steps"] = [*state.get("steps", ()), 1]
        state["steps"].append(2)


@pytest.mark.parametrize(("home", "share"), [("host", 1.0), ("host disk", 0.0)])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_entries_that_are_no_tensors_change_once_in_a_step(
    state_dtype: str, home: str, share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_small_rooms(monkeypatch)
    plan = {"home": home, "update": Update.ACROSS_STEPS, "share": share, "optimizer": elixir.hybrid(Noted, state_dtype)}
    disk = {} if share else {"disk_path": tmp_path}
    with small_pieces():  # which change the size of the ladder and its rows
        batches = rows(3)
        with hybrid_run(ladder(), batches[0], **plan, **disk) as run:
            run.train(batches)
            states = [dict(state) for state in run.optimizer.state.values()]
    assert all(state["nothing"] is None and state["steps"] == [1, 2] * 3 for state in states)


@pytest.mark.parametrize("home", ["split", pytest.param("host", marks=pytest.mark.slow)])
def test_a_parameter_that_passes_whole_has_its_shape(home: str) -> None:
    trained_equally(users.FastSquares, home, 3)


def test_the_host_counts_the_steps_of_a_fused_class(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    keep = streaming.PassingParam.keep_other

    def noted(param: streaming.PassingParam, name: str, value: Any) -> None:
        copied.append(name)
        keep(param, name, value)

    monkeypatch.setattr(streaming.PassingParam, "keep_other", noted)
    use_small_rooms(monkeypatch)
    trained_equally(Adam, "host", 3, fused=True)
    assert copied == ["step"] * 7, "the counters of the first step, which the class makes"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_pieces_of_masters_give_the_bits_of_whole_tensors(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(dtype)
    use_small_rooms(monkeypatch)
    assert_same_tensors(expected, trained(dtype, 4, home="host", update=Update.ACROSS_STEPS))


@pytest.mark.parametrize("home", ["host", pytest.param("split", marks=pytest.mark.slow)])
def test_the_rooms_take_no_more_than_the_plan_counts(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = Plain.empty

    def counted(lanes: Plain, nbytes: int) -> torch.Tensor:
        taken.append(nbytes)
        return empty(lanes, nbytes)

    model, batches = ladder(), rows(2)
    with hybrid_run(model, batches[0], home=home, update=Update.AFTER_BACKWARD, share=1.0) as run:
        run.train(batches[:1])
        monkeypatch.setattr(Plain, "empty", counted)
        step: Any = streaming.Stream._allocate
        in_update: list[int] = []

        def allocating(self: streaming.Stream, rows: Any) -> None:
            before = len(taken)
            step(self, rows)
            in_update.extend(taken[before:])

        monkeypatch.setattr(streaming.Stream, "_allocate", allocating)
        run.train(batches[1:])
        planned = max(streamed_bytes(bucket.spec, bucket.placement.param) for bucket in buckets_of(run))
        num_tensors = 2 * 4
        assert len(in_update) == 1
        assert 0 < in_update[0] <= planned + num_tensors * streaming.ALIGN_BYTES


@pytest.mark.parametrize(
    ("nbytes", "num_rooms"), [(0, 1), (1000, 1), (2 * MIB - 1, 1), (2 * MIB, 2), (5 * MIB, 4), (1 << 33, 4)]
)
def test_rooms_share_the_bytes_of_the_largest_bucket(nbytes: int, num_rooms: int) -> None:
    found, room_bytes = streamed_rooms(nbytes)
    assert found == num_rooms
    assert found * room_bytes <= nbytes
    assert room_bytes <= MOST_STREAMED_ROOM_BYTES
    assert room_bytes >= min(nbytes, MIB - 256)


# ----------------------------------------------------------------------------------------------------------------------
# Random delays of the worker, and random reads between steps, change nothing.


BATCHES = rows(8)


def _params(run: Run) -> list[torch.nn.Parameter]:
    return list(run.model.parameters())


def _scale_gradients(run: Run) -> None:
    for param in _params(run):
        if param.grad is not None:
            param.grad.mul_(0.5)


def _eager(run: Run) -> Any:
    with torch.no_grad():
        return [run.model(BATCHES[0])]


def _shrink(run: Run) -> None:
    with torch.no_grad():
        _params(run)[2].mul_(0.9)


def _change_lr(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.99


def _states(run: Run) -> Any:
    state = run.optimizer.state_dict()["state"]
    return [state[index][name].clone() for index in sorted(state) for name in sorted(state[index])]


def _reload(run: Run) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def _norm(run: Run) -> Any:
    return [torch.nn.utils.clip_grad_norm_(_params(run), 1e-2)]


BETWEEN: dict[str, Callable[[Run], Any]] = {
    "nothing": lambda run: None,
    "one": lambda run: [_params(run)[3].sum()],
    "all": lambda run: [param.detach().clone() for param in _params(run)],
    "first": lambda run: [_params(run)[0].detach().clone()],
    "gradient": lambda run: [g.clone() for p in _params(run)[:2] if (g := p.grad) is not None],
    "scale": _scale_gradients,
    "norm": _norm,
    "state": _states,
    "reload": _reload,
    "eager": _eager,
    "shrink": _shrink,
    "lr": _change_lr,
    "step again": lambda run: run.optimizer.step(),
    "zero": lambda run: run.optimizer.zero_grad(),
    "fill with zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "deepcopy": lambda run: [copy.deepcopy(_params(run)[1])],
}


def interleave(seed: int, num_steps: int, home: str, share: float) -> None:
    """Train `num_steps` steps with random calls before, between and behind backward and step."""
    chance, model = random.Random(seed), ladder()
    expected = eager_run(model)
    with (
        controlled_worker() as worker,
        nan_staging(),
        hybrid_run(model, BATCHES[0], home=home, share=share, update=Update.ACROSS_STEPS) as run,
    ):
        run.train(BATCHES[:1])
        expected.train(BATCHES[:1])
        worker.delay_s = random_delay(seed)
        for number in range(num_steps):
            batch = BATCHES[number % len(BATCHES)]
            calls = [chance.choice(list(BETWEEN)) for _ in range(3)]
            clears = chance.random() < 0.8
            seen = [one_step(each, batch, calls, clears=clears) for each in (expected, run)]
            for name, right, got in zip(calls, *seen, strict=True):
                assert all(map(torch.equal, right, got)), f"{name} in step {number} of {calls}"
        assert_same_tensors(weights_of(expected), weights_of(run))


def one_step(run: Run, batch: torch.Tensor, calls: list[str], *, clears: bool) -> list[list[torch.Tensor]]:
    """Return what each of `calls` read: before the backward, before the step, behind it."""
    seen = [BETWEEN[calls[0]](run) or []]
    loss_of(run.compiled, batch).backward()
    seen.append(BETWEEN[calls[1]](run) or [])
    run.optimizer.step()
    if clears:
        run.optimizer.zero_grad()
    seen.append(BETWEEN[calls[2]](run) or [])
    return seen


@pytest.mark.parametrize(("home", "share", "seed"), [("host", 0.0, 1), ("split", 0.25, 2), ("host", 0.5, 3)])
def test_random_interleavings(home: str, share: float, seed: int) -> None:
    """80 steps each, every one another interleaving."""
    interleave(seed, 80, home, share)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_many_more_random_interleavings(seed: int) -> None:
    for home, share in (("host", 0.0), ("split", 0.0), ("host", 0.75), ("split", 0.5)):
        interleave(100 + seed, 400, home, share)


# ----------------------------------------------------------------------------------------------------------------------
# A measured step does what the simulated step of the same plan does, in the same order.


SLOW_S = 0.03
"""One update of the worker, hundreds of times what else there is to do."""


def slow_host(plan: Plan) -> Cluster:
    """A machine whose links and host work beside compute, on which an update takes as long against the rest."""
    cluster = profile_for("cuda", GIB, GIB, "cuda")
    node = cluster.nodes[0]
    numel = min(bucket.numel for bucket in plan.buckets)
    return Cluster(nodes=(replace(node, host=replace(node.host, update_elements_per_s=numel / SLOW_S)),))


def order_of(spans: Iterable[Span], plan: Plan) -> list[str]:
    """Where updates of the host end and gathers and regions of the forward begin, in the order of time, until the last
    region does.

    Of two at once, what ends is first: the other one waited for it.
    """
    regions = [f"run {region.id}" for region in plan.regions if region.phase == "forward"]
    issued = [f"gather {action.target}" for action in plan.schedules[0].actions if action.verb is Verb.GATHER]
    found = [(span.end_s, 0, f"{span.label} ends") for span in spans if span.lane is Lane.HOST]
    found += [(span.start_s, 1, span.label) for span in spans if span.label in (*regions, *issued)]
    in_order = [label for _, _, label in sorted(found, key=lambda one: one[:2])]
    return in_order[: in_order.index(regions[-1]) + 1]


@pytest.mark.parametrize("home", ["host", "split"])
def test_measured_order_equals_the_simulated_order(home: str) -> None:
    model, batches = ladder(), rows(4)
    with (
        hybrid_run(model, batches[0], home=home, update=Update.ACROSS_STEPS) as run,
        controlled_worker() as worker,
    ):
        run.train(batches[:2])
        compiled = next(found for found in elixir.compilations(run.model) if found.plan.update is Update.ACROSS_STEPS)
        graph, plan = compiled.graph, compiled.plan
        worker.delay_s = lambda: SLOW_S

        def two_steps() -> None:
            for batch in batches[2:]:
                plain_step(run.compiled, run.optimizer, batch)

        measured = elixir.measure_step(two_steps)
    # Updates that the first step queued, and the forward of the second.
    begun_s = next(span.start_s for span in measured.spans if span.lane is Lane.HOST)
    got = order_of([span for span in measured.spans if span.start_s >= begun_s], plan)
    assert got == order_of(simulate(graph, plan, slow_host(plan)).spans, plan)
    waited = {
        span.label for span in measured.spans if span.lane is Lane.CALLER and span.end_s - span.start_s > SLOW_S / 2
    }
    assert waited & {f"wait {bucket.id}" for bucket in plan.buckets}
    ends = [label.endswith("ends") for label in got]
    assert ends.count(True) == len(plan.buckets)
    # Parameters on the device are read by one region, which waits for all; gathers wait one by one.
    assert (ends == sorted(ends, reverse=True)) == (home == "split")


# ----------------------------------------------------------------------------------------------------------------------
# Tensors of one slab are one run; whatever is not known to lie side by side is left alone.


SHAPES = [(3, 5), (129,), (1,), (16, 16)]
KINDS = (torch.bfloat16, torch.bfloat16, torch.int16, torch.float32, torch.float32)


def rows_of(shapes: list[tuple[int, ...]] = SHAPES) -> list[list[torch.Tensor]]:
    """Return tensors of each kind, cut from a slab per kind as buckets and rooms do, filled with their own number."""
    numels = [torch.Size(shape).numel() for shape in shapes]
    starts = [sum(aligned_bytes(2 * numel) for numel in numels[:index]) for index in range(len(numels) + 1)]
    columns = []
    for dtype in KINDS:
        ratio = dtype.itemsize // 2
        slab = Slab(ratio * starts[-1], pin=False)
        columns.append([slab.tensor(dtype, shape, ratio * s) for shape, s in zip(shapes, starts, strict=False)])
    rows = [list(row) for row in zip(*columns, strict=True)]
    for index, row in enumerate(rows):
        for tensor in row:
            tensor.fill_(index + 1)
    return rows


def test_a_bucket_is_joined_over_the_memory_of_its_tensors() -> None:
    rows = rows_of()
    ((members, joined),) = coalesce(rows, [4] * len(rows))
    assert members == [0, 1, 2, 3]
    for kind, tensor in enumerate(joined):
        assert tensor.dtype == KINDS[kind]
        assert len(tensor) == 128 + 256 + 128 + 256
        assert set(tensor.unique().tolist()) == {0, 1, 2, 3, 4}
        tensor.add_(1)
        assert all(bool((row[kind] == index + 2).all()) for index, row in enumerate(rows))


def test_the_order_of_the_rows_does_not_matter() -> None:
    rows = rows_of()
    ((members, _),) = coalesce([rows[index] for index in (2, 0, 3, 1)], [1] * 4)
    assert members == [1, 3, 0, 2]


def test_another_step_or_a_gap_separates_tensors() -> None:
    rows = rows_of()
    assert [members for members, _ in coalesce(rows, [4, 4, 5, 5])] == [[0, 1], [2, 3]]
    assert [members for members, _ in coalesce([rows[0], rows[2], rows[3]], [1] * 3)] == [[0], [1, 2]]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_tensor_in_other_memory_is_not_joined(kind: int) -> None:
    rows = rows_of()
    rows[1][kind] = rows[1][kind].clone()
    assert [members for members, _ in coalesce(rows, [1] * 4)] in (
        [[0], [1], [2, 3]],
        [[1], [0], [2, 3]],
        [[0], [2, 3], [1]],
    )


def test_memory_outside_slabs_is_never_joined() -> None:
    """The same offsets in memory that torch allocated, where anything may lie between."""
    rows = rows_of()
    (_, joined), *_ = coalesce(rows, [1] * 4)
    copies = [tensor.clone() for tensor in joined]
    views = [
        [copies[kind][start : start + numel] for kind in range(len(KINDS))]
        for start, numel in ((0, 15), (128, 129), (384, 1), (512, 256))
    ]
    assert len(list(coalesce(views, [1] * 4))) == 4


def test_a_single_row_keeps_its_tensors() -> None:
    transposed = torch.arange(6.0).view(2, 3).t()
    ((_, joined),) = coalesce([[transposed]], [1])
    assert joined[0].data_ptr() == transposed.data_ptr()
    assert flat(transposed).tolist() == [0, 1, 2, 3, 4, 5]
