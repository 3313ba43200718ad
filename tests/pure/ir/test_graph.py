"""Graphs: what they check of themselves, their fingerprints, and the seconds of their ops on a machine."""

import dataclasses
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, PlanFileError
from elixir_compile.base.units import GIB
from elixir_compile.ir import (
    BlockUpdate,
    Bucket,
    BucketId,
    Op,
    OpId,
    Phase,
    Ring,
    Shards,
    StepGraph,
    StorageId,
    Tier,
    WholeUpdate,
    fingerprint,
    graph_at,
    graph_from_json,
    graph_to_json,
    sizes,
)
from elixir_compile.ir.cost import (
    Stretch,
    average_s,
    collective_s,
    copy_s,
    corrected_s,
    host_memory_s,
    op_s,
    ring_s,
    update_s,
)
from elixir_compile.ir.hardware import Cluster, FormPrice, TensorRing, along_data, profile_for
from elixir_compile.ir.kinds import Batched, Kernel, Kind
from elixir_compile.tools.preview.few_layers import graph_of_line, line_of
from tests.pure.strategies import Layer, chain, step_graphs, symbolic, symbolic_graphs

# ----------------------------------------------------------------------------------------------------------------------
# Graphs with symbolic sizes: read back, evaluated elsewhere, and refused when text and number disagree.


STATIC = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(2)])
GRAPH = symbolic(STATIC)


@given(symbolic_graphs())
def test_dynamic_graphs_read_back_from_json(graph: StepGraph) -> None:
    assert graph_from_json(graph_to_json(graph)) == graph


@given(symbolic_graphs(), st.integers(1, 40))
def test_sizes_elsewhere(graph: StepGraph, value: int) -> None:
    there = graph_at(graph, {"s1": value})
    values = dict(graph.symbols) | {"s1": value}
    assert dict(there.symbols) == values
    for before, after in zip(graph.storages, there.storages, strict=True):
        assert after.nbytes == (sizes.evaluate(before.size, values) if before.size else before.nbytes)
    assert graph_at(there, {}) == there


def test_moved_bytes_grow_with_the_storages_and_flops_by_their_own_text() -> None:
    """The first op reads x (16 bytes per s0) and w0, and writes t0; three times s0 is 9."""
    graph = dataclasses.replace(
        GRAPH,
        ops=(
            dataclasses.replace(GRAPH.ops[0], flops=60, flops_size="20*s0", moved_bytes=40 + 2 * 48),
            *GRAPH.ops[1:],
        ),
    )
    op = graph_at(graph, {"s0": 9}).ops[0]
    assert (op.flops, op.moved_bytes) == (180, 40 + 2 * 144)
    assert graph_at(graph_at(graph, {"s0": 9}), {"s0": 3}).ops[0] == graph.ops[0]


def test_a_collective_grows_with_its_tensor_and_reads_back() -> None:
    ring = Ring(num_ranks=2, nbytes=48, passes=2, size="16*s0")
    graph = dataclasses.replace(GRAPH, ops=(dataclasses.replace(GRAPH.ops[0], ring=ring), *GRAPH.ops[1:]))
    found = graph_at(graph, {"s0": 9}).ops[0].ring
    assert found is not None
    assert found.nbytes == 144
    assert graph_from_json(graph_to_json(graph)) == graph
    assert graph_of_line(line_of(graph)).ops[0].ring == ring
    assert fingerprint(graph) != fingerprint(GRAPH)
    assert "sends 48 16*s0 x 2 round 2 ranks" in str(graph.ops[0])
    with pytest.raises(InvalidPlan, match=r"says that 16\*s0 is 40"):
        dataclasses.replace(graph, ops=(dataclasses.replace(GRAPH.ops[0], ring=dataclasses.replace(ring, nbytes=40)),))
    with pytest.raises(InvalidPlan, match="expected 0 bytes or more"):
        Ring(num_ranks=0, nbytes=1, passes=1)


def test_an_unknown_symbol_is_named() -> None:
    with pytest.raises(InvalidPlan, match="has no symbol s7; its symbols are: s0"):
        graph_at(GRAPH, {"s7": 2})
    with pytest.raises(InvalidPlan, match="its symbols are: none"):
        graph_at(STATIC, {"s0": 2})


