"""Failures that other engines had in preparing steps: here each is impossible, or caught before the step runs.

Each docstring describes the failure, and where it occurred.
"""

import tracemalloc

import numpy as np
import pytest
from batch_rig import World, every_backend

from foreword.batch import (
    CacheChecker,
    CapacityError,
    ContextParallel,
    KVGroup,
    NewRequest,
    PlanError,
    RequestError,
    SamplingParams,
    StagingRing,
    StaleBatchError,
    advance,
    make_dummy,
    prepare_inputs,
    validate,
)

S, M = 4, 24


class Engine(World):
    """States with one group (or more), and requests whose prompts are 0, 1, 2, …"""

    def __init__(self, *groups: KVGroup, **settings):
        super().__init__(
            *groups or [KVGroup(S)], **{"length": M, "vocab_size": 1000, "drafts": 3, "tokens": 32} | settings
        )

    def add(self, rid, num_prompt, outputs=(), computed=0, blocks=None, **extra):
        given = {"output_token_ids": outputs, "num_computed_tokens": computed}
        return super().add(rid, list(range(num_prompt)), blocks, **given, **extra)


# -- rows that move, and rows used again ---------------------------------------------------------------------------


def test_a_moved_row_leaves_no_parameter_behind():
    """vllm-project/vllm#43894: compaction left a moved row's token mask in the place it left, for the next request."""
    engine = Engine()
    engine.add("a", 2)
    engine.add("b", 2, sampling_params=SamplingParams(allowed_token_ids=[5], temperature=0.3, top_k=7))
    engine.states.remove_request("a")
    assert engine.states.condense() == [(1, 0)]
    row = engine.add("c", 2)
    fresh = Engine()
    assert row == 1
    fresh.add("x", 2)
    for name in ("temperature", "top_k", "top_p", "min_tokens", "num_logprobs"):
        assert getattr(engine.states.sampling, name)[1] == getattr(fresh.states.sampling, name)[0]
    assert engine.states.sampling.params.get(1) is None
    assert engine.states.sampling.params[0].allowed_token_ids == (5,)


def test_swapping_rows_does_not_alias_them():
    """vllm-project/vllm#48419: a tuple swap of two views copied one row over the other."""
    engine = Engine()
    engine.add("a", 3, lora_id=1)
    engine.add("b", 5, lora_id=2)
    before = [array[:2].copy() for array in (*engine.states._row_arrays(), engine.states.token_ids[:, :5])]
    engine.states.swap_rows(0, 1)
    after = [array[:2] for array in (*engine.states._row_arrays(), engine.states.token_ids[:, :5])]
    assert all(np.array_equal(x[::-1], y) for x, y in zip(before, after, strict=True))


@every_backend
def test_a_dummy_step_cannot_touch_blocks_of_vacated_rows(backend):
    """vllm-project/vllm#49757: dummy runs wrote state through stale table rows, into blocks that had new owners."""
    engine = Engine(KVGroup(S), KVGroup(1, recurrent=True))
    engine.add("a", 6)
    engine.step({"a": 6}, {"a": [1]}, backend=backend)
    engine.states.remove_request("a")
    dummy = make_dummy(engine.states, engine.buffers, num_tokens=8, num_reqs=4)
    assert all((slots == -1).all() for slots in dummy.slot_mapping)
    assert all(not table.any() for table in dummy.block_table)
    assert all(not table.table.any() for table in engine.states.block_tables)


def test_a_duplicate_admission_is_refused_by_name():
    """vllm-project/vllm#42655: a duplicated update of one request made the whole batch fail."""
    engine = Engine()
    engine.add("a", 2)
    with pytest.raises(RequestError, match=r"'a'.*is in use"):
        engine.add("a", 3)
    assert engine.step({"a": 2}).num_tokens == 2


