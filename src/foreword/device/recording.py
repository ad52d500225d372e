"""A device that records calls and computes nothing, for tests of the calls of a step and for timing the host's part. It
needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from foreword.arrays import AnyArray
from foreword.device.api import Event, Graph, Tensor


class RecordingDevice:
    """A `DeviceApi` whose ``calls`` are the names of the operations in the order of the calls: "zeros", "mapped",
    "pinned", "to device", "from device", "inside device", "launch KERNEL", "event", "record", "wait", "capture",
    "replay".

    Copies between host and device are made, so that packets can be read. A captured graph's launches are not recorded
    when it is replayed: ``captured`` has them by graph, in order of capture.
    """

    multiprocessors = 1
    converts_fp8 = large_tiles = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.captured: list[list[str]] = []
        self._memory: dict[int, Tensor] = {}

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.zeros`."""
        self.calls.append("zeros")
        array = np.zeros(shape, dtype)
        self._memory[id(array)] = array
        return array

    def mapped(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """See `DeviceApi.mapped`."""
        self.calls.append("mapped")
        return np.zeros(shape, dtype)

    def pinned(self, size: int) -> Tensor:
        """See `DeviceApi.pinned`."""
        self.calls.append("pinned")
        return np.zeros(size, np.int32)

    def to_host(self, x: Tensor) -> AnyArray:
        """See `DeviceApi.to_host`."""
        array: AnyArray = x
        return array

    def copy(self, to: Tensor, source: Tensor) -> None:
        """See `DeviceApi.copy`."""
        here, there = self._is_of_device(source), self._is_of_device(to)
        self.calls.append("inside device" if here and there else "to device" if there else "from device")
        to[...] = source

    def launch(self, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """See `DeviceApi.launch`."""
        self.calls.append(f"launch {kernel}")

    def event(self) -> Event:
        """See `DeviceApi.event`."""
        self.calls.append("event")
        return _RecordedEvent(self.calls)

    def capture(self, work: Callable[[], None]) -> Graph:
        """See `DeviceApi.capture`."""
        self.calls.append("capture")
        calls, self.calls = self.calls, []
        try:
            work()
            self.captured.append(self.calls)
        finally:
            self.calls = calls
        return _RecordedGraph(calls)

    def _is_of_device(self, array: Tensor) -> bool:
        return id(array if array.base is None else array.base) in self._memory


class _RecordedEvent:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def record(self) -> None:
        self._calls.append("record")

    def wait(self) -> None:
        self._calls.append("wait")


class _RecordedGraph:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def replay(self) -> None:
        self._calls.append("replay")
