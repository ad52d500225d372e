"""Traces of arrivals as CSV, read and simulated."""

from foreword.simulation import CostModel, read_trace
from fuzz.mutations import mutate_cells
from fuzz.simulated import run
from fuzz.target import Target

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


def valid():
    return [HEADER + b"2023-11-16 18:15:46.6805900,374,44\n2023-11-16T18:15:50Z,396,1\n2023-11-16 19:16:00,5,0\n"]


def hostile():
    date = b"2023-11-16 18:15:46,"
    rows = (
        date + b"9" * 5000 + b",1",
        date + b"1" * 200_000 + b",1",
        date + b"687000000,1",
        b"9999-12-31,1,1\n0001-01-01,1,1",
    )
    return [HEADER + row for row in rows] + [HEADER + b'"' + b"x" * 200_000, b"\0", b"\xff", HEADER]


def read(data, folder):
    path = folder / "trace.csv"
    path.write_bytes(data)
    run(read_trace(path), CostModel())


TARGET = Target(valid, read, mutate_cells, hostile)
