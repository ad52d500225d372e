"""Traces of arrivals as JSON lines, read and simulated."""

import json

from foreword.simulation import CostModel, read_trace
from fuzz.mutations import DEEP, mutate_lines
from fuzz.simulated import run
from fuzz.target import Target

ROWS = (
    {"timestamp": 0, "input_length": 900, "output_length": 52, "hash_ids": [0, 1]},
    {"timestamp": 500, "input_length": 700, "output_length": 3, "hash_ids": [0]},
    {"timestamp": 40000.5, "input_length": 5, "output_length": 80},
)


def lines(*rows):
    return "\n".join(map(json.dumps, rows)).encode()


def valid():
    return [lines(*ROWS)]


def hostile():
    changes = (
        {"input_length": 687_000_000},
        {"output_length": 10**18},
        {"timestamp": 1e308},
        {"timestamp": -1},
        {"hash_ids": list(range(10**6))},
        {"hash_ids": [10**4000]},
    )
    return [lines({**ROWS[0], **change}) for change in changes] + [b"[" * DEEP, b"\xff\xfe", b""]


def read(data, folder):
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    run(read_trace(path), CostModel())


TARGET = Target(valid, read, mutate_lines, hostile)