def test_text_and_number_must_agree() -> None:
    with pytest.raises(InvalidPlan, match=r"says that 16\*s0 is 48 at {'s0': 4}; it is 64"):
        dataclasses.replace(GRAPH, symbols=(("s0", 4),))
    with pytest.raises(InvalidPlan, match="has no value"):
        dataclasses.replace(GRAPH, symbols=())
    with pytest.raises(InvalidPlan, match="each once"):
        dataclasses.replace(GRAPH, symbols=(("s0", 3), ("s0", 3)))


def test_a_file_cannot_run_code() -> None:
    text = graph_to_json(GRAPH).replace('"16*s0"', "\"__import__('os').getpid()*s0\"")
    with pytest.raises(PlanFileError, match="getpid"):
        graph_from_json(text)


# ----------------------------------------------------------------------------------------------------------------------
# What counts for the fingerprint of a graph, and what does not.


CHAIN = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(3)])


def renamed(graph: StepGraph) -> StepGraph:
    """Return the graph with other names for everything but parameters, and its storages listed backwards."""
    names = {s.id: s.id if s.kind is Kind.PARAM else StorageId(f"other {s.id}") for s in graph.storages}
    return StepGraph(
        name="another name",
        ops=tuple(
            dataclasses.replace(
                op,
                id=op.id if op.id == "update" else OpId(f"other {op.id}"),
                reads=tuple(names[name] for name in op.reads),
                writes=tuple(names[name] for name in op.writes),
                source="elsewhere.py:1",
                flops=0,
            )
            for op in graph.ops
        ),
        storages=tuple(dataclasses.replace(s, id=names[s.id]) for s in reversed(graph.storages)),
        outputs=tuple(names[name] for name in graph.outputs),
    )


@given(step_graphs())
def test_names_do_not_count(graph: StepGraph) -> None:
    assert fingerprint(renamed(graph)) == fingerprint(graph)
    assert len(fingerprint(graph)) == 12
    assert set(fingerprint(graph)) <= set("0123456789abcdef")


def with_storage(index: int, **changes: object) -> StepGraph:
    storages = list(CHAIN.storages)
    storages[index] = dataclasses.replace(storages[index], **changes)
    return dataclasses.replace(CHAIN, storages=tuple(storages))


def with_op(index: int, **changes: object) -> StepGraph:
    ops = list(CHAIN.ops)
    ops[index] = dataclasses.replace(ops[index], **changes)
    return dataclasses.replace(CHAIN, ops=tuple(ops))


@pytest.mark.parametrize(
    "other",
    [
        with_storage(0, nbytes=99),
        with_storage(0, dtype="bfloat16"),
        with_storage(0, kind=Kind.BUFFER),
        with_op(0, target="aten.addmm.default"),
        with_op(0, module="elsewhere"),
        with_op(0, kernel=Kernel.POINTWISE),
        with_op(0, once=True),
        with_op(0, mixes="a mean over the batch"),
        with_storage(0, batched=Batched.EACH),
        with_storage(0, batched=Batched.SUM),
        with_storage(0, consecutive=True),
        dataclasses.replace(CHAIN, batch=8),
        with_op(2, reads=tuple(reversed(CHAIN.ops[2].reads))),
        with_op(2, writes=()),
        dataclasses.replace(CHAIN, ops=CHAIN.ops[:-1]),
        dataclasses.replace(CHAIN, outputs=()),
        chain([Layer(module=f"l{n}", params=((f"v{n}", 10),), frozen=False, act_numel=4) for n in range(3)]),
    ],
)
def test_fingerprints_depend_on_the_computation(other: StepGraph) -> None:
    assert fingerprint(other) != fingerprint(CHAIN)


@given(symbolic_graphs(), st.integers(1, 40))
def test_fingerprints_do_not_depend_on_sizes_or_names_of_symbols(graph: StepGraph, value: int) -> None:
    assert fingerprint(graph_at(graph, {"s0": value})) == fingerprint(graph)
    names = {"s0": "s77", "s1": "s5"}
    storages = tuple(
        dataclasses.replace(s, size=sizes.canonical(s.size, names) if s.size else "") for s in graph.storages
    )
    symbols = tuple((names[name], value) for name, value in graph.symbols)
    assert fingerprint(dataclasses.replace(graph, storages=storages, symbols=symbols)) == fingerprint(graph)


