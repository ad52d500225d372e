"""Values with many fields that are made from a step, each field against a definition by lists of requests."""

from functools import partial

import numpy as np
from batch_rig import arrays, every_backend, states_and_buffers, states_of
from batch_scenes import TENSOR_NAMES

from foreword.batch import (
    BlockOps,
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    NewRequest,
    PoolingParams,
    SamplingParams,
    entry_owners,
    logits_sampling_metadata,
    make_dummy,
    pooling_metadata,
    prepare_inputs,
    sampling_metadata,
)
from foreword.batch.adapters import (
    ascend_metadata,
    chunked_local,
    common_attention_metadata,
    dense_inputs,
    nano_vllm_context,
    token_tables,
)
from foreword.batch.state.sampling_metadata import build_metadata

V = 40


def rows(values) -> list:
    return np.asarray(values).tolist()


# -- CommonAttentionMetadata


def test_common_attention_metadata_is_the_step_under_its_names():
    cp = ContextParallel(size=2, rank=1, interleave=2)
    states = states_of(
        KVGroup(4, kernel_block_size=2, context_parallel=True),
        KVGroup(4, kernel_block_size=2),
        length=16,
        vocab_size=V,
        drafts=2,
        context_parallel=cp,
    )
    states.add_request(NewRequest("gone", [1], [[], []]))
    states.add_request(NewRequest("a", [1, 2, 3, 4, 5], [[3], [4, 5]], num_computed_tokens=1, encoder_len=9,
                                  bidirectional_ranges=[(1, 3)]))  # fmt: skip
    states.add_request(NewRequest("b", [6, 7], [[6], [7, 8]], [8], 2, encoder_len=11))
    states.remove_request("gone")
    # "b" verifies two drafts, "a" computes positions 1 … 3 of its prompt
    batch = prepare_inputs(
        states, {"b": 3, "a": 3}, InputBuffers.for_states(states, 12), draft_tokens={"b": [9, 10]}, pad_to=(8, 3)
    )
    padded = common_attention_metadata(batch, 1)
    lists = {
        "query_start_loc": [0, 3, 6, 6],
        "seq_lens": [5, 4, 0],
        "num_computed_tokens_cpu": [2, 1, 0],
        "block_table_tensor": [[14, 15, 16, 17, 0, 0, 0, 0], [8, 9, 10, 11, 0, 0, 0, 0], [0] * 8],
        "slot_mapping": [30, 31, 32, 17, 18, 19, -1, -1],
        "positions": [2, 3, 4, 1, 2, 3, 0, 0],
        "is_prefilling": [True, True, False],  # "b" was admitted with its first output: prompt + output are prefill
        "req_idx": [2, 1],
        "encoder_seq_lens": [11, 9, 0],
        "dcp_local_seq_lens": [2, 2, 0],  # rank 1 holds positions 2, 3, 6, 7, …
    }
    assert {name: rows(getattr(padded, name)) for name in lists} == lists
    numbers = {"num_reqs": 2, "num_actual_tokens": 6, "max_query_len": 3, "max_seq_len": 5, "num_logits_indices": 4}
    assert {name: getattr(padded, name) for name in numbers} == numbers
    assert padded.causal is True
    assert padded.mm_req_doc_ranges == {1: [(1, 2)]}
    assert rows(padded.logits_indices_padded[:4]) == [0, 1, 2, 5]
    for name in ("query_start_loc_cpu", "seq_lens_cpu", "seq_lens_cpu_upper_bound", "encoder_seq_lens_cpu",
                 "dcp_local_seq_lens_cpu"):  # fmt: skip
        assert rows(getattr(padded, name)) == lists[name.removesuffix("_upper_bound").removesuffix("_cpu")]

    real = padded.unpadded()
    per_request = {"seq_lens", "num_computed_tokens_cpu", "block_table_tensor", "is_prefilling", "encoder_seq_lens",
                   "dcp_local_seq_lens"}  # fmt: skip
    for name, values in lists.items():
        count = {"query_start_loc": 3, "slot_mapping": 6, "positions": 6}.get(name, 2 if name in per_request else None)
        assert rows(getattr(real, name)) == values[:count], name
    assert {name: getattr(real, name) for name in numbers} == numbers
    assert (real.causal, real.mm_req_doc_ranges) == (True, {1: [(1, 2)]})
    assert rows(real.logits_indices_padded[:4]) == [0, 1, 2, 5]
    assert rows(real.token_to_req_indices()) == [0, 0, 0, 1, 1, 1]


