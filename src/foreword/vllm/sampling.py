"""The sampling kernels of vLLM's second model runner, as functions over its buffers: see `foreword.vllm.inputs`.

Arithmetic is float32 in the order of vLLM's kernels, so that results are equal bit by bit to theirs in Triton's
interpreter. Logits are float32, float16, or bfloat16 as uint16 of the same bits. V is the size of the vocabulary.

What passes over whole rows of logits is native code where that is built. The lines of NumPy behind it define it: native
code gives their bits. Exponentials and logarithms are always NumPy's.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from foreword.arrays import F32, F64, I32, I64, U32, U64, AnyArray, Bools, Floats, Ints
from foreword.errors import ConfigError
from foreword.native import available, native
from foreword.vllm.inputs import Grid, ranges

_MINUS_INFINITY_BF16 = 0xFF80
_BITS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "f": (np.uint32, 0xFF800000),
    "e": (np.uint16, 0xFC00),
    "H": (np.uint16, _MINUS_INFINITY_BF16),
}
"""By the type of logits: that of their bits, and -∞ in bits."""
_LARGEST_BELOW_ONE = np.float32(5.960464477539063e-08)  # 2 ** -24


def as_float32(values: AnyArray) -> F32:
    """Return logits as float32, exactly: uint16 is bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


_F32 = (np.float32,)
_I32 = (np.int32,)


def is_native(*arrays: tuple[AnyArray, tuple[type[np.generic], ...]]) -> bool:
    """Return whether native code is built and takes these arrays, each with its types, and with rows without gaps."""
    return available() and all(
        values.strides[-1] == values.itemsize and any(values.dtype == dtype for dtype in types)
        for values, types in arrays
    )


def minus_infinity(logits: AnyArray) -> float | int:
    """Return what is stored into ``logits`` for -∞."""
    return _MINUS_INFINITY_BF16 if logits.dtype == np.uint16 else -np.inf


