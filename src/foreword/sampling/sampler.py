"""From a step's logits to its tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from foreword.arrays import F32, I32, I64
from foreword.batch import InputBatch
from foreword.batch.state.sampling_metadata import SamplingMetadata
from foreword.errors import PlanError
from foreword.native import native
from foreword.sampling.draw import draw_tokens
from foreword.sampling.failures import BadLogitsError, NoTokenLeftError, has_choice
from foreword.sampling.logprobs import TokenLogprobs, token_logprobs
from foreword.sampling.processors import StepSampling
from foreword.sampling.rows import LogitRows
from foreword.sampling.verification import accepted_tokens

FLOAT32 = np.dtype(np.float32)

Failure = Exception | type[BadLogitsError] | type[NoTokenLeftError]  # a type is made with the request's id and the step


@dataclass(slots=True, eq=False)
class Sampled:
    """What a step drew. Not to be changed; not frozen, for speed.

    token_ids: int32 [B], or [B, D + 1] padded with −1 when the step verified drafts.
    logprobs: batch index → one entry per token, for the requests that want them.
    prompt_logprobs: state row → (position of a prompt token, its log-probability and the likeliest tokens there), for
    the requests that want them, in order.
    failures: batch index → the error of a request whose logits or grammar give no token; it has none in token_ids.
    """

    token_ids: I32
    logprobs: dict[int, list[TokenLogprobs]]
    prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


class Sampler:
    """Draws the tokens of steps. It holds no state of requests. For each row of logits, in this order:

        token mask → processors (allowed ids, bias, minimum length → penalties → bad words → custom ones)
        → temperature → min-p → top-k → top-p → draw

    threads: the model whose idle threads draw too; no step of it may run meanwhile. The tokens are the same without.
    """

    __slots__ = ("threads",)

    def __init__(self, *, threads: native.CpuModel | None = None) -> None:
        self.threads = threads

    def sample(self, batch: InputBatch, logits: F32, sampling: StepSampling) -> Sampled:
        """Draw for every request of the batch from ``logits`` [L, V], which are not changed.

        A prompt chunk that is not the last gets a token too, that masks and processors do not affect;
        `RequestStates.commit` discards it. PlanError for logits of another shape or type.
        """
        at = batch.logits_indices
        if logits.shape != (len(at), batch.states.vocab_size) or logits.dtype is not FLOAT32:
            raise PlanError("the logits must be float32 [L, V]", step=batch.step, tensor="logits",
                            expected=(len(at), batch.states.vocab_size),
                            got=(*logits.shape, str(logits.dtype)))  # fmt: skip
        rows, columns = batch.expanded_idx_mapping, batch.states.sampling
        positions = batch.positions.take(at)
        positions += 1
        drawn = draw_tokens(logits, columns, rows, positions, self.threads)
        if sampling.processors or sampling.masks is not None:
            indices = _changed_rows(batch, positions, sampling)
            if indices.size:
                changed = _change(batch, logits, indices, sampling)
                drawn[indices] = draw_tokens(changed, columns, rows[indices], positions[indices], self.threads)
        width = 1  # the most logits of a request; each has at least one
        if len(drawn) > batch.num_reqs:
            width = int(np.diff(batch.cu_num_logits).max())
        tokens = drawn if width == 1 else accepted_tokens(drawn, batch.draft_token_ids, batch.cu_num_logits, width)
        failures: dict[int, Failure] = {}
        if drawn[drawn.argmin()] < 0:  # faster than min()
            failures |= _failures(batch, logits, drawn, positions)
        if sampling.masks is not None and sampling.masks.failures:
            failures |= sampling.masks.failures
            tokens[list(sampling.masks.failures)] = -1
        return Sampled(tokens, _logprobs(batch, logits, tokens, sampling.metadata), failures=failures)


def _changed_rows(batch: InputBatch, positions: I64, sampling: StepSampling) -> I64:
    """The rows of logits that masks or processors change, ascending: none of a prompt chunk that is not the last."""
    rows = batch.expanded_idx_mapping
    selected = np.zeros(len(rows), np.bool_)
    for processor in sampling.processors:
        selected |= processor.rows.mask.take(rows)
    if sampling.masks is not None:
        selected[sampling.masks.logit_rows] = True
    selected &= positions >= batch.states.num_tokens.take(rows)
    return selected.nonzero()[0]


def _change(batch: InputBatch, logits: F32, indices: I64, sampling: StepSampling) -> F32:
    """These rows of the logits [N, V], masked and processed."""
    changed, at = logits.take(indices, axis=0), LogitRows.of(batch, indices)
    if sampling.masks is not None:
        sampling.masks.apply(changed, indices)
    for processor in sampling.processors:
        applies = processor.rows.mask.take(at.rows)
        if applies.all():
            processor.apply(changed, at)
        else:
            some = applies.nonzero()[0]
            part = changed[some]
            processor.apply(part, at.take(some))
            changed[some] = part
    return changed


def _failures(batch: InputBatch, logits: F32, drawn: I32, positions: I64) -> dict[int, Failure]:
    """The requests whose first token of this step could not be drawn; not those whose token is discarded anyway."""
    first = batch.cu_num_logits[:-1]
    samples = positions[first] >= batch.states.num_tokens[batch.idx_mapping]
    failed = (samples & (drawn[first] < 0)).nonzero()[0]
    return {b: NoTokenLeftError if has_choice(logits[first[b]]) else BadLogitsError for b in failed.tolist()}


def _logprobs(
    batch: InputBatch, logits: F32, tokens: I32, metadata: SamplingMetadata
) -> dict[int, list[TokenLogprobs]]:
    if metadata.num_logprobs is None:
        return {}
    table = tokens.reshape(len(tokens), -1)
    wanting = (metadata.num_logprobs >= 0).nonzero()[0]
    counts = metadata.num_logprobs[wanting]
    return {
        b: [
            token_logprobs(logits[int(batch.cu_num_logits[b]) + j], token, count)
            for j, token in enumerate(table[b].tolist())
            if token >= 0
        ]
        for b, count in zip(wanting.tolist(), counts.tolist(), strict=True)
    }
