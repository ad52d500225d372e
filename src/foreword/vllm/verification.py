"""The kernels of speculation of vLLM's second model runner, as functions over its buffers: see `foreword.vllm.inputs`
and `foreword.vllm.sampling`. Verification of drafts by rejection sampling, and drafts from repeated n-grams.

Logit j of a request verifies its draft j + 1, the last one, or "bonus", none. The drafts of a request are
draft_sampled[l + 1] for its logits l but the last; -1 marks a placeholder, which is rejected. P is the number of blocks
of the vocabulary.
"""

from __future__ import annotations

import numpy as np

from foreword.arrays import F32, I64, AnyArray, Floats, Ints
from foreword.errors import ConfigError
from foreword.native import available, native
from foreword.vllm.inputs import Grid, ranges
from foreword.vllm.sampling import Blocks, argmax, as_float32, vocabulary_noise, with_logits


def flatten_sampled_kernel(
    grid: Grid,
    flat_sampled_ptr: Ints,
    sampled_ptr: Ints,
    sampled_stride: int,
    num_sampled_ptr: Ints,
    cu_num_logits_ptr: Ints,
) -> None:
    """Set flat_sampled[cu_num_logits[b] + j] = sampled[b, j] for j < num_sampled[b]."""
    counts = num_sampled_ptr[: grid[0]]
    to, owners = ranges(cu_num_logits_ptr[: grid[0]], counts)
    columns, _ = ranges(np.zeros_like(counts), counts)
    flat_sampled_ptr[to] = sampled_ptr[owners, columns]