def test_a_request_finished_and_sent_again_at_once_is_new():
    """vllm-metal#488 and similar: the next owner of a slot kept the state of the last one."""
    engine = Engine()
    engine.add("a", 5, lora_id=3)
    engine.step({"a": 5}, {"a": [9]})
    engine.states.remove_request("a")
    row = engine.add("a", 2)
    assert engine.states.num_tokens[row] == 2
    assert engine.states.num_computed_tokens[row] == 0
    assert engine.states.last_sampled_token[row] == -1
    assert engine.states.lora_id[row] == 0


def test_rows_are_given_by_order_of_events_alone():
    """mini-sglang iterated over a set, so that equal arrivals gave batches in different orders."""
    rows = []
    for _ in range(2):
        engine = Engine()
        for rid in ("z", "y", "x"):
            engine.add(rid, 2)
        engine.states.remove_request("y")
        engine.add("w", 3)
        rows.append(engine.step({"x": 2, "w": 3, "z": 1}).idx_mapping.tolist())
    assert rows[0] == rows[1] == [2, 1, 0]


# -- buffers and steps in flight -----------------------------------------------------------------------------------


def test_buffers_in_flight_are_not_written():
    """vllm-project/vllm#24527, #25279, #48214: host buffers were filled again while a copy still read them."""
    engine = Engine()
    ring = StagingRing(engine.states, max_num_batched_tokens=16, depth=1)
    ring.acquire()
    with pytest.raises(PlanError, match="still read by the step"):
        ring.acquire()


def test_a_batch_read_after_its_buffers_were_reused_raises():
    """The same race, seen from the reader: stale memory was read as if it were the step's."""
    engine = Engine()
    engine.add("a", 4)
    old = engine.step({"a": 2})
    engine.step({"a": 3})
    with pytest.raises(StaleBatchError, match="replaced by a later prepare_inputs"):
        _ = old.slot_mapping


@every_backend
def test_a_preempted_request_loses_its_placeholders(backend):
    """vllm-project/vllm#28787, #38624: placeholders of a preempted request stayed, and truncated its tokens."""
    engine = Engine()
    engine.add("a", 3)
    batch = engine.step({"a": 3}, backend=backend)
    advance(engine.states, batch)
    engine.states.remove_request("a")
    row = engine.add("a", 3, outputs=[7])
    engine.states.commit(batch, {"a": [8]})  # late
    assert engine.states.num_placeholders[row] == 0
    assert engine.states.num_tokens[row] == 4
    assert engine.step({"a": 4}, backend=backend).input_ids.tolist() == [0, 1, 2, 7]


@every_backend
def test_a_late_count_of_accepted_drafts_is_the_steps_own(backend):
    """vllm-project/vllm-ascend#13863: the accepted counts were read by row, after compaction had moved the rows."""
    engine = Engine()
    engine.add("a", 2)
    engine.add("b", 2)
    engine.step({"a": 2, "b": 2}, {"a": [1], "b": [1]}, backend=backend)
    batch = engine.step({"a": 4, "b": 1}, draft_tokens={"a": [5, 6, 7]}, backend=backend)
    engine.states.swap_rows(0, 1)
    with pytest.raises(PlanError, match="rows moved"):
        engine.states.commit(batch, {"a": [5, 6], "b": [1]})


# -- padding -------------------------------------------------------------------------------------------------------


@every_backend
def test_padding_after_a_larger_step_is_padding(backend):
    """vllm-project/vllm#34903, #33046, nano-vllm: padded graph rows read what an earlier, larger batch had left."""
    engine = Engine(rows=4)
    for rid in "abcd":
        engine.add(rid, 7)
    engine.step(dict.fromkeys("abcd", 7), backend=backend)
    engine.states.remove_request("a")
    padded = engine.step({"b": 1}, pad_to=(16, 4), backend=backend)
    assert padded.slot_mapping[0][1:].tolist() == [-1] * 15
    assert not padded.input_ids[1:].any()
    assert not padded.positions[1:].any()
    assert padded.seq_lens[1:].tolist() == [0] * 3
    assert not padded.block_table[0][1:].any()
    fresh = Engine(rows=4)
    fresh.add("b", 7, blocks=[engine.states.block_tables[0].table[1].tolist()])
    other = fresh.step({"b": 1}, pad_to=(16, 4), backend=backend)
    for name in ("input_ids", "positions", "seq_lens", "query_start_loc"):
        assert np.array_equal(getattr(padded, name), getattr(other, name)), name
    assert np.array_equal(padded.block_table[0], other.block_table[0])


