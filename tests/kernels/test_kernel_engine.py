"""Random traffic through an engine on the native executor: its tokens are those of each request alone."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_reference import SPECS, random_weights

from foreword.batch import SamplingParams
from foreword.engine import Engine, engine_config
from foreword.engine.speculation import SpeculationConfig
from foreword.executors.groups import batch_groups
from foreword.executors.native import NativeExecutor

NUM_BLOCKS, BLOCK_SIZE = 90, 16


def engine(spec, weights, *, num_threads, formats, **config):
    weight_format, kv_format = formats
    executor = NativeExecutor(
        spec,
        weights,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_threads=num_threads,
        weight_format=weight_format,
        kv_format=kv_format,
    )
    return Engine(
        executor,
        vocab_size=spec.vocab_size,
        max_model_len=200,
        kv_groups=batch_groups(spec, BLOCK_SIZE),
        num_blocks=NUM_BLOCKS,
        config=engine_config({"block_size": BLOCK_SIZE, "check": "full", **config}),
    )


def requests(rng, vocab_size):
    """Prompts that share beginnings and repeat themselves, so that there are prefix hits and accepted drafts."""
    stems = [rng.integers(0, vocab_size, 70).tolist() for _ in range(3)]
    for i in range(16):
        tail = rng.integers(0, vocab_size, rng.integers(1, 6)).tolist() * int(rng.integers(1, 5))
        prompt = stems[rng.integers(3)][: rng.integers(1, 70)] + tail
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 1.0])),
            top_p=float(rng.choice([0.8, 1.0])),
            top_k=int(rng.choice([0, 5])),
            max_tokens=int(rng.integers(1, 30)),
            seed=i,
            logprobs=2 if i % 5 == 0 else None,
        )
        yield f"r{i}", prompt, params


@pytest.mark.parametrize(
    ("name", "num_threads", "formats"),
    [
        ("llama", 1, ("fp32", "fp32")),
        ("gemma", 4, ("bf16", "bf16")),
        ("llama", 2, ("int8", "int8")),
        ("moe", 4, ("q4", "bf16")),
        ("qkv_bias", 2, ("auto", "int8")),
        ("mamba2", 3, ("auto", "bf16")),
        ("gated_delta", 2, ("q4", "int8")),
    ],
)
def test_tokens_do_not_depend_on_traffic_threads_drafts_or_overlap(name, num_threads, formats):
    spec = SPECS[name]
    weights = random_weights(spec)
    rng = np.random.default_rng(4)
    wanted = list(requests(rng, spec.vocab_size))
    drafts = None if spec.state_size else SpeculationConfig(num_tokens=3, min_match=1, adaptive=False)
    crowd = engine(
        spec, weights, num_threads=num_threads, formats=formats, max_num_seqs=5, max_num_batched_tokens=48,
        async_scheduling=True, speculation=drafts,
    )  # fmt: skip
    waiting, got, aborted = list(wanted), {}, set()
    while waiting or crowd.has_work:
        while waiting and rng.random() < 0.5:
            crowd.add_request(*waiting.pop(0))
        if rng.random() < 0.03 and not waiting:
            victim = str(rng.choice([r for r, _, _ in wanted]))
            if victim not in got and crowd.abort(victim) is not None:
                aborted.add(victim)
        for output in crowd.step():
            if output.finished:
                got[output.request_id] = output.outputs[0].token_ids
    crowd.close()
    assert crowd.cache.pool.num_used == 0
    alone = engine(spec, weights, num_threads=1, formats=formats, prefix_caching=False)
    for request_id, prompt, params in wanted:
        if request_id in aborted:
            continue
        alone.add_request(request_id, prompt, params)
        while alone.has_work:
            outputs = alone.step()
        assert got[request_id] == outputs[0].outputs[0].token_ids, request_id
