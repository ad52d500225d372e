"""Traces of steps, those that ship with the library and one recorded from an engine, replayed by every backend."""

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from foreword.batch import KVGroup, SamplingParams
from foreword.batch.prepare.prepare import BACKENDS
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, EngineConfig
from foreword.engine.speculation import SpeculationConfig
from foreword.errors import PlanError
from foreword.insight import Shrinker, Trace, TraceHeader, TraceWriter, conform, evidence
from foreword.scheduler import SchedulerConfig
from foreword.trace.project import requests_of, with_requests
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
        timed = re.compile(rb'"(time|started|arrival|model_ms|host_us)":[-+.e0-9]+')
        return timed.sub(rb'"\1":0.5', path.read_bytes())  # equal in every run


def every_kind():
    """A trace with each kind of event and each of its fields."""
    header = TraceHeader(
        max_num_reqs=4, max_num_batched_tokens=16, max_model_len=32, vocab_size=50, kv_groups=(KVGroup(4),),
        max_num_draft_tokens=2, engine="some engine 1.2", started=1.5e9,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.jsonl"
        with TraceWriter(path, header) as writer:
            writer.arrive("a", 3, time=0.5)
            extras = {
                "sampling_params": {"temperature": 0.5, "stop": ["x"]},
                "lora_request": {"lora_id": 3, "name": "l"},
            }
            writer.add("a", [1, 2, 3], [[1]], [4], 2, prefill_len=3, lora_id=3, cache_salt="salt", extras=extras)
            writer.append_blocks("a", [[2]])
            tensors = {"input_ids": [3, 4, 5], "slot_mapping": [[6, 7, 8]], "sampling.temperature": [0.5]}
            writer.step(["a"], [3], draft_tokens={"a": [5]}, zero=[3], copies=[[1, 9]], tensors=tensors, time=0.6)
            writer.commit({"a": [5, 7]}, {"a": [-0.5, -1.5]}, model_ms=3.5, host_us=20)
            writer.correct("a", num_tokens=5, token_ids=(5, [8]), num_computed_tokens=4, block_ids=[[1, 2]])
            writer.step(["a"], [2], pad_to=(8, 2))
            writer.fail("out of memory", time=0.7)
            writer.remove("a", preempted=True)
            writer.end("a", "stop", time=0.8)
            writer.restart(7, "lost")
            writer.wait("b", "no_blocks need=9 free=4")
            writer.add("b", [1], [[1]])
            writer.step(["b"], [1])
            writer.commit({"b": [1]})
        return path.read_bytes()


def valid():
    return [*(path.read_bytes() for path in conform.golden_vectors()), recorded(), every_kind()]


def hostile():
    header, *lines = valid()[0].splitlines()
    engine = json.loads(header)
    huge = ("max_num_reqs", "max_model_len", "max_num_batched_tokens", "max_num_draft_tokens", "vocab_size")
    changed = [json.dumps({**engine, name: 2**31 - 1}).encode() for name in huge]
    changed.append(json.dumps({**engine, "kv_groups": engine["kv_groups"] * 10**5}).encode())
    mixed = re.sub(rb'"input_ids": ?\[3, ?4, ?5\]', b'"input_ids": [3, [], %d]' % (2**70,), every_kind())
    assert mixed != every_kind()
    wide = {"step": {"num_scheduled_tokens": {}}, "tensors": {"block_table": [[[0] * 10**6]]}}
    return [
        *(b"\n".join([first, *lines]) for first in changed),
        b"\n".join([header, json.dumps(wide).encode()]),
        mixed,
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
        trace = Trace.read(path)  # raises if not even the first line can be used
        str(conform.run(path, strict=False))
        with_requests(trace.events, set(requests_of(trace.events)[::2]))
        Shrinker(evidence()).step_of(trace)
        raise refused


TARGET = Target(valid, read, mutate_lines, hostile, memory=3 << 29)