def temperature_kernel(
    grid: Grid,
    logits_ptr: F32,
    logits_stride: int,
    expanded_idx_mapping_ptr: Ints,
    temperature_ptr: F32,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Divide logits[l] by temperature[idx[l]], unless that is 0 or 1."""
    temperature = temperature_ptr[expanded_idx_mapping_ptr[: grid[0]]]
    rows = np.flatnonzero((temperature != 0) & (temperature != 1))
    if is_native((logits_ptr, _F32), (temperature, _F32)):
        native.divide_rows(logits_ptr, vocab_size, rows, temperature[rows])
        return
    for row in rows:
        logits_ptr[row, :vocab_size] /= temperature[row]


def min_p_kernel(
    grid: Grid,
    logits_ptr: F32,
    logits_stride: int,
    expanded_idx_mapping_ptr: Ints,
    min_p_ptr: F32,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set logits[l, v] = -∞ where logits[l, v] < max(logits[l]) + log(min_p[idx[l]]), unless min_p is 0."""
    min_p = min_p_ptr[expanded_idx_mapping_ptr[: grid[0]]]
    rows = np.flatnonzero(min_p != 0)
    distances = np.log(min_p[rows])
    if is_native((logits_ptr, _F32), (distances, _F32)):
        native.mask_below_largest(logits_ptr, vocab_size, rows, distances)
        return
    for row, distance in zip(rows, distances, strict=True):
        logits = logits_ptr[row, :vocab_size]
        logits[logits < np.nanmax(logits) + distance] = -np.inf


def bias_kernel(
    grid: Grid,
    logits_ptr: F32,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: Ints,
    num_allowed_token_ids_ptr: Ints,
    allowed_token_ids_ptr: Ints,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: Ints,
    bias_token_ids_ptr: Ints,
    bias_token_ids_stride: int,
    bias_ptr: F32,
    bias_stride: int,
    pos_ptr: Ints,
    min_lens_ptr: Ints,
    num_stop_token_ids_ptr: Ints,
    restore_when_all_masked_ptr: Ints,
    stop_token_ids_ptr: Ints,
    stop_token_ids_stride: int,
    *,
    BLOCK_SIZE: int,
    LOGITS_BLOCK_SIZE: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Keep only the allowed tokens, if a request names some; add its biases; mask its stop tokens while the position
    after this one is before min_lens. ``CHECK_ALL_MASKED_ROWS``: stop tokens stay where no other token is left, if
    restore_when_all_masked is set for the row.
    """
    rows = expanded_idx_mapping_ptr[: grid[0]]
    early = pos_ptr[: grid[0]] + 1 < min_lens_ptr[rows]
    stopping = np.where(early, num_stop_token_ids_ptr[rows], 0)
    for token in np.flatnonzero(
        (num_allowed_token_ids_ptr[rows] > 0) | (num_logit_bias_ptr[rows] > 0) | (stopping > 0)
    ):
        row, stops = rows[token], stopping[token]
        logits = logits_ptr[token, :vocab_size]
        if (allowed := num_allowed_token_ids_ptr[row]) > 0:
            ids = allowed_token_ids_ptr[row, :allowed]
            kept = logits[ids]
            logits[:] = -np.inf
            logits[ids] = kept
        if (biased := num_logit_bias_ptr[row]) > 0:
            logits[bias_token_ids_ptr[row, :biased]] += bias_ptr[row, :biased]
        if stops > 0:
            ids = stop_token_ids_ptr[row, :stops]
            before = logits[ids]
            logits[ids] = -np.inf
            restored = CHECK_ALL_MASKED_ROWS and restore_when_all_masked_ptr[row]
            if restored and np.nanmax(logits) == -np.inf:
                finite = np.isfinite(before)
                logits[ids[finite]] = before[finite]


def bincount_kernel(
    grid: Grid,
    expanded_idx_mapping_ptr: Ints,
    all_token_ids_ptr: Ints,
    all_token_ids_stride: int,
    prompt_len_ptr: Ints,
    prefill_len_ptr: Ints,
    prompt_bin_mask_ptr: Ints,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: Ints,
    output_bin_counts_stride: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set bit t of prompt_bin_mask[r] for each token t of the prompt, and count the tokens after it up to prefill_len
    in output_bin_counts[r]. The bits of 32 tokens are an int32, the first the lowest.
    """
    for row in expanded_idx_mapping_ptr[: grid[0]]:
        prompt, prefill = int(prompt_len_ptr[row]), int(prefill_len_ptr[row])
        tokens = all_token_ids_ptr[row, :prompt]
        np.bitwise_or.at(
            prompt_bin_mask_ptr[row].view(np.uint32), tokens // 32, np.uint32(1) << (tokens % 32).astype(np.uint32)
        )
        np.add.at(output_bin_counts_ptr[row], all_token_ids_ptr[row, prompt:prefill], 1)


def penalties_kernel(
    grid: Grid,
    logits_ptr: F32,
    logits_stride: int,
    expanded_idx_mapping_ptr: Ints,
    token_ids_ptr: Ints,
    expanded_local_pos_ptr: Ints,
    repetition_penalty_ptr: F32,
    frequency_penalty_ptr: F32,
    presence_penalty_ptr: F32,
    prompt_bin_mask_ptr: I32,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: I32,
    output_bin_counts_stride: int,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Apply penalties. With c[v] = output_bin_counts[r, v], and the drafts before logit l of its request counted too:

    logits[l, v] is divided by the repetition penalty if it is above 0, else multiplied by it, where v is in the prompt
    or c[v] > 0; then frequency_penalty * c[v] and, where c[v] > 0, the presence penalty are subtracted.
    """
    rows = expanded_idx_mapping_ptr[: grid[0]]
    penalties = np.stack(
        [repetition_penalty_ptr[rows], frequency_penalty_ptr[rows], presence_penalty_ptr[rows]], axis=1
    )
    tokens = np.flatnonzero((penalties != (1, 0, 0)).any(axis=1))
    rows, penalties, num_drafts = rows[tokens], penalties[tokens], expanded_local_pos_ptr[tokens]
    if is_native((logits_ptr, _F32), (penalties, _F32), (prompt_bin_mask_ptr, _I32), (output_bin_counts_ptr, _I32)):
        native.penalise_rows(
            logits_ptr,
            vocab_size,
            tokens,
            rows.astype(np.int64),
            penalties,
            prompt_bin_mask_ptr,
            output_bin_counts_ptr,
            token_ids_ptr.astype(np.int64),
            num_drafts.astype(np.int64),
        )
        return
    for token, row, drafts, (repetition, frequency, presence) in zip(tokens, rows, num_drafts, penalties, strict=True):
        logits = logits_ptr[token, :vocab_size]
        counts = output_bin_counts_ptr[row, :vocab_size]
        if drafts:
            counts = counts.copy()
            before = token_ids_ptr[token - drafts + 1 : token + 1]
            np.add.at(counts, before[(before >= 0) & (before < vocab_size)], 1)
        seen = counts > 0
        if repetition != 1:
            bits = prompt_bin_mask_ptr[row].view(np.uint8)
            in_prompt = np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)
            scale = np.where(in_prompt | seen, repetition, np.float32(1))
            logits *= np.where(logits > 0, np.float32(1) / scale, scale)
        logits -= frequency * counts.astype(np.float32)
        logits -= presence * seen.astype(np.float32)


def bad_words_kernel(
    grid: Grid,
    logits_ptr: AnyArray,
    logits_stride: int,
    expanded_idx_mapping_ptr: Ints,
    bad_word_token_ids_ptr: Ints,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: Ints,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: Ints,
    all_token_ids_ptr: Ints,
    all_token_ids_stride: int,
    prompt_len_ptr: Ints,
    total_len_ptr: Ints,
    input_ids_ptr: Ints,
    expanded_local_pos_ptr: Ints,
) -> None:
    """Set logits[l, last token of a bad word] = -∞ where the outputs, and the drafts before logit l, end with the
    tokens of the word before its last. Word i of row r has the tokens bad_word_offsets[r, i] to bad_word_offsets[r, i +
    1].
    """
    for token, row in enumerate(expanded_idx_mapping_ptr[: grid[0]]):
        drafts, words = int(expanded_local_pos_ptr[token]), int(num_bad_words_ptr[row])
        if words == 0:
            continue
        offsets = bad_word_offsets_ptr[row, : words + 1].tolist()
        longest = max(end - start for start, end in pairwise(offsets)) - 1
        first = max(int(prompt_len_ptr[row]), int(total_len_ptr[row]) - longest)
        known = all_token_ids_ptr[row, first : total_len_ptr[row]].tolist()
        known += input_ids_ptr[token - drafts + 1 : token + 1].tolist()
        for start, end in pairwise(offsets):
            *before, last = bad_word_token_ids_ptr[row, start:end].tolist()
            if len(before) <= len(known) and known[len(known) - len(before) :] == before:
                logits_ptr[token, last] = minus_infinity(logits_ptr)


def apply_grammar_bitmask_kernel(
    grid: Grid,
    logits_ptr: AnyArray,
    logits_stride: int,
    logits_indices_ptr: Ints,
    cu_num_logits_ptr: Ints,
    bitmask_ptr: I32,
    bitmask_stride: int,
    vocab_size: int,
    *,
    MASK_STRIDE: int,
    BLOCK_SIZE: int,
) -> None:
    """Set logits[cu[b] + j, v] = -∞ where bit v of bitmask[i] is 0, for logits_indices[i] = b * MASK_STRIDE + j, if
    request b has more than j logits. The bits of 32 tokens are an int32, the first the lowest.
    """
    requests, positions = np.divmod(logits_indices_ptr[: grid[0]], MASK_STRIDE)
    starts = cu_num_logits_ptr[requests]
    masks = np.flatnonzero(positions < cu_num_logits_ptr[requests + 1] - starts)
    rows = (starts + positions)[masks]
    if is_native((logits_ptr, (np.float32, np.float16, np.uint16)), (bitmask_ptr, _I32)):
        bits, infinity = _BITS[logits_ptr.dtype.char]
        native.mask_refused_rows(logits_ptr.view(bits), vocab_size, rows.astype(np.int64), bitmask_ptr, masks, infinity)
        return
    for row, mask in zip(rows, masks, strict=True):
        words = np.ascontiguousarray(bitmask_ptr[mask]).view(np.uint8)
        refused = np.unpackbits(words, count=vocab_size, bitorder="little") == 0
        logits_ptr[row, :vocab_size][refused] = minus_infinity(logits_ptr)


def gumbel_sample_kernel(
    grid: Grid,
    local_argmax_ptr: I64,
    local_argmax_stride: int,
    local_max_ptr: Floats,
    local_max_stride: int,
    logits_cache_ptr: AnyArray | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: Ints | None,
    logits_cache_source_ptr: AnyArray | None,
    logits_cache_source_stride: int,
    logits_ptr: AnyArray,
    logits_stride: int,
    expanded_idx_mapping_ptr: Ints,
    seeds_ptr: I64,
    pos_ptr: Ints,
    temp_ptr: F32,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> None:
    """Find the largest of logits[l, v] + noise(seed, position, v) and its v, for each block of ``BLOCK_SIZE`` tokens v.

    At temperature 0 and for rows -1 there is no noise. `gumbel_noise` is Gumbel noise from a hash of the request's
    seed, the position and v. Raises ConfigError where a draft model keeps its logits (logits_cache): with equal
    arguments, vLLM 0.33 draws with another seed there than 0.32.
    """
    if logits_cache_ptr is not None:
        raise ConfigError(
            "gumbel_sample_kernel: logits_cache_ptr, of draft models, is not supported: their seeds differ between "
            "0.32 and 0.33 of vLLM; pass None"
        )
    rows = expanded_idx_mapping_ptr[: grid[0]]
    temperatures = np.where(rows >= 0, temp_ptr[rows], np.float32(0))
    together = max(_CHUNK // vocab_size, 1)
    blocks = Blocks(grid[1], BLOCK_SIZE, np.float64 if USE_FP64 else np.float32, together)
    for start in range(0, grid[0], together):
        logits = as_float32(logits_ptr[start : start + together, :vocab_size])
        temperature = temperatures[start : start + together]
        hot, cold = np.flatnonzero(temperature), np.flatnonzero(temperature == 0)
        if hot.size:
            positions = pos_ptr[start + hot] + (_DRAFT_NOISE if IS_DRAFTING else 0)
            noise = vocabulary_noise(seeds_ptr[rows[start + hot]], positions, vocab_size, USE_FP64)
            divisors = temperature[hot] if APPLY_TEMPERATURE else np.ones(hot.size, np.float32)
            noisy = with_logits(noise, logits, hot, divisors)
            blocks.argmax(noisy, start + hot, local_argmax_ptr, local_max_ptr)
        if cold.size:
            blocks.argmax(logits[cold] if hot.size else logits, start + cold, local_argmax_ptr, local_max_ptr)


_CHUNK = 1 << 15
"""The number of logits that are drawn together: their noise stays in the cache of a core."""


class Blocks:
    """Rows of logits in blocks of Triton's programs: the last block ends with -∞."""

    def __init__(self, num_blocks: int, block_size: int, dtype: type[np.floating], rows: int = 1) -> None:
        self._padded = np.empty((rows, num_blocks * block_size), dtype)
        self._blocks = self._padded.reshape(rows, num_blocks, block_size)

    def filled(self, logits: Floats) -> Floats:
        """Return the logits [n, V] in blocks [n, num_blocks, block_size]. They are valid until the next call."""
        self._padded[: len(logits), : logits.shape[1]] = logits
        self._padded[: len(logits), logits.shape[1] :] = -np.inf
        return self._blocks[: len(logits)]

    def argmax(self, logits: Floats, rows: I64, tokens: I64, most: Floats) -> None:
        """Write the token of the largest of logits[i] in each block, and that logit, into rows[i] of the results."""
        _, num_blocks, size = self._blocks.shape
        if is_native((logits, (np.float32, most.dtype.type)), (tokens, (np.int64,)), (most, (np.float32, np.float64))):
            values = logits.astype(most.dtype, copy=False)
            native.block_argmax(values, size, num_blocks, rows, tokens, most)
            return
        best, value = argmax(self.filled(logits))
        tokens[rows, :num_blocks] = np.arange(num_blocks) * size + best
        most[rows, :num_blocks] = value

    def below_largest(self, logits: F32, *, by_block: bool) -> tuple[F32, F32]:
        """Return the largest of the logits [V], of all [1] or of each block, and the logits less that in blocks. They
        are valid until the next call.
        """
        blocks: F32 = self._blocks[0]
        most = np.empty(len(blocks) if by_block else 1, np.float32)
        if is_native((logits, _F32)):
            native.below_largest(logits, by_block, most, blocks)
            return most, blocks
        with np.errstate(invalid="ignore"):
            if by_block:
                most[:] = np.nanmax(self.filled(logits[None])[0], axis=1)
                blocks -= most[:, None]
            else:
                most[:] = np.nanmax(logits)
                self.filled((logits - most)[None])
        return most, blocks


def with_logits(noise: Floats, logits: F32, rows: I64, temperatures: F32) -> Floats:
    """Return logits[rows[i]] / temperatures[i] + noise[i], in the memory of the noise."""
    if is_native((logits, _F32), (temperatures, _F32)):
        native.add_logit_rows(logits, rows, temperatures, noise)
        return noise
    noise += logits[rows] / temperatures[:, None]
    return noise


_DRAFT_NOISE = 1 << 30
"""Added to the position for the noise of drafts, so that it differs from that of their verification."""


def argmax(values: Floats) -> tuple[I64, Floats]:
    """Return the index of the first largest number along the last axis, and that number; NaNs do not count."""
    if np.isnan(values).any():
        values = np.where(np.isnan(values), -np.inf, values)
    best = values.argmax(axis=-1)
    return best, np.take_along_axis(values, best[..., None], axis=-1)[..., 0]


def gumbel_noise(seeds: I64, positions: Ints, tokens: Ints, fp64: bool = False) -> Floats:
    """Return -log(-log(u)) [n, V] for a uniform number u of each seed with its position [n] and each token [V].

    In float32, the default, -log(-log(1 - u)), for whose largest values u is near 0, where float32 is fine.
    """
    words = tokens.astype(np.uint32)
    if fp64:
        return -np.log(-np.log(_uniform64(seeds, positions, words)))
    return -np.log(-_log_of_one_minus(_uniform32(seeds, positions, words)))


def vocabulary_noise(seeds: I64, positions: Ints, vocab_size: int, fp64: bool = False) -> Floats:
    """Return `gumbel_noise` of all tokens of a vocabulary, the same bits: hash and series are native where that is
    built, and logarithms NumPy's.
    """
    if not available():
        return gumbel_noise(seeds, positions, np.arange(vocab_size), fp64)
    seeds, at = np.ascontiguousarray(seeds, np.int64), np.ascontiguousarray(positions, np.int64)
    if fp64:
        uniforms = np.empty((len(seeds), vocab_size), np.float64)
        native.noise_uniform64(seeds, at, uniforms)
        return -np.log(-np.log(uniforms))
    noise, series = np.empty((2, len(seeds), vocab_size), np.float32)
    native.noise_uniform32(seeds, at, noise, series)
    native.noise_select(series, np.log(noise, out=noise))
    return np.negative(np.log(noise, out=noise), out=noise)


def _rotated(value: U32, by: int) -> U32:
    return (value << np.uint32(by)) | (value >> np.uint32(32 - by))


def _mixed(h: U32, key: U32) -> U32:
    key = _rotated(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def hash32(seeds: I64, positions: Ints, words: U32, domain: int = 0) -> U32:
    """Return MurmurHash3 (x86, 32 bits, seed ``domain``) of 16 bytes: a seed, the low half of its position, a word.

    seeds, positions: [n]. words: [V]. The result is [n, V].
    """
    h: U32 = np.full((len(seeds), 1), domain, np.uint32)
    for key in (seeds, seeds >> 32, positions):
        h = _mixed(h, (key & 0xFFFFFFFF).astype(np.uint32)[:, None])
    h = _mixed(h, words) ^ np.uint32(16)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _uniform32(seeds: I64, positions: Ints, words: U32) -> F32:
    """Return (hash + 0.5) / 2 ** 32, rounded once to float32."""
    bits = hash32(seeds, positions, words)
    low = (bits & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)
    return (bits >> np.uint32(16)).astype(np.float32) * np.float32(2.0**-16) + low * np.float32(2.0**-32)


def _uniform64(seeds: I64, positions: Ints, words: U32) -> F64:
    """Return (the upper 53 of 64 bits of two hashes + 0.5) / 2 ** 53, below 1."""
    low = hash32(seeds, positions, words).astype(np.uint64)
    high: U64 = hash32(seeds, positions, words, 0x9E3779B9).astype(np.uint64)
    uniform = ((((high << np.uint64(32)) | low) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.where(uniform == 1, uniform - 2.0**-53, uniform)


def _log_of_one_minus(u: F32) -> F32:
    """Return log(1 - u): below 0.25 by the first eight terms of its series, whose absolute error is less than 6e-7."""
    series = np.full_like(u, 1 / 8)
    for n in range(7, 0, -1):
        series = np.float32(1 / n) + u * series
    direct = np.log(np.maximum(np.float32(1) - u, _LARGEST_BELOW_ONE))
    return np.where(u < np.float32(0.25), -u * series, direct)


def topk_log_softmax_kernel(
    grid: Grid,
    output_ptr: F32,
    logits_ptr: AnyArray,
    logits_stride: int,
    topk_ids_ptr: Ints,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
    TOPK_BLOCK_SIZE: int,
) -> None:
    """Set output[l, k] = logits[l, i] - max(logits[l]) - log(Σ exp(logits[l] - max)) for i = topk_ids[l, k].

    The sum is taken over blocks of ``BLOCK_SIZE``, then over the blocks in order.
    """
    blocks = Blocks(-(-vocab_size // BLOCK_SIZE), BLOCK_SIZE, np.float32)
    for row in range(grid[0]):
        logits = as_float32(logits_ptr[row, :vocab_size])
        most, shifted = blocks.below_largest(logits, by_block=False)
        total = np.add.accumulate(np.exp(shifted, out=shifted).sum(axis=1))[-1]
        output_ptr[row, :topk] = logits[topk_ids_ptr[row, :topk]] - most - np.log(total)


def ranks_kernel(
    grid: Grid,
    output_ptr: Ints,
    logits_ptr: AnyArray,
    logits_stride: int,
    token_ids_ptr: Ints,
    vocab_size: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set output[l] to the number of logits[l] that are at least as large as that of token_ids[l].

    Where that is -∞, the -∞ that fill the last block of ``BLOCK_SIZE`` count too.
    """
    padding = -vocab_size % BLOCK_SIZE
    for row in range(grid[0]):
        logits = as_float32(logits_ptr[row, :vocab_size])
        own = logits[token_ids_ptr[row]]
        output_ptr[row] = np.count_nonzero(logits >= own) + (padding if own == -np.inf else 0)


def fill_logprob_token_ids_kernel(
    grid: Grid,
    out_token_ids_ptr: Ints,
    out_token_ids_stride: int,
    out_valid_mask_ptr: Bools,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: Ints,
    topk_indices_ptr: Ints,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: Ints,
    num_per_req_token_ids_ptr: Ints,
    per_req_token_ids_ptr: Ints,
    per_req_token_ids_stride: int,
    *,
    NUM_TOPK: int,
    PADDED_COLS: int,
) -> None:
    """Set the tokens of the columns of log-probabilities: the sampled one, then those that the request names, else the
    ``NUM_TOPK`` likeliest. out_valid_mask is set where a column is used.
    """
    rows = expanded_idx_mapping_ptr[: grid[0]]
    out_token_ids_ptr[: grid[0], 0] = sampled_token_ids_ptr[: grid[0]]
    out_valid_mask_ptr[: grid[0], 0] = True
    named = num_per_req_token_ids_ptr[rows]
    for token in range(grid[0]):
        count = int(named[token]) or NUM_TOPK
        source = per_req_token_ids_ptr[rows[token]] if named[token] > 0 else topk_indices_ptr[token]
        out_token_ids_ptr[token, 1 : 1 + count] = source[:count]
        out_valid_mask_ptr[token, 1 : 1 + count] = True


def num_nans_kernel(
    grid: Grid, logits_ptr: AnyArray, logits_stride: int, num_nans_ptr: Ints, vocab_size: int, *, BLOCK_SIZE: int
) -> None:
    """Set num_nans[l] to the number of logits[l] that are NaN."""
    for row in range(grid[0]):
        num_nans_ptr[row] = np.count_nonzero(np.isnan(as_float32(logits_ptr[row, :vocab_size])))


def prompt_logprobs_token_ids_kernel(
    grid: Grid,
    prompt_logprobs_token_ids_ptr: Ints,
    query_start_loc_ptr: Ints,
    idx_mapping_ptr: Ints,
    num_computed_tokens_ptr: Ints,
    all_token_ids_ptr: Ints,
    all_token_ids_stride: int,
    *,
    BLOCK_SIZE: int,
) -> None:
    """Set token_ids[loc[b] + j] = all_token_ids[r, computed[r] + 1 + j]: the token that follows each scheduled one."""
    rows, loc = idx_mapping_ptr[: grid[0]], query_start_loc_ptr[: grid[0] + 1]
    places, owners = ranges(num_computed_tokens_ptr[rows] + 1, np.diff(loc))
    prompt_logprobs_token_ids_ptr[loc[0] : loc[0] + len(owners)] = all_token_ids_ptr[rows[owners], places]
