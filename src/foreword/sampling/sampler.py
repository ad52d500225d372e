"""From logits to tokens: greedy for rows that want nothing else, the full pipeline for those that do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch import InputBatch, RequestStates
from foreword.batch.values.sampling_params import SamplingParams
from foreword.sampling import native
from foreword.sampling.filters import kept_tokens
from foreword.sampling.logprobs import TokenLogprobs, token_logprobs
from foreword.sampling.noise import gumbel_noise
from foreword.sampling.processors import Processors
from foreword.sampling.verification import accepted_tokens

if TYPE_CHECKING:
    from foreword import _native


NO_ROWS = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What a step drew.

    token_ids: int32 [B], or [B, D + 1] padded with −1 when the step verified drafts.
    logprobs: batch index → one entry a token, for the requests that asked.
    """

    token_ids: I32
    logprobs: dict[int, list[TokenLogprobs]]


class Sampler:
    """Draws tokens for the rows of ``states``.

    A token is argmax over the kept tokens of logits / temperature + noise(seed, position, token), where position is the
    one the token will take; temperature 0 is the argmax of the logits. Of equal ones the lowest id wins. Order:

        allowed ids, bias, minimum length → penalties → bad words → temperature → min-p → top-k → top-p → draw

    threads: an executor's, for the draws; no step of it may run meanwhile. The tokens are the same without.
    """

    def __init__(self, states: RequestStates, *, threads: _native.CpuModel | None = None) -> None:
        self.states, self.threads = states, threads
        self._processors: list[Processors | None] = [None] * states.max_num_reqs
        self._is_plain = np.ones(states.max_num_reqs, np.bool_)  # greedy, and nothing else wanted
        self._has_processors = np.zeros(states.max_num_reqs, np.bool_)
        self._wants_logprobs = np.zeros(states.max_num_reqs, np.bool_)
        self._num_processors = self._num_wanting_logprobs = 0  # rows that have them; as a rule none

    def set_request(self, row: int, params: SamplingParams, end_ids: I64) -> None:
        """Take a request's parameters, when it is admitted. end_ids: tokens that would end its output."""
        processors = Processors.of(params, end_ids)
        self._is_plain[row] = params.temperature == 0 and processors is None
        self._set(row, processors, params.logprobs is not None)

    def clear_request(self, row: int) -> None:
        """Forget the row's parameters, when it is freed."""
        self._is_plain[row] = True
        self._set(row, None, wants_logprobs=False)

    def _set(self, row: int, processors: Processors | None, wants_logprobs: bool) -> None:
        self._num_processors += (processors is not None) - int(self._has_processors[row])
        self._num_wanting_logprobs += wants_logprobs - int(self._wants_logprobs[row])
        self._processors[row] = processors
        self._has_processors[row] = processors is not None
        self._wants_logprobs[row] = wants_logprobs

    def sample(self, batch: InputBatch, logits: F32) -> Sampled:
        """Draw for every request of the batch from ``logits`` [L, V]. The logits are not changed.

        A prompt chunk that is not the last is drawn for too; `RequestStates.commit` discards that token.
        """
        rows = batch.expanded_idx_mapping
        if native.available():
            drawn = self._draw_natively(batch, logits)
            special = self._has_processors.take(rows).nonzero()[0] if self._num_processors else NO_ROWS
        else:
            drawn = logits.argmax(axis=1).astype(np.int32)
            special = np.flatnonzero(~self._is_plain[rows])
        if special.size:
            positions = batch.positions[batch.logits_indices[special]] + 1
            for i, position in zip(special.tolist(), positions.tolist(), strict=True):
                if self._is_used(batch, i):
                    drawn[i] = self._draw(int(rows[i]), position, logits[i], self._drafts_before(batch, i))
        width = 1  # logits a request; each has one at least
        if len(drawn) > batch.num_reqs:
            width = int(np.diff(batch.cu_num_logits).max())
        tokens = drawn if width == 1 else accepted_tokens(drawn, batch.draft_token_ids, batch.cu_num_logits, width)
        return Sampled(tokens, self._logprobs(batch, logits, tokens))

    def _draw_natively(self, batch: InputBatch, logits: F32) -> I32:
        """Every row by temperature, top-k, top-p and min-p alone: `_draw` without processors, and its very tokens."""
        drawn, columns = np.empty(len(logits), np.int32), self.states.sampling
        positions = batch.positions.take(batch.logits_indices)
        positions += 1
        native.sample(
            logits,
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            columns.seed,
            positions,
            batch.expanded_idx_mapping,
            drawn,
            self.threads,
        )
        return drawn

    def _draw(self, row: int, position: int, logits: F32, drafts: I32) -> int:
        states, columns = self.states, self.states.sampling
        processors = self._processors[row]
        if processors is not None:
            prompt, known = int(states.prompt_len[row]), int(states.num_tokens[row])
            output = states.token_ids[row, prompt:known]
            logits = processors.process(
                logits, states.token_ids[row, :prompt], np.concatenate([output, drafts]) if drafts.size else output
            )
        temperature = float(columns.temperature[row])
        if temperature == 0:
            return int(logits.argmax())
        scaled = logits.astype(np.float64) / temperature
        kept = kept_tokens(
            scaled,
            top_k=int(columns.top_k[row]),
            top_p=float(columns.top_p[row]),
            min_p=float(columns.min_p[row]),
        )
        noise = gumbel_noise(int(columns.seed[row]), position, kept)
        return int(kept[(scaled[kept] + noise).argmax()])

    def _is_used(self, batch: InputBatch, i: int) -> bool:
        """Whether logit row i follows the last known token or a draft, rather than the end of a chunk."""
        return int(batch.positions[batch.logits_indices[i]]) + 1 >= int(
            self.states.num_tokens[batch.expanded_idx_mapping[i]]
        )

    def _drafts_before(self, batch: InputBatch, i: int) -> I32:
        """The drafts that logit row i takes for granted."""
        j = int(batch.expanded_local_pos[i])
        if j == 0:
            return batch.draft_token_ids[:0]
        b = int(np.searchsorted(batch.cu_num_logits, i, side="right")) - 1
        start = int(batch.cu_num_draft_tokens[b])
        return batch.draft_token_ids[start : start + j]

    def _logprobs(self, batch: InputBatch, logits: F32, tokens: I32) -> dict[int, list[TokenLogprobs]]:
        if not self._num_wanting_logprobs:
            return {}
        wanting = self._wants_logprobs.take(batch.idx_mapping).nonzero()[0]
        if not wanting.size:
            return {}
        table = tokens.reshape(len(tokens), -1)
        counts = self.states.sampling.num_logprobs[batch.idx_mapping[wanting]]
        return {
            b: [
                token_logprobs(logits[int(batch.cu_num_logits[b]) + j], token, count)
                for j, token in enumerate(table[b].tolist())
                if token >= 0
            ]
            for b, count in zip(wanting.tolist(), counts.tolist(), strict=True)
        }
