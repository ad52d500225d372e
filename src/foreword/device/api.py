"""The device operations that a step needs: memory, copies, launches, events and captured graphs. They run in order in
one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from foreword.arrays import AnyArray

Tensor = Any
"""A torch tensor; a NumPy array on `foreword.device.recording.RecordingDevice`."""


class Event(Protocol):
    """A point in the stream."""

    def record(self) -> None:
        """Set the point to the end of the launches so far."""
        ...

    def wait(self) -> None:
        """Return when the stream has reached the point; at once for an event that was never recorded."""
        ...


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> None:
        """Launch all of them again in one call."""
        ...


class DeviceApi(Protocol):
    """A device. All copies, launches and replays enter one stream and run in this order.

    multiprocessors: the number of programs that run at a time. converts_fp8: whether it has conversions of
    float8_e4m3fn.
    large_tiles: whether a program may have 227 KiB of shared memory, and products of several warps, as from sm_90 on.
    """

    @property
    def multiprocessors(self) -> int: ...

    @property
    def converts_fp8(self) -> bool: ...

    @property
    def large_tiles(self) -> bool: ...

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return device memory, filled with zeros. dtype: a name that NumPy and torch share. Raise MemoryError without
        it.
        """
        ...

    def mapped(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return host memory that kernels read and write in place, filled with zeros."""
        ...

    def pinned(self, size: int) -> Tensor:
        """Return host memory, int32 [size], that the device copies from and to while the host continues."""
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
        """Return a new event."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Return the launches of ``work`` as a graph, without running them. ``work`` may only launch and copy inside
        the device. Every kernel of it must have been launched, and so compiled, before.
        """
        ...
