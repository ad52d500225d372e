"""A GPU through torch: CUDA, or ROCm under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreword.arrays import AnyArray
from foreword.device.api import Event, Graph, Tensor
from foreword.device.catalog import constants_of, load
from foreword.errors import ConfigError


class _Event:
    """An event of the current stream. The host sleeps while it waits, so that other threads run."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)
        self.record = self._event.record
        self.wait = self._event.synchronize


class CudaDevice:
    """`DeviceApi` on torch's current device and stream, the same ones in every call. All captured graphs share one pool
    of memory.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda': torch finds no GPU; use executor='native', or another one of CPUs")
        self._pool: Any = torch.cuda.graph_pool_handle()

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.zeros`."""
        return torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")

    def pinned(self, size: int) -> Tensor:
        """See `DeviceApi.pinned`."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def to_host(self, x: Tensor) -> AnyArray:
        """See `DeviceApi.to_host`."""
        array: AnyArray = x.cpu().numpy()
        return array

    def copy(self, to: Tensor, source: Tensor) -> None:
        """See `DeviceApi.copy`."""
        to.copy_(source, non_blocking=True)

    def launch(self, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """See `DeviceApi.launch`. Products and sums are rounded each, as the host's are."""
        load(kernel)[grid](*args, **constants_of(constants), enable_fp_fusion=False)

    def event(self) -> Event:
        """See `DeviceApi.event`."""
        return _Event()

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `DeviceApi.capture`."""
        graph: Graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph
