"""Random launches of vLLM's kernels: arguments as the runner passes them, over small states with stale contents.

`LAUNCHES` has a function of a generator for the name of each function of `foreword.vllm.kernels`. It returns the grid
and the arguments by name: arrays, numbers, and `Pointers` for a table of addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from foreword.vllm.vectors import Pointers

Launch = tuple[tuple[int, ...], dict[str, Any]]
Rng = np.random.Generator

WIDTH, VOCABULARY = 24, 37  # columns of the table of tokens, and of the logits


def i32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def i64(values: Any) -> np.ndarray:
    return np.asarray(values, np.int64)


def power_of_2(n: int) -> int:
    return 1 << max(int(n) - 1, 0).bit_length()


class State:
    """Rows and a step of some of them: chunks of prompts, decodes and, of the share ``drafting``, verifications."""

    def __init__(self, rng: Rng, drafting: float = 0.5) -> None:
        self.rng = rng
        self.rows = R = int(rng.integers(1, 7))
        self.requests = B = int(rng.integers(1, R + 1))
        self.idx = i32(rng.permutation(R)[:B])
        self.num_drafts = K = int(rng.integers(drafting == 1, 4))
        self.prefill = i32(rng.integers(1, 12, R))
        behind = self.prefill + rng.integers(0, 6, R)
        self.computed = i32(np.where(rng.random(R) < drafting, behind, rng.integers(0, self.prefill)))
        decoding = (self.computed >= self.prefill)[self.idx]
        self.drafts = np.where(decoding, rng.integers(0, K + 1, B), 0)
        left = np.maximum((self.prefill - self.computed)[self.idx], 1)
        self.scheduled = np.where(decoding, 1 + self.drafts, rng.integers(1, left + 1))
        self.tokens = int(self.scheduled.sum())
        self.loc = self.sums(self.scheduled)
        self.logits = self.drafts + 1
        self.count = int(self.logits.sum())
        self.cu = self.sums(self.logits)
        self.seq_lens = i32(self.computed[self.idx] + self.scheduled)
        self.expanded = i32(np.repeat(self.idx, self.logits))
        self.local = i32(np.concatenate([np.arange(n) for n in self.logits]))
        self.known = self.ids((R, WIDTH), np.int32)

    def sums(self, counts: np.ndarray) -> np.ndarray:
        """0 and the sums of counts; behind them an entry of padding."""
        return i32([0, *np.cumsum(counts), counts.sum() + self.rng.integers(0, 4)])

    def ids(self, shape: Any, dtype: type = np.int64) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, shape).astype(dtype)

    def stale(self, shape: Any, dtype: type = np.int32) -> np.ndarray:
        return self.rng.integers(-9, 0, shape).astype(dtype)

    def with_padding(self) -> np.ndarray:
        """The rows of the step, some of them -1."""
        return np.where(self.rng.random(self.requests) < 0.2, -1, self.idx).astype(np.int32)

    def logits_of(self, count: int, dtype: str = "float32", columns: int = VOCABULARY) -> np.ndarray:
        logits = (self.rng.normal(0, 3, (count, columns))).astype(np.float32)
        logits[self.rng.random(logits.shape) < 0.1] = -np.inf
        logits[:, 0] = self.rng.normal(0, 3, count)
        if dtype == "bfloat16":
            return (logits.view(np.uint32) >> 16).astype(np.uint16)
        return logits.astype(dtype)

    def temperatures(self) -> np.ndarray:
        return self.rng.choice([0, 0.5, 1, 1.7], self.rows).astype(np.float32)

    def seeds(self) -> np.ndarray:
        return self.rng.integers(-(2**63), 2**63, self.rows, dtype=np.int64)


def apply_write(rng: Rng) -> Launch:
    multi, writes = bool(rng.random() < 0.5), int(rng.integers(1, 6))
    widths = [int(x) for x in rng.integers(4, 9, int(rng.integers(1, 4)))]
    groups = rng.integers(0, len(widths), writes) if multi else np.zeros(writes, int)
    starts, lengths = rng.integers(0, 3, writes), rng.integers(0, 3, writes)
    tables = [i32(rng.integers(0, 99, (5, width))) for width in widths]
    return (writes,), {
        "output_ptr": Pointers(tables) if multi else tables[0],
        "output_stride": i64(widths) if multi else widths[0],
        "write_indices_ptr": i32(rng.integers(0, 5, writes)),
        "write_starts_ptr": i32(starts),
        "write_contents_ptr": i32(rng.integers(100, 200, max(int(lengths.sum()), 1))),
        "write_cu_lens_ptr": i32(np.cumsum(lengths)),
        "write_group_ids_ptr": i32(groups) if multi else None,
        "BLOCK_SIZE": 4,
        "MULTI_GROUP": multi,
    }


def gather_block_tables(rng: Rng) -> Launch:
    state = State(rng)
    widths = [int(x) for x in rng.integers(4, 9, int(rng.integers(1, 4)))]
    padded = int(rng.integers(state.requests, state.rows + 1))
    blocks = i32([rng.integers(0, width + 1, state.rows) for width in widths])
    return (len(widths), padded), {
        "batch_idx_to_req_idx": state.idx,
        "src_block_table_ptrs": Pointers([i32(rng.integers(1, 99, (state.rows, width))) for width in widths]),
        "dst_block_table_ptrs": Pointers([state.stale((state.rows, width)) for width in widths]),
        "block_table_strides": i64(widths),
        "num_blocks_ptr": blocks,
        "num_blocks_stride": state.rows,
        "num_reqs": state.requests,
        "num_computed_tokens_ptr": state.computed,
        "sliding_window_reach_ptr": i32(rng.choice([0, 1, 5], len(widths))),
        "block_sizes_ptr": i32(rng.choice([2, 4], len(widths))),
        "MASK_SLIDING_WINDOW": bool(rng.random() < 0.7),
        "BLOCK_SIZE": 4,
    }


def compute_slot_mappings(rng: Rng) -> Launch:
    state = State(rng)
    groups, ranks = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2]))
    capacity, tables = state.tokens + int(rng.integers(0, 5)), []
    sizes = i32(rng.choice([2, 4, 16], groups))
    for size in sizes:
        tables.append(i32(rng.integers(1, 99, (state.rows, -(-20 // int(size))))))
    positions = np.concatenate(
        [c + np.arange(n) for c, n in zip(state.computed[state.idx], state.scheduled, strict=True)]
    )
    return (groups, state.requests + 1), {
        "max_num_tokens": capacity,
        "idx_mapping": state.with_padding(),
        "query_start_loc": state.loc,
        "pos": i64(positions),
        "block_table_ptrs": Pointers(tables),
        "block_table_strides": i64([table.shape[1] for table in tables]),
        "block_sizes": sizes,
        "slot_mapping_enabled": rng.random(groups) < 0.8,
        "dcp_sharded": rng.random(groups) < 0.7,
        "slot_mappings_ptr": state.stale((groups, capacity), np.int64),
        "slot_mappings_stride": capacity,
        "cp_rank": int(rng.integers(ranks)),
        "CP_SIZE": ranks,
        "CP_INTERLEAVE": int(rng.choice([1, 2])),
        "PAD_ID": -1,
        "TRITON_BLOCK_SIZE": 8,
    }


def dcp_local_seq_lens(rng: Rng) -> Launch:
    requests, ranks = int(rng.integers(1, 9)), int(rng.integers(2, 5))
    capacity = requests + int(rng.integers(0, 4))
    return (-(-capacity // 4),), {
        "out_ptr": i32(rng.integers(-9, 0, capacity)),
        "seq_lens_ptr": i32(rng.integers(0, 99, capacity)),
        "dcp_size": ranks,
        "dcp_rank": int(rng.integers(ranks)),
        "cp_interleave": int(rng.choice([1, 2, 4])),
        "num_reqs": requests,
        "max_num_reqs": capacity,
        "BLOCK_SIZE": 4,
    }


def prepare_prefill_inputs(rng: Rng) -> Launch:
    state, lookahead = State(rng), int(rng.integers(1, 4))
    return (state.requests,), {
        "input_ids_ptr": state.stale(state.tokens),
        "next_prefill_tokens_ptr": state.stale((lookahead, state.rows)),
        "next_prefill_tokens_stride": state.rows,
        "num_lookahead": lookahead,
        "idx_mapping_ptr": state.idx,
        "query_start_loc_ptr": state.loc,
        "all_token_ids_ptr": state.known,
        "all_token_ids_stride": WIDTH,
        "prefill_lens_ptr": state.prefill,
        "num_computed_tokens_ptr": state.computed,
        "BLOCK_SIZE": 4,
        "LOOKAHEAD_BLOCK": power_of_2(lookahead),
    }


def prepare_pos_seq_lens(rng: Rng) -> Launch:
    state = State(rng)
    capacity = state.requests + int(rng.integers(0, 4))
    return (state.requests + 1,), {
        "pos_ptr": state.stale(state.tokens + 2, np.int64),
        "seq_lens_ptr": state.stale(capacity),
        "idx_mapping_ptr": state.idx,
        "query_start_loc_ptr": state.loc,
        "num_computed_tokens_ptr": state.computed,
        "max_num_reqs": capacity,
        "BLOCK_SIZE": 4,
    }


def combine_sampled_and_draft_tokens(rng: Rng) -> Launch:
    state, new = State(rng), int(rng.random() < 0.8)
    logits = np.where(new, state.logits, np.maximum(state.logits - 1, 0))
    if rng.random() < 0.3:  # a prompt's tail, padded with placeholder drafts
        logits = np.minimum(state.scheduled, rng.integers(1, state.num_drafts + 2, state.requests))
    return (state.requests,), {
        "input_ids_ptr": state.stale(state.tokens),
        "idx_mapping_ptr": state.idx,
        "last_sampled_tokens_ptr": state.ids((state.rows, 1)),
        "query_start_loc_ptr": state.loc,
        "seq_lens_ptr": state.seq_lens,
        "prefill_len_ptr": state.prefill,
        "draft_tokens_ptr": state.ids((state.rows, max(state.num_drafts, 1))),
        "draft_tokens_stride": max(state.num_drafts, 1),
        "cu_num_logits_ptr": state.sums(logits),
        "logits_indices_ptr": state.stale(max(int(logits.sum()), 1), np.int64),
        "BLOCK_SIZE": power_of_2(state.num_drafts + 1),
        "NUM_NEW_SAMPLED_TOKENS": new,
    }


def expand_idx_mapping(rng: Rng) -> Launch:
    state = State(rng)
    count = state.count
    return (state.requests,), {
        "idx_mapping_ptr": state.idx,
        "expanded_idx_mapping_ptr": state.stale(count),
        "expanded_local_pos_ptr": state.stale(count),
        "cu_num_logits_ptr": state.cu,
        "BLOCK_SIZE": power_of_2(state.num_drafts + 1),
    }


def get_num_sampled_and_rejected(rng: Rng) -> Launch:
    state = State(rng)
    return (state.requests,), {
        "num_sampled_ptr": i32(rng.integers(1, state.logits + 1)),
        "num_rejected_ptr": state.stale(state.requests),
        "seq_lens_ptr": state.seq_lens,
        "cu_num_logits_ptr": state.cu,
        "idx_mapping_ptr": state.idx,
        "prefill_len_ptr": state.prefill,
    }


def post_update(rng: Rng) -> Launch:
    state = State(rng)
    K, drafting = state.num_drafts, bool(rng.random() < 0.5)
    sampled = i32(rng.integers(0, state.logits + 1))
    counts = i32(rng.integers(0, 3, (state.rows, VOCABULARY)))
    return (state.requests,), {
        "idx_mapping_ptr": state.with_padding(),
        "num_computed_tokens_ptr": state.computed,
        "last_sampled_tokens_ptr": state.ids((state.rows, 1)),
        "output_bin_counts_ptr": counts if rng.random() < 0.6 else None,
        "output_bin_counts_stride": VOCABULARY,
        "sampled_tokens_ptr": state.ids((state.requests, K + 1)) % 3,  # equal ones in a row
        "sampled_tokens_stride": K + 1,
        "num_sampled_ptr": sampled,
        "num_rejected_ptr": i32(state.logits - sampled),
        "query_start_loc_ptr": state.loc if rng.random() < 0.7 else None,
        "all_token_ids_ptr": state.known,
        "all_token_ids_stride": WIDTH,
        "total_len_ptr": i32(np.minimum(state.computed + 1, WIDTH - 5)),
        "draft_tokens_ptr": state.ids((state.requests, K)) if drafting and K else None,
        "draft_tokens_out_ptr": state.ids((state.rows, K)) if drafting and K else None,
        "num_draft_tokens": K if drafting else 0,
    }


def post_update_num_computed_tokens(rng: Rng) -> Launch:
    state = State(rng)
    return (state.requests,), {
        "idx_mapping_ptr": state.idx,
        "num_computed_tokens_ptr": state.computed,
        "query_start_loc_ptr": state.loc,
    }


def prepare_rope_positions(rng: Rng) -> Launch:
    state, dimensions = State(rng), int(rng.choice([3, 4]))
    return (state.requests,), {
        "positions_ptr": state.stale((dimensions, state.tokens + 1), np.int64),
        "positions_stride": state.tokens + 1,
        "prefill_positions_ptr": i32(rng.integers(0, 99, (state.rows * dimensions, WIDTH))),
        "prefill_positions_stride0": dimensions * WIDTH,
        "prefill_positions_stride1": WIDTH,
        "prefill_delta_ptr": i32(rng.integers(-5, 5, state.rows)),
        "idx_mapping_ptr": state.idx,
        "query_start_loc_ptr": state.loc,
        "prefill_lens_ptr": state.prefill,
        "num_computed_tokens_ptr": state.computed,
        "BLOCK_SIZE": 4,
        "NUM_DIMS": dimensions,
    }


def apply_prompt_embeds(rng: Rng) -> Launch:
    state, hidden = State(rng), 6
    lengths = i32(np.where(rng.random(state.rows) < 0.7, rng.integers(1, state.prefill + 1), 0))
    embeds = [rng.normal(size=(n, hidden)).astype(np.float32) if n else None for n in lengths]
    masks = [(rng.random(n) < 0.4).astype(np.int8) if n and rng.random() < 0.5 else None for n in lengths]
    return (state.requests, -(-int(state.scheduled.max()) // 4)), {
        "inputs_embeds_ptr": rng.normal(size=(state.tokens, hidden)).astype(np.float32),
        "inputs_embeds_stride": hidden,
        "embeds_ptrs_ptr": Pointers(embeds),
        "mask_ptrs_ptr": Pointers(masks),
        "embeds_lens_ptr": lengths,
        "idx_mapping_ptr": state.idx,
        "query_start_loc_ptr": state.loc,
        "num_computed_tokens_ptr": state.computed,
        "hidden_size": hidden,
        "TOKEN_BLOCK": 4,
        "BLOCK_SIZE": 4,
    }


def scatter_num_accepted(rng: Rng) -> Launch:
    state = State(rng)
    return (state.requests,), {
        "idx_mapping_ptr": state.with_padding(),
        "num_sampled_ptr": i32(rng.integers(0, 4, state.requests)),
        "num_accepted_ptr": state.stale(state.rows),
    }


def fill_num_accepted(rng: Rng) -> Launch:
    state = State(rng)
    arguments = {"idx_mapping_ptr": state.with_padding(), "num_accepted_ptr": state.stale(state.rows), "num_sampled": 3}
    return (state.requests,), arguments


def temperature(rng: Rng) -> Launch:
    state = State(rng)
    count = state.count
    return (count, -(-VOCABULARY // 16)), {
        "logits_ptr": state.logits_of(count),
        "logits_stride": VOCABULARY,
        "expanded_idx_mapping_ptr": state.expanded,
        "temperature_ptr": state.temperatures(),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 16,
    }


def gumbel_sample(rng: Rng) -> Launch:
    state, fp64 = State(rng), bool(rng.random() < 0.3)
    count, blocks = state.count, -(-VOCABULARY // 16)
    return (count, blocks), {
        "local_argmax_ptr": state.stale((count, blocks), np.int64),
        "local_argmax_stride": blocks,
        "local_max_ptr": state.stale((count, blocks), np.float64 if fp64 else np.float32),
        "local_max_stride": blocks,
        "logits_cache_ptr": None,
        "logits_cache_stride_0": 0,
        "logits_cache_stride_1": 0,
        "logits_cache_col_ptr": None,
        "logits_cache_source_ptr": None,
        "logits_cache_source_stride": 0,
        "logits_ptr": state.logits_of(count, str(rng.choice(["float32", "float16", "bfloat16"]))),
        "logits_stride": VOCABULARY,
        "expanded_idx_mapping_ptr": np.where(rng.random(count) < 0.1, -1, state.expanded).astype(np.int32),
        "seeds_ptr": state.seeds(),
        "pos_ptr": i64(rng.integers(0, 2**33, count)),
        "temp_ptr": state.temperatures(),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 16,
        "IS_DRAFTING": bool(rng.random() < 0.3),
        "APPLY_TEMPERATURE": bool(rng.random() < 0.5),
        "USE_FP64": fp64,
        "PER_TOKEN_COL": False,
    }


def bias(rng: Rng) -> Launch:
    state = State(rng)
    count, most = state.count, 8
    logits = state.logits_of(count)
    stop_tokens = i32([rng.permutation(VOCABULARY)[:most] for _ in range(state.rows)])
    for token in np.flatnonzero(rng.random(count) < 0.5):  # where nothing but stop tokens is left
        kept = logits[token, stop_tokens[state.expanded[token]][:2]]
        logits[token] = -np.inf
        logits[token, stop_tokens[state.expanded[token]][:2]] = kept

    def some(share: float) -> np.ndarray:
        return i32(np.where(rng.random(state.rows) < share, rng.integers(1, most + 1, state.rows), 0))

    def tokens() -> np.ndarray:
        return i32([rng.permutation(VOCABULARY)[:most] for _ in range(state.rows)])

    return (count,), {
        "logits_ptr": logits,
        "logits_stride": VOCABULARY,
        "vocab_size": VOCABULARY,
        "expanded_idx_mapping_ptr": state.expanded,
        "num_allowed_token_ids_ptr": some(0.3),
        "allowed_token_ids_ptr": tokens(),
        "allowed_token_ids_stride": most,
        "num_logit_bias_ptr": some(0.5),
        "bias_token_ids_ptr": tokens(),
        "bias_token_ids_stride": most,
        "bias_ptr": rng.normal(size=(state.rows, most)).astype(np.float32),
        "bias_stride": most,
        "pos_ptr": i64(rng.integers(0, 20, count)),
        "min_lens_ptr": i32(rng.integers(0, 20, state.rows)),
        "num_stop_token_ids_ptr": some(0.7),
        "restore_when_all_masked_ptr": i32(rng.random(state.rows) < 0.5),
        "stop_token_ids_ptr": stop_tokens,
        "stop_token_ids_stride": most,
        "BLOCK_SIZE": most,
        "LOGITS_BLOCK_SIZE": 16,
        "CHECK_ALL_MASKED_ROWS": bool(rng.random() < 0.6),
    }


def bincount(rng: Rng) -> Launch:
    state = State(rng)
    words = -(-VOCABULARY // 32)
    prefill = state.prefill + i32(rng.integers(0, 8, state.rows))
    return (state.requests, -(-int(prefill.max()) // 4)), {
        "expanded_idx_mapping_ptr": i64(state.idx),
        "all_token_ids_ptr": state.known,
        "all_token_ids_stride": WIDTH,
        "prompt_len_ptr": state.prefill,
        "prefill_len_ptr": prefill,
        "prompt_bin_mask_ptr": np.zeros((state.rows, words), np.int32),
        "prompt_bin_mask_stride": words,
        "output_bin_counts_ptr": np.zeros((state.rows, VOCABULARY), np.int32),
        "output_bin_counts_stride": VOCABULARY,
        "BLOCK_SIZE": 4,
    }


def penalties(rng: Rng) -> Launch:
    state = State(rng)
    count, words = state.count, -(-VOCABULARY // 32)
    return (count, -(-VOCABULARY // 32)), {
        "logits_ptr": state.logits_of(count),
        "logits_stride": VOCABULARY,
        "expanded_idx_mapping_ptr": state.expanded,
        "token_ids_ptr": i32(rng.integers(-1, 5, count)),
        "expanded_local_pos_ptr": state.local,
        "repetition_penalty_ptr": rng.choice([1, 1.3, 0.7], state.rows).astype(np.float32),
        "frequency_penalty_ptr": rng.choice([0, 0.3, -0.7], state.rows).astype(np.float32),
        "presence_penalty_ptr": rng.choice([0, 0.2, -0.6], state.rows).astype(np.float32),
        "prompt_bin_mask_ptr": rng.integers(-(2**31), 2**31, (state.rows, words)).astype(np.int32),
        "prompt_bin_mask_stride": words,
        "output_bin_counts_ptr": i32(rng.choice([0, 0, 0, 1, 3], (state.rows, VOCABULARY))),
        "output_bin_counts_stride": VOCABULARY,
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 32,
    }


def bad_words(rng: Rng) -> Launch:
    state = State(rng)
    count, most = state.count, 4
    lengths = rng.integers(1, 4, (state.rows, most))
    known = state.known % 2
    total = i32(np.minimum(state.prefill + rng.integers(0, 6, state.rows), WIDTH))
    return (count, most), {
        "logits_ptr": state.logits_of(count, str(rng.choice(["float32", "bfloat16"]))),
        "logits_stride": VOCABULARY,
        "expanded_idx_mapping_ptr": state.expanded,
        "bad_word_token_ids_ptr": state.ids((state.rows, 3 * most), np.int32) % 2,
        "bad_word_token_ids_stride": 3 * most,
        "bad_word_offsets_ptr": i32(np.concatenate([np.zeros((state.rows, 1)), np.cumsum(lengths, axis=1)], axis=1)),
        "bad_word_offsets_stride": most + 1,
        "num_bad_words_ptr": i32(rng.integers(0, most + 1, state.rows)),
        "all_token_ids_ptr": known,
        "all_token_ids_stride": WIDTH,
        "prompt_len_ptr": state.prefill,
        "total_len_ptr": total,
        "input_ids_ptr": state.ids(count, np.int32) % 2,
        "expanded_local_pos_ptr": state.local,
    }


def min_p(rng: Rng) -> Launch:
    state = State(rng)
    count = state.count
    return (count,), {
        "logits_ptr": state.logits_of(count),
        "logits_stride": VOCABULARY,
        "expanded_idx_mapping_ptr": state.expanded,
        "min_p_ptr": rng.choice([0, 0.05, 0.3], state.rows).astype(np.float32),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 16,
    }


def topk_log_softmax(rng: Rng) -> Launch:
    state, top = State(rng), int(rng.integers(1, 5))
    count, columns = state.count, int(rng.choice([VOCABULARY, 300]))
    return (count,), {
        "output_ptr": state.stale((count, top), np.float32),
        "logits_ptr": state.logits_of(count, str(rng.choice(["float32", "bfloat16"])), columns),
        "logits_stride": columns,
        "topk_ids_ptr": i64(rng.integers(0, columns, (count, top))),
        "topk_ids_stride": top,
        "topk": top,
        "vocab_size": columns,
        "BLOCK_SIZE": 128,
        "TOPK_BLOCK_SIZE": 2,
    }


def ranks(rng: Rng) -> Launch:
    state = State(rng)
    count = state.count
    return (count,), {
        "output_ptr": state.stale(count, np.int64),
        "logits_ptr": state.logits_of(
            count, str(rng.choice(["float32", "float16"]))
        ),  # the interpreter compares the bits of bfloat16
        "logits_stride": VOCABULARY,
        "token_ids_ptr": state.ids(count),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 16,
    }


def fill_logprob_token_ids(rng: Rng) -> Launch:
    state, top = State(rng), int(rng.integers(0, 4))
    count, most = state.count, 5
    named = i32(np.where(rng.random(state.rows) < 0.5, rng.integers(1, most + 1, state.rows), 0))
    return (count,), {
        "out_token_ids_ptr": np.zeros((count, 1 + most), np.int64),
        "out_token_ids_stride": 1 + most,
        "out_valid_mask_ptr": np.zeros((count, 1 + most), np.bool_),
        "out_valid_mask_stride": 1 + most,
        "sampled_token_ids_ptr": state.ids(count),
        "topk_indices_ptr": state.ids((count, max(top, 1)), np.int32),
        "topk_indices_stride": max(top, 1),
        "expanded_idx_mapping_ptr": state.expanded,
        "num_per_req_token_ids_ptr": named,
        "per_req_token_ids_ptr": state.ids((state.rows, most), np.int32),
        "per_req_token_ids_stride": most,
        "NUM_TOPK": top,
        "PADDED_COLS": power_of_2(most),
    }


def num_nans(rng: Rng) -> Launch:
    state = State(rng)
    logits = state.logits_of(state.requests)
    logits[rng.random(logits.shape) < 0.05] = np.nan
    return (state.requests,), {
        "logits_ptr": logits,
        "logits_stride": VOCABULARY,
        "num_nans_ptr": state.stale(state.requests),
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": 16,
    }


def prompt_logprobs_token_ids(rng: Rng) -> Launch:
    state = State(rng)
    return (state.requests,), {
        "prompt_logprobs_token_ids_ptr": state.stale(state.tokens, np.int64),
        "query_start_loc_ptr": state.loc,
        "idx_mapping_ptr": state.idx,
        "num_computed_tokens_ptr": state.computed,
        "all_token_ids_ptr": state.known,
        "all_token_ids_stride": WIDTH,
        "BLOCK_SIZE": 4,
    }


def apply_grammar_bitmask(rng: Rng) -> Launch:
    state = State(rng)
    stride, words = state.num_drafts + 1, -(-VOCABULARY // 32)
    chosen = rng.permutation(state.requests)[: int(rng.integers(1, state.requests + 1))]
    places = (chosen[:, None] * stride + np.arange(stride)).reshape(-1)
    count = state.count
    return (len(places), words), {
        "logits_ptr": state.logits_of(count, str(rng.choice(["float32", "bfloat16"]))),
        "logits_stride": VOCABULARY,
        "logits_indices_ptr": i32(places),
        "cu_num_logits_ptr": state.cu,
        "bitmask_ptr": rng.integers(-(2**31), 2**31, (len(places), words)).astype(np.int32),
        "bitmask_stride": words,
        "vocab_size": VOCABULARY,
        "MASK_STRIDE": stride,
        "BLOCK_SIZE": 32,
    }


def flatten_sampled(rng: Rng) -> Launch:
    state = State(rng)
    return (state.requests,), {
        "flat_sampled_ptr": state.stale(state.count, np.int64),
        "sampled_ptr": state.ids((state.requests, state.num_drafts + 1)),
        "sampled_stride": state.num_drafts + 1,
        "num_sampled_ptr": i32(rng.integers(0, state.logits + 1)),
        "cu_num_logits_ptr": state.cu,
    }


def gather_draft_sampled(rng: Rng) -> Launch:
    state = State(rng)
    count = state.count
    return (-(-count // 4),), {
        "draft_sampled_ptr": state.stale(count),
        "pos_ptr": state.stale(count, np.int64),
        "input_ids_ptr": state.ids(state.tokens, np.int32),
        "positions_ptr": i64(rng.integers(0, 20, state.tokens)),
        "logits_indices_ptr": i64(rng.integers(0, state.tokens, count)),
        "expanded_idx_mapping_ptr": state.expanded,
        "expanded_local_pos_ptr": state.local,
        "prefill_len_ptr": state.prefill,
        "num_logits": count,
        "BLOCK_SIZE": 4,
    }


class Verification(State):
    """A step of verifications with what the first of its kernels found."""

    block = 16

    def __init__(self, rng: Rng) -> None:
        super().__init__(rng, drafting=1)
        self.blocks = -(-VOCABULARY // self.block)
        self.target = self.logits_of(self.count)
        self.target[:, :VOCABULARY] = np.maximum(self.target, -30)
        self.has_draft = bool(rng.random() < 0.5)
        draft = rng.normal(0, 3, (self.rows, self.num_drafts, VOCABULARY)).astype(np.float32)
        self.draft = draft if self.has_draft else None
        self.temperature, self.seed = self.temperatures(), self.seeds()
        self.sampled = np.where(rng.random(self.count) < 0.1, -1, self.ids(self.count)).astype(np.int32)
        likely = np.flatnonzero(rng.random(self.count - 1) < 0.6)
        self.sampled[likely + 1] = self.target.argmax(axis=1)[likely]
        padded = np.full((self.count, self.blocks * self.block), -np.inf, np.float32)
        padded[:, :VOCABULARY] = self.target
        target = padded.reshape(self.count, self.blocks, self.block)
        self.argmax = target.argmax(axis=2) + np.arange(self.blocks) * self.block
        self.max, self.sum = self.stats(target)
        padded = np.full((self.count, self.blocks * self.block), -np.inf, np.float32)
        padded[:, :VOCABULARY] = draft[self.expanded, np.minimum(self.local, draft.shape[1] - 1)]
        padded /= np.maximum(self.temperature[self.expanded], np.float32(0.1))[:, None]
        self.draft_max, self.draft_sum = self.stats(padded.reshape(self.count, self.blocks, self.block))
        self.draft_arguments = {
            "draft_logits_ptr": self.draft,
            "draft_logits_stride_0": draft.strides[0] // 4 if self.has_draft else 0,
            "draft_logits_stride_1": VOCABULARY if self.has_draft else 0,
        }

    @staticmethod
    def stats(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        largest = blocks.max(axis=2)
        return largest, np.exp(blocks - largest[..., None]).sum(axis=2, dtype=np.float32)

    @staticmethod
    def log_sums(largest: np.ndarray, sums: np.ndarray) -> np.ndarray:
        most = largest.max(axis=1)
        return (most + np.log((sums * np.exp(largest - most[:, None])).sum(axis=1))).astype(np.float32)


def compute_local_logits_stats(rng: Rng) -> Launch:
    step = Verification(rng)
    shape = (step.count, step.blocks)
    return shape, {
        "target_local_argmax_ptr": step.stale(shape, np.int64),
        "target_local_argmax_stride": step.blocks,
        "target_local_max_ptr": step.stale(shape, np.float32),
        "target_local_max_stride": step.blocks,
        "target_local_sumexp_ptr": step.stale(shape, np.float32),
        "target_local_sumexp_stride": step.blocks,
        "draft_local_max_ptr": step.stale(shape, np.float32),
        "draft_local_max_stride": step.blocks,
        "draft_local_sumexp_ptr": step.stale(shape, np.float32),
        "draft_local_sumexp_stride": step.blocks,
        "target_logits_ptr": step.logits_of(step.count),
        "target_logits_stride": VOCABULARY,
        **step.draft_arguments,
        "expanded_idx_mapping_ptr": step.expanded,
        "expanded_local_pos_ptr": step.local,
        "temp_ptr": step.temperature,
        "vocab_size": VOCABULARY,
        "num_logits": step.count,
        "num_speculative_steps": step.num_drafts,
        "BLOCK_SIZE": step.block,
        "HAS_DRAFT_LOGITS": step.has_draft,
    }


def rejection(rng: Rng) -> Launch:
    step, synthetic = Verification(rng), bool(rng.random() < 0.2)
    B, K = step.requests, step.num_drafts
    return (B,), {
        "sampled_ptr": step.stale((B, K + 1), np.int64),
        "sampled_stride": K + 1,
        "rejected_steps_ptr": step.stale(B),
        "target_rejected_logsumexp_ptr": step.stale(B, np.float32),
        "draft_rejected_logsumexp_ptr": step.stale(B, np.float32),
        "target_logits_ptr": step.target,
        "target_logits_stride": VOCABULARY,
        "target_local_argmax_ptr": step.argmax,
        "target_local_argmax_stride": step.blocks,
        "target_local_max_ptr": step.max,
        "target_local_max_stride": step.blocks,
        "target_local_sumexp_ptr": step.sum,
        "target_local_sumexp_stride": step.blocks,
        "draft_sampled_ptr": step.sampled,
        **step.draft_arguments,
        "draft_local_max_ptr": step.draft_max,
        "draft_local_max_stride": step.blocks,
        "draft_local_sumexp_ptr": step.draft_sum,
        "draft_local_sumexp_stride": step.blocks,
        "cu_num_logits_ptr": step.cu,
        "idx_mapping_ptr": step.idx,
        "temp_ptr": step.temperature,
        "seed_ptr": step.seed,
        "pos_ptr": i64(rng.integers(0, 2**33, step.count)),
        "synthetic_conditional_rates_ptr": rng.random(max(K, 1)).astype(np.float32) if synthetic else None,
        "cumulative_log_p_ptr": None,
        "local_residual_mass_ptr": None,
        "local_residual_mass_stride": 0,
        "fly_entropy_ptr": None,
        "fly_entropy_threshold": 0.3,
        "vocab_num_blocks": step.blocks,
        "PADDED_VOCAB_NUM_BLOCKS": power_of_2(step.blocks),
        "HAS_DRAFT_LOGITS": step.has_draft,
        "SYNTHETIC_MODE": synthetic,
        "USE_BLOCK_VERIFICATION": False,
        "FLY_WINDOW_SIZE": 0,
    }


def resample(rng: Rng) -> Launch:
    step, fp64 = Verification(rng), bool(rng.random() < 0.3)
    B = step.requests
    rejected = i32(rng.integers(0, step.logits))
    at = step.cu[: step.requests] + rejected
    return (B, step.blocks), {
        "resampled_local_argmax_ptr": step.stale((B, step.blocks), np.int64),
        "resampled_local_argmax_stride": step.blocks,
        "resampled_local_max_ptr": step.stale((B, step.blocks), np.float64 if fp64 else np.float32),
        "resampled_local_max_stride": step.blocks,
        "target_logits_ptr": step.target,
        "target_logits_stride": VOCABULARY,
        "target_rejected_logsumexp_ptr": step.log_sums(step.max, step.sum)[at],
        **step.draft_arguments,
        "draft_rejected_logsumexp_ptr": step.log_sums(step.draft_max, step.draft_sum)[at],
        "rejected_step_ptr": rejected,
        "cu_num_logits_ptr": step.cu,
        "expanded_idx_mapping_ptr": step.expanded,
        "draft_sampled_ptr": step.sampled,
        "temp_ptr": step.temperature,
        "seed_ptr": step.seed,
        "pos_ptr": i64(rng.integers(0, 2**33, step.count)),
        "cumulative_log_p_ptr": None,
        "contexts_ptr": None,
        "contexts_stride": 0,
        "watermarking_ptr": None,
        "watermarking_skip_mask_ptr": None,
        "watermark_key_0": 0,
        "watermark_key_1": 0,
        "vocab_size": VOCABULARY,
        "BLOCK_SIZE": step.block,
        "HAS_DRAFT_LOGITS": step.has_draft,
        "USE_FP64": fp64,
        "USE_BLOCK_VERIFICATION": False,
        "CONTEXT_WIDTH": 1,
        "WATERMARK": False,
        "DEDUPLICATE_CONTEXTS": False,
    }


def insert_resampled(rng: Rng) -> Launch:
    step = Verification(rng)
    B, K = step.requests, step.num_drafts
    return (B,), {
        "sampled_ptr": step.stale((B, K + 1), np.int64),
        "sampled_stride": K + 1,
        "num_sampled_ptr": i32(rng.integers(0, step.logits)),
        "resampled_local_argmax_ptr": step.ids((B, step.blocks)),
        "resampled_local_argmax_stride": step.blocks,
        "resampled_local_max_ptr": rng.normal(size=(B, step.blocks)).astype(np.float32),
        "resampled_local_max_stride": step.blocks,
        "resample_num_blocks": step.blocks,
        "cu_num_logits_ptr": step.cu,
        "expanded_idx_mapping_ptr": step.expanded,
        "temp_ptr": step.temperature,
        "PADDED_RESAMPLE_NUM_BLOCKS": power_of_2(step.blocks),
    }


def ngram_scan(rng: Rng) -> Launch:
    state, block = State(rng), 8
    least = int(rng.integers(1, 3))
    most, blocks = least + int(rng.integers(0, 3)), -(-WIDTH // block)
    return (state.requests, blocks), {
        "token_ids_ptr": state.known % 3,
        "token_ids_stride": WIDTH,
        "idx_mapping_ptr": i64(state.idx),
        "total_len_ptr": i32(rng.integers(0, WIDTH + 1, state.rows)),
        "num_sampled_ptr": i32(rng.integers(0, 3, state.requests)),
        "scratch_ptr": state.stale((state.requests, blocks), np.int64),
        "scratch_stride": blocks,
        "L": WIDTH,
        "MIN_N": least,
        "MAX_N": most,
        "MAX_N_PO2": power_of_2(most),
        "BLOCK_L": block,
    }


def ngram_finalize(rng: Rng) -> Launch:
    state, drafts = State(rng), int(rng.integers(1, 5))
    blocks = 3
    n, place = rng.integers(1, 4, (state.requests, blocks)), rng.integers(0, WIDTH - 4, (state.requests, blocks))
    scores = np.where(rng.random(n.shape) < 0.6, n * (WIDTH + 1) + place + 1, 0)
    return (state.requests,), {
        "token_ids_ptr": state.known,
        "token_ids_stride": WIDTH,
        "idx_mapping_ptr": i64(state.idx),
        "total_len_ptr": i32(rng.integers(1, WIDTH + 1, state.rows)),
        "num_sampled_ptr": i32(rng.integers(0, 3, state.requests)),
        "last_sampled_ptr": state.ids((state.rows, 1)),
        "scratch_ptr": i64(scores),
        "scratch_stride": blocks,
        "drafts_ptr": state.stale((state.requests, drafts), np.int64),
        "L": WIDTH,
        "N_BLOCKS": blocks,
        "K": drafts,
        "K_PO2": power_of_2(drafts),
        "N_BLOCKS_PO2": power_of_2(blocks),
    }


def update_committed_marker_cache(rng: Rng) -> Launch:
    state = State(rng)
    length = i32(rng.integers(0, WIDTH + 1, state.rows))
    start, end, _ = markers(rng)
    is_first = rng.random(state.rows) < 0.5

    def cached() -> np.ndarray:
        places = np.where(rng.random(state.rows) < 0.5, rng.integers(-1, 1, state.rows), rng.integers(0, WIDTH))
        return i32(np.where(is_first, -1, places))

    scanned = np.where(rng.random(state.rows) < 0.5, length, rng.integers(0, WIDTH + 2, state.rows))
    scanned[rng.random(state.rows) < 0.25] = 0
    return (state.requests,), {
        "req_ids_ptr": state.idx,
        "thinking_token_budget_ptr": i32(rng.integers(-1, 9, state.rows)),
        "all_token_ids_ptr": i32(rng.integers(0, 4, (state.rows, WIDTH))),
        "all_token_ids_stride": WIDTH,
        "total_len_ptr": length,
        "cached_last_start_ptr": cached(),
        "cached_last_end_ptr": cached(),
        "cached_scan_pos_ptr": i32(np.where(is_first, 0, scanned)),
        "reasoning_start_token_ids_ptr": start,
        "natural_reasoning_end_token_ids_ptr": end,
        "START_LEN": len(start),
        "NATURAL_END_LEN": len(end),
        "MAX_LEN": max(len(start), len(end)),
        "BLOCK": 4,
    }


def thinking_budget(rng: Rng) -> Launch:
    state = State(rng)
    start, natural_end, end = markers(rng)
    return (state.count,), {
        "logits_ptr": state.logits_of(state.count),
        "logits_stride": VOCABULARY,
        "expanded_idx_mapping_ptr": state.expanded,
        "thinking_token_budget_ptr": i32(rng.integers(-1, 5, state.rows)),
        "all_token_ids_ptr": i32(rng.integers(0, 3, (state.rows, WIDTH))),
        "all_token_ids_stride": WIDTH,
        "total_len_ptr": i32(rng.integers(1, WIDTH + 1, state.rows)),
        "input_ids_ptr": i32(rng.integers(0, 3, state.count)),
        "expanded_local_pos_ptr": state.local,
        "cached_last_start_ptr": i32(rng.integers(-1, WIDTH // 2, state.rows)),
        "cached_last_end_ptr": i32(rng.integers(-1, WIDTH // 2, state.rows)),
        "reasoning_start_token_ids_ptr": start,
        "natural_reasoning_end_token_ids_ptr": natural_end,
        "reasoning_end_token_ids_ptr": end,
        "START_LEN": len(start),
        "NATURAL_END_LEN": len(natural_end),
        "END_LEN": len(end),
    }


def markers(rng: Rng) -> list[np.ndarray]:
    """The begin, the natural end and the forced end of thinking, of tokens that often stand together."""
    return [i32(rng.integers(0, 3, int(rng.integers(1, most)))) for most in (3, 3, 4)]


def zero_kv_blocks(rng: Rng) -> Launch:
    segments, blocks = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    strides = rng.integers(3, 9, segments)
    sizes = rng.integers(1, strides + 1)
    return (blocks, segments, -(-int(sizes.max()) // 4)), {
        "seg_addrs_ptr": Pointers([i32(rng.integers(1, 99, 6 * stride)) for stride in strides]),
        "seg_block_strides_ptr": i64(strides),
        "seg_page_sizes_ptr": i64(sizes),
        "block_ids_ptr": i64(rng.permutation(6)[:blocks]),
        "BLOCK_SIZE": 4,
    }


class Recurrent:
    """Block tables of a few rows, no two of which share a block, and the states of some layers in these blocks."""

    columns, most_accepted = 5, 3

    def __init__(self, rng: Rng) -> None:
        self.rows = R = int(rng.integers(1, 4))
        self.requests = B = int(rng.integers(1, R + 1))
        self.has_mapping = bool(rng.random() < 0.7)
        idx = np.where(rng.random(B) < 0.2, -1, rng.permutation(R)[:B])
        self.is_dim_first = bool(rng.random() < 0.5)
        tables = [i32(rng.permutation(R * self.columns).reshape(R, -1)) for _ in range(int(rng.integers(1, 3)))]
        states = [self.state(rng) for _ in range(int(rng.integers(1, 4)))]
        tiles = int(rng.integers(1, 3))
        strides, sizes, inner, widths, dims, row_strides = zip(*states, strict=True)
        memory = [rng.integers(0, 256, R * self.columns * stride).astype(np.uint8) for stride in strides]
        self.grid = (B, len(states), tiles)
        self.arguments = {
            "block_table_ptrs_ptr": Pointers(tables),
            "block_table_stride_req": self.columns,
            "state_base_addrs_ptr": Pointers(memory),
            "state_block_strides_ptr": i64(strides),
            "state_elem_sizes_ptr": i32(sizes),
            "state_inner_sizes_ptr": i64(inner),
            "state_conv_widths_ptr": i32(widths),
            "state_group_indices_ptr": i32(rng.integers(0, len(tables), len(states))),
            "state_dim_row_count_ptr": i32(dims),
            "state_dim_row_stride_ptr": i64(row_strides),
            "idx_mapping_ptr": i32(idx) if self.has_mapping else None,
            "num_reqs": B,
            "COPY_BLOCK_SIZE": int(rng.choice([2, 16])),
            "CONV_STATE_DIM_FIRST": self.is_dim_first,
            "HAS_IDX_MAPPING": self.has_mapping,
            "TEMPORAL_TILES": tiles,
        }

    def state(self, rng: Rng) -> tuple[int, ...]:
        """Bytes between blocks, bytes of a number, numbers, width of a window or 0, its rows, bytes between them."""
        size, numbers, width, gap = (int(rng.integers(*limits)) for limits in ((0, 4), (1, 4), (2, 5), (0, 3)))
        size = 1 << size
        if rng.random() < 0.4:
            return (numbers + gap) * size, size, numbers, 0, 0, 0
        if self.is_dim_first:
            row = (width + gap) * size
            return numbers * row, size, 1, width, numbers, row
        return (width * numbers + gap) * size, size, numbers, width, 0, 0


def preprocess_mamba_align_fused(rng: Rng) -> Launch:
    state = State(rng)
    return (-(-state.requests // 4),), {
        "idx_mapping_ptr": state.idx,
        "state_idx_ptr": i32(rng.integers(-1, 4, state.rows)),
        "num_computed_tokens_ptr": state.computed,
        "query_start_loc_ptr": state.loc,
        "num_accepted_tokens_ptr": i32(rng.integers(0, 4, state.rows)),
        "src_col_ptr": state.stale(state.rows),
        "src_off_ptr": state.stale(state.rows),
        "num_reqs": state.requests,
        "BLOCK_SIZE": 4,
        "MAMBA_BLOCK_SIZE": int(rng.integers(2, 6)),
    }


def precopy_mamba_align_fused(rng: Rng) -> Launch:
    step = Recurrent(rng)
    bias = rng.integers(0, step.most_accepted, step.rows)
    source = rng.integers(0, step.columns - bias)
    return step.grid, {
        "mamba_state_idx_ptr": i32(rng.integers(0, step.columns, step.rows)),
        "src_col_ptr": i32(np.where(rng.random(step.rows) < 0.2, -1, source)),
        "token_bias_ptr": i32(bias),
        **step.arguments,
    }


def postprocess_mamba_fused(rng: Rng) -> Launch:
    step, is_advanced, size = Recurrent(rng), bool(rng.random() < 0.5), int(rng.integers(2, 5))
    accepted = rng.integers(1, step.most_accepted + 1, step.rows)
    running = rng.integers(1, size * step.columns - accepted + 2)
    scheduled, drafts = rng.integers(1, 5, step.rows), rng.integers(0, 4, step.rows)
    source = np.minimum(np.where(rng.random(step.rows) < 0.6, (running - 1) // size, 0), step.columns - accepted)
    return step.grid, {
        "num_accepted_tokens_ptr": i32(accepted),
        "mamba_state_idx_ptr": i32(source),
        "num_scheduled_tokens_ptr": None if is_advanced else i32(scheduled),
        "num_computed_tokens_ptr": i32(running + accepted - 1 if is_advanced else running - scheduled + drafts),
        "num_draft_tokens_ptr": None if is_advanced else i32(drafts),
        **step.arguments,
        "num_accepted_tokens_out_ptr": i32(accepted),
        "block_size": size,
        "PRECOMPUTED_NEW_COMPUTED": is_advanced,
    }


def get_aligned_state_indices_multi_group(rng: Rng) -> Launch:
    groups, requests, slots, size = (int(rng.integers(1, most)) for most in (4, 7, 4, 5))
    columns = 4 + slots
    return (-(-requests // 4),), {
        "block_table_ptrs_ptr": Pointers([i32(rng.integers(1, 99, (requests, columns))) for _ in range(groups)]),
        "seq_lens_ptr": i32(rng.integers(0, 4 * size + 1, requests)),
        "state_indices_ptr": i32(rng.integers(-9, 0, (groups, requests + 1, slots))),
        "block_table_stride_req": columns,
        "seq_lens_stride": 1,
        "state_indices_stride_0": (requests + 1) * slots,
        "state_indices_stride_1": slots,
        "state_indices_stride_2": 1,
        "num_requests": requests,
        "CACHE_BLOCK_SIZE": size,
        "NUM_GROUPS": groups,
        "BLOCK_GROUPS": power_of_2(groups),
        "NUM_STATE_SLOTS": slots,
        "BLOCK_STATE_SLOTS": power_of_2(slots),
        "BLOCK_ROWS": 4,
    }


LAUNCHES: dict[str, Callable[[Rng], Launch]] = {
    f"{function.__name__}_kernel": function
    for function in (
        apply_write,
        zero_kv_blocks,
        gather_block_tables,
        compute_slot_mappings,
        dcp_local_seq_lens,
        prepare_prefill_inputs,
        prepare_pos_seq_lens,
        combine_sampled_and_draft_tokens,
        expand_idx_mapping,
        get_num_sampled_and_rejected,
        post_update,
        post_update_num_computed_tokens,
        prepare_rope_positions,
        apply_prompt_embeds,
        scatter_num_accepted,
        fill_num_accepted,
        temperature,
        gumbel_sample,
        bias,
        bincount,
        penalties,
        bad_words,
        min_p,
        topk_log_softmax,
        ranks,
        fill_logprob_token_ids,
        num_nans,
        prompt_logprobs_token_ids,
        apply_grammar_bitmask,
        flatten_sampled,
        gather_draft_sampled,
        compute_local_logits_stats,
        rejection,
        resample,
        insert_resampled,
        ngram_scan,
        ngram_finalize,
        update_committed_marker_cache,
        thinking_budget,
        preprocess_mamba_align_fused,
        precopy_mamba_align_fused,
        postprocess_mamba_fused,
        get_aligned_state_indices_multi_group,
    )
}