@every_backend
def test_padded_offsets_never_decrease(backend):
    """vllm-project/vllm-ascend#5059: query_start_loc was padded with −1, which kernels read as a negative length."""
    engine = Engine()
    engine.add("a", 5)
    loc = engine.step({"a": 5}, pad_to=(8, 4), backend=backend).query_start_loc
    assert loc.tolist() == [0, 5, 5, 5, 5]


@every_backend
def test_the_pad_slot_is_outside_the_cache(backend):
    """vllm-project/vllm#43810, mini-sglang: −1 was used as an index, and overwrote the last cell. So it is only
    where there is no token, or no token of this rank's, and slots of tokens are never negative.
    """
    engine = Engine()
    engine.add("a", 9)
    batch = engine.step({"a": 9}, pad_to=(12, None), backend=backend)
    assert (batch.slot_mapping[0][:9] >= S).all(), "block 0 is reserved"
    assert (batch.slot_mapping[0][9:] == -1).all()


@every_backend
def test_slots_are_as_long_as_the_padded_tokens_in_every_group(backend):
    """vllm-project/vllm-ascend#13710: with ranks and drafts, slot mappings had 256 entries for 260 tokens."""
    engine = Engine(KVGroup(S, context_parallel=True), KVGroup(2), context_parallel=ContextParallel(size=2, rank=0))
    engine.add("a", 3)
    engine.step({"a": 3}, {"a": [1]}, backend=backend)
    batch = engine.step({"a": 4}, draft_tokens={"a": [1, 2, 3]}, pad_to=(7, None), backend=backend)
    assert {len(slots) for slots in batch.slot_mapping} == {len(batch.input_ids)} == {7}


# -- blocks --------------------------------------------------------------------------------------------------------


@every_backend
def test_entries_below_the_window_point_to_no_block(backend):
    """vllm-project/vllm#42273, #27753, #53628: entries below a sliding window pointed to blocks that were evicted."""
    engine = Engine(KVGroup(S, sliding_window=5))
    row = engine.add("a", 14)
    engine.step({"a": 13}, {}, backend=backend)
    shown = engine.step({"a": 1}, backend=backend).block_table[0][0]
    held = engine.states.block_tables[0].table[row]
    assert shown[:2].tolist() == [0, 0], "positions 0 … 7, and position 13 sees 9 … 13"
    assert shown[2:].tolist() == held[2:].tolist()


@every_backend
def test_a_write_past_the_rows_blocks_is_refused(backend):
    """vllm-project/vllm#54296: with groups of different block sizes, a row was read past its end."""
    engine = Engine(KVGroup(S), KVGroup(2))
    engine.add("a", 7, blocks=[[1, 2], [3, 4, 5]])
    with pytest.raises(PlanError) as caught:
        engine.step({"a": 7}, backend=backend)
    assert (caught.value.tensor, caught.value.expected, caught.value.got) == ("block_table[1]", 4, 3)
    assert [t.shape[1] for t in engine.step({"a": 6}, backend=backend).block_table] == [6, 12]


def test_more_blocks_than_a_row_holds_are_refused():
    """The same overflow at the source: appending past a row's end reached into the next row."""
    engine = Engine()
    engine.add("a", 2)
    engine.add("b", 2)
    with pytest.raises(CapacityError):
        engine.states.append_blocks("a", [[99]])
    assert 99 not in engine.states.block_tables[0].table


