"""The CPU executor of encoders: a whole step in one native call, texts of different lengths without padding.

The arithmetic is in `native/kernels/encoder.h`. The results of a text depend on that text alone.
"""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np

from foreword.arrays import F32
from foreword.batch import InputBatch
from foreword.errors import ConfigError, EngineError, PlanError
from foreword.executors.encoder import EncoderExecutor
from foreword.executors.native import packed_format, source_of
from foreword.executors.option_types import NativeKeywords
from foreword.executors.options import NativeOptions, WeightFormat
from foreword.machine import default_threads
from foreword.models.encoder_spec import EncoderSpec, encoder_weight_names
from foreword.models.pooling import PoolingSpec
from foreword.models.weights import Weights
from foreword.native import native

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


class NativeEncoderExecutor(EncoderExecutor):
    """Runs ``spec`` with ``weights`` on this machine's CPU. Options and errors are those of `NativeExecutor`."""

    def __init__(
        self,
        spec: EncoderSpec,
        weights: Weights,
        pooling: PoolingSpec,
        *,
        isa: str | None = None,
        **options: Unpack[NativeKeywords],
    ) -> None:
        own = NativeOptions(**options).of_encoder()
        super().__init__(spec, weights, pooling)
        try:
            self.core = native.CpuEncoder(
                hidden_size=spec.hidden_size,
                num_heads=spec.num_heads,
                head_dim=spec.head_dim,
                vocab_size=spec.vocab_size,
                norm_eps=spec.norm_eps,
                query_scale=spec.query_scale,
                activation=spec.activation,
                norms_before=spec.norms_before,
                isa=isa or "",
                num_threads=own.num_threads or default_threads(),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._pack(weights, own.weight_format)

    def _pack(self, weights: Weights, weight_format: WeightFormat) -> None:
        spec, core = self.spec, self.core
        tables = {name: np.zeros((0, spec.hidden_size), np.float32) for name in ("positions", "token_types")}
        ids: dict[str, dict[str, Any]] = {"": {}, **{f"layers.{i}.": {} for i in range(spec.num_layers)}}
        for name, _ in encoder_weight_names(spec):
            prefix, _, last = name.rpartition(".")
            tensor = weights[name]
            if name in tables:
                tables[name] = tensor.dequantize()
            elif name == "embed":
                core.set_embedding(*source_of(tensor), spec.hidden_size)
            elif last in MATRICES:
                to, exact = packed_format(tensor.quant, weight_format), weight_format == "auto"
                ids[f"{prefix}."][last] = core.pack(*source_of(tensor), tensor.shape[-1], to, exact)
            else:
                vector = np.ascontiguousarray(tensor.dequantize(), np.float32)
                ids[f"{prefix}." if prefix else ""][last] = core.vector(vector)
        core.set_tables(tables["positions"], tables["token_types"])
        ropes: dict[object, int] = {}
        for i, layer in enumerate(spec.layers):
            own = ids[f"layers.{i}."]
            if layer.rope is not None and layer.rope not in ropes:
                ropes[layer.rope] = core.add_rope(list(layer.rope.inv_freq), layer.rope.scale)
            own["rope"] = -1 if layer.rope is None else ropes[layer.rope]
            own["window"] = -1 if layer.window is None else layer.window
            core.add_encoder_layer(own)
        core.finish_encoder(ids[""])

    def encode(self, batch: InputBatch) -> F32:
        """The hidden states [T, hidden], valid until the next call."""
        try:
            return self.core.encode(
                num_tokens=batch.num_tokens,
                num_reqs=batch.num_reqs,
                input_ids=batch.input_ids,
                positions=batch.positions,
                query_start_loc=batch.query_start_loc,
                token_types=self.token_types(batch),
            )
        except ValueError as error:
            raise PlanError(str(error), step=batch.step) from None
        except RuntimeError as error:
            raise EngineError(str(error)) from None
