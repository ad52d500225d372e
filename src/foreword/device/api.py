"""The operations that a step needs of a device: memory, copies, launches, events, captured graphs. One stream, in
order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from foreword.arrays import AnyArray

Tensor = Any
"""A torch tensor; a NumPy array on `foreword.device.recording.RecordingDevice`."""


class Event(Protocol):
    """A moment of the stream."""

    def record(self) -> None:
        """Set the moment to the end of what was launched so far."""
        ...

    def wait(self) -> None:
        """Return once the moment has come; at once for an event that was never recorded."""
        ...


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> None:
        """Launch them again, in one call."""
        ...


class DeviceApi(Protocol):
    """A device. All copies, launches and replays enter one stream and run in this order.

    multiprocessors: how many programs run at a time. converts_fp8: whether it has conversions of float8_e4m3fn.
    large_tiles: whether a program may have 227 KiB of shared memory, and products of several warps, as from sm_90 on.
    """

    @property
    def multiprocessors(self) -> int: ...

    @property
    def converts_fp8(self) -> bool: ...

    @property
    def large_tiles(self) -> bool: ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Memory of the device, filled with zeros. dtype: a name that NumPy and torch share. Raise MemoryError without
        it.
        """
        ...

    def mapped(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Memory of the host that kernels read and write where it is, filled with zeros."""
        ...

    def pinned(self, size: int) -> Tensor:
        """int32 [size] of the host that the device copies from and to while the host goes on."""
        ...

    def to_host(self, x: Tensor) -> AnyArray:
        """Return the values of a tensor as an array. Memory of the device is copied, once what was launched before is
        done; pinned memory is shared, so that the array is written in place of the tensor.
        """
        ...

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Copy between host and device, or inside the device, without waiting."""
        ...

    def launch(self, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launch a kernel of `foreword.device.catalog`. A constant that is a type is given by its name; num_warps,
        num_stages and maxnreg are the compiler's.
        """
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """The launches of ``work`` as a graph. It may only launch and copy inside the device, and every kernel of it
        must have been launched before, which compiles it. Nothing runs.
        """
        ...
