"""Read a small graph that a test writes by hand, in the form in which `str(graph)` prints it."""

from elixir_compile.ir import Batched, Kernel, Kind, Op, OpId, Phase, StepGraph, Storage, StorageId

WORDS_OF_OPS = {"reads", "writes", "flops", "moved", "module", "source", "kernel", "once", "mixes", "times"}


def parse_graph(text: str) -> StepGraph:
    """Return the graph in `text`, whose names hold no spaces. Raises KeyError or ValueError for any other form."""
    name, batch, sections = "", 1, {"storages": [], "outputs": [], "aliases": [], "ops": []}
    rows: list[list[str]] = []
    for line in filter(None, text.split("\n")):
        row = line.split("#")[0].split()
        if line.startswith(" "):
            rows.append(row)
        elif row[0] == "graph":
            name = row[1]
        elif row[0] == "batch":
            batch = int(row[1])
        else:
            rows = sections[row[0]]
    return StepGraph(
        name=name,
        ops=tuple(map(_op, sections["ops"])),
        storages=tuple(map(_storage, sections["storages"])),
        outputs=tuple(StorageId(row[0]) for row in sections["outputs"]),
        aliases=tuple((row[0], StorageId(row[1])) for row in sections["aliases"]),
        batch=batch,
    )


def _storage(row: list[str]) -> Storage:
    """Return the storage of a row such as `w.grad  grad  float32  40  of w  batched sum`."""
    named = dict(zip(row[4::2], row[5::2], strict=True))
    return Storage(
        id=StorageId(row[0]),
        kind=Kind(row[1]),
        dtype=row[2],
        nbytes=int(row[3]),
        of=StorageId(named["of"]) if "of" in named else None,
        batched=Batched(named.get("batched", Batched.SAME)),
        consecutive="slices" in named,
        traced=named.get("traced", ""),
    )


def _op(row: list[str]) -> Op:
    """Return the op of a row such as `fwd.mm  aten.mm forward  reads x w  writes h  flops 80  kernel pointwise`."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in row[3:]:
        if word in WORDS_OF_OPS:
            values = found[word] = []
        else:
            values.append(word)
    return Op(
        id=OpId(row[0]),
        target=row[1],
        phase=Phase(row[2]),
        reads=tuple(map(StorageId, found.get("reads", ()))),
        writes=tuple(map(StorageId, found.get("writes", ()))),
        flops=int(found.get("flops", ["0"])[0]),
        moved_bytes=int(found.get("moved", ["0"])[0]),
        module=found.get("module", [""])[0],
        source=found.get("source", [""])[0],
        kernel=Kernel(found.get("kernel", [Kernel.OPAQUE])[0]),
        once="once" in found,
        mixes=found.get("mixes", [""])[0],
        times=int(found.get("times", ["1"])[0]),
    )
