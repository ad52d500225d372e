"""Traces of steps, those that ship with the library and one recorded from an engine, replayed by every backend."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from foreword.batch import KVGroup, SamplingParams
from foreword.batch.prepare.prepare import BACKENDS
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, EngineConfig
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import PlanError
from foreword.insight import conform
from foreword.scheduler import SchedulerConfig
from fuzz.mutations import DEEP, mutate_lines
from fuzz.target import Target


def recorded():
    """The steps of an engine that speculates, with two KV groups."""
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8), speculation=SpeculationConfig(num_tokens=2)
    )
    groups = [KVGroup(4), KVGroup(4, sliding_window=5)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        engine = Engine(
            NothingModel(8, 16),
            vocab_size=16,
            max_model_len=24,
            kv_groups=groups,
            num_blocks=40,
            config=replace(config, record=str(path), record_tensors=1),
        )
        for i in range(3):
            engine.add_request(
                str(i), [1, 2, 3, 4 + i] * 2, SamplingParams(temperature=0.0, max_tokens=6, detokenize=False)
            )
        while engine.has_work:
            engine.step()
        engine.close()
        return path.read_bytes()


def valid():
    return [*(path.read_bytes() for path in conform.golden_vectors()), recorded()]


def hostile():
    header, *lines = valid()[0].splitlines()
    engine = json.loads(header)
    huge = ("max_num_reqs", "max_model_len", "max_num_batched_tokens", "max_num_draft_tokens", "vocab_size")
    changed = [json.dumps({**engine, name: 2**31 - 1}).encode() for name in huge]
    changed.append(json.dumps({**engine, "kv_groups": engine["kv_groups"] * 10**5}).encode())
    wide = {"step": {"num_scheduled_tokens": {}}, "tensors": {"block_table": [[[0] * 10**6]]}}
    return [
        *(b"\n".join([first, *lines]) for first in changed),
        b"\n".join([header, json.dumps(wide).encode()]),
        b"\n".join([header, b"[" * DEEP]),
        b"\n".join([header, b'{"add": ' * DEEP]),
        b"\xff\xfe\x00",
        b"",
    ]


def read(data, folder):
    path = folder / "steps.jsonl"
    path.write_bytes(data)
    refused = None
    for backend in BACKENDS:
        try:
            str(conform.run(path, backend=backend))
        except PlanError as error:
            refused = error
    if refused:
        raise refused


TARGET = Target(valid, read, mutate_lines, hostile, memory=3 << 29)
