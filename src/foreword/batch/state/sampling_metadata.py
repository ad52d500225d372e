"""What a sampler reads for one step, and flags that let it skip what no row needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.arrays import F32, I32, I64, Bools
from foreword.batch.prepare.backends import native
from foreword.batch.state.sampling_columns import RARE, Need
from foreword.batch.values.sampling_params import SamplingParams

if TYPE_CHECKING:
    from foreword.batch.state.request_states import RequestStates


# As plain integers: arithmetic on enum members costs more than the arrays here.
_GREEDY, _RANDOM, _TOP_P, _TOP_K, _MIN_P, _PENALTIES, _LOGPROBS, _PROMPT_LOGPROBS, _MIN_TOKENS = (
    int(n)
    for n in (
        Need.GREEDY, Need.RANDOM, Need.TOP_P, Need.TOP_K, Need.MIN_P, Need.PENALTIES, Need.LOGPROBS,
        Need.PROMPT_LOGPROBS, Need.MIN_TOKENS,
    )
)  # fmt: skip
_RARE = int(RARE)


@dataclass(slots=True, eq=False)
class SamplingMetadata:
    """Parameters of B rows in batch order (requests, or logit rows). None where no row of the step needs the parameter.

    rows: int32 [B] state rows. needs: the union of their `Need` flags. params: batch index → the request's parameters,
    for the rows with a rare one. Copies: it stays true after the step. Shared by all who ask for the same batch, so not
    to be changed; not frozen, because freezing would cost more than all the rest of making one.
    """

    rows: I32
    needs: int
    vocab_size: int
    temperature: F32 | None
    seed: I64 | None
    top_p: F32 | None
    top_k: I32 | None
    min_p: F32 | None
    presence_penalty: F32 | None
    frequency_penalty: F32 | None
    repetition_penalty: F32 | None
    min_tokens: I32 | None
    num_logprobs: I32 | None
    num_prompt_logprobs: I32 | None
    params: dict[int, SamplingParams]

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
        """Whether the arg max of the logits is all there is to do."""
        return self.needs in (0, _GREEDY)

    @property
    def max_num_logprobs(self) -> int:
        """The most alternatives any row wants; −1 if none does."""
        return -1 if self.num_logprobs is None else int(self.num_logprobs.max())

    # -- rare tables, made when asked ----------------------------------------------------------------------------

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
        """Batch index → stop tokens not to choose before min_tokens outputs; the engine adds the model's end tokens."""
        return {b: tuple(p.stop_token_ids) for b, p in self.params.items() if p.min_tokens}


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """What penalties look at, for the P rows that have one. batch_indices: int64 [P]. in_prompt: bool [P, V].
    in_output: int32 [P, V], how often; outputs a resumed request brought are outputs.
    """

    batch_indices: I64
    in_prompt: Bools
    in_output: I32


def build_metadata(states: RequestStates, rows: I32, needs: int | None = None) -> SamplingMetadata:
    """The metadata of these state rows, in this order; ``needs``: the union of their flags, where it is known.
    O(B), and one gather a parameter that somebody needs.
    """
    c = states.sampling
    if needs is None:
        needs = int(np.bitwise_or.reduce(c.needs[rows])) if len(rows) else 0
    params: dict[int, SamplingParams] = {}
    if needs & _RARE:
        rare = np.flatnonzero(c.needs[rows] & _RARE)
        held = zip(rare.tolist(), rows[rare].tolist(), strict=True)
        params = {b: c.params[row] for b, row in held if row in c.params}
    at = rows.astype(np.intp)  # once: NumPy would convert it for every gather
    penalties = needs & _PENALTIES
    is_random = needs & _RANDOM
    return SamplingMetadata(
        rows,
        needs,
        states.vocab_size,
        c.temperature.take(at) if is_random else None,
        c.seed.take(at) if is_random else None,
        c.top_p.take(at) if needs & _TOP_P else None,
        c.top_k.take(at) if needs & _TOP_K else None,
        c.min_p.take(at) if needs & _MIN_P else None,
        c.presence_penalty.take(at) if penalties else None,
        c.frequency_penalty.take(at) if penalties else None,
        c.repetition_penalty.take(at) if penalties else None,
        c.min_tokens.take(at) if needs & _MIN_TOKENS else None,
        c.num_logprobs.take(at) if needs & _LOGPROBS else None,
        c.num_prompt_logprobs.take(at) if needs & _PROMPT_LOGPROBS else None,
        params,
    )


def token_counts(states: RequestStates, metadata: SamplingMetadata) -> TokenCounts:
    """Counted from the committed tokens now, O(P · (V + tokens))."""
    index = np.flatnonzero(states.sampling.needs[metadata.rows] & Need.PENALTIES)
    in_prompt = np.zeros((len(index), metadata.vocab_size), np.bool_)
    in_output = np.zeros((len(index), metadata.vocab_size), np.int32)
    for i, row in enumerate(metadata.rows[index].tolist()):
        prompt, known = int(states.prompt_len[row]), int(states.num_tokens[row])
        ids = states.token_ids[row, :prompt]
        if states.is_token_id is not None:
            ids = ids[states.is_token_id[row, :prompt]]
        in_prompt[i, ids] = True
        in_output[i] = np.bincount(states.token_ids[row, prompt:known], minlength=metadata.vocab_size)
    return TokenCounts(index, in_prompt, in_output)


class MetadataCache:
    """The metadata of the last few batches: the same object as long as neither rows nor parameters changed."""

    __slots__ = ("_known", "_probe", "_states")
    SIZE = 2  # steps in flight alternate

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._probe: Any = native.sampling_probe(states.sampling.needs, states.sampling.stamp) or _Probe(states)
        self._known: list[SamplingMetadata | None] = [None] * self.SIZE

    def get(self, rows: I32) -> SamplingMetadata:
        """Metadata for these rows. Costs a comparison where it is known, `build_metadata` where it is not."""
        answer: tuple[int, bool, int | None] = self._probe.look(rows, self._states.sampling.version)
        slot, known, needs = answer
        metadata = self._known[slot]
        if known and metadata is not None:
            return metadata
        metadata = build_metadata(self._states, rows.copy(), needs)
        self._known[slot] = metadata
        return metadata


class _Probe:
    """Which of the last batches asked about this is, by its rows and the stamps of their parameters."""

    def __init__(self, states: RequestStates) -> None:
        self._columns = states.sampling
        self._keys: list[tuple[bytes, bytes] | None] = [None] * MetadataCache.SIZE
        self._oldest = 0

    def look(self, rows: I32, version: int) -> tuple[int, bool, None]:
        """(slot, whether it is known there, its needs: not counted here)"""
        key = rows.tobytes(), self._columns.stamp[rows].tobytes()
        if key in self._keys:
            return self._keys.index(key), True, None
        slot, self._oldest = self._oldest, (self._oldest + 1) % MetadataCache.SIZE
        self._keys[slot] = key
        return slot, False, None