def test_the_expression_of_a_size_counts() -> None:
    graphs = [CHAIN, symbolic(CHAIN), symbolic(CHAIN, "{numel}*s0 + 1"), symbolic(CHAIN, "{numel}*s0**2")]
    assert len({fingerprint(graph) for graph in graphs}) == 4


def test_fingerprints_are_equal_in_every_process() -> None:
    script = "import sys; from elixir_compile.ir import *; print(fingerprint(graph_from_json(sys.stdin.read())))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            [sys.executable, "-c", script],
            input=graph_to_json(CHAIN),
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.strip() == fingerprint(CHAIN)


# ----------------------------------------------------------------------------------------------------------------------
# `cost`: closed forms and limits.


CUDA = profile_for("cuda", 8 * GIB, 8 * GIB, "cuda")
FOUR = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=4, peer=CUDA.h2d),))
SIZES = st.integers(0, 2**40)


def op(flops: int, moved_bytes: int) -> Op:
    return Op(
        id=OpId("fwd.mm"), target="mm", phase=Phase.FORWARD, reads=(), writes=(), flops=flops, moved_bytes=moved_bytes
    )


def bucket(nbytes: int, trainable: bool = True) -> Bucket:
    return Bucket(
        id=BucketId("b0"),
        params=(StorageId("p"),),
        numel=nbytes // 4,
        nbytes=nbytes,
        state_nbytes=2 * nbytes if trainable else 0,
        dtype="float32",
        trainable=trainable,
        shard_numels=Shards.of((nbytes // 4,)),
    )


def test_op_s_is_the_roofline() -> None:
    device = replace(
        CUDA.device, flops_per_s={"float32": 100.0, "bfloat16": 400.0}, memory_bytes_per_s=10.0, launch_s=1.0
    )
    cluster = replace(CUDA, nodes=(replace(CUDA.nodes[0], device=device),))
    assert op_s(op(1000, 50), cluster) == 1 + 10
    assert op_s(op(1000, 500), cluster) == 1 + 50
    assert op_s(op(1000, 0), cluster, "bfloat16") == 1 + 2.5
    assert op_s(op(1000, 0), cluster, "int8") == 1 + 10
    assert op_s(op(0, 0), cluster) == 0


def test_a_collective_in_the_graph_takes_its_messages_round_the_tensor_axis() -> None:
    link = replace(CUDA.h2d, latency_s=1.0, bytes_per_s=10.0)
    cluster = replace(CUDA, tensor=TensorRing(num_ranks=4, link=link))
    summed = replace(op(0, 800), ring=Ring(num_ranks=4, nbytes=400, passes=2))
    assert ring_s(summed, cluster) == 2 * 3 * (1 + 100 / 10)
    assert ring_s(replace(summed, times=5), cluster) == 2 * 3 * (5 + 100 / 10)  # the bytes are those of all times
    assert op_s(summed, cluster) == op_s(op(0, 800), cluster) + ring_s(summed, cluster)
    assert ring_s(op(0, 800), cluster) == 0


def test_a_collective_of_the_model_itself_takes_its_messages_round_ranks_along_the_data_axes() -> None:
    """Those of two ranks stay in a node; those of more pass the network, as do those of a world of both axes."""
    peer, network = (replace(CUDA.h2d, latency_s=1.0, bytes_per_s=rate) for rate in (10.0, 2.0))
    cluster = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=2, peer=peer),) * 2, network=network)
    of_two, of_all = (replace(op(0, 800), ring=Ring(num_ranks=num, nbytes=400, passes=1)) for num in (2, 4))
    assert ring_s(of_two, cluster) == 1 * (1 + 200 / 10)
    assert ring_s(of_all, cluster) == 3 * (1 + 100 / 2)
    assert op_s(of_all, cluster) == op_s(op(0, 800), cluster) + ring_s(of_all, cluster)
    within = along_data(cluster, 2)  # each slice has one device of each node
    assert ring_s(of_two, within) == ring_s(of_two, cluster)  # along the tensor axis, in a node
    assert ring_s(of_all, within) == 3 * (1 + 100 / 1)  # both slices share the network
    alone = replace(op(0, 800), ring=Ring(num_ranks=1, nbytes=400, passes=1))
    assert ring_s(alone, cluster) == ring_s(of_two, CUDA) == 0  # a machine of one device has no link between ranks


