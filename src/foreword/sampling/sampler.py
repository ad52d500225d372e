"""Draw a step's tokens from its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch import InputBatch
from foreword.errors import PlanError
from foreword.native import native
from foreword.sampling.failures import BadLogitsError, NoTokenLeftError, has_choice
from foreword.sampling.logprobs import LogprobArrays, StepLogprobs, TokenLogprobs
from foreword.sampling.processors import StepSampling
from foreword.sampling.reference import StepArrays
from foreword.sampling.rows import LogitRows

FLOAT32 = np.dtype(np.float32)
_NO_LOGPROBS = (None, None, None, None)

Failure = Exception | type[BadLogitsError] | type[NoTokenLeftError]  # a type is made with the request's id and the step


@dataclass(slots=True, eq=False)
class Sampled:
    """The result of a step's sampling. Not to be changed; not frozen, for speed.

    token_ids: int32 [B], or [B, D + 1] padded with −1 when the step verified drafts.
    logprobs: batch index → one entry per token, for the requests that want them.
    prompt_logprobs: state row → (position of a prompt token, its log-probability and the likeliest tokens there), for
    the requests that want them, in order.
    failures: batch index → the error of a request whose logits or grammar give no token; it has none in token_ids.
    pooled: batch index → the result of a pooling request that the step completed; these have no token either.
    """

    token_ids: I32
    logprobs: Mapping[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    pooled: dict[int, F32] = field(default_factory=dict)

    def of_requests(self, batch_indices: I64) -> Sampled:
        """Return what was drawn for these requests of the batch, in this order, as of a batch of them alone."""
        kept = batch_indices.tolist()
        return Sampled(
            self.token_ids[batch_indices],
            {i: self.logprobs[b] for i, b in enumerate(kept) if b in self.logprobs},
            self.prompt_logprobs,
            {i: self.failures[b] for i, b in enumerate(kept) if b in self.failures},
            {i: self.pooled[b] for i, b in enumerate(kept) if b in self.pooled},
        )


class Sampler:
    """Draws the tokens of steps, as `foreword.sampling.reference` defines. It holds no state of requests.

    threads: the model whose idle threads sample too; no step of it may run meanwhile. The tokens are the same without.
    """

    __slots__ = ("threads",)

    def __init__(self, *, threads: native.CpuModel | None = None) -> None:
        self.threads = threads

    def sample(self, batch: InputBatch, logits: F32, sampling: StepSampling) -> Sampled:
        """Draw for every request of the batch from ``logits`` [L, V], which are not changed.

        A prompt chunk that is not the last gets a token too, that rules, masks and processors do not affect;
        `RequestStates.commit` discards it. Raise PlanError for logits of another shape or type.
        """
        num_reqs, states, masks = batch.num_reqs, batch.states, sampling.masks
        num_logits = batch.scalars.num_logits
        if logits.shape != (num_logits, states.vocab_size) or logits.dtype is not FLOAT32:
            raise PlanError("the logits must be float32 [L, V]", step=batch.step, tensor="logits",
                            expected=(num_logits, states.vocab_size),
                            got=(*logits.shape, str(logits.dtype)))  # fmt: skip
        width = 1  # the most logits of a request; each has at least one
        if num_logits > num_reqs:
            width = int(np.diff(batch.cu_num_logits).max())
        tokens = np.empty((num_reqs, width), np.int32)
        wanted, buffers = None, None
        if sampling.step.num_logprobs is not None:
            wanted = wanted_logprobs(batch, sampling, tokens)
        elif masks is None and not sampling.processors and not states.extras.prompt_embeds:
            buffers = sampling.rules.buffers(batch.buffers)
        if buffers is not None:
            has_failed = buffers.sample(num_reqs, logits, tokens, self.threads)
        else:
            self._sample(batch, logits, sampling, tokens, wanted)
            has_failed = bool((tokens[:, 0] < 0).any())
        failures: dict[int, Failure] = _failures(batch, logits, tokens[:, 0]) if has_failed else {}
        if masks is not None and masks.failures:
            failures |= masks.failures
            tokens[list(masks.failures)] = -1
        return Sampled(tokens if width > 1 else tokens.reshape(-1), wanted or {}, failures=failures)

    def _sample(
        self, batch: InputBatch, logits: F32, sampling: StepSampling, tokens: I32, wanted: StepLogprobs | None
    ) -> None:
        """Fill the tokens [B, W] of a step with anything, and the log-probabilities that are wanted."""
        masks = sampling.masks
        step = StepArrays(
            logits,
            batch.idx_mapping,
            batch.num_computed_tokens,
            batch.cu_num_logits,
            batch.positions.take(batch.logits_indices) + 1,
            batch.draft_token_ids,
            batch.states.extras.is_embedding,
            None if masks is None else masks.logit_rows,
            None if masks is None else masks.words,
        )
        indices, changed = self._process(batch, step, sampling) if sampling.processors else (None, None)
        logprobs = _NO_LOGPROBS if wanted is None else wanted.arrays.all()
        sampling.rules.core.sample(*step, indices, changed, tokens, *logprobs, self.threads)

    def _process(
        self, batch: InputBatch, step: StepArrays, sampling: StepSampling
    ) -> tuple[I32, F32] | tuple[None, None]:
        """Return rows of logits that custom processors change, ascending, with values [n, V]; none of unfinished
        prompts.
        """
        rows = batch.expanded_idx_mapping
        applies = [processor.rows.mask.take(rows) for processor in sampling.processors]
        selected = np.logical_or.reduce(applies) & (step.positions >= batch.states.num_tokens.take(rows))
        indices = selected.nonzero()[0].astype(np.int32)
        if not indices.size:
            return None, None
        changed, at = np.empty((len(indices), step.logits.shape[1]), np.float32), LogitRows.of(batch, indices)
        sampling.rules.core.change(*step, indices, changed, self.threads)
        for processor, applied in zip(sampling.processors, applies, strict=True):
            some = applied[indices].nonzero()[0]
            if len(some) == len(indices):
                processor.apply(changed, at)
            elif len(some):
                part = changed[some]
                processor.apply(part, at.take(some))
                changed[some] = part
        return indices, changed


def wanted_logprobs(batch: InputBatch, sampling: StepSampling, tokens: I32) -> StepLogprobs:
    """Return memory for the log-probabilities of each row of logits whose request wants them."""
    counts = sampling.step.num_logprobs
    assert counts is not None
    wanting = (counts >= 0).nonzero()[0]
    per_row = np.repeat(counts.astype(np.int64), np.diff(batch.cu_num_logits))
    return StepLogprobs(LogprobArrays.for_counts(per_row), wanting, batch.cu_num_logits[wanting], tokens)


def _failures(batch: InputBatch, logits: F32, drawn: I32) -> dict[int, Failure]:
    """Return the errors of `failed_requests`."""
    first = batch.cu_num_logits[:-1]
    failed = failed_requests(batch, drawn)
    return {b: NoTokenLeftError if has_choice(logits[first[b]]) else BadLogitsError for b in failed}


def failed_requests(batch: InputBatch, drawn: I32) -> list[int]:
    """Return the requests whose first token of this step, drawn[b], could not be drawn; not those that discard it
    anyway.
    """
    first = batch.cu_num_logits[:-1]
    samples = batch.positions[batch.logits_indices[first]] + 1 >= batch.states.num_tokens[batch.idx_mapping]
    return (samples & (drawn < 0)).nonzero()[0].tolist()
