"""A GPU that is used through torch: CUDA, or ROCm under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foreword.arrays import AnyArray
from foreword.device.api import Event, Graph, Tensor
from foreword.device.catalog import constants_of, load
from foreword.errors import ConfigError


class _Event:
    """An event of a device. The host sleeps while it waits, so that other threads run."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event(blocking=True)
        self.wait = self._event.synchronize

    def record(self) -> None:
        """See `Event.record`."""
        self._event.record(torch.cuda.current_stream(self._device))


def gpu_of(device: torch.device | str) -> torch.device:
    """Return a GPU with its number; "cuda" is torch's current device. Raise ConfigError for one that torch lacks."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device='{device}': torch finds no GPU; use executor='native', or device='cpu' with executor='torch' or "
            "'transformers'"
        )
    index, count = torch.device(device).index, torch.cuda.device_count()
    if index is not None and index >= count:
        raise ConfigError(f"device='{device}': torch finds {count} GPUs; use a number below {count}")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


class CudaDevice:
    """`DeviceApi` on one GPU and the current stream of that GPU, the same one in every call. All captured graphs share
    one pool of memory.

    device: see `gpu_of`. torch's operators run on the stream of their tensors' device; Triton launches on the current
    device, which is this one during a launch.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = gpu_of(device)
        self.multiprocessors: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        capability = torch.cuda.get_device_capability(self.device) if torch.version.hip is None else (0, 0)
        self.converts_fp8, self.large_tiles = capability >= (8, 9), capability[0] in (9, 10)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._capture_stream: Any = None

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.zeros`."""
        return self._allocated(shape, dtype, device=self.device)

    def mapped(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.mapped`: pinned memory has an address of the device, which Triton passes to kernels."""
        return self._allocated(shape, dtype, device="cpu", pin_memory=True)

    def pinned(self, size: int) -> Tensor:
        """See `DeviceApi.pinned`."""
        return self._allocated((size,), "int32", device="cpu", pin_memory=True)

    def _allocated(self, shape: tuple[int, ...], dtype: str, **place: Any) -> Tensor:
        try:
            with torch.cuda.device(self.device):
                return torch.zeros(shape, dtype=getattr(torch, dtype), **place)
        except RuntimeError as error:  # device memory or pinned memory is missing
            if "out of memory" not in str(error):
                raise
            raise MemoryError(f"{self.device}: no memory for {dtype} {list(shape)}") from None

    def to_host(self, x: Tensor) -> AnyArray:
        """See `DeviceApi.to_host`."""
        array: AnyArray = x.cpu().numpy()
        return array

    def copy(self, to: Tensor, source: Tensor) -> None:
        """See `DeviceApi.copy`."""
        to.copy_(source, non_blocking=True)

    def launch(self, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """See `DeviceApi.launch`. Products and sums are rounded separately, as on the host."""
        if torch.version.hip is not None:  # its compiler has no such option
            constants.pop("maxnreg", None)
        with torch.cuda.device(self.device):
            load(kernel)[grid](*args, **constants_of(constants), enable_fp_fusion=False)

    def event(self) -> Event:
        """See `DeviceApi.event`."""
        return _Event(self.device)

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `DeviceApi.capture`. CUDA calls of other threads, as of another engine, do not end the capture."""
        graph: Graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            if self._capture_stream is None:  # torch's own one is of the first device that captures
                self._capture_stream = torch.cuda.Stream(self.device)
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"
            ):
                work()
        return graph
