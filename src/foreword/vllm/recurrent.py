"""The kernels of vLLM (`vllm.v1.worker.mamba_utils`) that keep recurrent states at the borders of blocks, as functions.

They are needed where a model with recurrent states caches prefixes: while a request computes a block of S tokens, its
states are in the block's column of the block table. `inputs` describes how the functions are called.

A state is an array of one layer, with an entry per block: base_addrs [N] its address, block_strides [N] the bytes from
one entry to the next, elem_sizes [N] the bytes of a number, group_indices [N] the KV cache group of the layer. It is
*temporal* (conv_widths 0, inner_sizes numbers) or a *window* of the last conv_widths tokens, with inner_sizes numbers
per token. With ``CONV_STATE_DIM_FIRST`` a window has dim_row_count rows, dim_row_stride bytes apart, with a number per
token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foreword.arrays import Ints
from foreword.vllm.inputs import Grid, array_at


@dataclass(frozen=True, slots=True)
class _States:
    """The states of all layers, and the block tables through which rows find them. See the module."""

    block_table_ptrs: Ints
    block_table_stride: int
    base_addrs: Ints
    block_strides: Ints
    elem_sizes: Ints
    inner_sizes: Ints
    conv_widths: Ints
    group_indices: Ints
    dim_row_count: Ints
    dim_row_stride: Ints
    is_dim_first: bool

    def copy(self, rows: Ints, sources: Ints, targets: Ints, shifts: Ints) -> None:
        """Copy each state of row rows[i] from column sources[i] to column targets[i], as it was shifts[i] tokens later.

        A window loses its first shifts[i] tokens, and its last ones keep what they were. A temporal state is that of
        column sources[i] + shifts[i], where the states after each draft are.
        """
        if not len(rows):
            return
        tables = [
            array_at(address, (int(rows.max()) + 1, self.block_table_stride))[rows]
            for address in self.block_table_ptrs.tolist()
        ]
        entries = np.arange(len(rows))
        for state, group in enumerate(self.group_indices.tolist()):
            table, is_window = tables[group], bool(self.conv_widths[state])
            written = table[entries, targets]
            if is_window:
                for shift in np.unique(shifts):
                    at = shifts == shift
                    self._copy_blocks(state, table[entries, sources][at], written[at], int(shift))
            else:
                self._copy_blocks(state, table[entries, sources + shifts], written, 0)

    def _copy_blocks(self, state: int, sources: Ints, targets: Ints, shift: int) -> None:
        token, width = int(self.elem_sizes[state]), int(self.conv_widths[state])
        if self.is_dim_first and width:
            rows, row = int(self.dim_row_count[state]), int(self.dim_row_stride[state])
        else:
            token *= int(self.inner_sizes[state])
            rows, row = 1, max(width, 1) * token
        shape = int(max(sources.max(), targets.max())) + 1, int(self.block_strides[state])
        blocks = array_at(int(self.base_addrs[state]), shape, np.uint8)[:, : rows * row].reshape(-1, rows, row)
        kept = max(width, 1) - shift
        if kept > 0:
            start = shift * token
            blocks[targets, :, : kept * token] = blocks[sources, :, start : start + kept * token]


def _rows_of(num_reqs: int, idx_mapping: Ints | None) -> Ints:
    if idx_mapping is None:
        return np.arange(num_reqs)
    rows = idx_mapping[:num_reqs]
    return rows[rows >= 0]


def preprocess_mamba_align_fused_kernel(
    grid: Grid,
    idx_mapping_ptr: Ints,
    state_idx_ptr: Ints,
    num_computed_tokens_ptr: Ints,
    query_start_loc_ptr: Ints,
    num_accepted_tokens_ptr: Ints,
    src_col_ptr: Ints,
    src_off_ptr: Ints,
    num_reqs: int,
    *,
    BLOCK_SIZE: int,
    MAMBA_BLOCK_SIZE: int,
) -> None:
    """Move each row r of the step to the column in which the step ends, and note from where its states are copied:
    src_col[r] = state_idx[r], src_off[r] = max(num_accepted[r] - 1, 0),
    state_idx[r] = ceil((computed[r] + tokens of the step) / MAMBA_BLOCK_SIZE) - 1.

    num_accepted[r] becomes 1 where the column is another one, and there was one (state_idx[r] >= 0).
    """
    rows, loc = idx_mapping_ptr[:num_reqs], query_start_loc_ptr[: num_reqs + 1]
    before = state_idx_ptr[rows]
    after = -(-(num_computed_tokens_ptr[rows] + np.diff(loc)) // MAMBA_BLOCK_SIZE) - 1
    src_col_ptr[rows] = before
    src_off_ptr[rows] = np.maximum(num_accepted_tokens_ptr[rows] - 1, 0)
    state_idx_ptr[rows] = after
    num_accepted_tokens_ptr[rows[(before >= 0) & (before != after)]] = 1


def precopy_mamba_align_fused_kernel(
    grid: Grid,
    mamba_state_idx_ptr: Ints,
    src_col_ptr: Ints,
    token_bias_ptr: Ints,
    block_table_ptrs_ptr: Ints,
    block_table_stride_req: int,
    state_base_addrs_ptr: Ints,
    state_block_strides_ptr: Ints,
    state_elem_sizes_ptr: Ints,
    state_inner_sizes_ptr: Ints,
    state_conv_widths_ptr: Ints,
    state_group_indices_ptr: Ints,
    state_dim_row_count_ptr: Ints,
    state_dim_row_stride_ptr: Ints,
    idx_mapping_ptr: Ints | None,
    num_reqs: int,
    *,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = True,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Copy the states of each row r of the step from column src_col[r] to column state_idx[r], token_bias[r] tokens
    later, unless src_col[r] is -1 or state_idx[r].

    Without ``HAS_IDX_MAPPING`` request b is row b; rows -1 are left out.
    """
    states = _States(
        block_table_ptrs_ptr,
        block_table_stride_req,
        state_base_addrs_ptr,
        state_block_strides_ptr,
        state_elem_sizes_ptr,
        state_inner_sizes_ptr,
        state_conv_widths_ptr,
        state_group_indices_ptr,
        state_dim_row_count_ptr,
        state_dim_row_stride_ptr,
        CONV_STATE_DIM_FIRST,
    )
    rows = _rows_of(num_reqs, idx_mapping_ptr if HAS_IDX_MAPPING else None)
    rows = rows[(src_col_ptr[rows] >= 0) & (src_col_ptr[rows] != mamba_state_idx_ptr[rows])]
    states.copy(rows, src_col_ptr[rows], mamba_state_idx_ptr[rows], token_bias_ptr[rows])


