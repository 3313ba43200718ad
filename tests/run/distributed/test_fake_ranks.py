"""A prepared model on a process group that is none: its plan for any number of ranks, without a cluster."""

import subprocess
import sys

_PROGRAM = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir

distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=256)
model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512))
elixir.prepare(model, mesh=init_device_mesh("cpu", (256,)))
options = {"inner": "aot_eager", "report": False, "plan_cache": False}
compiled = torch.compile(model, backend="elixir", options=options)
compiled(torch.randn(4, 512)).square().mean().backward()
plan = elixir.compilations(compiled)[-1].plan
print(plan.num_ranks, sum(bucket.shard_nbytes() for bucket in plan.buckets))
print(sum(param.to_local().nbytes for param in model.parameters()))
"""


def test_a_model_is_planned_for_256_ranks() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    numbers = [int(word) for word in ran.stdout.split()]
    # 4 rows of 512 floats and 2 of 1024, and of the biases 4 and 2 elements: 256 copies of 2 KiB are too many.
    assert numbers[0] == 256
    assert numbers[1] == numbers[2] == 4 * (4 * 512 + 2 * 1024 + 4 + 2)


_WRITES = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir

distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = nn.Sequential(nn.Embedding(64, 64, max_norm=1.0), nn.Linear(64, 64))
elixir.prepare(model, mesh=init_device_mesh("cpu", (2,)))
compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
try:
    compiled(torch.arange(4))
except elixir.UnsupportedModel as error:
    print(error)
"""


def test_several_ranks_refuse_a_forward_that_writes_a_parameter() -> None:
    ran = subprocess.run([sys.executable, "-c", _WRITES], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "0.weight is not supported: the forward writes it (embedding), and several ranks share it" in ran.stdout


_EAGER_WRITES = """
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir

distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(256, 256), nn.Linear(256, 4)
        self.written = ()

    def forward(self, x):
        x = self.large(x)
        self.touch()
        return self.small(x)

    @torch.compiler.disable
    def touch(self):
        self.large.weight.sum()
        with torch.no_grad():
            for name in self.written:
                self.get_submodule(name).weight.clamp_(-0.01, 0.01)

model = elixir.prepare(Broken(), mesh=init_device_mesh("cpu", (2,)))
compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})

def step():
    compiled(torch.randn(4, 256)).square().mean().backward()

step()
step()
model.written = ["small"]
step()
step()
assert model.small._parameters["weight"].to_local().abs().max() <= 0.01
model.written = ["large"]
try:
    step()
except elixir.UnsupportedModel as error:
    print(error)
"""


def test_a_write_of_eager_code_to_a_part_of_a_parameter_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _EAGER_WRITES], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "large.weight is not supported: eager code, outside of the compiled graphs, wrote in place" in ran.stdout
