"""Packets through shared memory: bytes of any size, in order, to readers that are slower than the writer."""

from __future__ import annotations

import os
import socket
import time
from multiprocessing.connection import Connection
from threading import Thread

import pytest

pytest.importorskip("torch")

from foreword.errors import EngineError
from foreword.executors.torch.packets import PacketReader, PacketRing, PacketWriter

PACKETS = [os.urandom(size) for size in (1, 100, 1 << 18, (1 << 18) + 1, 3_000_000, 7)]


def ends():
    """The two ends of a socket as connections."""
    return [Connection(end.detach()) for end in socket.socketpair()]


def test_every_reader_gets_every_packet():
    connections = [ends() for _ in range(2)]
    ring = PacketRing(2)
    got: list[list[bytes]] = [[], []]

    def read(index: int) -> None:
        reader = PacketReader(PacketRing(2, ring.descriptor), connections[index][1], index)
        for _ in PACKETS:
            time.sleep(0.01 * index)
            got[index].append(reader.receive())

    threads = [Thread(target=read, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    writer = PacketWriter(ring, [ours for ours, _ in connections], lambda: None, 60.0)
    for packet in PACKETS:
        writer.send(packet)
    for thread in threads:
        thread.join(60)
    os.close(ring.descriptor)
    assert got == [PACKETS, PACKETS]


def test_a_writer_does_not_wait_for_a_reader_that_has_ended():
    ours, _theirs = ends()
    ring = PacketRing(1)
    os.close(ring.descriptor)

    def check() -> None:
        raise EngineError("rank 1 of the model ended")

    with pytest.raises(EngineError, match="rank 1"):
        PacketWriter(ring, [ours], check, 60.0).send(bytes(10_000_000))


def test_a_writer_waits_no_longer_than_its_limit_for_a_reader_that_does_not_read():
    ours, _theirs = ends()
    ring = PacketRing(1)
    os.close(ring.descriptor)
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s \(rank_timeout\)"):
        PacketWriter(ring, [ours], lambda: None, 0.1).send(bytes(10_000_000))


def test_a_reader_ends_with_its_writer():
    ours, theirs = ends()
    ring = PacketRing(1)
    os.close(ring.descriptor)
    ours.close()
    with pytest.raises(EOFError):
        PacketReader(ring, theirs, 0).receive()
