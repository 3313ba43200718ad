"""What several ranks change in a question to the planner: the machine."""

from elixir_compile.api.budget import num_sharing_host
from elixir_compile.errors import InvalidOption
from elixir_compile.hardware import Cluster, with_devices
from elixir_compile.options import Options
from elixir_compile.runtime.ranks import Ranks


def cluster_of(cluster: Cluster, ranks: Ranks | None, options: Options) -> Cluster:
    """Return `cluster`, what is known of the machine, with as many devices as there are ranks.

    Raises InvalidOption where the user named a machine of another number of devices.
    """
    num_ranks = 1 if ranks is None else ranks.num_ranks
    if options.hardware is not None and cluster.num_ranks not in (1, num_ranks):
        expected = "a machine with one device" if num_ranks == 1 else f"a machine with {num_ranks} devices"
        raise InvalidOption("hardware", options.hardware, expected)
    if cluster.num_ranks == num_ranks:
        return cluster
    # A profile that was measured under torchrun knows several.
    alone = cluster.alone()
    if num_ranks == 1:
        return alone
    num_local = num_sharing_host(ranks)
    num_nodes = num_ranks // num_local if num_ranks > num_local and num_ranks % num_local == 0 else 1
    return with_devices(alone, num_ranks // num_nodes, num_nodes)
