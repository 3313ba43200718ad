"""Seconds of the ring collectives of one bucket: over its parts, and over the copies of one part.

    all-gather, reduce-scatter of n ranks    (n - 1) * latency_s + bytes * (n - 1) / n / bytes_per_s
    all-reduce of n ranks                    twice that

Of c copies of n parts, rank i * n + j has part j: its neighbours have the other parts. Not modelled: trees, and a
network and a peer link at once.
"""

from elixir_compile.hardware import Cluster, Link


def collective_s(nbytes: int, cluster: Cluster, num_copies: int = 1) -> float:
    """Return the seconds of an all-gather, or a reduce-scatter, of `nbytes` whole bytes over all parts; 0 for one."""
    num_parts = cluster.num_ranks // num_copies
    is_within_a_node = cluster.num_local_ranks % num_parts == 0
    return _ring_s(nbytes, num_parts, cluster.nodes[0].peer if is_within_a_node else cluster.collective)


def average_s(nbytes: int, cluster: Cluster, num_copies: int) -> float:
    """Return the seconds in which ranks with the same part, of `nbytes`, all-reduce it; 0 for one copy.

    All parts do so at once. Between nodes they share what a node sends and receives; devices of one have links of
    their own.
    """
    num_at_once = min(cluster.num_ranks // num_copies, cluster.num_local_ranks) if len(cluster.nodes) > 1 else 1
    return 2 * _ring_s(nbytes * num_at_once, num_copies, cluster.collective)


def _ring_s(nbytes: int, num_ranks: int, link: Link | None) -> float:
    if link is None or num_ranks == 1:
        return 0.0
    return (num_ranks - 1) * (link.latency_s + nbytes / num_ranks / link.bytes_per_s)
