"""Random traffic through an engine on the native executor: its tokens are those of each request alone."""

import pytest
from kernel_reference import SPECS, random_weights
from kernel_traffic import BLOCK_SIZE, assert_traffic_changes_nothing, engine

from foreword.engine.speculation import SpeculationConfig
from foreword.executors.native import NativeExecutor

NUM_BLOCKS = 90


def executor(spec, weights, *, num_threads, formats):
    weight_format, kv_format = formats
    return NativeExecutor(
        spec,
        weights,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_threads=num_threads,
        weight_format=weight_format,
        kv_format=kv_format,
    )


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("name", "num_threads", "formats"),
    [
        ("llama", 1, ("fp32", "fp32")),
        ("gemma", 4, ("bf16", "bf16")),
        ("llama", 2, ("int8", "int8")),
        ("moe", 4, ("q4", "bf16")),
        ("qkv_bias", 2, ("auto", "int8")),
        ("mamba2", 3, ("auto", "bf16")),
        ("mamba1", 3, ("int8", "bf16")),
        ("rg_lru", 3, ("q4", "bf16")),
        ("aside", 3, ("auto", "int8")),
        ("gated_delta", 2, ("q4", "int8")),
    ],
)
def test_tokens_do_not_depend_on_traffic_threads_drafts_or_overlap(name, num_threads, formats):
    spec = SPECS[name]
    weights = random_weights(spec)
    drafts = None if spec.state_size else SpeculationConfig(num_tokens=3, min_match=1, adaptive=False)
    crowd = engine(
        executor(spec, weights, num_threads=num_threads, formats=formats), spec, num_blocks=NUM_BLOCKS,
        max_num_seqs=5, max_num_batched_tokens=48, async_scheduling=True, speculation=drafts,
    )  # fmt: skip
    single = executor(spec, weights, num_threads=1, formats=formats)
    alone = engine(single, spec, num_blocks=NUM_BLOCKS, prefix_caching=False)
    assert_traffic_changes_nothing(crowd, alone, spec.vocab_size)
