"""Dry runs of optimizer classes at real shapes, against real steps; and plans that count the state and the work space
of classes that are not element-wise."""

import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, Muon, Optimizer

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops import optimizers
from elixir_compile.optim.generic.dry_step import attributes_of
from elixir_compile.optim.generic.tensor_step import StateTensor, TensorStep, tensor_step, work_bytes_of
from elixir_compile.optim.rule import order_of
from tests.covering import some_slow
from tests.run import optimizers as users
from tests.run.models import seeded
from tests.run.optim.tensor_wise_classes import Plain, Prodigy, Soap
from tests.run.training import Run, assert_same, by_elixir, by_torch, on_host, planned_peak_bytes, state_on_host

# ----------------------------------------------------------------------------------------------------------------------
# A dry run at a shape against two real steps.


class Nested(users.Lion):
    """State in lists, dictionaries and tuples; two entries share their memory, one is the weight itself."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            grams = [torch.zeros(size, size) for size in param.shape]
            state.update(GG=grams, Q=({"left": torch.zeros(3, dtype=torch.float64)}, 7), same=grams[0].T, own=param)
            state["moments"] = torch.zeros(2, *param.shape, dtype=torch.bfloat16)
        param.add_(param.grad, alpha=-group["lr"])


class FromMemory(users.Lion):
    """Reads the memory of its tensors, as kernels of other libraries do."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        param.detach().numpy()
        state["row"] = torch.zeros(param.shape[0], 1)
        state["codes"] = torch.zeros(param.shape, dtype=torch.uint8)
        state["scales"] = torch.zeros(-(-param.numel() // 256))
        state["table"] = torch.zeros(256)


class Growing(users.Lion):
    """Reads the memory of its tensors, and keeps state whose size is the square of theirs."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.detach().numpy()
        self.state[param]["square"] = torch.zeros(param.shape[0] ** 2)


class Reads(users.Lion):
    """Reads values on the host, of each kind, and branches on them."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        number, is_large, count = float(param.norm()), bool(param.sum() > 1e9), int(param.argmax())
        state["seen"] = torch.zeros(4 if number >= 0 and is_large in (True, False) and count >= 0 else 5)
        param.div_(max(1.0, number))


def dry(cls: type[Optimizer], shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> TensorStep:
    optimizer = cls([nn.Parameter(torch.ones(4, 4))], **options)
    like = torch.empty(shape, dtype=dtype) if shape[0] < 4096 else Like(shape)
    return tensor_step(cls, attributes_of(optimizer), optimizer.param_groups[0], like)


class Like:
    """The shape of a tensor whose memory would take a second to fill."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def trained(
    cls: type[Optimizer], shape: tuple[int, ...], count: int, dtype: torch.dtype, num_steps: int = 2, **options: Any
) -> Any:
    """Return an optimizer after `num_steps` real steps, its parameters, and the most bytes that the last step held
    beside its tensors, as the allocator tells."""
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for _ in range(count)]
    optimizer = cls(params, **options)
    for _ in range(num_steps):
        for param in params:
            param.grad = torch.randn(shape).to(dtype)
        with compat.AllocatorProfile() as blocks:
            optimizer.step()
    now = most = 0
    for _, _, nbytes in blocks.allocations():
        now += nbytes
        most = max(most, now)
    return optimizer, params, most


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path.removeprefix("."), value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, entry in pairs:
            yield from leaves(entry, f"{path}.{key}")


CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any], torch.dtype]] = {
    "Muon": (Muon, {}, torch.float32),
    "Muon in bfloat16": (Muon, {}, torch.bfloat16),
    "Adafactor": (Adafactor, {}, torch.float32),
    "Adafactor on lists": (Adafactor, {"foreach": True}, torch.float32),
    "Adafactor with momentum": (Adafactor, {"beta2_decay": -0.5, "d": 2.0}, torch.bfloat16),
    "SGD": (SGD, {"momentum": 0.9}, torch.float32),
    "Adam with amsgrad": (Adam, {"amsgrad": True}, torch.float32),
    "Lion, which replaces its state": (users.Lion, {}, torch.float32),
    "Factored": (users.Factored, {}, torch.float32),
    "Nested": (Nested, {}, torch.float32),
    "Reads": (Reads, {}, torch.float32),
    "FromMemory": (FromMemory, {}, torch.float32),
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_state_of_a_dry_run_is_what_the_class_makes(name: str) -> None:
    cls, options, dtype = CLASSES[name]
    shape = (24, 40)
    optimizer, (param,), _ = trained(cls, shape, 1, dtype, **options)
    made = dict(leaves(optimizer.state[param]))
    found = dry(cls, shape, dtype, **options)
    assert found.state == {
        path: StateTensor(shape=tuple(each.shape), dtype=each.dtype, order=order_of(each))
        for path, each in made.items()
    }
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in made.values()}
    memory.pop(param.data_ptr(), None)
    assert found.state_bytes == sum(memory.values()) > 0
    assert bool(found.unknown) is (cls is FromMemory)


def test_the_paths_of_nested_state() -> None:
    found = dry(Nested, (8, 6))
    assert found.state is not None
    assert list(found.state) == ["GG.0", "GG.1", "Q.0.left", "same", "own", "moments"]
    assert found.state["Q.0.left"] == StateTensor(shape=(3,), dtype=torch.float64)
    assert found.state_bytes == 4 * (64 + 36) + 3 * 8 + 2 * 48 * 2


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Adafactor on lists", "SGD"])
def test_the_work_space_is_what_the_allocator_sees(name: str, count: int) -> None:
    """Of Muon up to the 129 KiB in which oneDNN packs a product of bfloat16."""
    cls, options, dtype = CLASSES[name]
    shape = (256, 320)
    _, _, most_bytes = trained(cls, shape, count, dtype, **options)
    own = dry(cls, shape, dtype, **options)
    kernel_bytes = 132_200 if cls is Muon else 64  # else numbers as tensors
    found = work_bytes_of([own] * count)
    assert 0 <= most_bytes - found <= kernel_bytes, (most_bytes, found)


class EveryTenth(Plain):
    """Makes a square of its tensor in every tenth step, counted in the state, in a tensor there, or in the group."""

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params)
        self.where = where

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        counted = group if self.where == "group" else state
        if "step" not in counted:
            counted["step"] = torch.zeros(()) if self.where == "tensor" else 0
        counted["step"] += 1
        norm = (param.grad @ param.grad.T).norm() if int(counted["step"]) % 10 == 0 else param.grad.norm()
        param.sub_(param.grad / norm, alpha=group["lr"])


@pytest.mark.parametrize("where", ["state", "tensor", "group"])
def test_what_a_class_does_in_every_tenth_step_is_counted(where: str) -> None:
    shape = (256, 64)
    _, _, most_bytes = trained(EveryTenth, shape, 1, torch.float32, 10, where=where)
    found = dry(EveryTenth, shape, where=where)
    assert 0 <= most_bytes - found.work_bytes <= 64
    assert most_bytes > 4 * 256**2  # the product, which the second step does not make
    assert found.flops == {"float32": round(2 * 256**2 * 64 / 10)}


def test_what_a_class_does_as_often_as_a_hyperparameter_says_is_counted() -> None:
    shape = (96, 64)
    often, rarely, never = (dry(Soap, shape, every=every) for every in (1, 20, 10**9))
    assert never.work_bytes < rarely.work_bytes == often.work_bytes
    more = often.flops["float32"] - never.flops["float32"]
    assert rarely.flops["float32"] - never.flops["float32"] == more // 20 > 0
    _, _, most_bytes = trained(Soap, shape, 1, torch.float32, 20, every=20)
    assert 0 <= rarely.work_bytes - most_bytes <= 4 * 66 * 96  # scratch of small factorisations takes less


def test_the_work_space_of_tensors_of_several_shapes() -> None:
    shapes = [(64, 64), (256, 256), (32, 512)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for foreach, expected in ((False, 2 * 4 * 256**2), (True, 4 * (64**2 + 256**2 + 32 * 512))):
        steps = [dry(Adafactor, tuple(param.shape), foreach=foreach) for param in params]
        assert work_bytes_of(steps) == pytest.approx(expected, rel=0.01)
    assert work_bytes_of([]) == 0


@pytest.mark.parametrize("shape", [(64, 256), (300, 100), (128, 128), (4096, 11008)])
def test_flops_of_muon(shape: tuple[int, ...]) -> None:
    short, long = sorted(shape)
    flops = 4 * short**2 * long + 2 * short**3
    assert dry(Muon, shape).flops == {"bfloat16": 5 * flops}  # of tensors in fp32
    assert dry(Muon, shape, ns_steps=3).flops == {"bfloat16": 3 * flops}


def test_the_figures_of_a_large_matrix() -> None:
    """Those of 4096 x 11008 by hand."""
    nbytes = 4 * 4096 * 11008
    muon, adafactor = dry(Muon, (4096, 11008)), dry(Adafactor, (4096, 11008))
    # The update in fp32, two iterates and two squares in bfloat16.
    assert muon.work_bytes == nbytes + 2 * nbytes // 2 + 2 * 2 * 4096**2
    assert muon.state_bytes == nbytes
    assert adafactor.state_bytes == 4 * (4096 + 11008 + 1)
    assert adafactor.work_bytes == pytest.approx(nbytes, rel=0.01)
    assert adafactor.flops == {"float32": 2 * 4096 * 11008}  # the product of a column and a row
    assert 20 * nbytes < muon.moved_bytes < 40 * nbytes
    assert 10 * nbytes < adafactor.moved_bytes < 20 * nbytes
    assert muon.num_kernels < 40


def test_bytes_moved_and_kernels() -> None:
    found = dry(SGD, (100, 50), lr=0.1, momentum=0.5)
    # momentum * 0.5, momentum + gradient, weight - momentum: each op reads its tensors and writes one.
    assert (found.num_kernels, found.moved_bytes) == (3, (2 + 3 + 3) * 4 * 5000)


def test_factorisations_have_flops() -> None:
    class Whitened(users.Lion):
        def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
            torch.linalg.qr(param.grad)
            torch.linalg.eigh(param.grad.T @ param.grad)

    assert dry(Whitened, (60, 30)).flops == {"float32": 180_000 + 9 * 30**3 + 2 * 30 * 60 * 30}


def test_a_class_that_fails_on_tensors_without_memory_is_scaled_from_small_ones() -> None:
    found = dry(FromMemory, (4096, 11008))
    assert "RuntimeError on tensors without memory" in found.unknown
    assert found.state == {
        "row": StateTensor(shape=(4096, 1), dtype=torch.float32),
        "codes": StateTensor(shape=(4096, 11008), dtype=torch.uint8),
        "scales": StateTensor(shape=(4096 * 11008 // 256,), dtype=torch.float32),
        "table": StateTensor(shape=(256,), dtype=torch.float32),
    }
    assert found.state_bytes == sum(each.nbytes for each in found.state.values())
    assert (found.work_bytes, found.flops, found.moved_bytes, found.num_kernels) == (0, {}, 0, 0)


@pytest.mark.parametrize(("cls", "because"), [(Growing, "the shape of square does not follow"), (LBFGS, "closure")])
def test_state_that_no_dry_run_shows(cls: type[Optimizer], because: str) -> None:
    found = dry(cls, (4096, 11008))
    assert found.state is None
    assert because in found.unknown
    optimizer = elixir.hybrid(cls)([nn.Parameter(torch.ones(600, 600))])
    with pytest.warns(elixir.ElixirWarning, match="not element-wise"):
        assert not optimizer.places_state
    assert optimizer.states_of(optimizer.param_groups[0]["params"])[0].state_nbytes == 8 * 600 * 600
    assert optimizer.work_bytes(of_one=False) == 0


def test_compiled_parts_of_a_class_are_not_compiled_by_a_dry_run_and_are_by_its_steps() -> None:
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    @torch.compile(backend=backend)
    def direction(grad: torch.Tensor) -> torch.Tensor:
        return (grad @ grad.T @ grad).sign()

    class Compiled(users.Lion):
        def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
            param.sub_(direction(param.grad), alpha=group["lr"])

    found = dry(Compiled, (30, 20))
    assert found.flops == {"float32": 2 * 2 * 30 * 30 * 20}
    assert not graphs
    assert elixir.hybrid(Compiled)([nn.Parameter(torch.ones(8, 8))]).places_state
    assert not graphs
    trained(Compiled, (30, 20), 1, torch.float32)
    assert len(graphs) == 1


def test_hyperparameters_that_are_lists_by_parameter() -> None:
    class Ranked(users.Lion):
        def __init__(self, params: Any, ranks: list[int]) -> None:
            super().__init__(params)
            self.param_groups[0]["ranks"] = ranks

        def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
            places = zip(group["params"], group["ranks"], group["param_names"], strict=True)
            rank, name = next((rank, name) for own, rank, name in places if own is param)
            self.state[param][name] = param.new_zeros(rank, param.shape[1])
            param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])

    params = [nn.Parameter(torch.ones(6, 5)) for _ in range(2)]
    optimizer = elixir.hybrid(Ranked)([("a", params[0]), ("b", params[1])], ranks=[3, 2])
    with pytest.warns(elixir.ElixirWarning, match="not element-wise: .*; and its param group has ranks by parameter"):
        assert not optimizer.places_state
    assert [state.state_nbytes for state in optimizer.states_of(params)] == [4 * 3 * 5, 4 * 2 * 5]


def test_a_dry_run_leaves_nothing_in_caches_of_the_optimizer() -> None:
    class Caching(users.Lion):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.eyes: dict[str, list[torch.Tensor]] = {"eyes": []}

        def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
            self.eyes["eyes"] = self.eyes["eyes"] or [torch.eye(param.shape[0])]
            param.sub_(self.eyes["eyes"][0] @ param.grad)

    optimizer = Caching([nn.Parameter(torch.ones(8, 8))])
    attributes = {**attributes_of(optimizer), "eyes": optimizer.eyes}
    found = tensor_step(Caching, attributes, optimizer.param_groups[0], optimizer.param_groups[0]["params"][0])
    assert found.flops == {"float32": 2 * 8**3}
    assert optimizer.eyes == {"eyes": []}


def test_a_dry_run_leaves_random_state_and_gradient_mode_as_they_were() -> None:
    before = torch.random.get_rng_state()
    with torch.no_grad():
        dry(users.Noisy, (8, 8))
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert torch.equal(torch.random.get_rng_state(), before)


# ----------------------------------------------------------------------------------------------------------------------
# Plans count the state and the work space.


class Wide(nn.Module):
    """Layers whose matrices are most of the memory of a step."""

    def __init__(self, width: int = 512, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = torch.relu(layer(batch)) + batch
        return batch.square().mean()


MAKERS = {
    "Muon": functools.partial(Muon, lr=0.02, ns_steps=1),  # products in bf16 take seconds on many a CPU
    "Adafactor": functools.partial(Adafactor, lr=0.02),
    "Adafactor on lists": functools.partial(Adafactor, lr=0.02, foreach=True),
}


QUICK_PEAKS = {("Muon", "some on the host"), ("Adafactor", "all on the device")}


@pytest.mark.parametrize(
    ("name", "budget"),
    some_slow(itertools.product(MAKERS, ("all on the device", "some on the host")), lambda *each: each in QUICK_PEAKS),
)
def test_the_planned_peak_of_a_class_that_is_not_elementwise_is_measured(
    name: str, budget: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also of the first step, which makes the state where the plan wants it. Its bits are those of the class. In 30 %
    of the 22.2 MB that Muon takes with all on the device, none of its state is there; it updates on this thread, since
    no measurement sees what the thread that updates beside it allocates."""

    def batch_of(seed: int) -> torch.Tensor:
        return torch.randn(64, 512, generator=torch.Generator().manual_seed(seed))

    parts = {"Muon": (3.7, 0.889), "Adafactor": (2.4, 1.5), "Adafactor on lists": (3.1, 1.5)}[name]
    budget_bytes = int(parts[budget == "some on the host"] * 6 * 4 * 512**2) + (1 << 20)
    make = MAKERS[name]

    def hybrid(params: Any) -> Optimizer:
        return elixir.hybrid(make.func)(params, **make.keywords)

    by_elixir(seeded(Wide)).train([batch_of(0)])  # measures kernels, once on a machine, on tensors that no plan knows
    run = by_elixir(
        seeded(Wide),
        optimizer=hybrid,
        device_memory=budget_bytes,
        update="after_backward" if name == "Muon" else "auto",
    )
    peaks = [elixir.measure_step(lambda seed=seed: run.train([batch_of(seed)])).device_peak_bytes for seed in range(3)]
    assert bool(on_host(run)) is (budget == "some on the host")
    if (name, budget) == ("Muon", "some on the host"):
        assert len(state_on_host(run)) == len([*run.model.parameters()])
    assert max(peaks) <= budget_bytes
    assert max(peaks) == pytest.approx(planned_peak_bytes(run), rel=0.01), peaks
    assert not any("keeps its state" in text for text in caplog.messages)
    assert_same(by_torch(seeded(Wide), optimizer=make).train(map(batch_of, range(3))), run)


@pytest.mark.slow
def test_the_planned_peak_holds_in_the_step_in_which_a_class_does_more() -> None:
    def hybrid(params: Any) -> Optimizer:
        return elixir.hybrid(Soap)(params, every=10)

    def peak_of(run: Run) -> int:
        return elixir.measure_step(lambda: run.train([torch.randn(64, 256)])).device_peak_bytes

    kept_bytes = planned_peak_bytes(by_elixir(seeded(Wide, 256), optimizer=hybrid).train([torch.randn(64, 256)]))
    gc.collect()
    options = {"device_memory": int(0.6 * kept_bytes), "update": "after_backward", "replan": False}
    run = by_elixir(seeded(Wide, 256), optimizer=hybrid, **options)
    peaks = [peak_of(run) for _ in range(11)]
    assert max(peaks) == peaks[9] == pytest.approx(planned_peak_bytes(run), rel=0.01), peaks
    assert max(peaks[:9]) < 0.9 * peaks[9], peaks


@pytest.mark.slow
def test_muon_for_matrices_beside_adamw_for_the_rest() -> None:
    """Both are counted, each with the bytes of its class. Products in bf16 on a CPU take 160 KiB that nobody counts."""
    width = 448

    def make(params: Any) -> Optimizer:
        made = list(params)
        rest = [param for param in made if param.dim() < 2]
        optimizer = elixir.hybrid(Muon)([param for param in made if param.dim() == 2], lr=0.02)
        others.append(elixir.HybridAdamW(rest, lr=0.02))
        return optimizer

    def step(compiled: Any, optimizer: Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss = compiled(batch)
        loss.backward()
        for each in (optimizer, *others):
            each.step()
            each.zero_grad()
        return loss

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8))
            self.scale = nn.Parameter(torch.ones(width, width // 2).flatten())

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                batch = torch.relu(layer(batch)) + batch
            return (batch.square().mean() + 1) * self.scale.square().mean()

    others: list[Optimizer] = []
    run = by_elixir(seeded(Mixed), optimizer=make, device_memory="21MiB")
    peaks = []
    for _ in range(2):
        batch = torch.randn(32, width)
        peaks.append(elixir.measure_step(lambda batch=batch: run.train([batch], step)).device_peak_bytes)
    assert peaks[-1] == pytest.approx(planned_peak_bytes(run), rel=0.01)


@pytest.mark.filterwarnings("ignore:.*not element-wise.*")
def test_a_budget_below_the_state_of_a_global_class_is_refused_before_the_first_step() -> None:
    """Its state alone is 6 MiB, and no plan moves it from the memory of its parameters."""
    run = by_elixir(seeded(Wide), optimizer=lambda params: elixir.hybrid(Prodigy)(params), device_memory="5MiB")
    with pytest.raises(elixir.NoFeasiblePlan) as raised:
        run.train([torch.randn(4, 512)])
    assert raised.value.needed_bytes > 6 << 20


class Joined(Adafactor):
    """Adafactor that ends with an op on two parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        params = self.param_groups[0]["params"]
        params[-1].add_(params[0].sum() * 0)


def test_state_and_work_space_that_plans_ask_for() -> None:
    params = [nn.Parameter(torch.ones(64, 32)) for _ in range(3)]
    optimizer = elixir.hybrid(Adafactor)(params, foreach=True)
    assert [state.state_nbytes for state in optimizer.states_of(params)] == [4 * (64 + 32)] * 3
    assert optimizers.place_state(params)
    for state in optimizer.states_of(params):  # one tensor after another, each in the memory where it is updated
        assert state.whole_update is not None
        assert state.whole_update.work_nbytes == pytest.approx(4 * 64 * 32, rel=0.02)
    assert optimizers.update_work_bytes(params, torch.device("cpu")) == 0


@pytest.mark.filterwarnings("ignore:.*not element-wise.*")
def test_state_and_work_space_of_a_global_class_that_plans_ask_for() -> None:
    """On an accelerator ops on lists count for one tensor: which are there is what a plan decides."""
    params = [nn.Parameter(torch.ones(64, 32)) for _ in range(3)]
    optimizer = elixir.hybrid(Joined)(params, foreach=True)
    assert [state.state_nbytes for state in optimizer.states_of(params)] == [4 * (64 + 32 + 1)] * 3
    on_cpu = optimizers.update_work_bytes(params, torch.device("cpu"))
    on_accelerator = optimizers.update_work_bytes(params, torch.device("cuda"))
    assert on_cpu == 3 * on_accelerator == pytest.approx(3 * 4 * 64 * 32, rel=0.01)
    assert not optimizers.place_state(params)
    assert optimizers.planned_states(params)[id(params[0])].state_nbytes == 4 * (64 + 32 + 1)
    rest = [nn.Parameter(torch.ones(4))]
    adamw = elixir.HybridAdamW(rest)
    assert optimizers.place_state(rest)
    assert not optimizers.place_state([*params, *rest])
    assert optimizers.update_work_bytes(rest, torch.device("cpu")) == 0
    del adamw
    assert not optimizers.place_state(rest)


@pytest.mark.filterwarnings("ignore:.*not element-wise.*")
def test_nested_state_counts_after_the_first_step_too() -> None:
    """The state that an optimizer made takes the place of the state that was planned."""
    run = by_elixir(seeded(Wide, 128, 2), optimizer=lambda params: elixir.hybrid(Nested)(params), device_memory="4MiB")
    found = []
    for _ in range(2):
        run.train([torch.randn(4, 128)])
        found.append(sum(executor_of(run.model).plain_state.by_name().values()))
    assert found == [2 * (4 * 2 * 128**2 + 3 * 8 + 2 * 2 * 128**2)] * 2
