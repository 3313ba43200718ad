"""A plugin of pytest: tests that name no device run on the accelerator of this process, on device 0.

python -m tests.cuda_standin.build -m tests.device.on_device -p tests.device.on_default tests/run/...
python -m tests.device.on_gpu                    # on a GPU, whose copies run when they run

`--moments early,late,0,1` runs each test with copies at once, with copies as late as waits allow, and with copies at
the random moments of two seeds.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._device import DeviceContext, _device_constructors

from tests.cuda_standin import device as standin
from tests.device import emulated

DEVICE = torch.device("cuda" if standin.is_gpu() else emulated.NAME, 0)
_MOMENTS = "moments"
_place = DeviceContext.__torch_function__


def _place_random(
    context: DeviceContext, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
) -> Any:
    """Make random numbers where their generator is, and the tensor on the device."""
    generator = (kwargs or {}).get("generator")
    if generator is None or generator.device == context.device or func not in _device_constructors():
        return _place(context, func, types, args, kwargs)
    return func(*args, **{**kwargs, "device": generator.device}).to(context.device)


DeviceContext.__torch_function__ = _place_random


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--moments", default="late", help="when copies run: early, late, or seeds; each test runs with all"
    )


def pytest_configure() -> None:
    """Let what test files make when they are imported be on the device too."""
    from elixir_compile import compat
    from elixir_compile.session.backend import elixir

    compat.name_backend(elixir)  # a GPU's machine may have the source tree alone
    torch.set_default_device(DEVICE)


@pytest.hookimpl(trylast=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test once for each of the moments, whose names come last in its name."""
    metafunc.fixturenames.append(_MOMENTS)
    metafunc.parametrize(_MOMENTS, metafunc.config.getoption("--moments").split(","))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Set the default device again, because a test may have set another one."""
    torch.set_default_device(DEVICE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Function) -> Iterator[None]:
    """Run each test with copies at its moments, and fail it if two of its accesses had no order."""
    if standin.is_gpu():
        return (yield)
    with emulated.policy_named(item.callspec.params[_MOMENTS]), emulated.ordered():
        return (yield)
