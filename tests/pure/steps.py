"""Training steps small enough to work out by hand, and the text that they are written in."""

from elixir_compile.ir import Batched, Kernel, Kind, Op, OpId, Phase, StepGraph, Storage, StorageId

# ----------------------------------------------------------------------------------------------------------------------
# Read a small graph that a test writes by hand, in the form in which `str(graph)` prints it.


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


# ----------------------------------------------------------------------------------------------------------------------
# Training steps small enough to work out by hand, as text.


GELU = parse_graph("""
graph gelu
storages
  x  input  float32  8
  w0  param  float32  40
  w1  param  float32  40
  h  saved  float32  16
  g  saved  float32  16
  out  temp  float32  4
  tangent  temp  float32  4
  w1.grad  grad  float32  40  of w1
  d  temp  float32  16
  e  temp  float32  16
  w0.grad  grad  float32  40  of w0
outputs
  out
aliases
ops
  fwd.mm  aten.mm forward  reads x w0  writes h  flops 80  moved 64
  fwd.gelu  aten.gelu forward  reads h  writes g  moved 32  kernel pointwise
  fwd.mm_1  aten.mm forward  reads g w1  writes out  flops 80  moved 60
  bwd.mm_1  aten.mm backward  reads g tangent  writes tangent w1.grad  flops 80  moved 64
  bwd.mm_2  aten.mm backward  reads tangent w1  writes d  flops 80  moved 60
  bwd.gelu_1  aten.gelu_backward backward  reads h d  writes e  moved 48  kernel pointwise
  bwd.mm_3  aten.mm backward  reads x e  writes w0.grad  flops 80  moved 64
  update  update update  reads w0 w1 w0.grad w1.grad
""")
"""`h` and `g` are saved; `w1.grad` is there from op 3 on, `w0.grad` from op 6."""

LAYERS = parse_graph("""
graph layers
storages
  x  input  float32  8
  w0  param  float32  40
  w1  param  float32  40
  a0  saved  float32  64
  g0  saved  float32  32
  n0  temp  float32  8
  r0  saved  float32  16
  a1  saved  float32  64
  g1  saved  float32  32
  t1  saved  float32  16
  m1  saved  float32  4
  r1  temp  float32  16
  d  temp  float32  16
  w1.grad  grad  float32  40  of w1
  w0.grad  grad  float32  40  of w0
outputs
  r1
aliases
ops
  fwd.mm_0  aten.mm forward  reads x w0  writes a0  flops 100  module h.0
  fwd.gelu_0  aten.gelu forward  reads a0  writes g0  module h.0  kernel pointwise
  fwd.norm_0  aten.norm forward  reads g0  writes n0  module h.0  kernel reduction
  fwd.add_0  aten.add forward  reads n0 x  writes r0  module h.0  kernel pointwise
  fwd.mm_1  aten.mm forward  reads r0 w1  writes a1  flops 100  module h.1
  fwd.gelu_1  aten.gelu forward  reads a1  writes g1  module h.1  kernel pointwise
  fwd.attention_1  aten.attention forward  reads g1  writes t1  flops 100  module h.1
  fwd.drop_1  aten.drop forward  reads t1  writes m1  module h.1  kernel pointwise  once
  fwd.add_1  aten.add forward  reads t1 m1 r0  writes r1  module h.1  kernel pointwise
  bwd.mm_2  aten.mm backward  reads g1 t1 m1  writes d  module h.1
  bwd.mm_3  aten.mm backward  reads r0 a1 d  writes w1.grad  module h.1
  bwd.mm_4  aten.mm backward  reads x a0 g0 d  writes w0.grad  module h.0
  update  update update  reads w0 w1 w0.grad w1.grad
""")
"""Two layers with saved activations of every class: `r0` is what the first hands to the second."""
