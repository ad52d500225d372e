"""Results of pooling requests from hidden states: pooling over chunks, the head of a classifier, normalisation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foreword.arrays import F32, I64, AnyArray
from foreword.batch import InputBatch, PoolingParams, pooling_metadata
from foreword.batch.features.pooling import PoolingMetadata
from foreword.errors import RequestError
from foreword.executors.functions import ACTIVATIONS, layer_norm
from foreword.models.pooling import PoolingSpec
from foreword.models.weights import Weights


class BadHiddenStatesError(RequestError):
    """The model's hidden states are not numbers: one is NaN or infinite."""

    def __init__(self, request_id: str, step: int) -> None:
        super().__init__(
            request_id,
            "hidden_states",
            f"step {step}",
            "the model computed NaN or infinite hidden states",
            "Verify the model's weights (`foreword models pull` fetches a known model again).",
        )


class Pooler:
    """The pooling of a model, with its head's weights in float32."""

    def __init__(self, spec: PoolingSpec, weights: Weights) -> None:
        self.spec = spec
        self._floats: dict[str, F32] = {name: weights[name].dequantize() for name, _ in spec.weight_names()}

    def pool(
        self, batch: InputBatch, hidden_states: Callable[[I64], F32]
    ) -> tuple[dict[int, F32], dict[int, Exception]]:
        """The results of the pooling requests whose prompt a step completes, and their errors, by batch index.

        hidden_states: the rows [N, hidden] of tokens of the step. What later chunks need is kept in the requests'
        pooling states: sums in float64, so that chunks do not change a mean.
        """
        meta = pooling_metadata(batch)
        tokens = [self._tokens(batch, meta, i) for i in range(len(meta.params))]
        rows = np.split(hidden_states(np.concatenate(tokens)), np.cumsum([len(own) for own in tokens])[:-1])
        results: dict[int, F32] = {}
        failures: dict[int, Exception] = {}
        for i, (b, params) in enumerate(zip(meta.batch_indices.tolist(), meta.params, strict=True)):
            state = meta.states[i]
            if self.pooling(params) == "mean":
                state.append(rows[i].sum(0, dtype=np.float64, keepdims=True))
            elif len(rows[i]):
                state.append(rows[i].copy())
            if not meta.is_last_chunk[i]:
                continue
            pooled: AnyArray = state.take()
            if self.pooling(params) == "mean":
                pooled = pooled.sum(0, keepdims=True) / meta.prompt_lens[i]
            result = self.result(params, pooled.astype(np.float32))
            if np.isfinite(result).all():
                results[b] = result
            else:
                failures[b] = BadHiddenStatesError(batch.req_ids[b], batch.step)
        return results, failures

    def pooling(self, params: PoolingParams) -> str:
        """The request's pooling, by default the model's."""
        return params.pooling_or(self.spec.pooling)

    def _tokens(self, batch: InputBatch, meta: PoolingMetadata, i: int) -> I64:
        """The tokens of the step whose hidden states the pooling needs."""
        first, last = int(meta.first_token[i]), int(meta.last_token[i])
        match self.pooling(meta.params[i]):
            case "last":
                return np.arange(last if meta.is_last_chunk[i] else last + 1, last + 1)
            case "cls":
                return np.arange(first, first + (int(batch.positions[first]) == 0))
            case "step":
                return first + np.flatnonzero(batch.input_ids[first : last + 1] == meta.params[i].step_tag_id)
            case _:
                return np.arange(first, last + 1)

    def result(self, params: PoolingParams, pooled: F32) -> F32:
        """From pooled states [n, hidden]: n is 1, and the result one row, except for "step" and "all"."""
        if params.task in ("embed", "token_embed"):
            out = pooled[:, : params.dimensions]
            if params.normalize:
                length = np.sqrt(np.square(out, dtype=np.float64).sum(-1, keepdims=True))
                out = (out / np.maximum(length, 1e-12)).astype(np.float32)
        else:
            out = self.head(pooled)
            if params.task != "reward":
                out = ACTIVATIONS[self.spec.activation](out)
        return out if self.pooling(params) in ("step", "all") else out[0]

    def head(self, h: F32) -> F32:
        """[n, hidden] → [n, labels]"""
        for i, layer in enumerate(self.spec.head):
            h = h @ self._floats[f"head.{i}"].T
            if layer.bias:
                h = h + self._floats[f"head.{i}_bias"]
            h = ACTIVATIONS[layer.activation](h)
            if layer.norm:
                h = layer_norm(h, self._floats[f"head.{i}_norm"], None, self.spec.norm_eps)
        return h
