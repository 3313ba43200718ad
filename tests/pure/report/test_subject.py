"""`subject`: whole parts of a path are matched, and a name that is not there suggests the nearest."""

import pytest

from elixir_compile.base.errors import UnknownSubject
from elixir_compile.ir import Plan, Saving
from elixir_compile.tools.report.tables import find_subject
from tests.pure.mixes import group
from tests.pure.plans import bucket_of, make_plan
from tests.pure.strategies import Layer, chain

NAMES = ["model.layers.3.up", "model.layers.3.down", "model.layers.30.up"]


def plan_of_layers() -> Plan:
    """Return a plan whose bucket `b0` holds layer 3 and whose bucket `b1` holds layer 30; each has activations."""
    layers = [Layer(module=f"m{n}", params=((name, 10),), frozen=False, act_numel=4) for n, name in enumerate(NAMES)]
    graph = chain(layers)
    params = {storage.id: storage for storage in graph.storages}
    buckets = [
        bucket_of(graph, "b0", [params[name] for name in NAMES[:2]]),
        bucket_of(graph, "b1", [params[NAMES[2]]]),
    ]
    activations = (
        group(graph, "model.layers.3.matmul", Saving.KEEP, "s0"),
        group(graph, "model.layers.30.pointwise", Saving.OFFLOAD, "s1"),
    )
    return make_plan(graph, buckets, ["host", "device"], activations)


@pytest.mark.parametrize(
    ("name", "buckets", "params"),
    [
        ("b1", ["b1"], []),
        ("model.layers.3.up", ["b0"], ["model.layers.3.up"]),
        ("layers.3", ["b0"], NAMES[:2]),
        ("3", ["b0"], NAMES[:2]),
        ("up", ["b0", "b1"], [NAMES[0], NAMES[2]]),
        ("model", ["b0", "b1"], NAMES),
    ],
)
def test_a_name_finds_buckets_and_the_named_parameters(name: str, buckets: list[str], params: list[str]) -> None:
    found = find_subject(plan_of_layers(), name)
    assert [bucket.id for bucket in found.buckets] == buckets
    assert found.params == set(params)
    assert found.region is None


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("model.layers.3.matmul", [0]),
        ("layers.3", [0]),
        ("matmul", [0]),
        ("layers", [0, 1]),
        ("30.pointwise", [1]),
        ("b0", []),
        ("up", []),
    ],
)
def test_a_name_finds_activations_too(name: str, groups: list[int]) -> None:
    plan = plan_of_layers()
    assert find_subject(plan, name).groups == tuple(plan.activations[number] for number in groups)


def test_a_region_is_found_by_its_id() -> None:
    plan = plan_of_layers()
    found = find_subject(plan, plan.regions[1].id)
    assert found.region == plan.regions[1]
    assert found.buckets == ()


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("layers.33", "layers.3"),
        ("b2", "b1"),
        ("fwd.9", "fwd.0"),
        ("model.layer.30", "model.layers.30"),
        ("layers.3.matmull", "layers.3.matmul"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownSubject, match=f"no bucket, region, parameter, module or activations '{name}'") as caught:
        find_subject(plan_of_layers(), name)
    assert nearest in caught.value.nearest
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", ".", "layers.", "ayers.3", "layers.3.u"])
def test_a_part_of_a_part_is_not_found(name: str) -> None:
    with pytest.raises(UnknownSubject):
        find_subject(plan_of_layers(), name)


def test_unknown_names_without_similar_ones_list_a_few() -> None:
    with pytest.raises(UnknownSubject, match="It has names such as 'b0', 'b1'"):
        find_subject(plan_of_layers(), "zzzzzzzzzz")
