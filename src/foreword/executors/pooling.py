"""Results of pooling requests from hidden states: pooling over chunks, the head of a classifier, normalisation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np

from foreword.arrays import F32, I64, AnyArray
from foreword.batch import InputBatch, PoolingMetadata, PoolingParams, PoolingTask, PoolingType, pooling_metadata
from foreword.errors import ModelOutputError
from foreword.executors.functions import ACTIVATIONS, layer_norm
from foreword.models.pooling import HeadLayer, PoolingSpec
from foreword.models.weights import Weights


class BadHiddenStatesError(ModelOutputError):
    """The model's hidden states are not numbers: one is NaN or infinite."""

    def __init__(self, request_id: str, step: int) -> None:
        super().__init__(
            request_id,
            "hidden_states",
            f"step {step}",
            "the model computed NaN or infinite hidden states",
            "Verify the model's weights (`foreword models pull` fetches a known model again).",
        )


_EMBEDDING = ("embed", "token_embed")
_MANY = ("step", "all")
"""Poolings whose result has several rows."""


class Pooler:
    """The pooling of a model, with its head's weights in float32."""

    def __init__(self, spec: PoolingSpec, weights: Weights) -> None:
        self.spec = spec
        self._num_early = len(spec.head) - 1 if spec.is_late else 0  # layers of the head before the pooling
        self._floats: dict[str, F32] = {name: weights[name].dequantize() for name, _ in spec.weight_names()}

    def pool(
        self, batch: InputBatch, hidden_states: Callable[[I64], F32]
    ) -> tuple[dict[int, F32], dict[int, Exception]]:
        """Return the results of the pooling requests whose prompt a step completes, and their errors, by batch index.

        hidden_states: the rows [N, hidden] of tokens of the step. What later chunks need is kept in the requests'
        pooling states: sums in float64, so that chunks do not change a mean.
        """
        meta = pooling_metadata(batch)
        kinds = [self.pooling(params) for params in meta.params]
        tokens, counts = _tokens(batch, meta, kinds)
        parts: list[AnyArray] = np.split(hidden_states(tokens), np.cumsum(counts)[:-1])
        if self.spec.is_late:
            for i, params in enumerate(meta.params):
                if params.task not in _EMBEDDING:
                    parts[i] = self.layers(parts[i], "head", range(self._num_early))
        in_one_step = meta.is_last_chunk & (batch.num_computed_tokens[meta.batch_indices] == 0)
        groups: dict[tuple[PoolingType, PoolingTask, int | None, bool], list[int]] = {}  # each is one computation
        for i, (kind, params, is_whole) in enumerate(zip(kinds, meta.params, in_one_step.tolist(), strict=True)):
            if kind == "mean":  # np.add.reduceat over all texts takes three times as long
                parts[i] = parts[i].sum(0, dtype=np.float64, keepdims=True)
            if not is_whole:
                meta.states[i].append(parts[i].copy())
                if not meta.is_last_chunk[i]:
                    continue
                chunks = meta.states[i].take()
                parts[i] = chunks.sum(0, keepdims=True) if kind == "mean" else chunks
            groups.setdefault((kind, params.task, params.dimensions, params.normalize), []).append(i)
        results: dict[int, F32] = {}
        failures: dict[int, Exception] = {}
        for (kind, *_), members in groups.items():
            pooled = np.concatenate([parts[i] for i in members])
            if kind == "mean":
                pooled /= meta.prompt_lens[members, None]
            rows = self.result(meta.params[members[0]], pooled.astype(np.float32))
            each = np.split(rows, np.cumsum([len(parts[i]) for i in members])[:-1]) if kind in _MANY else rows
            all_finite = np.isfinite(rows).all()
            for b, result in zip(meta.batch_indices[members].tolist(), each, strict=True):
                if all_finite or np.isfinite(result).all():
                    results[b] = result
                else:
                    failures[b] = BadHiddenStatesError(batch.req_ids[b], batch.step)
        return results, failures

    def pooling(self, params: PoolingParams) -> PoolingType:
        """Return the request's pooling, by default the model's."""
        return params.pooling_or(self.spec.pooling)

    def result(self, params: PoolingParams, pooled: F32) -> F32:
        """Return the result of pooled states [n, hidden], row by row: each row's bits are the same whatever the other
        rows are.
        """
        if params.task in _EMBEDDING:
            count = len(self.spec.dense) if params.task == "embed" else int(self.spec.is_projected)
            out = self.layers(pooled, "dense", range(count))
            out = out[:, : params.dimensions]
            if params.normalize:
                length = np.sqrt(np.square(out, dtype=np.float64).sum(-1, keepdims=True))
                out = (out / np.maximum(length, 1e-12)).astype(np.float32)
            return out
        out = self.layers(pooled, "head", range(self._num_early, len(self.spec.head)))
        return out if params.task == "reward" else ACTIVATIONS[self.spec.activation](out)

    def layers(self, h: F32, part: Literal["dense", "head"], numbers: Iterable[int]) -> F32:
        """Apply layers of a part to h [n, hidden], and return [n, outputs of the last one]."""
        layers: Sequence[HeadLayer] = getattr(self.spec, part)
        for i in numbers:
            layer, name = layers[i], f"{part}.{i}"
            h = (h[:, None] @ self._floats[name].T)[:, 0]  # a product per row, whose sums depend on it alone
            if layer.bias:
                h = h + self._floats[f"{name}_bias"]
            h = ACTIVATIONS[layer.activation](h)
            if layer.norm:
                h = layer_norm(h, self._floats[f"{name}_norm"], None, self.spec.norm_eps)
        return h


def _tokens(batch: InputBatch, meta: PoolingMetadata, kinds: Sequence[PoolingType]) -> tuple[I64, I64]:
    """Return the tokens of the step whose hidden states the poolings need, by request, and how many each needs."""
    kind, starts, ends = np.array(kinds), meta.first_token, meta.last_token + 1
    starts = np.where(kind == "last", np.where(meta.is_last_chunk, ends - 1, ends), starts)
    ends = np.where(kind == "cls", starts + (batch.positions[meta.first_token] == 0), ends)
    counts = ends - starts
    tokens = np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    if "step" in kinds:
        of_request = np.repeat(np.arange(len(counts)), counts)
        tags = np.array([-1 if params.step_tag_id is None else params.step_tag_id for params in meta.params])
        is_needed = (kind[of_request] != "step") | (batch.input_ids[tokens] == tags[of_request])
        tokens, counts = tokens[is_needed], np.bincount(of_request[is_needed], minlength=len(counts))
    return tokens, counts