# -- block operations


def test_a_batch_carries_the_blocks_to_zero_and_to_copy():
    states = states_of(KVGroup(4), rows=2, length=8, vocab_size=V)
    states.add_request(NewRequest("a", [1, 2], [[1]]))
    buffers = InputBuffers.for_states(states, 8)
    ops = BlockOps.of(zero=[3, 4], copies=[(1, 2), (5, 6)])
    got = prepare_inputs(states, {"a": 2}, buffers, block_ops=ops).block_ops
    assert (rows(got.zero), rows(got.copies)) == ([3, 4], [[1, 2], [5, 6]])
    none = prepare_inputs(states, {"a": 2}, buffers).block_ops
    assert (rows(none.zero), rows(none.copies)) == ([], [])


# -- sampling metadata

PARAMS = {
    "a": SamplingParams(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=0.25, frequency_penalty=0.5,
        repetition_penalty=1.5, seed=3, min_tokens=2, logprobs=4, prompt_logprobs=1, stop_token_ids=(7,),
        bad_words_token_ids=((1, 2),), allowed_token_ids=(1, 2, 3), logit_bias={4: 1.5},
        structured_outputs={"regex": "x"},
        typical_p=0.25, top_n_sigma=1.5, xtc_probability=0.5, xtc_threshold=0.125, dry_multiplier=0.75, dry_base=2.5,
        dry_allowed_length=3, dry_range=5,
    ),
    "b": SamplingParams(
        temperature=0.75, top_p=0.5, top_k=9, min_p=0.2, presence_penalty=-0.5, frequency_penalty=0.75,
        repetition_penalty=0.5, seed=8, min_tokens=1, logprobs=2, prompt_logprobs=3, stop_token_ids=(9,),
        bad_words_token_ids=((5,),), allowed_token_ids=(0,), logit_bias={6: -1.0},
        typical_p=0.5, top_n_sigma=0.5, xtc_probability=0.75, xtc_threshold=0.25, dry_multiplier=1.5, dry_base=1.5,
        dry_allowed_length=1, dry_range=-1,
    ),
}  # fmt: skip
FIELDS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                                  "repetition_penalty", "seed", "min_tokens", "typical_p", "top_n_sigma",
                                  "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base",
                                  "dry_allowed_length", "dry_range")}  # fmt: skip
FIELDS |= {"num_logprobs": "logprobs", "num_prompt_logprobs": "prompt_logprobs"}
NEEDS = sum(2**i for i in range(1, 17))  # all flags but "greedy"


def sampling_step() -> InputBatch:
    """A step of "b" with one draft, then "a"; their rows in the other order."""
    states = states_of(KVGroup(4), rows=3, length=8, vocab_size=V, drafts=1)
    for rid, params in PARAMS.items():
        states.add_request(NewRequest(rid, [1, 2], [[1, 2]], num_computed_tokens=1, sampling_params=params))
    return prepare_inputs(states, {"b": 2, "a": 1}, InputBuffers.for_states(states, 8), draft_tokens={"b": [5]})


def assert_parameters(metadata, ids: list[str]) -> None:
    """The metadata of these requests, one entry each."""
    row_of = {"a": 0, "b": 1}
    assert rows(metadata.rows) == [row_of[rid] for rid in ids]
    assert (metadata.needs, metadata.vocab_size) == (NEEDS, V)
    for name, field in FIELDS.items():
        assert np.allclose(getattr(metadata, name), [getattr(PARAMS[rid], field) for rid in ids]), name
    assert metadata.params == {b: PARAMS[rid] for b, rid in enumerate(ids)}
    assert metadata.max_num_logprobs == 4
    assert metadata.has_structured_output
    assert metadata.needs_penalties
    assert metadata.all_random
    assert not metadata.all_greedy
    assert not metadata.is_plain
    assert metadata.bad_words() == {b: PARAMS[rid].bad_words_token_ids for b, rid in enumerate(ids)}
    assert metadata.end_token_ids() == {b: PARAMS[rid].stop_token_ids for b, rid in enumerate(ids)}
    assert rows(metadata.allowed_token_ids_mask()) == [
        [t in PARAMS[rid].allowed_token_ids for t in range(V)] for rid in ids
    ]
    bias = [(b, t, v) for b, rid in enumerate(ids) for t, v in PARAMS[rid].logit_bias.items()]
    assert list(zip(*map(rows, metadata.logit_bias()), strict=True)) == bias