def test_transfers_are_latency_plus_bytes_over_rate() -> None:
    link = replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)
    assert copy_s(40, link) == 2 + 4
    assert copy_s(40, link, num_copies=3) == 3 * 2 + 4
    assert copy_s(0, link, num_copies=0) == 0


def test_a_collective_goes_round_the_ring() -> None:
    """Three hops of 2 s; each rank receives 30 of 40 bytes, at 10 bytes per second."""
    link = replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)
    cluster = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=4, peer=link),))
    assert collective_s(40, cluster) == 6 + 3
    assert collective_s(40, CUDA) == 0


def test_copies_of_parts_are_averaged_over_their_own_ring() -> None:
    """Of 2 copies on 4 ranks each ring has 2: a hop of 2 s and half of 40 bytes at 10 bytes per second, twice where
    copies are averaged. Between nodes of 2 the rings of both parts share the network, at 5 bytes per second."""
    link = replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)
    one = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=4, peer=link),))
    assert collective_s(40, one, num_copies=2) == 2 + 2
    assert average_s(40, one, num_copies=2) == 2 * (2 + 2)
    assert average_s(40, one, num_copies=1) == 0
    network = replace(link, bytes_per_s=5.0, latency_s=3.0)
    two = Cluster(nodes=(replace(CUDA.nodes[0], num_devices=2, peer=link),) * 2, network=network)
    assert collective_s(40, two, num_copies=2) == 2 + 2
    assert average_s(40, two, num_copies=2) == 2 * (3 + 2 * 4)
    # One part, four copies: nothing is gathered. One copy in four parts: its ring takes the network.
    assert (collective_s(40, two, num_copies=4), average_s(40, two, num_copies=4)) == (0, 2 * 3 * (3 + 2))
    assert collective_s(40, two) == 3 * (3 + 2)


def test_ranks_of_a_node_share_the_host_and_update_their_shards() -> None:
    shared = replace(bucket(4000), shard_numels=Shards.of((250,) * 4))
    assert copy_s(shared.shard_nbytes(), replace(CUDA.h2d, bytes_per_s=10.0, latency_s=2.0)) == 2 + 100
    assert update_s(shared, Tier.HOST, FOUR) == 1000 / CUDA.host.update_elements_per_s


@pytest.mark.parametrize(
    ("dtype", "state_bytes", "state_dtype", "rough", "measured"),
    [
        ("float32", 8, None, 1.0, 1.0),
        ("bfloat16", 10, None, 1.0, 0.75),
        ("bfloat16", 4, None, 1.0, 1.0),  # without a master
        ("bfloat16", 6, "bfloat16", 0.82, 0.5),
        ("float32", 4, "bfloat16", 0.82, 0.82),  # no price
        ("float32", 2, "int8", 1.2, 2.5),
    ],
)
def test_a_host_update_has_the_price_of_its_form(
    dtype: str, state_bytes: int, state_dtype: str | None, rough: float, measured: float
) -> None:
    """Of a rough machine and of one that measured three forms. Ranks that share the host keep the proportions. A device
    that is the host's cores has the same price, beside the launch."""
    numel, rate = 1000, CUDA.host.update_elements_per_s
    one = replace(bucket(4 * numel), dtype=dtype, state_nbytes=state_bytes * numel, state_dtype=state_dtype)
    forms = (("bfloat16", "float32", 0.75), ("bfloat16", "bfloat16", 0.5), ("float32", "int8", 2.5))
    prices = tuple(FormPrice(dtype=own, state_dtype=moments, over_fp32=over) for own, moments, over in forms)
    node = replace(CUDA.nodes[0], host=replace(CUDA.host, update_forms=prices))
    assert update_s(one, Tier.HOST, CUDA) == pytest.approx(rough * numel / rate)
    assert update_s(one, Tier.HOST, Cluster(nodes=(node,))) == pytest.approx(measured * numel / rate)
    four = Cluster(nodes=(replace(node, num_devices=4, peer=CUDA.h2d),))
    assert update_s(one, Tier.HOST, along_data(four, 4)) == pytest.approx(4 * measured * numel / rate)
    assert update_s(one, Tier.DEVICE, Cluster(nodes=(node,))) == update_s(one, Tier.DEVICE, CUDA)
    copy = replace(node.h2d, overlaps_compute=False)
    device_s = update_s(one, Tier.DEVICE, Cluster(nodes=(replace(node, h2d=copy, d2h=copy),)))
    assert device_s == pytest.approx(node.device.launch_s + measured * numel / node.device.update_elements_per_s)


