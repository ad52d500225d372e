"""What a sampler reads for one step, with flags that let it skip what no row needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from foreword.arrays import F32, I32, I64, Bools
from foreword.batch.state.sampling_columns import COLUMNS, RARE, Need, SamplingColumns
from foreword.batch.values.sampling_params import SamplingParams
from foreword.native import available, native

# As plain integers: arithmetic on enum members costs more than the arrays here.
_GREEDY, _RANDOM, _PENALTIES, _RARE = map(int, (Need.GREEDY, Need.RANDOM, Need.PENALTIES, RARE))


@dataclass(slots=True, eq=False)
class SamplingMetadata:
    """Parameters of B rows in batch order (requests, or logit rows). None where no row of the step needs the parameter.

    rows: int32 [B] state rows. needs: the union of their `Need` flags. params: batch index → the request's parameters,
    for the rows with a rare one. The arrays are copies and stay valid after the step. Batches of the same requests
    share one object: do not change it. Not frozen, because a frozen one takes twice as long to make.
    """

    rows: I32
    needs: int
    vocab_size: int
    params: dict[int, SamplingParams]
    temperature: F32 | None = None
    seed: I64 | None = None
    top_p: F32 | None = None
    top_k: I32 | None = None
    min_p: F32 | None = None
    typical_p: F32 | None = None
    top_n_sigma: F32 | None = None
    xtc_probability: F32 | None = None
    xtc_threshold: F32 | None = None
    presence_penalty: F32 | None = None
    frequency_penalty: F32 | None = None
    repetition_penalty: F32 | None = None
    dry_multiplier: F32 | None = None
    dry_base: F32 | None = None
    dry_allowed_length: I32 | None = None
    dry_range: I32 | None = None
    min_tokens: I32 | None = None
    num_logprobs: I32 | None = None
    num_prompt_logprobs: I32 | None = None

    @property
    def all_greedy(self) -> bool:
        return not self.needs & _RANDOM

    @property
    def all_random(self) -> bool:
        return not self.needs & _GREEDY

    @property
    def needs_penalties(self) -> bool:
        return bool(self.needs & _PENALTIES)

    @property
    def has_structured_output(self) -> bool:
        return bool(self.needs & Need.STRUCTURED_OUTPUT)

    @property
    def is_plain(self) -> bool:
        """Whether each token is the argmax of its logits, without log-probabilities."""
        return self.needs in (0, _GREEDY)

    @property
    def max_num_logprobs(self) -> int:
        """The largest number of alternatives requested by a row; −1 if no row requests log-probabilities."""
        return -1 if self.num_logprobs is None else int(self.num_logprobs.max())

    # -- rare tables, made on demand ----------------------------------------------------------------------------

    def logit_bias(self) -> tuple[I64, I64, F32]:
        """(batch indices, token ids, values), N each: logits[batch indices, token ids] += values."""
        entries = [(b, t, v) for b, p in self.params.items() for t, v in (p.logit_bias or {}).items()]
        b, t, v = zip(*entries, strict=True) if entries else ((), (), ())
        return np.array(b, np.int64), np.array(t, np.int64), np.array(v, np.float32)

    def allowed_token_ids_mask(self) -> Bools | None:
        """bool [B, V], True where the row may choose the token; None if no row is limited."""
        if not self.needs & Need.ALLOWED_TOKENS:
            return None
        mask = np.ones((len(self.rows), self.vocab_size), np.bool_)
        for b, p in self.params.items():
            if p.allowed_token_ids is not None:
                mask[b] = False
                mask[b, list(p.allowed_token_ids)] = True
        return mask

    def bad_words(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Batch index → token sequences never to complete."""
        return {b: tuple(map(tuple, p.bad_words_token_ids)) for b, p in self.params.items() if p.bad_words_token_ids}

    def end_token_ids(self) -> dict[int, tuple[int, ...]]:
        """Batch index → stop tokens not to choose before min_tokens outputs, besides the model's end tokens."""
        return {b: tuple(p.stop_token_ids) for b, p in self.params.items() if p.min_tokens}


_NEEDED_FOR = {"temperature": Need.RANDOM, "seed": Need.RANDOM, "top_p": Need.TOP_P, "top_k": Need.TOP_K,
               "min_p": Need.MIN_P, "typical_p": Need.TYPICAL_P, "top_n_sigma": Need.TOP_N_SIGMA,
               "xtc_probability": Need.XTC, "xtc_threshold": Need.XTC,
               "presence_penalty": Need.PENALTIES, "frequency_penalty": Need.PENALTIES,
               "repetition_penalty": Need.PENALTIES,
               "dry_multiplier": Need.DRY, "dry_base": Need.DRY, "dry_allowed_length": Need.DRY, "dry_range": Need.DRY,
               "min_tokens": Need.MIN_TOKENS, "num_logprobs": Need.LOGPROBS,
               "num_prompt_logprobs": Need.PROMPT_LOGPROBS}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """What penalties read, for the P rows that have one. batch_indices: int64 [P]. in_prompt: bool [P, V].
    in_output: int32 [P, V], occurrences. Outputs that a resumed request was admitted with are outputs.
    """

    batch_indices: I64
    in_prompt: Bools
    in_output: I32