def test_each_parameter_of_each_request_is_in_the_metadata_in_batch_order():
    batch = sampling_step()
    assert_parameters(sampling_metadata(batch), ["b", "a"])
    assert_parameters(build_metadata(batch.states.sampling, V, batch.idx_mapping.copy()), ["b", "a"])


def test_each_parameter_is_repeated_for_the_logit_rows_of_its_request():
    assert_parameters(logits_sampling_metadata(sampling_step()), ["b", "b", "a"])


# -- pooling


def test_each_pooling_request_has_its_own_parameters_tokens_and_lengths():
    states = states_of(KVGroup(4), rows=3, length=8, vocab_size=V)
    params = {"p": PoolingParams(task="classify", dimensions=5, normalize=False), "q": PoolingParams(task="score")}
    for i, rid in enumerate(("p", "s", "q")):
        states.add_request(NewRequest(rid, [1] * (4 + i), [[1, 2]], pooling_params=params.get(rid)))
    batch = prepare_inputs(states, {"q": 3, "s": 2, "p": 4}, InputBuffers.for_states(states, 16))
    got = pooling_metadata(batch)
    assert got.params == (params["q"], params["p"])
    lists = {
        "batch_indices": [0, 2], "first_token": [0, 5], "last_token": [2, 8], "prompt_lens": [6, 4],
        "seq_lens": [3, 4], "is_last_chunk": [False, True],
    }  # fmt: skip
    assert {name: rows(getattr(got, name)) for name in lists} == lists


# -- addresses


@every_backend
def test_every_tensor_of_every_step_is_at_one_address(backend):
    """The next step writes what a captured graph has read: also after other sizes, padding and a dummy."""
    states = states_of(
        KVGroup(4, context_parallel=True),
        KVGroup(2),
        length=16,
        vocab_size=V,
        drafts=2,
        context_parallel=ContextParallel(2, 0, 1),
    )
    for i, rid in enumerate("abc"):
        states.add_request(NewRequest(rid, [1, 2, 3], [[1, 2], [3, 4, 5]], [4], 3 if i else 0))
    buffers = InputBuffers.for_states(states, 16)
    names = {"input_ids", "positions", "query_start_loc", "seq_lens", "dcp_local_seq_lens", "block_table"}
    assert names | {"row_generation", "num_blocks"} <= set(TENSOR_NAMES)

    def address(read) -> dict[str, tuple[int, ...]]:
        found = {name: read(name) for name in TENSOR_NAMES}
        return {name: tuple(a.ctypes.data for a in arrays(value)) for name, value in found.items()}

    want = address(buffers.__getitem__)
    for plan, drafts, pad in (
        ({"b": 3, "a": 4}, {"b": [5, 6]}, None),
        ({"c": 2}, {"c": [7]}, (8, 4)),
        ({"a": 1, "b": 3, "c": 1}, {"b": [1, 2]}, (None, 4)),
    ):
        batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts, pad_to=pad, backend=backend)
        assert address(partial(getattr, batch)) == want
    dummy = address(partial(getattr, make_dummy(states, buffers, num_tokens=4, num_reqs=2)))
    assert dummy == want


# -- tables of the documents


def test_a_row_of_blocks_is_as_wide_as_the_longest_request_needs():
    """max_model_len 5 and blocks of 2: three entries per row, so no two requests share one."""
    states = states_of(rows=3, length=5, vocab_size=V)
    for rid, blocks in (("a", [1]), ("b", [2, 3, 4]), ("c", [5, 6])):
        states.add_request(NewRequest(rid, [1] * {"a": 2, "b": 5, "c": 3}[rid], [blocks]))
    batch = prepare_inputs(states, {"a": 2, "b": 5, "c": 3}, InputBuffers.for_states(states, 16))
    got = batch.explain()
    assert rows(got.token_indices) == [0, 1, 5, 6, 7, 8, 9, 10, 11, 12]
    assert rows(got.block_table_indices) == [0, 0, 3, 3, 4, 4, 5, 6, 6, 7]
    assert rows(got.block_numbers) == [1, 1, 2, 2, 3, 3, 4, 5, 5, 6]
    assert rows(got.block_offsets) == [0, 1, 0, 1, 0, 1, 0, 0, 1, 0]
    assert rows(batch.slot_mapping[0]) == [2, 3, 4, 5, 6, 7, 8, 10, 11, 12]


