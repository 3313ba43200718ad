"""Seconds of a ring collective over all ranks of a cluster.

    collective_s = (ranks - 1) * latency_s + bytes * (ranks - 1) / ranks / bytes_per_s

A reduce-scatter moves as many bytes the other way round. Not modelled: trees, and a network and a peer link at once.
"""

from elixir_compile.hardware import Cluster


def collective_s(nbytes: int, cluster: Cluster) -> float:
    """Return the seconds of an all-gather, or a reduce-scatter, of `nbytes` whole bytes; 0 for one rank."""
    link = cluster.collective
    if link is None or cluster.num_ranks == 1:
        return 0.0
    hops = cluster.num_ranks - 1
    return hops * link.latency_s + nbytes * hops / cluster.num_ranks / link.bytes_per_s
