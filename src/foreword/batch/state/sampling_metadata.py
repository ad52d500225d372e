"""The inputs of one step's sampling, and all sampling parameters of a step for samplers other than Foreword's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from foreword.arrays import F32, I32, I64, AnyArray, Bools
from foreword.batch.state.sampling_columns import COLUMNS, GIVEN, SamplingColumns
from foreword.batch.values.parameters import RARE, Need
from foreword.batch.values.sampling_params import SamplingParams
from foreword.native import available, native

# Plain integers, because arithmetic on enum members takes longer than the array operations here.
_GREEDY, _RANDOM, _PENALTIES, _RARE = map(int, (Need.GREEDY, Need.RANDOM, Need.PENALTIES, RARE))
Arrays = dict[str, AnyArray]
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True, eq=False)
class StepNeeds:
    """The inputs of the sampling of B rows in batch order (requests, or logit rows).

    rows: int32 [B] state rows. needs: the union of their `Need` flags. num_logprobs, num_prompt_logprobs: int32 [B],
    the number of alternatives requested with each token, −1 for none; None if no row requests any. The arrays are
    copies and stay
    valid after the step. Batches of the same requests share one object: do not change it. Not frozen, for speed.
    """

    rows: I32
    needs: int
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
        """Return whether each token is the argmax of its logits, without log-probabilities."""
        return self.needs in (0, _GREEDY)

    @property
    def max_num_logprobs(self) -> int:
        """The largest number of alternatives requested by a row; −1 if no row requests log-probabilities."""
        return -1 if self.num_logprobs is None else int(self.num_logprobs.max())


@dataclass(slots=True, eq=False)
class SamplingMetadata(StepNeeds):
    """All parameters of B rows in batch order.

    params: batch index → the request's parameters, for the rows with a rare parameter. arrays: column (a name of
    `COLUMNS`) → [B], for the other columns that some row needs. Each column is an attribute, which is None if no row
    needs it.
    """

    vocab_size: int = 0
    params: dict[int, SamplingParams] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> AnyArray | None:
            """Return a column of `GIVEN`."""

    # -- rare tables, made on demand ----------------------------------------------------------------------------

    def logit_bias(self) -> tuple[I64, I64, F32]:
        """Return (batch indices, token ids, values), N each: logits[batch indices, token ids] += values."""
        entries = [(b, t, v) for b, p in self.params.items() for t, v in (p.logit_bias or {}).items()]
        b, t, v = zip(*entries, strict=True) if entries else ((), (), ())
        return np.array(b, np.int64), np.array(t, np.int64), np.array(v, np.float32)

    def allowed_token_ids_mask(self) -> Bools | None:
        """Return bool [B, V], True if the row may choose the token; None if no row is limited."""
        if not self.needs & Need.ALLOWED_TOKENS:
            return None
        mask = np.ones((len(self.rows), self.vocab_size), np.bool_)
        for b, p in self.params.items():
            if p.allowed_token_ids is not None:
                mask[b] = False
                mask[b, list(p.allowed_token_ids)] = True
        return mask

    def bad_words(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Return batch index → token sequences that must not be completed."""
        return {b: tuple(map(tuple, p.bad_words_token_ids)) for b, p in self.params.items() if p.bad_words_token_ids}

    def end_token_ids(self) -> dict[int, tuple[int, ...]]:
        """Return batch index → stop tokens, besides the model's end tokens, that must not be chosen before min_tokens
        outputs.
        """
        return {b: tuple(p.stop_token_ids) for b, p in self.params.items() if p.min_tokens}


def _property(name: str) -> property:
    def values(self: SamplingMetadata) -> AnyArray | None:
        return self.arrays.get(name)

    return property(values)


_COUNTS = ("num_logprobs", "num_prompt_logprobs")
for _name in GIVEN.keys() - set(_COUNTS):
    setattr(SamplingMetadata, _name, _property(_name))