def test_scalars_that_are_held_are_those_of_their_step():
    """Native code writes the scalars of a step over those that no code holds."""
    states, buffers = states_and_buffers(rows=4, length=600)
    states.add_request(NewRequest("a", [1] * 599, [list(range(1, 301))]))
    held = {}
    for i in range(1, 300):
        scalars = prepare_inputs(states, {"a": i}, buffers if i <= 64 else InputBuffers.for_states(states, 600)).scalars
        if i % 3:
            held[i] = scalars
        assert (scalars.num_tokens, scalars.max_query_len, scalars.max_seq_len, scalars.num_reqs) == (i, i, i, 1)
    assert {i: scalars.num_tokens for i, scalars in held.items()} == {i: i for i in held}
    assert len(set(map(id, held.values()))) == len(held)


def test_token_tables_say_where_each_scheduled_token_goes():
    states, buffers = states_and_buffers(KVGroup(2))
    states.add_request(NewRequest("a", [1, 2, 3, 4], [[5, 3]], num_computed_tokens=1))
    states.add_request(NewRequest("b", [5, 6], [[7]]))
    tables = token_tables(prepare_inputs(states, {"b": 2, "a": 2}, buffers))
    assert tables.req_to_token.tolist() == [[14, 15, 0], [10, 11, 6]]
    assert tables.out_cache_loc.tolist() == [14, 15, 11, 6]
    assert tables.extend_start_loc.tolist() == [0, 2]
    assert tables.extend_prefix_lens.tolist() == [0, 1]


def test_each_entry_of_an_axis_belongs_to_the_request_that_it_was_made_for():
    states, buffers = states_and_buffers(KVGroup(4), drafts=2)
    states.add_request(NewRequest("a", [1, 2, 3], [[1, 2]], num_computed_tokens=2))
    states.add_request(NewRequest("b", [4, 5, 6], [[3, 4]]))
    batch = prepare_inputs(states, {"a": 3, "b": 2}, buffers, draft_tokens={"a": [7, 8]}, pad_to=(7, 3))
    for axis, owners in {
        "T": [0, 0, 0, 1, 1],
        "Tp": [0, 0, 0, 1, 1, -1, -1],
        "L": [0, 0, 0, 1],
        "D": [0, 0],
        "B": [0, 1],
        "Bp": [0, 1, -1],
        "B+1": [0, 0, 1],
        "Bp+1": [0, 0, 1, -1],
    }.items():
        assert entry_owners(batch, axis, len(owners)).tolist() == owners, axis


def test_forms_of_a_step_without_requests_are_empty():
    states, buffers = states_and_buffers(KVGroup(2), KVGroup(4))
    batch = prepare_inputs(states, {}, buffers)
    pieces = chunked_local(batch, 4, 1)
    assert (pieces.max_seqlen_q, pieces.max_seqlen_k, pieces.cu_seqlens_q.tolist()) == (0, 0, [0])
    assert [len(array) for array in (pieces.seqlens_k, pieces.block_table, pieces.req_indices)] == [0, 0, 0]
    varlen, plan = batch.to_flash_attn(), batch.to_flashinfer()
    assert (varlen.max_seqlen_q, varlen.max_seqlen_k, varlen.cu_seqlens_k.tolist()) == (0, 0, [0])
    assert varlen.block_table.shape == (0, 0)
    assert (plan.kv_indptr.tolist(), plan.kv_indices.tolist(), plan.kv_last_page_len.tolist()) == ([0], [], [])
    dense, context = dense_inputs(batch), nano_vllm_context(batch)
    assert dense.mask.shape == (0, 0, 0)
    assert (context.max_seqlen_q, context.max_seqlen_k, context.slot_mapping.tolist()) == (0, 0, [])
    metadata = common_attention_metadata(batch)
    assert (metadata.num_reqs, metadata.num_actual_tokens, metadata.query_start_loc.tolist()) == (0, 0, [0])
    assert ascend_metadata(batch).attn_mask.shape == (0, 0)
    assert token_tables(batch).req_to_token.shape == (0, 0)
