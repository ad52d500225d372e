"""Pinned memory of the steps in flight: each has a packet and its samples, and they are used in turn."""

from __future__ import annotations

from typing import Protocol
from weakref import ref

from foreword.arrays import I32
from foreword.device.api import DeviceApi, Tensor
from foreword.errors import ConfigError


class SampleReader(Protocol):
    """A function that reads the samples of a step, once."""

    def read(self) -> None:
        """Wait for the samples and keep a copy of them."""
        ...


class PacketSlot:
    """A packet, the samples of its step, and the event after which the device no longer uses them.

    packet, sampled: the pinned memory, int32. packet_array, sampled_array: the same as NumPy arrays.
    """

    __slots__ = (
        "_event",
        "_in_flight",
        "_is_open",
        "_packets",
        "_reader",
        "_samples",
        "packet",
        "packet_array",
        "sampled",
        "sampled_array",
    )

    def __init__(self, api: DeviceApi, packet_size: int, sampled_size: int) -> None:
        self.packet, self.sampled = api.pinned(packet_size), api.pinned(sampled_size)
        self.packet_array: I32 = api.to_host(self.packet)
        self.sampled_array: I32 = api.to_host(self.sampled)
        self._event, self._is_open, self._in_flight = api.event(), False, False
        self._reader: ref[SampleReader] | None = None
        self._packets: dict[int, tuple[Tensor, Tensor]] = {}
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}

    def packet_to(self, memory: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return (to, from) of the copy of the first entries of the packet to the device's memory. Every call returns
        the same views, because creating a view takes longer than a launch.
        """
        return self._packets.get(size) or self._packets.setdefault(size, (memory[:size], self.packet[:size]))

    def samples_from(self, memory: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Return a view of the first entries of the device's samples, the same in every call."""
        return self._samples.get(size) or self._samples.setdefault(size, (self.sampled[:size], memory[:size]))

    def keep_for(self, reader: SampleReader) -> None:
        """Let ``reader`` read the samples of the step before the slot is used again, while the reader exists."""
        self._reader = ref(reader)

    def open(self) -> None:
        """Open the slot for copies of a new step, after those of the step before are done and its samples are read."""
        reader, self._reader = None if self._reader is None else self._reader(), None
        if reader is not None:
            reader.read()
        if self._is_open or self._in_flight:
            self.wait()
        self._is_open = True

    def launched(self) -> None:
        """Record that the last copy of the step was launched."""
        self._event.record()
        self._is_open, self._in_flight = False, True

    def wait(self) -> None:
        """Return when the copies of the step are done, also those of a step that was interrupted before `launched`."""
        if self._is_open:
            self.launched()
        if self._in_flight:
            self._event.wait()
            self._in_flight = False


class PacketRing:
    """A ring of ``depth`` slots. A slot is written again only after the copies that read it are done."""

    def __init__(self, api: DeviceApi, *, depth: int, packet_size: int, sampled_size: int) -> None:
        if depth < 1:
            raise ConfigError(f"depth={depth}: a ring has at least one slot")
        self._slots = [PacketSlot(api, packet_size, sampled_size) for _ in range(depth)]
        self._next = 0

    def acquire(self) -> PacketSlot:
        """Return the next slot. If more than ``depth`` steps are in flight, wait for the samples of the oldest one and
        read them first.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.open()
        return slot
