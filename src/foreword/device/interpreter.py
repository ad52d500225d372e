"""Run the kernels without a GPU, by Triton's interpreter on tensors of the host. It is for tests; a launch takes
milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton

from foreword.arrays import AnyArray
from foreword.device.api import Event, Graph, Tensor
from foreword.device.catalog import constants_of, load
from foreword.errors import ConfigError


class _Passed:
    """An event of a device whose operations are done when they return."""

    def record(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _Repeated:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class InterpretedDevice:
    """`DeviceApi` on the host. TRITON_INTERPRET=1 must be set before the kernels' modules are imported."""

    multiprocessors = 1
    converts_fp8 = False
    large_tiles = True

    def __init__(self) -> None:
        if not triton.knobs.runtime.interpret:
            raise ConfigError(
                "device='cpu': Triton's interpreter, for tests, needs TRITON_INTERPRET=1 in the environment; use "
                "executor='native'"
            )

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.zeros`."""
        return torch.from_numpy(np.zeros(shape, dtype))  # pages are taken when they are touched

    def mapped(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.mapped`."""
        return self.zeros(shape, dtype)

    def pinned(self, size: int) -> Tensor:
        """See `DeviceApi.pinned`."""
        return torch.zeros(size, dtype=torch.int32)

    def to_host(self, x: Tensor) -> AnyArray:
        """See `DeviceApi.to_host`."""
        array: AnyArray = x.cpu().numpy()
        return array

    def copy(self, to: Tensor, source: Tensor) -> None:
        """See `DeviceApi.copy`."""
        to.copy_(source)

    def launch(self, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """See `DeviceApi.launch`."""
        load(kernel)[grid](*args, **constants_of(constants))

    def event(self) -> Event:
        """See `DeviceApi.event`."""
        return _Passed()

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `DeviceApi.capture`."""
        return _Repeated(work)