def test_a_freed_block_in_a_live_row_is_caught():
    """mini-sglang PR 142: freeing a duplicate page left a live row pointing to it."""
    engine = Engine()
    engine.add("a", 3, blocks=[[1]])
    engine.step({"a": 3}, {"a": [5]}, check="full")
    CacheChecker.of(engine.states).blocks_freed([1])
    with pytest.raises(PlanError, match="freed block is still seen"):
        engine.step({"a": 1}, check="full")


def test_two_writers_of_one_partial_page_are_caught():
    """sgl-project/sglang#35635, #23392: a page that was partly filled was continued by two requests."""
    engine = Engine()
    engine.add("a", 6, blocks=[[1, 2]])
    engine.step({"a": 6}, {"a": [6]}, check="full")
    engine.add("b", 7, computed=6, blocks=[[1, 2]])
    with pytest.raises(PlanError, match="which request 'a' sees"):
        engine.step({"b": 1}, check="full")


def test_a_hit_on_keys_of_other_tokens_is_caught():
    """openvinotoolkit/openvino.genai#3722: a hash collision silently reused another prompt's cache."""
    engine = Engine()
    engine.add("a", 5, blocks=[[1, 2]])
    engine.step({"a": 5}, {"a": [6]}, check="full")
    engine.states.add_request(NewRequest("b", [0, 1, 2, 9, 4], [[1, 3]], num_computed_tokens=4))
    with pytest.raises(PlanError) as caught:
        engine.step({"b": 1}, check="full")
    assert caught.value.got == "written by request 'a', with other tokens"


