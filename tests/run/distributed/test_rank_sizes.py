"""`rank_sizes`: the machine that a mesh of ranks is planned for."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elixir_compile.base.errors import InvalidOption
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import GIB
from elixir_compile.ir.hardware import Cluster, preset, profile_for
from elixir_compile.session.planning import cluster_of

ALONE = profile_for("cpu", GIB, GIB, "cpu")
SQUARE: Any = SimpleNamespace(
    num_ranks=4, num_shards=2, num_copies=2, num_local=4, control=SimpleNamespace(is_echo=False)
)
"""Two copies of two parts, all on one host."""


def test_measured_links_count_for_shards_and_copies() -> None:
    node = replace(ALONE.nodes[0], num_devices=4, peer=replace(ALONE.h2d, bytes_per_s=123.0))
    measured = Cluster(nodes=(node,))
    assert cluster_of(measured, SQUARE, parse_options({})) is measured
    assert cluster_of(measured, None, parse_options({})) == measured.alone()


def test_ranks_that_nobody_measured_share_their_host_by_a_rough_link() -> None:
    found = cluster_of(ALONE, SQUARE, parse_options({}))
    assert (found.num_ranks, found.num_local_ranks, found.nodes[0].peer is None) == (4, 4, False)
    over_two_hosts: Any = SimpleNamespace(**{**vars(SQUARE), "num_local": 2})
    found = cluster_of(ALONE, over_two_hosts, parse_options({}))
    assert (found.num_ranks, found.num_local_ranks, found.network is None) == (4, 2, False)


def test_a_machine_by_name_has_a_device_for_every_rank() -> None:
    named = preset("a100-40g", 4)
    assert cluster_of(named, SQUARE, parse_options({"hardware": "4 x a100-40g"})) is named
    with pytest.raises(InvalidOption, match="a machine with 4 devices"):
        cluster_of(preset("a100-40g", 2), SQUARE, parse_options({"hardware": "2 x a100-40g"}))
