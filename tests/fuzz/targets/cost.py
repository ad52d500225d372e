"""Cost models, read and used in a simulation."""

import json

from foreword.simulation import Arrival, CostModel, Trace
from fuzz.mutations import DEEP, mutate_json
from fuzz.simulated import run
from fuzz.target import Target

COST = {"step": 3e-3, "token": 2e-5, "context": 1e-8, "model": "a model", "num_steps": 12}
TRACE = Trace((Arrival(0.0, 900, 52, (0, 1)), Arrival(0.5, 700, 3, (0,)), Arrival(40.0, 5, 80)))


def valid():
    return [json.dumps(COST).encode()]


def hostile():
    steps = (1e308, -1, float("nan"), float("inf"), 10**400, True, "1", 1e6)
    changed = [json.dumps({**COST, "step": step}).encode() for step in steps]
    return [*changed, json.dumps(dict.fromkeys(COST, 0)).encode(), b"[" * DEEP, b"\xff"]


def read(data, folder):
    path = folder / "cost.json"
    path.write_bytes(data)
    run(TRACE, CostModel.read(path))


TARGET = Target(valid, read, mutate_json, hostile)
