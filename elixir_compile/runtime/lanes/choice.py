"""Choose the lanes of an executor: by its device, and with the checks of tests around them."""

import importlib
import os

import torch

from elixir_compile.base.errors import InvalidOption, UnsupportedDevice
from elixir_compile.compat.platforms import platform_of
from elixir_compile.runtime.lanes.accelerator import Accelerator
from elixir_compile.runtime.lanes.interface import Lanes
from elixir_compile.runtime.lanes.plain import Plain


def lanes_for(device: torch.device) -> Lanes:
    """Return new lanes on `device`, if the environment has `ELIXIR_CHECK_RACES=tests.races.checked` with its checks.

    Raises UnsupportedDevice if torch has no streams, no events or no figures of memory for the type of `device`, and
    InvalidOption if the module that the environment names has no checks.
    """
    platform = platform_of(device)
    if missing := platform.missing(device):
        raise UnsupportedDevice(device.type, missing)
    lanes = Accelerator(device) if platform.has_own_memory else Plain(device)
    checker = os.environ.get(_CHECKER)
    return _checked(lanes, checker) if checker else lanes


_CHECKER = "ELIXIR_CHECK_RACES"


def _checked(lanes: Lanes, checker: str) -> Lanes:
    try:
        made: Lanes = importlib.import_module(checker).Checked(lanes)
    except (ImportError, AttributeError, TypeError) as error:
        expected = '"tests.races.checked", with the folder of the tests of this package in PYTHONPATH'
        raise InvalidOption(_CHECKER, checker, expected) from error
    return made
