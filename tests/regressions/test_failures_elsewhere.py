"""Failures that other engines had in preparing steps: each is impossible here, or caught before the step runs.

`FAILURES` names the tests that would fail; below are those that no other folder has.
"""

import tracemalloc

import numpy as np
from batch_rig import World

from foreword.batch import KVGroup, SamplingParams, prepare_inputs
from reference.pages import defined_tests

TRACES = "test_random_traces::test_every_tensor_of_every_step_equals_the_model"
MOVES = "test_sampling_metadata::test_after_any_moves_every_field_is_that_of_its_request"
LIMITS = "test_errors_and_limits::test_"
CHECKER = "test_checker::test_"
ADMISSION = f"{LIMITS}a_refused_admission_changes_nothing"
FAILURES = {
    # Rows that move, and rows used again.
    "vllm-project/vllm#48419: a tuple swap of two views copied one row over the other": MOVES,
    "vllm-project/vllm#49757: dummy runs wrote state through stale table rows, into blocks that had new owners":
        "test_dummies::test_a_dummy_reads_no_live_block_and_changes_no_row",
    "vllm-project/vllm#42655: a duplicated update of one request made the whole batch fail": ADMISSION,
    "vllm-metal#488 and similar: the next owner of a slot kept the state of the last one":
        f"{LIMITS}a_row_used_again_equals_a_fresh_one",
    "mini-sglang iterated over a set, so that equal arrivals gave batches in different orders":
        "test_vllm_apply::test_the_finished_and_the_preempted_leave_in_the_same_order_on_every_rank",
    # Buffers and steps in flight.
    "vllm-project/vllm#24527, #25279, #48214: host buffers were filled again while a copy still read them":
        "test_steps_in_flight::test_a_ring_refuses_to_reuse_a_slot_in_flight",
    "the same race, seen from the reader: stale memory was read as if it were the step's":
        f"{LIMITS}a_batch_ends_with_the_next_one_on_its_buffers",
    "vllm-project/vllm#28787, #38624: placeholders of a preempted request stayed, and truncated its tokens": TRACES,
    "vllm-project/vllm-ascend#13863: the accepted counts were read by row, after compaction had moved the rows":
        f"{LIMITS}rows_that_moved_refuse_the_batch_before",
    # Padding.
    "vllm-project/vllm#34903, #33046, nano-vllm: padded graph rows read what an earlier, larger batch had left": TRACES,
    "vllm-project/vllm-ascend#5059: query_start_loc was padded with −1, read as a negative length": TRACES,
    "vllm-project/vllm#43810, mini-sglang: −1 was used as an index, and overwrote the last cell": TRACES,
    "vllm-project/vllm-ascend#13710: with ranks and drafts, slot mappings had 256 entries for 260 tokens": TRACES,
    # Blocks.
    "vllm-project/vllm#42273, #27753, #53628: entries below a sliding window pointed to evicted blocks": TRACES,
    "vllm-project/vllm#54296: with groups of different block sizes, a row was read past its end":
        f"{LIMITS}a_write_without_a_block_is_refused",
    "the same overflow at the source: appending past a row's end reached into the next row":
        f"{LIMITS}blocks_past_the_end_of_any_group_change_no_group",
    "mini-sglang PR 142: freeing a duplicate page left a live row pointing to it":
        f"{CHECKER}a_block_given_back_while_its_request_lives",
    "sgl-project/sglang#35635, #23392: a page that was partly filled was continued by two requests":
        f"{CHECKER}a_write_to_a_block_that_another_request_sees",
    "openvinotoolkit/openvino.genai#3722: a hash collision silently reused another prompt's cache":
        f"{CHECKER}a_hit_with_other_tokens",
    "sgl-project/sglang#22819: prompts were corrupted where the cached prefix was exactly one page": TRACES,
    "GeeeekExplorer/nano-vllm#144: a prompt that was cached whole left no query token to sample from": ADMISSION,
    # What kind of step, and counts over steps.
    "GeeeekExplorer/nano-vllm#212: during a chunk the key length was that of the whole prompt": TRACES,
    "GeeeekExplorer/nano-vllm#144: a phase flag said decode for a request that had to be computed again": TRACES,
    "vllm-project/vllm#47381: verification and prompt chunks were distinguished by their length alone": TRACES,
    "NVIDIA/TensorRT-LLM#17811, InternLM/lmdeploy#4024: positions and lengths were counted twice": TRACES,
    "sgl-project/sglang#31218: after verification the cache was moved for tokens that had been rejected": TRACES,
    "NVIDIA/TensorRT-LLM: rows of different widths were reshaped into one rectangle, which shifted later rows": TRACES,
}  # fmt: skip


def test_every_failure_elsewhere_has_a_test_here():
    assert set(FAILURES.values()) <= defined_tests()


def test_a_moved_row_leaves_no_parameter_behind():
    """vllm-project/vllm#43894: compaction left a moved row's token mask in the place it left, for the next request."""
    world = World()
    world.add("a", [0, 1])
    world.add("b", [0, 1], sampling_params=SamplingParams(allowed_token_ids=[5], temperature=0.3, top_k=7))
    world.states.remove_request("a")
    assert world.states.condense() == [(1, 0)]
    row = world.add("c", [0, 1])
    fresh = World()
    assert row == 1
    fresh.add("x", [0, 1])
    for name in ("temperature", "top_k", "top_p", "min_tokens", "num_logprobs"):
        assert getattr(world.states.sampling, name)[1] == getattr(fresh.states.sampling, name)[0]
    assert world.states.sampling.params.get(1) is None
    assert world.states.sampling.params[0].allowed_token_ids == (5,)


def test_a_decode_step_allocates_nothing_that_grows_with_the_engine():
    """NVIDIA/TensorRT-LLM#16313, nano-vllm: whole tables were copied each step, whatever was live in them."""
    peaks = []
    for rows in (8, 512):
        world = World(KVGroup(4), rows=rows, length=24, tokens=rows)
        row = world.add("a", [0, 1])
        world.step({"a": 2}, {"a": [1]})
        plan = np.array([row], np.int32), np.array([1], np.int32)
        prepare_inputs(world.states, plan, world.buffers)
        tracemalloc.start()
        prepare_inputs(world.states, plan, world.buffers)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= peaks[0] + 256