_NEED_OF = {name: int(column.need) for name, column in GIVEN.items()}
_SELDOM = _RARE | _NEED_OF["num_logprobs"] | _NEED_OF["num_prompt_logprobs"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """The inputs of penalties, for the P rows with a penalty. batch_indices: int64 [P]. in_prompt: bool [P, V].
    in_output: int32 [P, V], occurrences. The outputs with which a resumed request was admitted count as outputs.
    """

    batch_indices: I64
    in_prompt: Bools
    in_output: I32


def build_metadata(columns: SamplingColumns, vocab_size: int, rows: I32, needs: int | None = None) -> SamplingMetadata:
    """Return the metadata of these state rows, in this order. needs: the union of their flags, if known.

    O(B), with one gather for each parameter that a row needs.
    """
    if needs is None:
        needs = int(np.bitwise_or.reduce(columns.needs[rows])) if len(rows) else 0
    return _metadata(columns, vocab_size, rows, needs, _gathered(columns, GIVEN, rows, needs))


def _metadata(columns: SamplingColumns, vocab_size: int, rows: I32, needs: int, arrays: Arrays) -> SamplingMetadata:
    if not needs & _SELDOM:
        return SamplingMetadata(rows, needs, None, None, vocab_size, {}, arrays)
    rare = np.flatnonzero(columns.needs[rows] & _RARE)
    held = zip(rare.tolist(), rows[rare].tolist(), strict=True)
    params = {b: columns.params[row] for b, row in held if row in columns.params}
    output, prompt = _COUNTS
    return SamplingMetadata(rows, needs, arrays.pop(output, None), arrays.pop(prompt, None), vocab_size, params, arrays)


def _gathered(columns: SamplingColumns, names: Iterable[str], rows: I32, needs: int) -> Arrays:
    at = rows.astype(np.intp)  # converted once, not in every gather
    return {name: getattr(columns, name).take(at) for name in names if needs & _NEED_OF[name]}


def token_counts(
    metadata: SamplingMetadata, token_ids: I32, prompt_len: I32, num_tokens: I32, is_embedding: Bools | None = None
) -> TokenCounts:
    """Return the counts of the committed tokens, in O(P · (V + tokens)).

    token_ids [R, M], prompt_len [R], num_tokens [R], is_embedding [R, M]: the arrays of `RequestStates`.
    """
    vocab_size = metadata.vocab_size
    index = _penalized(metadata)
    in_prompt = np.zeros((len(index), vocab_size), np.bool_)
    in_output = np.zeros((len(index), vocab_size), np.int32)
    for i, row in enumerate(metadata.rows[index].tolist()):
        prompt, known = int(prompt_len[row]), int(num_tokens[row])
        ids = token_ids[row, :prompt]
        if is_embedding is not None:
            ids = ids[~is_embedding[row, :prompt]]
        in_prompt[i, ids] = True
        in_output[i] = np.bincount(token_ids[row, prompt:known], minlength=vocab_size)
    return TokenCounts(index, in_prompt, in_output)


def _penalized(metadata: SamplingMetadata) -> I64:
    """Return the batch indices of rows with a penalty."""
    has_one = np.zeros(len(metadata.rows), np.bool_)
    if metadata.needs_penalties:
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            has_one |= getattr(metadata, name) != COLUMNS[name][1]
    return np.flatnonzero(has_one)


class StepCache(Protocol[T_co]):
    """A cache of the results for the last few batches: the same object as long as neither rows nor parameters
    changed.
    """

    def get(self, count: int) -> T_co:
        """Return the result for the first ``count`` rows of the buffer. A known result is found by comparing the rows;
        otherwise it is computed.
        """


def needs_cache(columns: SamplingColumns, rows: I32) -> StepCache[StepNeeds]:
    """Return the `StepNeeds` of batches whose state rows are the first entries of ``rows``, a buffer at one address."""
    return _cache(columns, rows, _COUNTS, lambda rows, needs, arrays: StepNeeds(rows, needs, **arrays))


def metadata_cache(columns: SamplingColumns, vocab_size: int, rows: I32) -> StepCache[SamplingMetadata]:
    """Return the `SamplingMetadata` of such batches."""
    return _cache(columns, rows, GIVEN, partial(_metadata, columns, vocab_size))


def _cache(
    columns: SamplingColumns, rows: I32, names: Iterable[str], make: Callable[[I32, int, Arrays], T]
) -> StepCache[T]:
    """Return a cache. make: called with (rows, needs, arrays), where arrays has those of the columns ``names`` that a
    row needs.
    """
    if not available():
        return _Cache(columns, rows, tuple(names), make)
    gathered = [(name, getattr(columns, name), _NEED_OF[name]) for name in names]
    return native.StepCache(gathered, columns.needs, columns.stamp, columns.counters, rows, make)


class _Cache(Generic[T]):
    """A cache like the native StepCache, which compares bytes."""

    SIZE = 2  # two results, because steps in flight alternate

    def __init__(
        self, columns: SamplingColumns, rows: I32, names: tuple[str, ...], make: Callable[[I32, int, Arrays], T]
    ) -> None:
        self._columns, self._rows, self._names, self._make = columns, rows, names, make
        self._known: dict[tuple[bytes, bytes], T] = {}  # the oldest result first

    def get(self, count: int) -> T:
        columns, rows = self._columns, self._rows[:count].copy()
        key = rows.tobytes(), columns.stamp[rows].tobytes()
        known = self._known.get(key)
        if known is None:
            needs = int(np.bitwise_or.reduce(columns.needs[rows])) if count else 0
            known = self._make(rows, needs, _gathered(columns, self._names, rows, needs))
            if len(self._known) == self.SIZE:
                del self._known[next(iter(self._known))]
            self._known[key] = known
        return known
