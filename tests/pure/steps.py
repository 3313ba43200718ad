"""Training steps small enough to work out by hand, as text."""

from tests.pure.graph_text import parse_graph

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
