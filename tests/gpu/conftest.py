"""Fixtures of the tests that need a CUDA device. Where there is none, or the library is not installed, they skip and say why."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

import fagen
from fagen import LaunchError, driver


@pytest.fixture(scope="session")
def device() -> driver.DeviceInfo:
    """The first device, one that the built-in schedules run on."""
    try:
        driver.device_count()
        info = driver.device_info(0)
    except LaunchError as e:
        pytest.skip(str(e))
    if info.compute_capability != (9, 0):
        pytest.skip(f"the built-in schedules need compute capability 9.0; {info}")
    return info


@pytest.fixture(scope="session")
def torch(device: driver.DeviceInfo) -> Any:
    module = pytest.importorskip("torch", reason="torch is not installed")
    if not module.cuda.is_available():
        pytest.skip("torch was built without CUDA, or sees no device")
    return module


@pytest.fixture(scope="session")
def compiled(device: driver.DeviceInfo) -> Callable[..., Any]:
    """compiled("fa3", head_dim=64, …): the kernel of a built-in schedule with some fields changed; each is compiled once."""
    return cache(lambda name, **changes: fagen.compile(*fagen.load(name, **changes)))
