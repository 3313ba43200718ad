"""Machines as JSON and back: what `elixir-compile measure` writes and the option `hardware` reads.

```text
  {"elixir": "machine", "format": 1, "nodes": [{"device": {...}, "host": {...}, "h2d": {"bytes_per_s": 25e9, ...}}]}
```
"""

import hashlib

from elixir_compile.codec import Form, from_json, to_json
from elixir_compile.errors import ProfileFileError
from elixir_compile.hardware.cluster import Cluster

MACHINE_FORMAT = 1

_MACHINE = Form(what="machine", version=MACHINE_FORMAT, error=ProfileFileError)


def cluster_to_json(cluster: Cluster) -> str:
    """Return `cluster` as JSON; equal clusters have equal text."""
    return to_json(_MACHINE, cluster)


def cluster_from_json(text: str) -> Cluster:
    """Return the cluster in `text`; ProfileFileError names the field that is not right, `nodes[0].h2d.bytes_per_s`."""
    return from_json(_MACHINE, Cluster, text)


def hardware_fingerprint(cluster: Cluster) -> str:
    """Return 12 hex digits that two clusters share only when every number of theirs is equal."""
    return hashlib.sha256(cluster_to_json(cluster).encode()).hexdigest()[:12]
