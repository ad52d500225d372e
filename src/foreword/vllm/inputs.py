"""The kernels of the input layer of vLLM's second model runner (`vllm.v1.worker.gpu`), as functions over its buffers.

A function has the name of the kernel without its leading underscore. It takes the grid of the launch, then the kernel's
arguments under their names. What is a pointer there is an array here, as the runner holds it: with its shape and
strides, so that the arguments ``…_stride`` are not read. Constants (upper case) are keywords, and arguments that only
one of the known versions of vLLM has are optional. Arrays are changed in place; nothing is returned. A table of
pointers (uint64) holds addresses of memory of this process.

R rows of requests, B requests of the step, T its tokens, L its logits, G KV cache groups, K drafts of a request.
``idx_mapping`` [B] is the row of each request; ``query_start_loc`` [B + 1] the first token of each and, last, T;
``cu_num_logits`` [B + 1] likewise for logits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.arrays import I64, AnyArray, Ints

Grid = tuple[int, ...]


class _Memory:
    """Memory at an address, for `np.asarray`."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }


def array_at(address: int, shape: tuple[int, ...], dtype: npt.DTypeLike = np.int32) -> AnyArray:
    """Return the memory at an address of this process as an array. The caller keeps the memory alive."""
    return np.asarray(_Memory(int(address), shape, dtype))


def ranges(starts: Ints, lengths: Ints) -> tuple[I64, I64]:
    """Return starts[b], …, starts[b] + lengths[b] - 1 for each b, one after another, and the b of each entry."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.arange(len(owners)) + (starts - first)[owners], owners


def apply_write_kernel(
    grid: Grid,
    output_ptr: AnyArray,
    output_stride: int | Ints,
    write_indices_ptr: Ints,
    write_starts_ptr: Ints,
    write_contents_ptr: AnyArray,
    write_cu_lens_ptr: Ints,
    write_group_ids_ptr: Ints | None,
    *,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Write staged contents into rows: output[indices[i], starts[i] + j] = contents[cu_lens[i - 1] + j].

    ``MULTI_GROUP``: write i goes to the int32 table at the address output_ptr[group_ids[i]], whose rows have
    output_stride[group_ids[i]] entries. Where writes overlap, the last one counts.
    """
    writes = grid[0]
    ends = write_cu_lens_ptr[:writes]
    columns, owners = ranges(write_starts_ptr[:writes], np.diff(ends, prepend=0))
    rows, contents = write_indices_ptr[:writes][owners], write_contents_ptr[: len(owners)]
    if write_group_ids_ptr is None or not MULTI_GROUP:
        output = output_ptr.reshape(len(output_ptr), -1)
        output[rows, columns] = contents
        return
    groups = write_group_ids_ptr[:writes][owners]
    for group in np.unique(groups):
        mine = groups == group
        table = array_at(output_ptr[group], (int(rows[mine].max()) + 1, int(np.asarray(output_stride)[group])))
        table[rows[mine], columns[mine]] = contents[mine]