def build_metadata(columns: SamplingColumns, vocab_size: int, rows: I32, needs: int | None = None) -> SamplingMetadata:
    """The metadata of these state rows, in this order. needs: the union of their flags, if known. O(B), with one gather
    for each parameter that a row needs.
    """
    c = columns
    if needs is None:
        needs = int(np.bitwise_or.reduce(c.needs[rows])) if len(rows) else 0
    params: dict[int, SamplingParams] = {}
    if needs & _RARE:
        rare = np.flatnonzero(c.needs[rows] & _RARE)
        held = zip(rare.tolist(), rows[rare].tolist(), strict=True)
        params = {b: c.params[row] for b, row in held if row in c.params}
    at = rows.astype(np.intp)  # once, not in every gather
    gathered: dict[str, Any] = {name: getattr(c, name).take(at) for name, need in _NEEDED_FOR.items() if needs & need}
    return SamplingMetadata(rows, needs, vocab_size, params, **gathered)


def token_counts(
    metadata: SamplingMetadata, token_ids: I32, prompt_len: I32, num_tokens: I32, is_token_id: Bools | None = None
) -> TokenCounts:
    """Counted from the committed tokens, O(P · (V + tokens)).

    token_ids [R, M], prompt_len [R], num_tokens [R], is_token_id [R, M]: the arrays of `RequestStates`.
    """
    vocab_size = metadata.vocab_size
    index = _penalized(metadata)
    in_prompt = np.zeros((len(index), vocab_size), np.bool_)
    in_output = np.zeros((len(index), vocab_size), np.int32)
    for i, row in enumerate(metadata.rows[index].tolist()):
        prompt, known = int(prompt_len[row]), int(num_tokens[row])
        ids = token_ids[row, :prompt]
        if is_token_id is not None:
            ids = ids[is_token_id[row, :prompt]]
        in_prompt[i, ids] = True
        in_output[i] = np.bincount(token_ids[row, prompt:known], minlength=vocab_size)
    return TokenCounts(index, in_prompt, in_output)


def _penalized(metadata: SamplingMetadata) -> I64:
    """The batch indices of rows with a penalty."""
    has_one = np.zeros(len(metadata.rows), np.bool_)
    if metadata.needs_penalties:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            has_one |= getattr(metadata, name) != COLUMNS[name][1]
    return np.flatnonzero(has_one)


class MetadataCache(Protocol):
    """The metadata of the last few batches: the same object as long as neither rows nor parameters changed."""

    def get(self, count: int) -> SamplingMetadata:
        """The metadata of the first ``count`` rows in the buffer: a comparison if known, else `build_metadata`."""


def metadata_cache(columns: SamplingColumns, vocab_size: int, rows: I32) -> MetadataCache:
    """A cache for batches whose state rows are the first entries of ``rows``, a buffer at one address."""

    def build(count: int, needs: int | None = None) -> SamplingMetadata:
        return build_metadata(columns, vocab_size, rows[:count].copy(), needs)

    if not available():
        return _Cache(columns, rows, build)
    needed = [(name, getattr(columns, name), int(need)) for name, need in _NEEDED_FOR.items()]
    c = columns
    cache: MetadataCache = native.MetadataCache(
        needed, c.needs, c.stamp, c.counters, rows, vocab_size, SamplingMetadata, build, _RARE
    )
    return cache


class _Cache:
    """As native MetadataCache, by comparison of bytes."""

    SIZE = 2  # steps in flight alternate

    def __init__(self, columns: SamplingColumns, rows: I32, build: Callable[[int], SamplingMetadata]) -> None:
        self._columns, self._rows, self._build = columns, rows, build
        self._known: dict[tuple[bytes, bytes], SamplingMetadata] = {}  # the oldest first

    def get(self, count: int) -> SamplingMetadata:
        rows = self._rows[:count]
        key = rows.tobytes(), self._columns.stamp[rows].tobytes()
        metadata = self._known.get(key)
        if metadata is None:
            if len(self._known) == self.SIZE:
                del self._known[next(iter(self._known))]
            metadata = self._known[key] = self._build(count)
        return metadata