@every_backend
@pytest.mark.parametrize("hit", [S - 1, S, S + 1, 2 * S - 1, 2 * S])
def test_a_hit_of_any_length_continues_at_its_end(backend, hit):
    """sgl-project/sglang#22819: prompts were corrupted where the cached prefix was exactly one page."""
    engine = Engine()
    row = engine.add("a", 2 * S + 1, computed=hit)
    batch = engine.step({"a": 2 * S + 1 - hit}, backend=backend)
    assert batch.positions.tolist() == batch.input_ids.tolist() == list(range(hit, 2 * S + 1))
    table = engine.states.block_tables[0].table[row]
    assert batch.slot_mapping[0].tolist() == [table[p // S] * S + p % S for p in range(hit, 2 * S + 1)]


def test_a_full_hit_leaves_a_token_to_compute():
    """GeeeekExplorer/nano-vllm#144: a prompt that was cached whole left no query token, and nothing to sample from."""
    engine = Engine()
    with pytest.raises(RequestError, match="the last known token has to be computed"):
        engine.add("a", 2 * S, computed=2 * S)
    engine.add("a", 2 * S, computed=2 * S - 1)
    assert engine.step({"a": 1}).logits_indices.tolist() == [0]


# -- what kind of step ---------------------------------------------------------------------------------------------


@every_backend
def test_a_chunk_has_the_keys_up_to_its_end_not_the_prompts_length(backend):
    """GeeeekExplorer/nano-vllm#212: during a chunk the key length was that of the whole prompt."""
    engine = Engine()
    engine.add("a", 20)
    for end in (8, 16):
        batch = engine.step({"a": 8}, backend=backend)
        assert (batch.seq_lens.tolist(), batch.max_seq_len) == ([end], end)
        assert batch.to_flash_attn().cu_seqlens_k.tolist() == [0, end]
        engine.states.commit(batch, {})


@every_backend
def test_a_resumed_request_is_the_same_case_as_a_new_one(backend):
    """GeeeekExplorer/nano-vllm#144: a phase flag said decode for a request that had to be computed again."""
    engine = Engine()
    engine.add("a", 3, outputs=[50, 51])
    resumed = engine.step({"a": 5}, backend=backend)
    assert resumed.input_ids.tolist() == [0, 1, 2, 50, 51]
    assert resumed.is_prefilling.all()
    engine.states.commit(resumed, {"a": [52]})
    decode = engine.step({"a": 1}, backend=backend)
    assert decode.input_ids.tolist() == [52]
    assert not decode.is_prefilling.any()


@every_backend
def test_a_chunk_as_long_as_a_verification_is_not_taken_for_one(backend):
    """vllm-project/vllm#47381: verification and prompt chunks were distinguished by their length alone."""
    engine = Engine()
    engine.add("chunk", 8)
    engine.add("verify", 2)
    engine.step({"verify": 2}, {"verify": [1]}, backend=backend)
    batch = engine.step({"chunk": 4, "verify": 4}, draft_tokens={"verify": [1, 2, 3]}, order="decode_first",
                        backend=backend)  # fmt: skip
    assert list(batch.req_ids) == ["verify", "chunk"]
    assert batch.num_draft_tokens.tolist() == [3, 0]
    assert batch.cu_num_logits.tolist() == [0, 4, 5]


# -- counts over steps ---------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("chunks", [[9], [4, 5], [1] * 9, [3, 3, 3]])
def test_positions_are_contiguous_over_steps(backend, chunks):
    """NVIDIA/TensorRT-LLM#17811, InternLM/lmdeploy#4024: positions and lengths were counted twice between steps."""
    engine = Engine()
    engine.add("a", 9)
    seen = []
    for chunk in chunks:
        batch = engine.step({"a": chunk}, backend=backend)
        seen += batch.positions.tolist()
        assert batch.max_query_len == chunk
        engine.states.commit(batch, {"a": [100]})
    seen += engine.step({"a": 1}, backend=backend).positions.tolist()
    assert seen == list(range(10))


@every_backend
def test_rejected_drafts_are_replaced_not_kept(backend):
    """sgl-project/sglang#31218: after verification the cache was moved for tokens that had been rejected."""
    engine = Engine()
    row = engine.add("a", 2)
    engine.step({"a": 5}, {"a": [7, 9]}, draft_tokens={"a": [7, 8, 8]}, backend=backend)
    assert engine.states.num_computed_tokens[row] == 3
    batch = engine.step({"a": 1}, backend=backend)
    assert (batch.positions.tolist(), batch.input_ids.tolist()) == ([3], [9])
    validate(batch)


@every_backend
def test_drafts_of_different_numbers_keep_to_their_rows(backend):
    """NVIDIA/TensorRT-LLM: rows of different widths were reshaped into one rectangle, which shifted later rows."""
    engine = Engine()
    for rid in "abc":
        engine.add(rid, 2)
    engine.step(dict.fromkeys("abc", 2), {rid: [i] for i, rid in enumerate("abc")}, backend=backend)
    batch = engine.step({"a": 3, "b": 1, "c": 2}, draft_tokens={"a": [5, 6], "c": [7]}, backend=backend)
    assert batch.input_ids.tolist() == [0, 5, 6, 1, 2, 7]
    assert batch.draft_token_ids.tolist() == [5, 6, 7]
    assert batch.target_logits_indices.tolist() == [0, 1, 4]
    assert batch.bonus_logits_indices.tolist() == [2, 3, 5]


# -- cost ----------------------------------------------------------------------------------------------------------


def test_a_decode_step_allocates_nothing_that_grows_with_the_engine():
    """NVIDIA/TensorRT-LLM#16313, nano-vllm: whole tables were copied each step, whatever was live in them."""
    peaks = []
    for rows in (8, 512):
        engine = Engine(rows=rows, tokens=rows)
        row = engine.add("a", 2)
        engine.step({"a": 2}, {"a": [1]})
        plan = np.array([row], np.int32), np.array([1], np.int32)
        prepare_inputs(engine.states, plan, engine.buffers)
        tracemalloc.start()
        prepare_inputs(engine.states, plan, engine.buffers)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= peaks[0] + 256
