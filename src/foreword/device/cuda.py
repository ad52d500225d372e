"""A GPU through torch: CUDA, or ROCm under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreword.device.api import Event, Graph, Tensor
from foreword.errors import ConfigError


class _Event:
    """An event of a stream. The host sleeps while it waits, so that other threads run."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._event = stream, torch.cuda.Event(blocking=True)

    def record(self) -> None:
        self._event.record(self._stream)

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """`DeviceApi` on a GPU, with a stream of its own. All captured graphs share one pool of memory."""

    def __init__(self, device: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device='cuda': torch finds no GPU; use the CPU executors")
        self.device = torch.device(device)
        self.stream: Any = torch.cuda.Stream(self.device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.zeros`."""
        with torch.cuda.stream(self.stream):
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def pinned(self, size: int) -> Tensor:
        """See `DeviceApi.pinned`."""
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """See `DeviceApi.copy`."""
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)

    def launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """See `DeviceApi.launch`."""
        with torch.cuda.stream(self.stream):
            kernel[grid](*args, **constants)

    def event(self) -> Event:
        """See `DeviceApi.event`."""
        return _Event(self.stream)

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `DeviceApi.capture`. Kernels that ``work`` launches must have been compiled: launch them once before."""
        graph: Any = torch.cuda.CUDAGraph()
        self.stream.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, stream=self.stream):
            work()
        return _Replay(graph, self.stream)


class _Replay:
    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph, self._stream = graph, stream

    def replay(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