def postprocess_mamba_fused_kernel(
    grid: Grid,
    num_accepted_tokens_ptr: Ints,
    mamba_state_idx_ptr: Ints,
    num_scheduled_tokens_ptr: Ints | None,
    num_computed_tokens_ptr: Ints,
    num_draft_tokens_ptr: Ints | None,
    block_table_ptrs_ptr: Ints,
    block_table_stride_req: int,
    state_base_addrs_ptr: Ints,
    state_block_strides_ptr: Ints,
    state_elem_sizes_ptr: Ints,
    state_inner_sizes_ptr: Ints,
    state_conv_widths_ptr: Ints,
    state_group_indices_ptr: Ints,
    state_dim_row_count_ptr: Ints,
    state_dim_row_stride_ptr: Ints,
    num_accepted_tokens_out_ptr: Ints,
    idx_mapping_ptr: Ints | None,
    num_reqs: int,
    *,
    block_size: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = False,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Keep the states of the last full block, where accepted drafts of row r have passed its border.

    The states at column state_idx[r] are those after n tokens; accepted drafts add a = num_accepted[r] - 1. With
    e = (n + a) // block_size * block_size >= n, they are copied to column e // block_size - 1, e - n tokens later. If
    the column is the same one, num_accepted_out[r] becomes 1.

    ``PRECOMPUTED_NEW_COMPUTED``: num_computed[r] is n + a, else n = num_computed[r] + num_scheduled[r] - num_draft[r].
    """
    states = _States(
        block_table_ptrs_ptr,
        block_table_stride_req,
        state_base_addrs_ptr,
        state_block_strides_ptr,
        state_elem_sizes_ptr,
        state_inner_sizes_ptr,
        state_conv_widths_ptr,
        state_group_indices_ptr,
        state_dim_row_count_ptr,
        state_dim_row_stride_ptr,
        CONV_STATE_DIM_FIRST,
    )
    rows = _rows_of(num_reqs, idx_mapping_ptr if HAS_IDX_MAPPING else None)
    reached, accepted = num_computed_tokens_ptr[rows], num_accepted_tokens_ptr[rows] - 1
    if num_scheduled_tokens_ptr is not None and num_draft_tokens_ptr is not None and not PRECOMPUTED_NEW_COMPUTED:
        reached = reached + num_scheduled_tokens_ptr[rows] - num_draft_tokens_ptr[rows] + accepted
    ends = reached // block_size * block_size
    shifts, columns = ends - (reached - accepted), ends // block_size - 1
    is_passed, is_same = shifts >= 0, mamba_state_idx_ptr[rows] == columns
    num_accepted_tokens_out_ptr[rows[is_passed & is_same]] = 1
    at = is_passed & ~(is_same & (shifts == 0))
    states.copy(rows[at], mamba_state_idx_ptr[rows[at]], columns[at], shifts[at])


def get_aligned_state_indices_multi_group_kernel(
    grid: Grid,
    block_table_ptrs_ptr: Ints,
    seq_lens_ptr: Ints,
    state_indices_ptr: Ints,
    block_table_stride_req: int,
    seq_lens_stride: int,
    state_indices_stride_0: int,
    state_indices_stride_1: int,
    state_indices_stride_2: int,
    num_requests: int,
    *,
    CACHE_BLOCK_SIZE: int,
    NUM_GROUPS: int,
    BLOCK_GROUPS: int,
    NUM_STATE_SLOTS: int,
    BLOCK_STATE_SLOTS: int,
    BLOCK_ROWS: int,
) -> None:
    """Set state_indices[g, b, s] = table[g][b, max((seq_lens[b] - 1) // CACHE_BLOCK_SIZE, 0) + s], for request b and
    slot s < NUM_STATE_SLOTS: the blocks with the states of the last token, and of each draft after it.
    """
    first = np.maximum((seq_lens_ptr[:num_requests] - 1) // CACHE_BLOCK_SIZE, 0)
    columns = first[:, None] + np.arange(NUM_STATE_SLOTS)
    for group, address in enumerate(block_table_ptrs_ptr[:NUM_GROUPS].tolist()):
        table = array_at(address, (num_requests, block_table_stride_req))
        state_indices_ptr[group, :num_requests] = table[np.arange(num_requests)[:, None], columns]
