"""Recordings of an engine whose model computes nothing."""

import numpy as np

from foreword.batch import KVGroup, SamplingParams
from foreword.bench.engine_host import NothingModel
from foreword.engine import Engine, EngineConfig
from foreword.engine.speculation import SpeculationConfig
from foreword.insight import TraceHeader, TraceWriter
from foreword.scheduler import SchedulerConfig


def record_ranges(path):
    """Steps of a prompt with two ranges in which tokens see each other, computed in two chunks, in two KV groups."""
    header = TraceHeader(
        max_num_reqs=2,
        max_num_batched_tokens=16,
        max_model_len=32,
        vocab_size=99,
        kv_groups=(KVGroup(4), KVGroup(4, sliding_window=3)),
    )
    with TraceWriter(path, header) as writer:
        ranges = [(1, 5), (7, 12)]
        writer.add("images", list(range(1, 15)), [[1, 2, 3, 4], [5, 6, 7, 8]], bidirectional_ranges=ranges)
        writer.add("text", [1, 2], [[9], [10]])
        for plan, sampled in (({"images": 6, "text": 2}, {"text": [3]}), ({"images": 8}, {"images": [3]})):
            writer.step(list(plan), list(plan.values()))
            writer.commit(sampled)
    return path


def record(path, num_steps, *, rows=5, drafts=0, waiting=2, num_blocks=None):
    """Steps of requests "req-0", "req-1", …, of which half begin with the same 64 tokens; a few wait for a row."""
    rng = np.random.default_rng(1)
    limits = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=max(256, rows * 4))
    speculation = {"speculation": SpeculationConfig(num_tokens=drafts)} if drafts else {}
    blocks = num_blocks or rows * 20
    engine = Engine(
        NothingModel(blocks, 1000),
        vocab_size=1000,
        max_model_len=512,
        kv_groups=[KVGroup(16)],
        num_blocks=blocks,
        config=EngineConfig(scheduler=limits, record=str(path), **speculation),
    )
    shared, number = rng.integers(1, 1000, 64).tolist(), 0
    for _ in range(num_steps):
        while engine.num_unfinished < rows + waiting:
            own = rng.integers(1, 1000, int(rng.integers(5, 120))).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(5, 120)), detokenize=False)
            engine.add_request(f"req-{number}", (shared if rng.random() < 0.5 else []) + own, params)
            number += 1
        engine.step()
    engine.close()
    return path