def prepare_prefill_inputs_kernel(
    grid: Grid,
    input_ids_ptr: Ints,
    next_prefill_tokens_ptr: Ints,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: Ints,
    query_start_loc_ptr: Ints,
    all_token_ids_ptr: Ints,
    all_token_ids_stride: int,
    prefill_lens_ptr: Ints,
    num_computed_tokens_ptr: Ints,
    *,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """Copy the scheduled tokens of requests inside their prefill to input_ids, and the tokens after them, for drafters.

    For request b of row r with c = computed[r] < prefill_lens[r] and n scheduled tokens:
    input_ids[loc[b] + j] = all_token_ids[r, c + j] for j < n;
    next_prefill_tokens[k, r] = all_token_ids[r, c + n + k] if c + n + k < prefill_lens[r], else 0.
    """
    rows = idx_mapping_ptr[: grid[0]]
    inside = num_computed_tokens_ptr[rows] < prefill_lens_ptr[rows]
    if not inside.any():
        return
    rows, starts = rows[inside], query_start_loc_ptr[: grid[0]][inside]
    lengths = np.diff(query_start_loc_ptr[: grid[0] + 1])[inside]
    computed = num_computed_tokens_ptr[rows]
    places, owners = ranges(computed, lengths)
    to, _ = ranges(starts, lengths)
    input_ids_ptr[to] = all_token_ids_ptr[rows[owners], places]
    following = (computed + lengths)[None] + np.arange(num_lookahead)[:, None]
    known = following < prefill_lens_ptr[rows]
    tokens = all_token_ids_ptr[rows, np.where(known, following, 0)]
    next_prefill_tokens_ptr[:num_lookahead, rows] = np.where(known, tokens, 0)


def prepare_pos_seq_lens_kernel(
    grid: Grid,
    pos_ptr: Ints,
    seq_lens_ptr: Ints,
    idx_mapping_ptr: Ints,
    query_start_loc_ptr: Ints,
    num_computed_tokens_ptr: Ints,
    max_num_reqs: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set seq_lens[b] = computed[idx[b]] + n[b], zero up to max_num_reqs, and pos[loc[b] + j] = computed[idx[b]] + j.

    The grid has one program per request and one for the zeros.
    """
    requests = grid[0] - 1
    loc = query_start_loc_ptr[: requests + 1]
    lengths, computed = np.diff(loc), num_computed_tokens_ptr[idx_mapping_ptr[:requests]]
    seq_lens_ptr[:requests] = computed + lengths
    seq_lens_ptr[requests:max_num_reqs] = 0
    positions, owners = ranges(computed, lengths)
    pos_ptr[loc[0] : loc[0] + len(owners)] = positions


def combine_sampled_and_draft_tokens_kernel(
    grid: Grid,
    input_ids_ptr: Ints,
    idx_mapping_ptr: Ints,
    last_sampled_tokens_ptr: Ints,
    query_start_loc_ptr: Ints,
    seq_lens_ptr: Ints,
    prefill_len_ptr: Ints,
    draft_tokens_ptr: Ints,
    draft_tokens_stride: int,
    cu_num_logits_ptr: Ints,
    logits_indices_ptr: Ints,
    *,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Set logits_indices to the last n = cu_num_logits[b + 1] - cu_num_logits[b] tokens of each request. Behind its
    prefill (seq_lens[b] > prefill_len) the first of these tokens becomes the last sampled one, the others the drafts.

    The sampled token is written only if its position is not of the prefill. ``NUM_NEW_SAMPLED_TOKENS`` 0: all n are
    drafts.
    """
    requests = grid[0]
    rows, ends = idx_mapping_ptr[:requests], query_start_loc_ptr[1 : requests + 1]
    cu, lengths = cu_num_logits_ptr[: requests + 1], seq_lens_ptr[:requests]
    logits, prefill = np.diff(cu), prefill_len_ptr[idx_mapping_ptr[:requests]]
    indices, _ = ranges(ends - logits, logits)
    logits_indices_ptr[cu[0] : cu[0] + len(indices)] = indices
    behind = lengths > prefill
    if NUM_NEW_SAMPLED_TOKENS > 0:
        generated = np.flatnonzero(behind & (lengths - logits >= prefill))
        input_ids_ptr[(ends - logits)[generated]] = last_sampled_tokens_ptr.reshape(-1)[rows[generated]]
    drafts = np.where(behind, np.maximum(logits - NUM_NEW_SAMPLED_TOKENS, 0), 0)
    if drafts.any():
        to, owners = ranges(ends - drafts, drafts)
        columns, _ = ranges(np.zeros_like(drafts), drafts)
        input_ids_ptr[to] = draft_tokens_ptr[rows[owners], columns]


def get_num_sampled_and_rejected_kernel(
    grid: Grid,
    num_sampled_ptr: Ints,
    num_rejected_ptr: Ints,
    seq_lens_ptr: Ints,
    cu_num_logits_ptr: Ints,
    idx_mapping_ptr: Ints,
    prefill_len_ptr: Ints,
) -> None:
    """Set both counts to 0 within the prefill (seq_lens[b] < prefill_len[idx[b]]); else rejected = logits - sampled."""
    requests = grid[0]
    chunk = seq_lens_ptr[:requests] < prefill_len_ptr[idx_mapping_ptr[:requests]]
    num_sampled_ptr[:requests][chunk] = 0
    rejected = np.diff(cu_num_logits_ptr[: requests + 1]) - num_sampled_ptr[:requests]
    num_rejected_ptr[:requests] = np.where(chunk, 0, rejected)


def post_update_kernel(
    grid: Grid,
    idx_mapping_ptr: Ints,
    num_computed_tokens_ptr: Ints,
    last_sampled_tokens_ptr: Ints,
    output_bin_counts_ptr: Ints | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: Ints,
    sampled_tokens_stride: int,
    num_sampled_ptr: Ints,
    num_rejected_ptr: Ints,
    query_start_loc_ptr: Ints | None,
    all_token_ids_ptr: Ints,
    all_token_ids_stride: int,
    total_len_ptr: Ints,
    *,
    draft_tokens_ptr: Ints | None = None,
    draft_tokens_out_ptr: Ints | None = None,
    num_draft_tokens: int = 0,
) -> None:
    """Record the samples of a step: for each request b with row r = idx[b] >= 0 and n = num_sampled[b]:

    all_token_ids[r, total_len[r] + j] = sampled[b, j] and output_bin_counts[r, sampled[b, j]] += 1 for j < n;
    last_sampled[r] = sampled[b, n - 1] if n > 0; total_len[r] += n;
    computed[r] += scheduled tokens - rejected[b] (without ``query_start_loc``: - rejected[b]);
    draft_tokens_out[r] = draft_tokens[b].
    """
    live = np.flatnonzero(idx_mapping_ptr[: grid[0]] >= 0)
    rows, counts = idx_mapping_ptr[live], num_sampled_ptr[live]
    if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
        draft_tokens_out_ptr[rows, :num_draft_tokens] = draft_tokens_ptr[live, :num_draft_tokens]
    sampling = np.flatnonzero(counts > 0)
    last = sampled_tokens_ptr[live[sampling], counts[sampling] - 1]
    last_sampled_tokens_ptr.reshape(-1)[rows[sampling]] = last
    columns, owners = ranges(np.zeros_like(counts), np.maximum(counts, 0))
    tokens = sampled_tokens_ptr[live[owners], columns]
    all_token_ids_ptr[rows[owners], total_len_ptr[rows[owners]] + columns] = tokens
    if output_bin_counts_ptr is not None:
        np.add.at(output_bin_counts_ptr, (rows[owners], tokens), 1)
    total_len_ptr[rows] += np.maximum(counts, 0)
    scheduled = 0 if query_start_loc_ptr is None else np.diff(query_start_loc_ptr[: grid[0] + 1])[live]
    num_computed_tokens_ptr[rows] += scheduled - num_rejected_ptr[live]


def post_update_num_computed_tokens_kernel(
    grid: Grid, idx_mapping_ptr: Ints, num_computed_tokens_ptr: Ints, query_start_loc_ptr: Ints
) -> None:
    """Add to computed[idx[b]] the scheduled tokens of request b: for pooling, and for pipeline stages that sample
    nothing.
    """
    num_computed_tokens_ptr[idx_mapping_ptr[: grid[0]]] += np.diff(query_start_loc_ptr[: grid[0] + 1])


def expand_idx_mapping_kernel(
    grid: Grid,
    idx_mapping_ptr: Ints,
    expanded_idx_mapping_ptr: Ints,
    expanded_local_pos_ptr: Ints,
    cu_num_logits_ptr: Ints,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set expanded_idx_mapping[cu[b] + j] = idx[b] and expanded_local_pos[cu[b] + j] = j for logit j of request b."""
    cu = cu_num_logits_ptr[: grid[0] + 1]
    counts = np.diff(cu)
    positions, owners = ranges(np.zeros_like(counts), counts)
    logits = slice(int(cu[0]), int(cu[0]) + len(owners))
    expanded_idx_mapping_ptr[logits] = idx_mapping_ptr[owners]
    expanded_local_pos_ptr[logits] = positions


def gather_block_tables_kernel(
    grid: Grid,
    batch_idx_to_req_idx: Ints,
    src_block_table_ptrs: AnyArray,
    dst_block_table_ptrs: AnyArray,
    block_table_strides: Ints,
    num_blocks_ptr: Ints,
    num_blocks_stride: int,
    num_reqs: int,
    *,
    num_computed_tokens_ptr: Ints | None = None,
    sliding_window_reach_ptr: Ints | None = None,
    block_sizes_ptr: Ints | None = None,
    BLOCK_SIZE: int,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the block tables of the batch: dst[g][b, c] = src[g][idx[b], c] for c < num_blocks[g, idx[b]]; rows from
    num_reqs to the end of the grid are zeroed. What is behind the blocks of a request stays as it was.

    ``MASK_SLIDING_WINDOW``: for groups with reach w > 0 the first max(computed[idx[b]] - w, 0) // block_size blocks,
    which no token of the step attends to, are 0.
    """
    groups, padded = grid[0], grid[1]
    computed, reaches, sizes = num_computed_tokens_ptr, sliding_window_reach_ptr, block_sizes_ptr
    rows = batch_idx_to_req_idx[:num_reqs]
    held = num_blocks_ptr[:groups, rows]
    longest = held.max(axis=1, initial=0)
    height = int(rows.max(initial=-1)) + 1
    for group in range(groups):
        width, columns = int(block_table_strides[group]), np.arange(longest[group])
        target = array_at(dst_block_table_ptrs[group], (padded, width))
        target[num_reqs:] = 0
        blocks = array_at(src_block_table_ptrs[group], (height, width))[rows, : longest[group]]
        if MASK_SLIDING_WINDOW and computed is not None and reaches is not None and sizes is not None:
            reach = int(reaches[group])
            below = np.maximum(computed[rows] - reach, 0) // sizes[group] if reach > 0 else np.zeros_like(rows)
            blocks[columns < below[:, None]] = 0
        np.copyto(target[:num_reqs, : longest[group]], blocks, where=columns < held[group][:, None])


def compute_slot_mappings_kernel(
    grid: Grid,
    max_num_tokens: int,
    idx_mapping: Ints,
    query_start_loc: Ints,
    pos: Ints,
    block_table_ptrs: AnyArray,
    block_table_strides: Ints,
    block_sizes: Ints,
    slot_mapping_enabled: AnyArray,
    dcp_sharded: AnyArray,
    slot_mappings_ptr: Ints,
    slot_mappings_stride: int,
    cp_rank: int,
    *,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Write the slot of the key and value of each token: for token t of request b at position p of a group with blocks
    of S:
    slot = table[idx[b], p // S] * S + p % S, computed in int64.

    ``PAD_ID`` for tokens of rows -1, for groups that are not enabled, and from T to max_num_tokens. In sharded groups
    of ``CP_SIZE`` ranks, runs of ``CP_INTERLEAVE`` positions go to the ranks in turn: p becomes the position among
    those of this rank, and tokens of other ranks are ``PAD_ID``. The grid has groups, and requests and one more.
    """
    groups, requests = grid[0], grid[1] - 1
    loc = query_start_loc[: requests + 1]
    _, owners = ranges(loc[:-1], np.diff(loc))
    rows, positions = idx_mapping[owners], pos[loc[0] : loc[0] + len(owners)].astype(np.int64)
    real = rows >= 0
    rows, height = np.maximum(rows, 0), int(rows.max(initial=0)) + 1
    slot_mappings_ptr[:groups, loc[-1] : max_num_tokens] = PAD_ID
    for group in range(groups):
        out = slot_mappings_ptr[group, loc[0] : loc[0] + len(owners)]
        if not slot_mapping_enabled[group]:
            out[:] = PAD_ID
            continue
        size, mine, local = int(block_sizes[group]), real, positions
        if CP_SIZE != 1 and dcp_sharded[group]:
            turn, offset = np.divmod(positions, size * CP_SIZE)
            mine = real & (offset // CP_INTERLEAVE % CP_SIZE == cp_rank)
            local = turn * size + offset // (CP_INTERLEAVE * CP_SIZE) * CP_INTERLEAVE + offset % CP_INTERLEAVE
        table = array_at(block_table_ptrs[group], (height, int(block_table_strides[group])))
        columns, offsets = np.divmod(local, size)
        blocks = table[rows, np.where(mine, columns, 0)].astype(np.int64)
        out[:] = np.where(mine, blocks * size + offsets, PAD_ID)


def dcp_local_seq_lens_kernel(
    grid: Grid,
    out_ptr: Ints,
    seq_lens_ptr: Ints,
    dcp_size: int,
    dcp_rank: int,
    cp_interleave: int,
    num_reqs: int,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Set out[b] to the number of seq_lens[b] positions on this rank, where runs of ``cp_interleave`` go to
    ``dcp_size`` ranks in turn. The entries from num_reqs to max_num_reqs become zero.
    """
    rounds, rest = np.divmod(seq_lens_ptr[:num_reqs], dcp_size * cp_interleave)
    rest = np.clip(rest - dcp_rank * cp_interleave, 0, cp_interleave)
    out_ptr[:num_reqs] = rounds * cp_interleave + rest
    out_ptr[num_reqs:max_num_reqs] = 0


def prepare_rope_positions_kernel(
    grid: Grid,
    positions_ptr: Ints,
    positions_stride: int,
    prefill_positions_ptr: Ints,
    prefill_positions_stride0: int,
    prefill_positions_stride1: int,
    prefill_delta_ptr: Ints,
    idx_mapping_ptr: Ints,
    query_start_loc_ptr: Ints,
    prefill_lens_ptr: Ints,
    num_computed_tokens_ptr: Ints,
    *,
    BLOCK_SIZE: int,
    NUM_DIMS: int,
) -> None:
    """Set the positions of M-RoPE: positions[d, loc[b] + j] for dimension d of token j of request b with row r and c =
    computed[r] becomes prefill_positions[r * NUM_DIMS + d, c + j] where c is in the prefill, else c + j +
    prefill_delta[r].
    """
    rows, loc = idx_mapping_ptr[: grid[0]], query_start_loc_ptr[: grid[0] + 1]
    computed = num_computed_tokens_ptr[rows]
    places, owners = ranges(computed, np.diff(loc))
    inside = (computed < prefill_lens_ptr[rows])[owners]
    given, later = rows[owners][inside], rows[owners][~inside]
    for dimension in range(NUM_DIMS):
        positions = positions_ptr[dimension, loc[0] : loc[0] + len(owners)]
        positions[inside] = prefill_positions_ptr[given * NUM_DIMS + dimension, places[inside]]
        positions[~inside] = places[~inside] + prefill_delta_ptr[later]


def apply_prompt_embeds_kernel(
    grid: Grid,
    inputs_embeds_ptr: AnyArray,
    inputs_embeds_stride: int,
    embeds_ptrs_ptr: AnyArray,
    mask_ptrs_ptr: AnyArray,
    embeds_lens_ptr: Ints,
    idx_mapping_ptr: Ints,
    query_start_loc_ptr: Ints,
    num_computed_tokens_ptr: Ints,
    *,
    hidden_size: int,
    TOKEN_BLOCK: int,
    BLOCK_SIZE: int,
) -> None:
    """Set inputs_embeds[loc[b] + j] = embeds[c + j] for the tokens of request b whose position c + j is below
    embeds_lens[r], unless mask[c + j] says that the position has a token id.

    embeds_ptrs [R]: addresses of arrays [embeds_lens[r], hidden_size] of the dtype of ``inputs_embeds``; mask_ptrs [R]:
    addresses of int8 [embeds_lens[r]], or 0.
    """
    rows, loc = idx_mapping_ptr[: grid[0]], query_start_loc_ptr[: grid[0] + 1]
    computed, known = num_computed_tokens_ptr[rows], embeds_lens_ptr[rows]
    for b in np.flatnonzero(computed < known):
        row, start, count = rows[b], computed[b], min(loc[b + 1] - loc[b], known[b] - computed[b])
        shape = (int(known[b]), hidden_size)
        source = array_at(embeds_ptrs_ptr[row], shape, inputs_embeds_ptr.dtype)[start : start + count]
        target = inputs_embeds_ptr[loc[b] : loc[b] + count]
        if mask_ptrs_ptr[row]:
            is_token = array_at(mask_ptrs_ptr[row], shape[:1], np.int8)[start : start + count] != 0
            np.copyto(target, source, where=~is_token[:, None])
        else:
            target[:] = source


def scatter_num_accepted_kernel(
    grid: Grid, idx_mapping_ptr: Ints, num_sampled_ptr: Ints, num_accepted_ptr: Ints
) -> None:
    """Set num_accepted[idx[b]] = max(num_sampled[b], 1) where idx[b] >= 0, for models with recurrent states."""
    live = np.flatnonzero(idx_mapping_ptr[: grid[0]] >= 0)
    num_accepted_ptr[idx_mapping_ptr[live]] = np.maximum(num_sampled_ptr[live], 1)


def fill_num_accepted_kernel(grid: Grid, idx_mapping_ptr: Ints, num_accepted_ptr: Ints, num_sampled: int) -> None:
    """Set num_accepted[idx[b]] = num_sampled where idx[b] >= 0."""
    rows = idx_mapping_ptr[: grid[0]]
    num_accepted_ptr[rows[rows >= 0]] = num_sampled


def zero_kv_blocks_kernel(
    grid: Grid,
    seg_addrs_ptr: AnyArray,
    seg_block_strides_ptr: Ints,
    seg_page_sizes_ptr: Ints,
    block_ids_ptr: Ints,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Zero blocks of the cache: page_sizes[s] int32 words from word block_ids[i] * strides[s] on, in the memory at the
    address addrs[s] of each segment: models with recurrent states. The grid has blocks, segments, and chunks of a page.
    """
    blocks, segments = block_ids_ptr[: grid[0]], slice(grid[1])
    strides, sizes = seg_block_strides_ptr[segments].tolist(), seg_page_sizes_ptr[segments].tolist()
    for address, stride, size in zip(seg_addrs_ptr[segments].tolist(), strides, sizes, strict=True):
        array_at(address, (int(blocks.max()) + 1, stride))[blocks, :size] = 0