@pytest.mark.parametrize(
    ("dtype", "state_bytes", "state_dtype", "host", "device_bytes"),
    [
        ("bfloat16", 2, None, 7.3, 28 + 74),  # the low half of a master is all of the state, as of SGD
        ("bfloat16", 6, None, 7.3, 28 + 74),
        ("float16", 8, None, 2.4, 28 + 12),
        ("float32", 2, "bfloat16", 8.0, 300),
        ("bfloat16", 4, "bfloat16", 14.3, 300),
    ],
)
def test_masters_of_other_classes_than_adamw_are_in_the_price(
    dtype: str, state_bytes: int, state_dtype: str | None, host: float, device_bytes: int
) -> None:
    """On the host as on the device, over the 28 bytes of AdamW in fp32: no pass of one loop joins and splits them. The
    same bytes of state without masters cost nothing more."""
    numel = 1000
    one = replace(bucket(4 * numel), dtype=dtype, state_nbytes=state_bytes * numel, state_dtype=state_dtype)
    blocks = replace(one, block_update=BlockUpdate())
    on_host_s = numel / CUDA.host.update_elements_per_s
    on_device_s = numel / CUDA.device.update_elements_per_s
    assert update_s(blocks, Tier.HOST, CUDA) == pytest.approx(host * on_host_s)
    device_s = CUDA.device.launch_s + device_bytes / 28 * on_device_s
    assert update_s(blocks, Tier.DEVICE, CUDA) == pytest.approx(device_s)
    if state_dtype is None:
        assert update_s(one, Tier.HOST, CUDA) == pytest.approx(on_host_s)
        assert update_s(one, Tier.DEVICE, CUDA) == pytest.approx(CUDA.device.launch_s + on_device_s)


WHOLE = WholeUpdate(
    flops=(("bfloat16", 4 * 10**15), ("float32", 10**15)),
    moved_bytes=1000,
    num_kernels=30,
    most_nbytes=4000,
    most_state_nbytes=4000,
)


def test_an_update_of_whole_tensors_has_the_rates_of_the_dtypes_of_its_products() -> None:
    """Whatever the dtype of the parameters. On a host that was not measured all dtypes have one rough rate."""
    one = replace(bucket(4000), whole_update=WHOLE)
    rates = CUDA.device.flops_per_s
    on_device_s = 4e15 / rates["bfloat16"] + 1e15 / rates["float32"] + 30 * CUDA.device.launch_s
    assert update_s(one, Tier.DEVICE, CUDA) == pytest.approx(on_device_s)
    assert update_s(replace(one, dtype="bfloat16"), Tier.DEVICE, CUDA) == pytest.approx(on_device_s)
    assert update_s(one, Tier.HOST, CUDA) == pytest.approx(5e15 / 1e11)
    host = replace(CUDA.host, flops_per_s={"float32": 2e12, "bfloat16": 8e12})
    node = replace(CUDA.nodes[0], host=host, num_devices=4, peer=CUDA.h2d)
    assert update_s(one, Tier.HOST, Cluster(nodes=(node,))) == pytest.approx(4 * (4 / 8 + 1 / 2) * 1e3)
    assert update_s(one, Tier.HOST, along_data(Cluster(nodes=(node,)), 4)) == pytest.approx(4e3)
    moved = replace(one, whole_update=replace(WHOLE, flops=(), moved_bytes=10**12))
    assert update_s(moved, Tier.HOST, CUDA) == pytest.approx(host_memory_s(10**12, CUDA))
    assert update_s(moved, Tier.DEVICE, CUDA) == pytest.approx(
        30 * CUDA.device.launch_s + 1e12 / CUDA.device.memory_bytes_per_s
    )


