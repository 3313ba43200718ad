"""What Elixir asks of torch for CUDA is there in this version, also where torch has no CUDA; its advice is no error."""

import inspect
import warnings
from pathlib import Path

import pytest
import torch
from torch._inductor import compile_fx

from elixir_compile.compat.platforms.platform import CudaPlatform
from tests.run.processes import spawn

ADVICE = {
    "torch._inductor.compile_fx": (
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider setting "
        "`torch.set_float32_matmul_precision('high')` for better performance."
    ),
    "torch.autograd.graph": (
        "Attempting to run cuBLAS, but there was no current CUDA context! Attempting to set the primary context... "
        "(Triggered internally at /pytorch/aten/src/ATen/cuda/CublasHandlePool.cpp:180.)"
    ),
}


def advise(rank: int, world_size: int) -> None:
    """Warn as torch does on a GPU: in its first fp32 compilation, and in the first backward of a process."""
    for module, text in ADVICE.items():
        warnings.warn_explicit(text, UserWarning, "file.py", 1, module=module)


def test_advice_of_torch_is_no_error_in_a_test() -> None:
    assert "TensorFloat32 tensor cores" in inspect.getsource(compile_fx)
    advise(0, 1)
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", UserWarning, stacklevel=1)


def test_advice_of_torch_is_no_error_in_a_process_of_a_test(tmp_path: Path) -> None:
    assert spawn(advise, 1, folder=tmp_path) == [None]


def test_the_functions_that_cuda_must_have_are_there() -> None:
    assert [name for name in CudaPlatform.needed if not callable(getattr(torch.cuda, name, None))] == []


def test_a_torch_that_keeps_its_workspaces_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    CudaPlatform("cuda").drop_workspaces()
