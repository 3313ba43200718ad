"""measure_step against tensors whose bytes are known, and the arithmetic under it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode

from elixir_compile import compat
from elixir_compile.base.errors import NestedMeasurement
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Origin, Record
from elixir_compile.runtime import measure as step_bytes
from elixir_compile.runtime.bucket import Slab
from elixir_compile.runtime.lanes import lanes_for
from elixir_compile.runtime.measure import Resident, measure_step, peak_bytes
from elixir_compile.runtime.recording import Ledger

MB = 1_000_000


def measured_beyond_base(fn: object) -> int:
    """Peak of `fn` less what a step that does nothing holds."""
    base_bytes = measure_step(lambda: None, device="cpu").device_peak_bytes
    return measure_step(fn, device="cpu").device_peak_bytes - base_bytes  # type: ignore[arg-type]


def ones(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * MB, dtype=torch.uint8)


def test_the_peak_of_slabs_is_measured() -> None:
    def step() -> None:
        first = ones(40)
        second = first + 1
        del first
        third = second * 2
        del second, third
        ones(70)

    assert measured_beyond_base(step) == pytest.approx(80 * MB, rel=0.01)


def test_memory_allocated_before_the_measurement_counts() -> None:
    empty_bytes = measure_step(lambda: None, device="cpu").device_peak_bytes
    held = ones(50)
    views = (held[:10], held.view(2, -1), held.view(torch.int8))
    record = measure_step(lambda: ones(20), device="cpu")
    assert record.device_peak_bytes - empty_bytes == pytest.approx(70 * MB, rel=0.01)
    assert len(views) == 3


def test_memory_held_before_and_freed_in_the_step_is_subtracted() -> None:
    """30 die, then 40 are allocated: 40, not 70. A view keeps 20 alive while 5 are allocated: 60 + 5."""
    held = {"first": ones(30), "second": ones(20)}

    def replace() -> None:
        del held["first"]
        held["first"] = ones(40)

    def replace_with_a_view_left() -> None:
        view = held.pop("second")[:7]
        ones(5)
        del view
        held["second"] = ones(20)

    assert measured_beyond_base(replace) == pytest.approx(10 * MB, rel=0.01)
    assert measured_beyond_base(replace_with_a_view_left) == pytest.approx(5 * MB, rel=0.01)


def test_an_earlier_measurements_block_is_freed_only_once() -> None:
    held: list[torch.Tensor] = []
    measure_step(lambda: held.append(ones(30)), device="cpu")

    def replace() -> None:
        held.clear()
        held.append(ones(20))
        ones(25)

    assert measured_beyond_base(replace) == pytest.approx(15 * MB, rel=0.01)


def test_gradients_held_only_by_parameters_count_in_the_peak() -> None:
    weight = torch.nn.Parameter(torch.ones(5 * MB))
    bare_bytes = Resident().nbytes
    weight.sum().backward()
    assert Resident().nbytes - bare_bytes == 20 * MB


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        result = torch.empty_like(x)
        result[..., :2], result[..., 2:] = x[..., :2] * factor, x[..., 2:]
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return torch.cat([grads[0][..., :2] * factor, grads[0][..., 2:]], -1), None


def functional() -> object:
    return torch._to_functional_tensor(torch.ones(MB))


def batched() -> object:
    kept: list[torch.Tensor] = []
    torch.vmap(lambda row: kept.append(row) or row.sum())(torch.ones(2, MB // 8))
    return kept


def fake() -> object:
    with FakeTensorMode():
        return torch.ones(MB), torch.nn.Parameter(torch.ones(MB))


def failed() -> object:
    def refuse(_: Any, __: Any) -> Any:
        raise RuntimeError("no")

    step = torch.compile(lambda x: x.sin() * 2, backend=aot_autograd(fw_compiler=refuse))
    with pytest.raises(Exception, match="no") as kept:
        step(torch.randn(4, 4, requires_grad=True))
    return kept


def custom() -> object:
    layer = torch.nn.Linear(4, 4)
    step = torch.compile(lambda x, factor: Doubled.apply(layer(x), factor).sum(), backend="aot_eager")
    step(torch.randn(3, 4), torch.ones(3, 2)).backward()
    return step, layer


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # Dynamo does
@pytest.mark.parametrize("make", [functional, batched, fake, failed, custom], ids=lambda make: make.__name__)
def test_tensors_without_memory_that_a_capture_leaves_count_nothing(make: Callable[[], object]) -> None:
    torch._dynamo.reset()
    kept = make()
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)
    del kept


def test_slabs_are_host_memory() -> None:
    slab = Slab(8 * MB, pin=False)
    tensor = slab.tensor(torch.uint8, (8 * MB,), 0)
    record = measure_step(lambda: Slab(4 * MB, pin=False), device="cpu")
    with_bytes = record.device_peak_bytes
    slab_bytes = slab.nbytes
    del slab, tensor
    without = measure_step(lambda: None, device="cpu")
    assert with_bytes == pytest.approx(without.device_peak_bytes, abs=0.1 * MB)
    assert record.host_peak_bytes - without.host_peak_bytes == pytest.approx(slab_bytes + 4 * MB, abs=8192)


def test_buffers_of_inductor_count() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu() @ x

    x = torch.ones(1024, 1024)
    compiled = torch.compile(forward)
    compiled(x)
    assert measured_beyond_base(lambda: compiled(x)) == pytest.approx(2 * 4 * 1024 * 1024, rel=0.01)


def test_a_training_step_counts_gradients_and_state() -> None:
    """Weights 4 MB; the first step adds gradients 4 MB and two moments 8 MB; the update in place."""
    weight = torch.nn.Parameter(torch.ones(1 * MB))
    optimizer = torch.optim.AdamW([weight], fused=True)

    def step() -> None:
        weight.sum().backward()
        optimizer.step()

    assert measured_beyond_base(step) == pytest.approx(12 * MB, rel=0.01)


def test_an_exception_passes_and_everything_is_restored() -> None:
    ledger = Ledger(lanes_for(torch.device("cpu")))

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_step(fail, device="cpu")
    assert not ledger.is_recording
    assert measured_beyond_base(lambda: ones(10)) == pytest.approx(10 * MB, rel=0.01)


def test_a_measurement_inside_a_measurement_is_refused() -> None:
    with pytest.raises(NestedMeasurement, match="one step at a time"):
        measure_step(lambda: measure_step(lambda: None, device="cpu"), device="cpu")
    assert isinstance(measure_step(lambda: None, device="cpu"), Record)


def test_counts_are_those_of_the_step() -> None:
    old = Ledger(lanes_for(torch.device("cpu")))
    made: list[Ledger] = []

    def act(ledger: Ledger, label: str) -> None:
        with ledger.span(Lane.H2D, label):
            pass

    def step() -> None:
        act(old, "gather b0")
        act(old, "release b0")
        made.append(Ledger(lanes_for(torch.device("cpu"))))
        act(made[0], "gather b1")

    act(old, "gather b0")
    act(old, "offload b0.grad")
    record = measure_step(step, device="cpu")
    assert record.counts == {"gather": 2, "release": 1}
    assert [span.label for span in record.spans] == ["gather b0", "release b0"]
    assert all(0 <= span.start_s <= span.end_s for span in record.spans)
    assert record.origin is Origin.MEASURED


def test_two_threads_cannot_measure_at_once() -> None:
    refused: list[BaseException] = []

    def other() -> None:
        try:
            measure_step(lambda: None, device="cpu")
        except NestedMeasurement as error:
            refused.append(error)

    def step() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    measure_step(step, device="cpu")
    assert len(refused) == 1


@pytest.mark.parametrize(
    ("freed", "allocations", "expected_bytes"),
    [
        ([], [(1, 7, 30), (2, 7, -30), (3, 8, 40)], 140),
        ([(2, 1)], [(3, 7, 30)], 100),  # dies first: 100 - 100 + 30
        ([(4, 1)], [(3, 7, 30)], 130),  # dies after
        ([(2, 1)], [(1, 1, -100), (3, 7, 30)], 100),  # told twice, given back once
        ([], [(1, 1, -999), (3, 7, 130)], 130),  # stale size of an earlier profiler
        ([], [(1, 99, -50), (3, 7, 30)], 130),  # a block nobody knew
        ([(5, 1)], [(3, 1, 60), (4, 2, 50)], 110),  # its address was handed out again before its death was told
    ],
)
def test_peak_bytes(freed: list[tuple[int, int]], allocations: list[tuple[int, int, int]], expected_bytes: int) -> None:
    """One block of 100 bytes at address 1 is there before."""
    assert peak_bytes({1: 100}, freed, allocations) == expected_bytes


@pytest.mark.gpu
@pytest.mark.cuda
def test_cuda_peak_is_the_allocators() -> None:
    held = torch.ones(10 * MB, device="cuda")

    def step() -> None:
        first = torch.ones(20 * MB, device="cuda")
        del first
        torch.ones(5 * MB, device="cuda")

    record = measure_step(step)
    base_bytes = torch.cuda.memory_allocated()
    assert record.device_peak_bytes - base_bytes == pytest.approx(80 * MB, rel=0.05)
    assert held.numel() == 10 * MB


def test_a_measured_step_that_another_thread_ends_leaves_no_profiler_on() -> None:
    """A model, and with it the measurement of its step, may end wherever the garbage collector runs."""
    step_bytes.drop_running_step_bytes()  # of a model of another test
    running = step_bytes.start_step_bytes(torch.device("cpu"), (), 0)
    assert running is not None
    found: list[object] = []

    def other_thread() -> None:
        found.append(running.stop())
        found.append(step_bytes.drop_running_step_bytes())
        found.append(step_bytes.start_step_bytes(torch.device("cpu"), (), 0))
        with pytest.raises(NestedMeasurement, match="another thread"):
            measure_step(lambda: None, device="cpu")

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert found == [{}, False, None]
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)


def test_a_measured_step_that_ends_in_a_backward_pass_leaves_no_profiler_on() -> None:
    step_bytes.drop_running_step_bytes()  # of a model of another test
    running = step_bytes.start_step_bytes(torch.device("cpu"), (), 0)
    assert running is not None
    param = torch.ones(3, requires_grad=True)
    found: list[object] = []
    param.register_post_accumulate_grad_hook(
        lambda _: found.extend((running.stop(), step_bytes.start_step_bytes(torch.device("cpu"), (), 0)))
    )
    param.sum().backward()
    assert found == [{}, None]
    assert compat.is_profiling()
    step_bytes.end_idle_profiler()
    assert not compat.is_profiling()
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)


def test_a_measured_step_ends_with_the_thread_that_began_it() -> None:
    step_bytes.drop_running_step_bytes()  # of a model of another test
    thread = threading.Thread(target=step_bytes.start_step_bytes, args=(torch.device("cpu"), (), 0))
    thread.start()
    thread.join()
    assert measured_beyond_base(lambda: ones(20)) == pytest.approx(20 * MB, rel=0.01)