def test_updates_one_after_another_take_the_work_space_of_the_largest() -> None:
    first, second = replace(WHOLE, work_nbytes=70), replace(WHOLE, flops=(("float32", 5),), work_nbytes=90)
    both = WholeUpdate.of_all([first, second])
    assert both.flops == (("bfloat16", 4 * 10**15), ("float32", 10**15 + 5))
    assert (both.total_flops, both.work_nbytes, both.moved_bytes) == (5 * 10**15 + 5, 90, 2000)


def test_measured_seconds_are_divided_in_proportion_to_the_roofline() -> None:
    index = {OpId(f"op{i}"): i for i in range(5)}
    stretches = [
        Stretch(first=OpId("op1"), last=OpId("op2"), run_s=8.0),
        Stretch(first=OpId("op4"), last=OpId("op4"), run_s=1.0),
    ]
    assert corrected_s([1.0, 1.0, 3.0, 5.0, 0.0], index, stretches) == [1.0, 2.0, 6.0, 5.0, 1.0]
    with pytest.raises(InvalidPlan, match="ops op1 to elsewhere"):
        corrected_s([1.0] * 5, index, [Stretch(first=OpId("op1"), last=OpId("elsewhere"), run_s=1.0)])
    with pytest.raises(InvalidPlan, match="took -1"):
        Stretch(first=OpId("op1"), last=OpId("op2"), run_s=-1.0)


def test_update_s_is_elements_over_rate() -> None:
    assert update_s(bucket(4000), Tier.HOST, CUDA) == 1000 / CUDA.host.update_elements_per_s
    assert update_s(bucket(4000), Tier.DEVICE, CUDA) == pytest.approx(
        CUDA.device.launch_s + 1000 / CUDA.device.update_elements_per_s
    )
    assert update_s(bucket(4000, trainable=False), Tier.HOST, CUDA) == 0
    with pytest.raises(InvalidPlan, match="nothing can be updated on disk"):
        update_s(bucket(4000), Tier.DISK, CUDA)


@given(SIZES, SIZES, SIZES, SIZES)
def test_more_work_is_never_faster(flops: int, moved: int, more_flops: int, more_moved: int) -> None:
    assert op_s(op(flops, moved), CUDA) <= op_s(op(flops + more_flops, moved + more_moved), CUDA)
    assert copy_s(moved, CUDA.h2d) <= copy_s(moved + more_moved, CUDA.h2d)
    assert copy_s(moved, CUDA.h2d, 1) <= copy_s(moved, CUDA.h2d, 2)
    assert collective_s(moved, FOUR) <= collective_s(moved + more_moved, FOUR)
    for tier in (Tier.DEVICE, Tier.HOST):
        assert update_s(bucket(moved), tier, CUDA) <= update_s(bucket(moved + more_moved), tier, CUDA)


_NUMELS = st.lists(st.sampled_from([0, 1, 5]), min_size=1, max_size=9)


@given(_NUMELS, st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_shards_are_the_sequence_of_their_numbers_in_runs(numels: list[int], random: Random) -> None:
    shards = Shards.of(numels)
    assert list(shards) == numels
    assert (len(shards), shards.most, shards.total) == (len(numels), max(numels), sum(numels))
    assert [shards[rank] for rank in range(-len(numels), len(numels))] == numels * 2
    assert shards[1:] == tuple(numels[1:])
    assert all(shards.are_all(numel) == (set(numels) == {numel}) for numel in (0, 1, 5))
    assert len(shards.runs) == len(list(itertools.groupby(numels)))
    others = [[random.choice([0, 2, 5]) for _ in numels] for _ in range(3)]
    assert Shards.added(map(Shards.of, [numels, *others])) == Shards.of(map(sum, zip(numels, *others, strict=True)))
    for rank in (len(numels), -len(numels) - 1):
        with pytest.raises(IndexError):
            shards[rank]


@pytest.mark.parametrize("runs", [((-1, 2),), ((1, 0),), ((1, 2), (1, 1))])
def test_shards_with_negative_empty_or_equal_runs_are_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvalidPlan, match=r"shards .* have"):
        Shards(runs)


def test_shards_of_other_ranks_are_not_added() -> None:
    with pytest.raises(ValueError, match="shards of 2, 3 ranks"):
        Shards.added([Shards.equal(1, 2), Shards.equal(1, 3)])
