"""The CPU executor of encoders: a whole step in one native call, texts of different lengths without padding.

The arithmetic is in `native/kernels/encoder.h`. The results of a text depend on that text alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

import numpy as np

from foreword.arrays import F32
from foreword.batch import InputBatch, lora_mapping
from foreword.errors import ConfigError, EngineError, PlanError
from foreword.executors.encoder import EncoderExecutor
from foreword.executors.native import NativeAdapters, packed_format
from foreword.executors.option_types import NativeKeywords
from foreword.executors.options import NativeOptions, WeightFormat
from foreword.executors.packed.parts import Parts, built
from foreword.machine import default_threads
from foreword.models.encoder_spec import EncoderSpec, by_distance, encoder_weight_names
from foreword.models.pooling import PoolingSpec
from foreword.models.weights import Tensor, Weights
from foreword.native import native

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def native_encoder(
    spec: EncoderSpec, weights: Weights, options: NativeOptions, *, isa: str | None = None, what: str = "encoder"
) -> Parts[native.CpuEncoder]:
    """Return the parts of the native encoder of a spec. Errors are those of `NativeExecutor`. what: it is, among those
    of a file.
    """
    return built(
        lambda: _new_core(spec, options, isa), partial(_fill, spec, options.weight_format), weights, options, spec, what
    )


def _new_core(spec: EncoderSpec, options: NativeOptions, isa: str | None) -> native.CpuEncoder:
    """Return a native encoder without layers. Raise ConfigError for an instruction set that the machine lacks."""
    try:
        return native.CpuEncoder(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            vocab_size=max(1, spec.vocab_size),
            norm_eps=spec.norm_eps,
            query_scale=spec.query_scale,
            activation="silu" if spec.activation == "quick_gelu" else spec.activation,
            act_scale=1.702 if spec.activation == "quick_gelu" else 1.0,
            norms_before=spec.norms_before,
            rms_norm=spec.rms_norm,
            isa=isa or "",
            num_threads=options.num_threads or default_threads(),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _fill(spec: EncoderSpec, weight_format: WeightFormat, parts: Parts[native.CpuEncoder]) -> None:
    core = parts.core
    tables = {name: np.zeros((0, spec.hidden_size), np.float32) for name in ("positions", "token_types")}
    ids: dict[str, dict[str, Any]] = {"": {}, **{f"layers.{i}.": {} for i in range(spec.num_layers)}}
    for name, _ in encoder_weight_names(spec):
        prefix, _, last = name.rpartition(".")
        tensor = parts.weights[name]
        if name in tables:
            tables[name] = parts.table(name, tensor.dequantize)
        elif name == "relative":
            core.set_distances(parts.table(name, partial(_distances, spec, tensor)))
        elif name == "embed":
            parts.embedding(name, spec.hidden_size)
        elif last in MATRICES:
            ids[f"{prefix}."][last] = parts.matrix(name, packed_format(tensor.quant, weight_format))
        else:
            ids[f"{prefix}." if prefix else ""][last] = parts.weight(name)
    core.set_tables(tables["positions"], tables["token_types"])
    ropes: dict[object, int] = {}
    for i, layer in enumerate(spec.layers):
        own = ids[f"layers.{i}."]
        if layer.rope is not None and layer.rope not in ropes:
            ropes[layer.rope] = core.add_rope(list(layer.rope.inv_freq), layer.rope.scale, list(layer.rope.axes))
        own["rope"] = -1 if layer.rope is None else ropes[layer.rope]
        own["window"] = -1 if layer.window is None else layer.window
        own["grouped"] = int(layer.is_windowed)
        if spec.unit_v:
            own["v_norm"] = parts.vector(f"layers.{i}.v_norm", lambda: np.ones(spec.head_dim, np.float32))
        core.add_encoder_layer(own)
    core.finish_encoder(ids[""])


def _distances(spec: EncoderSpec, relative: Tensor) -> F32:
    return by_distance(spec, relative.dequantize())


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
        parts = native_encoder(spec, weights, own, isa=isa)
        self.core, self.adapters = parts.core, NativeAdapters(parts, spec.num_heads)

    def encode(self, batch: InputBatch) -> F32:
        """Return the hidden states [T, hidden], valid until the next call."""
        try:
            return self.core.encode(
                num_tokens=batch.num_tokens,
                num_reqs=batch.num_reqs,
                input_ids=batch.input_ids,
                positions=batch.positions,
                query_start_loc=batch.query_start_loc,
                token_types=self.token_types(batch),
                lora_ids=lora_mapping(batch).requests if batch.states.loras else None,
            )
        except ValueError as error:
            raise PlanError(str(error), step=batch.step) from None
        except RuntimeError as error:
            raise EngineError(str(error)) from None