def gather_draft_sampled_kernel(
    grid: Grid,
    draft_sampled_ptr: Ints,
    pos_ptr: Ints,
    input_ids_ptr: Ints,
    positions_ptr: Ints,
    logits_indices_ptr: Ints,
    expanded_idx_mapping_ptr: Ints,
    expanded_local_pos_ptr: Ints,
    prefill_len_ptr: Ints,
    num_logits: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set draft_sampled[l] and pos[l] to input id and position of the token of logit l. Drafts of a step that began
    within the prefill are placeholders: -1.
    """
    tokens, local = logits_indices_ptr[:num_logits], expanded_local_pos_ptr[:num_logits]
    positions, prefill = positions_ptr[tokens], prefill_len_ptr[expanded_idx_mapping_ptr[:num_logits]]
    placeholder = (local > 0) & (positions - local < prefill)
    draft_sampled_ptr[:num_logits] = np.where(placeholder, -1, input_ids_ptr[tokens])
    pos_ptr[:num_logits] = positions


def compute_local_logits_stats_kernel(
    grid: Grid,
    target_local_argmax_ptr: I64,
    target_local_argmax_stride: int,
    target_local_max_ptr: F32,
    target_local_max_stride: int,
    target_local_sumexp_ptr: F32,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: F32,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: F32,
    draft_local_sumexp_stride: int,
    target_logits_ptr: AnyArray,
    target_logits_stride: int,
    draft_logits_ptr: AnyArray | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: Ints,
    expanded_local_pos_ptr: Ints,
    temp_ptr: F32,
    vocab_size: int,
    *,
    num_logits: int | None = None,
    num_speculative_steps: int | None = None,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Compute for each logit but the bonus, per block: at temperature 0 the largest target logit and its token; else
    the largest logit m and Σ exp(logit - m) of target and draft, whose logits are divided by the temperature here.

    The bonus logit is the last one of its request (with ``num_logits``), or that at num_speculative_steps.
    """
    local = expanded_local_pos_ptr[: grid[0]]
    if num_speculative_steps is not None:
        bonus = local >= num_speculative_steps
    else:
        bonus = np.append(local[1:num_logits], 0) == 0
    rows = expanded_idx_mapping_ptr[: grid[0]]
    blocks = Blocks(grid[1], BLOCK_SIZE, np.float32)
    for logit in np.flatnonzero(~bonus):
        row, target = rows[logit], as_float32(target_logits_ptr[logit, :vocab_size])
        if (temperature := temp_ptr[row]) == 0:
            blocks.argmax(target[None], np.array([logit]), target_local_argmax_ptr, target_local_max_ptr)
            continue
        _max_and_sum(blocks, target, target_local_max_ptr[logit], target_local_sumexp_ptr[logit])
        if draft_logits_ptr is not None and HAS_DRAFT_LOGITS:
            draft = as_float32(draft_logits_ptr[row, local[logit], :vocab_size]) / temperature
            _max_and_sum(blocks, draft, draft_local_max_ptr[logit], draft_local_sumexp_ptr[logit])


def _max_and_sum(blocks: Blocks, logits: F32, most: F32, sums: F32) -> None:
    """Write the largest number m of each block, and Σ exp(number - m), 0 where m is -∞."""
    largest, shifted = blocks.below_largest(logits, by_block=True)
    most[: len(largest)] = largest
    sums[: len(largest)] = np.where(largest > -np.inf, np.exp(shifted, out=shifted).sum(axis=1), 0)


def _log_sums(most: F32, sums: F32, padded: int) -> F32:
    """Return log Σ exp over the blocks [n, P] of rows, summed over ``padded`` terms as vLLM's kernels do."""
    terms, largest = np.zeros((len(most), padded), np.float32), np.nanmax(most, axis=1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        np.multiply(sums, np.exp(most - largest[:, None]), out=terms[:, : most.shape[1]])
    logsumexp: F32 = largest + np.log(terms.sum(axis=1))
    return logsumexp


def philox_uniforms(seeds: I64, positions: Ints) -> F32:
    """Return Triton's `rand` of seeds and offsets [n], but not less than its smallest value above 0.

    The first word of Philox 4x32 after ten rounds, of which the positive half becomes a float32 in (0, 1).
    """
    uniforms = np.empty(len(seeds), np.float32)
    if available():
        native.philox_uniforms(seeds.astype(np.int64), positions.astype(np.int64), uniforms)
        return uniforms
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    offsets, keys = positions.astype(np.uint64), seeds.astype(np.uint64)
    c0, c1, k0, k1 = offsets & mask, offsets >> half, keys & mask, keys >> half
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & mask, (a >> half) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    smallest = np.float32(4.6566127342e-10)
    positive = np.where(c0 < np.uint64(1 << 31), c0, mask - c0)
    np.maximum(positive.astype(np.float32) * smallest, smallest, out=uniforms)
    return uniforms


def rejection_kernel(
    grid: Grid,
    sampled_ptr: I64,
    sampled_stride: int,
    rejected_steps_ptr: Ints,
    target_rejected_logsumexp_ptr: F32,
    draft_rejected_logsumexp_ptr: F32,
    target_logits_ptr: AnyArray,
    target_logits_stride: int,
    target_local_argmax_ptr: I64,
    target_local_argmax_stride: int,
    target_local_max_ptr: F32,
    target_local_max_stride: int,
    target_local_sumexp_ptr: F32,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: Ints,
    draft_logits_ptr: AnyArray | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: F32,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: F32,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: Ints,
    idx_mapping_ptr: Ints,
    temp_ptr: F32,
    seed_ptr: I64,
    pos_ptr: Ints,
    synthetic_conditional_rates_ptr: F32 | None,
    cumulative_log_p_ptr: F32 | None,
    local_residual_mass_ptr: F32 | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    *,
    fly_entropy_ptr: F32 | None = None,
    fly_entropy_threshold: float = 0.0,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    FLY_WINDOW_SIZE: int = 0,
) -> None:
    """Accept the drafts of each request up to the first rejected one: rejected_steps[b] of them, in sampled[b].

    At temperature 0 a draft is accepted if it is the token of the largest target logit, which is stored in its place
    otherwise. Else draft x with target probability p and draft probability q (1 without draft logits) is accepted if
    log p > log u + log q, with u = `philox_uniforms(seed, position)`. ``SYNTHETIC_MODE``: if u < rates[i] for draft i.
    The two last arrays of results get log Σ exp of target and draft logits at the last draft that was looked at.
    Raises ConfigError for verification by blocks or by entropy (``USE_BLOCK_VERIFICATION``, ``FLY_WINDOW_SIZE``).
    """
    _refuse("rejection_kernel", USE_BLOCK_VERIFICATION=USE_BLOCK_VERIFICATION, FLY_WINDOW_SIZE=FLY_WINDOW_SIZE)
    cu, num_blocks = cu_num_logits_ptr[: grid[0] + 1], vocab_num_blocks
    num_drafts = np.maximum(np.diff(cu) - 1, 0)
    logits, owners = ranges(cu[:-1], num_drafts)  # logits that verify a draft
    steps, _ = ranges(np.zeros_like(num_drafts), num_drafts)
    rows, drafts = idx_mapping_ptr[owners], draft_sampled_ptr[logits + 1]
    temperatures = temp_ptr[rows]
    greedy, hot = np.flatnonzero(temperatures == 0), np.flatnonzero(temperatures)
    accept, tokens = np.zeros(len(logits), np.bool_), drafts.astype(np.int64)
    uniforms = philox_uniforms(seed_ptr[rows], pos_ptr[logits])

    blocks, _ = argmax(target_local_max_ptr[logits[greedy], :num_blocks])
    best = target_local_argmax_ptr[logits[greedy], blocks]
    accept[greedy] = drafts[greedy] == best

    of_hot, draft, padded = logits[hot], np.maximum(drafts[hot], 0), PADDED_VOCAB_NUM_BLOCKS
    target_sums = _log_sums(
        target_local_max_ptr[of_hot, :num_blocks], target_local_sumexp_ptr[of_hot, :num_blocks], padded
    )
    draft_sums, draft_log_probabilities = np.zeros((2, len(hot)), np.float32)
    if draft_logits_ptr is not None and HAS_DRAFT_LOGITS:
        draft_sums = _log_sums(
            draft_local_max_ptr[of_hot, :num_blocks], draft_local_sumexp_ptr[of_hot, :num_blocks], padded
        )
        of_draft = as_float32(draft_logits_ptr[rows[hot], steps[hot], draft])
        draft_log_probabilities = of_draft / temperatures[hot] - draft_sums
    target = as_float32(target_logits_ptr[of_hot, draft]) - target_sums
    accept[hot] = target > np.log(uniforms[hot]) + draft_log_probabilities

    if synthetic_conditional_rates_ptr is not None and SYNTHETIC_MODE:
        accept = uniforms < synthetic_conditional_rates_ptr[steps]
    accept &= drafts >= 0
    tokens[greedy] = np.where(accept[greedy], drafts[greedy], best)
    accepted = num_drafts.copy()
    np.minimum.at(accepted, owners[~accept], steps[~accept])
    decided = (steps <= accepted[owners]) & ((drafts >= 0) | (temperatures == 0))
    sampled_ptr[owners[decided], steps[decided]] = tokens[decided]
    rejected_steps_ptr[: grid[0]] = accepted
    for sums, out in ((target_sums, target_rejected_logsumexp_ptr), (draft_sums, draft_rejected_logsumexp_ptr)):
        out[: grid[0]] = 0
        out[owners[hot[decided[hot]]]] = sums[decided[hot]]  # the last part of a request


def resample_kernel(
    grid: Grid,
    resampled_local_argmax_ptr: I64,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: Floats,
    resampled_local_max_stride: int,
    target_logits_ptr: AnyArray,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: F32,
    draft_logits_ptr: AnyArray | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: F32,
    rejected_step_ptr: Ints,
    cu_num_logits_ptr: Ints,
    expanded_idx_mapping_ptr: Ints,
    draft_sampled_ptr: Ints,
    temp_ptr: F32,
    seed_ptr: I64,
    pos_ptr: Ints,
    cumulative_log_p_ptr: F32 | None,
    contexts_ptr: Ints | None,
    contexts_stride: int,
    watermarking_ptr: AnyArray | None,
    watermarking_skip_mask_ptr: AnyArray | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> None:
    """Find, per block, the largest residual logit of the first rejected draft or of the bonus, with Gumbel noise, and
    its token. Nothing is written for a rejected draft at temperature 0, because the target's token is already in its
    place.

    Residual logits: the target's for the bonus and after a placeholder; without draft logits the target's without the
    rejected token; else log(max(p - q, 0)), whose log1p is NumPy's.
    Raises ConfigError for verification by blocks and for watermarks.
    """
    _refuse("resample_kernel", USE_BLOCK_VERIFICATION=USE_BLOCK_VERIFICATION, WATERMARK=WATERMARK)
    blocks = Blocks(grid[1], BLOCK_SIZE, np.float64 if USE_FP64 else np.float32)
    for b in range(grid[0]):
        step = int(rejected_step_ptr[b])
        logit = int(cu_num_logits_ptr[b]) + step
        row, bonus = expanded_idx_mapping_ptr[logit], logit == cu_num_logits_ptr[b + 1] - 1
        temperature = temp_ptr[row] if row >= 0 else np.float32(0)
        if temperature == 0 and not bonus:
            continue
        residual = as_float32(target_logits_ptr[logit, :vocab_size])
        rejected = -1 if bonus else int(draft_sampled_ptr[logit + 1])
        if rejected >= 0 and draft_logits_ptr is not None and HAS_DRAFT_LOGITS:
            draft = as_float32(draft_logits_ptr[row, step, :vocab_size]) / temperature - draft_rejected_logsumexp_ptr[b]
            residual = residual - target_rejected_logsumexp_ptr[b]
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                ratio = np.exp(draft - residual)
                residual = np.where(ratio < 1, residual + np.log1p(-ratio), np.float32(-np.inf))
        elif rejected >= 0:
            residual = residual.copy()
            residual[rejected] = -np.inf
        results: Floats = residual[None]
        if temperature != 0:
            noise = vocabulary_noise(seed_ptr[row : row + 1], pos_ptr[logit : logit + 1], vocab_size, USE_FP64)
            results = with_logits(noise, results, np.zeros(1, np.int64), np.ones(1, np.float32))
        blocks.argmax(results, np.array([b]), resampled_local_argmax_ptr, resampled_local_max_ptr)


def insert_resampled_kernel(
    grid: Grid,
    sampled_ptr: I64,
    sampled_stride: int,
    num_sampled_ptr: Ints,
    resampled_local_argmax_ptr: I64,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: Floats,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: Ints,
    expanded_idx_mapping_ptr: Ints,
    temp_ptr: F32,
    *,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Set sampled[b, n] to the token of the largest of the blocks, for n = num_sampled[b], which then counts it; at
    temperature 0 only for the bonus.
    """
    counts = num_sampled_ptr[: grid[0]]
    logits = cu_num_logits_ptr[: grid[0]] + counts
    temperatures = temp_ptr[expanded_idx_mapping_ptr[logits]]
    resampled = np.flatnonzero((temperatures != 0) | (logits == cu_num_logits_ptr[1 : grid[0] + 1] - 1))
    blocks, _ = argmax(resampled_local_max_ptr[resampled, :resample_num_blocks])
    sampled_ptr[resampled, counts[resampled]] = resampled_local_argmax_ptr[resampled, blocks]
    counts += 1


def ngram_scan_kernel(
    grid: Grid,
    token_ids_ptr: Ints,
    token_ids_stride: int,
    idx_mapping_ptr: Ints,
    total_len_ptr: Ints,
    num_sampled_ptr: Ints,
    scratch_ptr: I64,
    scratch_stride: int,
    L: int,
    *,
    MIN_N: int,
    MAX_N: int,
    MAX_N_PO2: int,
    BLOCK_L: int,
) -> None:
    """Find the last place in each block of ``BLOCK_L`` positions where the longest suffix of a request's tokens stood:
    scratch[b, block] = n * (L + 1) + p + 1 for the n tokens at p, ``MIN_N`` to ``MAX_N`` of them, or 0.
    """
    for b in range(grid[0]):
        row = idx_mapping_ptr[b]
        length, best = int(total_len_ptr[row]), np.zeros(grid[1] * BLOCK_L, np.int64)
        if num_sampled_ptr[b] > 0:
            tokens = token_ids_ptr[row, :length]
            for n in range(MIN_N, min(MAX_N, length - 1) + 1):
                found = np.ones(length - n, np.bool_)  # the suffix itself is not a place
                for j in range(n):
                    found &= tokens[j : length - n + j] == tokens[length - n + j]
                places = np.flatnonzero(found)
                best[places] = n * (L + 1) + places + 1
        scratch_ptr[b, : grid[1]] = best.reshape(grid[1], BLOCK_L).max(axis=1)


def ngram_finalize_kernel(
    grid: Grid,
    token_ids_ptr: Ints,
    token_ids_stride: int,
    idx_mapping_ptr: Ints,
    total_len_ptr: Ints,
    num_sampled_ptr: Ints,
    last_sampled_ptr: Ints,
    scratch_ptr: I64,
    scratch_stride: int,
    drafts_ptr: I64,
    L: int,
    N_BLOCKS: int,
    *,
    K: int,
    K_PO2: int,
    N_BLOCKS_PO2: int,
) -> None:
    """Set drafts[b, k] to the tokens that followed the place with the longest suffix, the last of equal places.

    The last sampled token where there are none.
    """
    rows = idx_mapping_ptr[: grid[0]]
    scores = scratch_ptr[: grid[0], :N_BLOCKS].max(axis=1)
    n, place = np.divmod(scores - 1, L + 1)
    following = (place + n)[:, None] + np.arange(K)
    known = (following < total_len_ptr[rows][:, None]) & ((num_sampled_ptr[: grid[0]] > 0) & (scores > 0))[:, None]
    tokens = token_ids_ptr[rows[:, None], np.where(known, following, 0)]
    drafts_ptr[: grid[0], :K] = np.where(known, tokens, last_sampled_ptr.reshape(-1)[rows][:, None])


def _refuse(kernel: str, **options: int) -> None:
    for name, value in options.items():
        if value:
            raise ConfigError(f"{kernel}: {name}={value!r} is not supported; standard rejection sampling is")
