"""Compressed recordings, damaged before or after they are compressed: read as a trace, as a load, and as a page."""

import gzip
import zlib

from foreword.errors import ForewordError
from foreword.insight.page import write_page
from foreword.simulation.recording import read_recording
from foreword.trace.reader import Trace, TraceReader
from fuzz.mutations import mutate_bytes, mutate_lines
from fuzz.target import Target
from fuzz.targets import conform


def valid():
    return [gzip.compress(conform.recorded(), mtime=0), gzip.compress(conform.every_kind(), mtime=0)]


def hostile():
    header, *lines = conform.recorded().splitlines(keepends=True)
    many = gzip.compress(header + lines[0] + b"\n" * (1 << 20), mtime=0)
    long = gzip.compress(header + b" " * (1 << 23) + b"{}\n", mtime=0)
    return [many, long, gzip.compress(b""), b"", b"\x1f\x8b", valid()[0] * 2, zlib.compress(header)]


def mutate(rng, data):
    if rng.random() < 0.5:
        return mutate_bytes(rng, data)
    return gzip.compress(mutate_lines(rng, gzip.decompress(data)), 1, mtime=0)


def read(data, folder):
    path = folder / "steps.jsonl.gz"
    path.write_bytes(data)
    trace = Trace.read(path)  # raises if not even the first line can be used
    reader = TraceReader(path)
    assert reader.num_lines() >= 1
    write_page(path, folder / "page.html")
    refused = None
    try:
        read_recording(path)
    except ForewordError as error:
        refused = error
    if damage := trace.damage or (refused if data not in valid() else None):
        raise damage


TARGET = Target(valid, read, mutate, hostile)
