"""The CPU executor: packs a model's weights for this machine and runs a whole step in one native call.

The arithmetic is in `native/kernels/`. The results of a request depend on that request alone: not on the batch it runs
in, on the chunks of its prompt, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from math import prod
from typing import Any, Unpack

import numpy as np

from foreword.arrays import F32, I64, AnyArray
from foreword.batch import InputBatch, InputBuffers, lora_mapping
from foreword.errors import ConfigError, EngineError, PlanError
from foreword.executors.executor import Capability
from foreword.executors.functions import softplus, xielu_numbers
from foreword.executors.host import TransferPagedExecutor
from foreword.executors.inputs import check_whole, last_seen
from foreword.executors.key_scales import key_scales
from foreword.executors.memory import ROW_PADDING
from foreword.executors.nodes import first_nodes
from foreword.executors.option_types import NativeKeywords
from foreword.executors.options import KVFormat, NativeOptions, WeightFormat
from foreword.executors.packed.parts import AS_IN_FILE, Parts, built, mapping_key, source_bytes
from foreword.executors.pool import batch_groups
from foreword.executors.pooling import Pooler
from foreword.machine import default_threads
from foreword.models.digests import native_digest
from foreword.models.lora import LoraAdapter, LoraPair
from foreword.models.pooling import PoolingSpec
from foreword.models.quants import Quant
from foreword.models.recurrent import GATES, RECURRENT_KINDS, RecurrentSpec, in_bias_of
from foreword.models.spec import (
    AsideSpec,
    DecoderSpec,
    LayerSpec,
    MlaSpec,
    MoeSpec,
    RopeSpec,
    RouterSpec,
    block_of,
    projections,
)
from foreword.models.weights import Tensor, Weights
from foreword.native import native
from foreword.sampling import Sampled, Sampler, StepSampling

_BYTES = {
    "f32": 4, "bf16": 2, "i8": 1, "q4": 9 / 16, "q4_min": 5 / 8, "q8": 17 / 16, "q8_min": 9 / 8, "q8_half": 9 / 8,
    **dict.fromkeys(("fp4", "iq4", "iq3_s", "iq3_xxs", "iq2_xxs", "iq1_s"), 9 / 16),
}  # bytes of a weight, with its part of the scales (native/kernels/formats.h)  # fmt: skip
_FLOATS = (Quant.F32, Quant.F16, Quant.BF16)
_GROUP = 16
"""Adjacent channels of mamba1, whose states are beside each other (native/kernels/recurrent.h)."""
_VECTOR = 16
"""Heads have a multiple of so many floats: kTile in native/kernels/formats.h."""
_LOG2E = np.float32(np.log2(np.e))


def packed_format(quant: Quant, weight_format: WeightFormat, *, keep_precise: bool = False) -> str:
    """Return how a matrix stored as ``quant`` is packed (native/kernels/formats.h).

    auto: with the integers of the file, in 4 bit if 32 weights or more have one scale and at most 16 values, else in 8.
    Q2_K, whose minima are those of 16 weights, becomes 8 bit with a scale per block. q4: the same, and floats become 4
    bit with a scale and a minimum per block of 32, or 8 bit where ``keep_precise`` (the output projection).
    """
    match weight_format:
        case "fp32":
            return "f32"
        case "bf16":
            return "bf16"
        case "int8":
            return "i8"
        case "q4" if quant in _FLOATS:
            return "q8" if keep_precise else "q4_min"
        case "auto" | "q4":
            return AS_IN_FILE.get(quant, "q8")


def _target_of_heads(target: str) -> str:
    """Return the format of the matrices of single heads, whose products have no integer kernels."""
    return target if target in ("f32", "bf16") else "bf16"


def _packed_as(options: NativeOptions) -> str:
    """Return what a decoder's weights are packed as, besides their format."""
    return f"decoder{' and scaled keys' if options.kv_format == 'int8' else ''} as"


def weights_key(spec: DecoderSpec, weights: Weights, options: NativeOptions) -> str | None:
    """Return what tells the mapped weights of a decoder from others; None if they are not kept in a file."""
    return mapping_key(weights, options, spec, _packed_as(options))


def packed_bytes(spec: DecoderSpec, weights: Weights, weight_format: WeightFormat) -> int:
    """Return the bytes of a model's weights as the executor holds them.

    These are packed matrices, vectors in float32, the rows of embeddings as native code reads them, and the output
    projection in 8 bit too (`make_screen` in native/kernels/model.h).
    """
    tables = {"embed", "per_layer_embed"} & weights.keys()
    size = sum(source_bytes(weights[name]) for name in tables)
    for name, tensor in weights.items():
        if name not in tables or (name == "embed" and spec.tie_embeddings and spec.has_logits):
            size += weight_bytes(spec, name, tensor, weight_format)
    return size + (round(spec.vocab_size * spec.hidden_size * _BYTES["i8"]) if spec.has_logits else 0)


def weight_bytes(spec: DecoderSpec, name: str, tensor: Tensor, weight_format: WeightFormat) -> int:
    """Return the bytes of one weight as it is packed, or of a vector in float32."""
    head = "embed" if spec.tie_embeddings else "lm_head"
    target = packed_format(tensor.quant, weight_format, keep_precise=name == head)
    is_of_heads = spec.mla is not None and name.endswith((".k_b", ".v_b"))
    if is_of_heads or (".state." in name and name.endswith((*GATES, ".heads_conv"))):
        target = _target_of_heads(target)
    return round(prod(tensor.shape) * (_BYTES[target] if len(tensor.shape) > 1 else 4))


def _pool_bytes(spec: DecoderSpec, kv_format: KVFormat, *, num_blocks: int, block_size: int, num_states: int) -> int:
    """Return the bytes of a KV pool with padding and scales. num_states: slots for states; 0: states are in blocks."""
    return native.kv_bytes(
        kv_format=kv_format,
        num_blocks=num_blocks,
        block_size=block_size,
        num_slots=spec.num_slots,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.own_heads.value_dim,
        recurrent=_recurrent_sizes(spec),
        more_heads=_more_heads(spec),
        keys_are_values=spec.mla is not None,
        num_states=num_states,
        num_state_slots=spec.num_state_slots,
        index_dim=spec.index_size,
    )


def bytes_per_value(spec: DecoderSpec, kv_format: KVFormat) -> float:
    """Return the bytes of one number of a key or value in the cache, with padding and scales. A block of n tokens has
    n · storage slots · token_size of them.
    """
    size = partial(_pool_bytes, spec, kv_format, block_size=16, num_states=int(spec.state_size > 0))
    return (size(num_blocks=2) - size(num_blocks=1)) / max(16 * spec.num_slots * spec.token_size, 1)


def state_bytes(spec: DecoderSpec) -> int:
    """Return the bytes of the state of one request in all recurrent layers, with its padding."""
    if not spec.state_size:
        return 0
    size = partial(_pool_bytes, spec, "fp32", num_blocks=1, block_size=16)
    return size(num_states=2) - size(num_states=1)


def kv_report(
    spec: DecoderSpec, *, num_blocks: int, block_size: int, num_states: int = 0, kv_format: KVFormat = "bf16"
) -> str:
    """Return size and capacity of a KV pool: "KV 1.2 GiB = 2,048 blocks of 16 tokens: 4 requests of 8k". States in
    slots of their own are counted, too: "2,048 blocks of 16 tokens, 80 states".
    """
    size = _pool_bytes(spec, kv_format, num_blocks=num_blocks, block_size=block_size, num_states=num_states)
    length = spec.max_model_len
    per_request = 0
    for group in batch_groups(spec, block_size):
        if group.recurrent and num_states:
            continue
        span = length if group.sliding_window is None else min(length, group.sliding_window + block_size)
        per_request += -(-span // group.tokens_per_block(None, length))
    requests = (num_blocks - 1) // per_request
    if num_states:
        requests = min(requests, num_states // sum(group.recurrent for group in spec.kv_groups()))
    name = f"{length // 1024}k" if length % 1024 == 0 else f"{length:,} tokens"
    holds = f"{requests} request{'s' if requests != 1 else ''} of {name}"
    if requests == 0:
        holds = f"part of one request of {name}"
    states = f", {num_states:,} states" if num_states else ""
    return f"KV {_bytes_text(size)} = {num_blocks:,} blocks of {block_size} tokens{states}: {holds}"


class NativeAdapters:
    """An `AdapterStore` in the native model. Factors are as floats as their weights, else 8 bit, scaled by rank.

    parts: those of the model. Changes of matrices that it has as vectors are multiplied out. heads: as many matrices,
    each of a head, are Wk_b, and Wv_b.
    """

    def __init__(self, parts: Parts[native.CpuModel] | Parts[native.CpuEncoder], heads: int) -> None:
        self._core: native.CpuModel = parts.core
        self._matrices, self._vectors = parts.matrices, parts.vectors
        self._inputs, self._heads = parts.inputs, heads

    def load(self, lora_id: int, adapter: LoraAdapter) -> int:
        """See `AdapterStore.load`. Raise MemoryError if the factors do not fit."""
        factors = [
            (self._matrices[matrix], a, b, pair.scale)
            for name, pair in adapter.pairs.items()
            if name not in self._vectors
            for matrix, a, b in self._factors(name, pair)
        ]
        changes = [
            (number, _multiplied(adapter.pairs[name]).ravel())
            for name, number in self._vectors.items()
            if name in adapter.pairs
        ]
        return self._core.add_lora(lora_id, factors, changes)

    def _factors(self, name: str, pair: LoraPair) -> Iterator[tuple[str, F32, F32]]:
        """Yield the matrices of a weight by name, and the factors of each."""
        a, b = pair.a.dequantize(), pair.b.dequantize()
        if not name.endswith((".k_b", ".v_b")):
            yield name, a * self._inputs[name] if name in self._inputs else a, b
            return
        for head, own in enumerate(b.reshape(self._heads, -1, len(a))):
            turned = name.endswith(".k_b")  # see `_Packer._latent`
            yield f"{name}.{head}", *((np.ascontiguousarray(own.T), np.ascontiguousarray(a.T)) if turned else (a, own))

    def drop(self, lora_id: int) -> None:
        self._core.drop_lora(lora_id)


def _multiplied(pair: LoraPair) -> F32:
    """Return scale · B A [out, in], what is added to the matrix."""
    change: F32 = np.float32(pair.scale) * (pair.b.dequantize() @ pair.a.dequantize())
    return change


class NativeExecutor(TransferPagedExecutor):
    """Runs ``spec`` with ``weights`` on this machine's CPU.

    num_blocks, block_size: the KV pool; block ids are shared by all KV groups and block 0 is the null block.
    num_states: slots for states of recurrent layers, whose ids follow those of the blocks; 0: states are in blocks.
    pooling: what pooling requests compute; None: the last token, without a head. isa: default FOREWORD_ISA, else the
    best of the machine. options: see `NativeOptions`.

    Steps whose requests are all greedy compute few logits (docs/decisions/0021): for that the output projection is kept
    in 8 bit too, of float weights from the start, of others from the first step with three such requests on.

    Weights are packed matrix by matrix from ``weights``, or mapped where that was done before (`weight_cache_bytes`,
    docs/decisions/0026); afterwards no file of the model is read. Raise ModelError if it changed meanwhile.
    Raise ConfigError for an instruction set or nodes that the machine lacks, an unknown format, or threads that cannot
    start. Raise MemoryError if the KV pool or the weights do not fit.

    Not thread-safe. A process forked from the one that made it cannot use it, unless it has one thread: EngineError.
    """

    capabilities = TransferPagedExecutor.capabilities | {
        Capability.LORA, Capability.POOLING, Capability.RECURRENT_STATE, Capability.DRAFTED_STATES,
    }  # fmt: skip
    reads_gathered_tables = False

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int,
        num_states: int = 0,
        isa: str | None = None,
        pooling: PoolingSpec | None = None,
        **options: Unpack[NativeKeywords],
    ) -> None:
        own = NativeOptions(**options)
        self.spec = spec
        self.num_blocks, self.block_size, self.num_states = num_blocks, block_size, num_states
        self.weight_format, self.kv_format = own.weight_format, own.kv_format
        self.num_groups = len(spec.kv_groups())
        parts = built(lambda: self._new_core(isa, own), self._fill, weights, own, spec, _packed_as(own))
        self.core, self.maps_weights = parts.core, parts.is_mapped
        self.isa, self.num_threads = self.core.isa, self.core.num_threads
        super().__init__(
            self.core,
            NativeAdapters(parts, spec.num_heads),
            Sampler(threads=self.core),  # the model's threads are idle while tokens are sampled
            pooler=Pooler(pooling or PoolingSpec(), weights),
            hidden_size=spec.hidden_size,
            extra_size=spec.extra_size,
            mrope_dims=spec.mrope_dims,
            prefix_lm=spec.prefix_lm,
        )
        if own.preallocate_kv:
            self.core.touch_cache()

    def _fill(self, parts: Parts[native.CpuModel]) -> None:
        _Packer(self.spec, parts, self.weight_format, scaled_keys=self.kv_format == "int8").pack_all()

    def _new_core(self, isa: str | None, options: NativeOptions) -> native.CpuModel:
        """Return a native model without layers. Errors are those of the executor."""
        spec, nodes = self.spec, first_nodes(options.numa_nodes)
        try:
            return native.CpuModel(
                hidden_size=spec.hidden_size,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                value_dim=spec.own_heads.value_dim,
                vocab_size=spec.vocab_size,
                norm_eps=spec.norm_eps,
                query_scale=spec.query_scale,
                embedding_scale=spec.embedding_scale,
                activation=spec.activation,
                attn_softcap=spec.attn_softcap or 0.0,
                final_softcap=spec.final_softcap or 0.0,
                gate_scale=spec.gate_scale,
                logit_scale=spec.logit_scale,
                joint_qk_norm=spec.joint_qk_norm,
                gate_alpha=spec.clamped_gate.alpha if spec.clamped_gate else 0.0,
                gate_limit=spec.clamped_gate.limit if spec.clamped_gate else 0.0,
                layer_norm=spec.layer_norm,
                head_gates=spec.head_gates,
                softplus_gates=spec.softplus_gates,
                rounds_inputs=spec.rounds_inputs,
                latent=_latent_sizes(spec),
                latent_eps=spec.mla.norm_eps if spec.mla else 0.0,
                indexer=_index_sizes(spec),
                indexer_eps=spec.indexer.norm_eps if spec.indexer else 0.0,
                clip_qkv=spec.clip_qkv or 0.0,
                num_groups=self.num_groups,
                num_slots=spec.num_slots,
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                kv_format=options.kv_format,
                isa=isa or "",
                num_threads=options.num_threads or default_threads(nodes),
                recurrent=_recurrent_sizes(spec),
                cpu_groups=nodes,
                more_heads=_more_heads(spec),
                num_states=self.num_states,
                num_state_slots=spec.num_state_slots,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        except MemoryError:
            raise MemoryError(f"the KV pool of {self.num_blocks} blocks does not fit: use fewer") from None

    @property
    def block_layout(self) -> str:
        """See `TransferExecutor`. Another build of the kernels may round or lay out keys in another way."""
        return f"native {native_digest()} {self.isa} weights {self.weight_format} kv {self.kv_format}"

    def memory_report(self) -> str:
        """Return weights and KV pool in one line."""
        kv = kv_report(
            self.spec,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_states=self.num_states,
            kv_format=self.kv_format,
        )
        return f"weights {_bytes_text(self.core.packed_bytes)} packed ({self.weight_format}, {self.isa}); {kv}"

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        """Compute the logits [L, V] at ``logits_indices``, valid until the next call.

        Keys and values of the batch's tokens are written at its slots; the states' own block tables are read, no
        gathered copy. Raise PlanError if a tensor of the batch is out of range, MemoryError if buffers cannot grow;
        nothing was written then.
        """
        return self._step(batch, logits_indices, greedy=False)

    def draw(self, batch: InputBatch, sampling: StepSampling) -> Sampled:
        """See `HostExecutor.draw`. Of a step whose requests are all greedy, few logits are computed."""
        greedy = sampling.step.is_plain and sampling.masks is None and not sampling.processors
        return self.sampler.sample(batch, self._step(batch, batch.logits_indices, greedy=greedy), sampling)

    def _step(self, batch: InputBatch, logits_indices: I64, *, greedy: bool) -> F32:
        if not self.spec.is_causal:
            check_whole(batch)
        inputs = batch.buffers.attach(_model_inputs, _model_inputs)
        own = logits_indices is batch.logits_indices
        num_reqs, num_tokens = batch.scalars.num_reqs, batch.scalars.num_tokens
        try:
            return self.core.step(
                inputs,
                num_tokens,
                num_reqs,
                len(logits_indices),
                None if own else logits_indices,
                greedy=greedy,
                bidirectional=not self.spec.is_causal,
                **self._given_inputs(batch),
            )
        except ValueError as error:
            raise PlanError(str(error), step=batch.step) from None
        except RuntimeError as error:
            raise EngineError(str(error)) from None

    def hidden_states(self, tokens: I64) -> F32:
        return self.core.hidden_states(tokens)

    def _given_inputs(self, batch: InputBatch) -> dict[str, AnyArray]:
        """Return prompt embeddings, M-RoPE positions, the last keys that are seen, and adapters by the names of the
        native call; nothing for a step whose tokens are all text for a causal model itself.
        """
        given: dict[str, AnyArray] = {}
        seeing: tuple[I64, AnyArray] | None = None
        embeds, mrope = self.inputs_of(batch)
        if embeds is not None:
            tokens, vectors = embeds
            given = {"embed_rows": tokens, "embeds": np.ascontiguousarray(vectors[:, : self.hidden_size], np.float32)}
            if self.spec.num_features and vectors.shape[1] > self.hidden_size:
                given["features"] = np.ascontiguousarray(vectors[:, self.hidden_size : -1], np.float32)
            if vectors.shape[1] > self.hidden_size and vectors[:, -1].any():
                seeing = embeds
        if (seen := last_seen(batch, seeing)) is not None:
            given["last_seen"] = seen
        if mrope is not None:
            given["mrope_positions"] = mrope
        if batch.states.loras:
            given["lora_ids"] = lora_mapping(batch).requests
        return given


def _model_inputs(buffers: InputBuffers) -> native.ModelInputs:
    names = (
        "input_ids", "positions", "query_start_loc", "seq_lens", "idx_mapping", "logits_indices", "num_draft_tokens",
    )  # fmt: skip
    states = buffers.states
    return native.ModelInputs(
        **{name: buffers[name] for name in names},
        slot_mapping=list(buffers["slot_mapping"]),
        block_tables=[table.table for table in states.block_tables],
        num_accepted_tokens=states.num_accepted_tokens,
    )


class _Packer:
    """Makes a native model of a model's weights, in execution order."""

    def __init__(
        self, spec: DecoderSpec, parts: Parts[native.CpuModel], weight_format: WeightFormat, *, scaled_keys: bool
    ) -> None:
        self.spec, self.parts, self.core, self.weight_format = spec, parts, parts.core, weight_format
        self.weights, self.scaled_keys = parts.weights, scaled_keys
        self.ropes: dict[RopeSpec, int] = {}
        self.input_norm = ""  # that of the mixer that is packed

    def pack_all(self) -> None:
        spec = self.spec
        places = spec.places()
        if (own := spec.per_layer) is not None:
            table = self.parts.rows("per_layer_embed", spec.num_layers * own.size)
            matrix, norm = self._matrix("per_layer_in"), self.parts.weight("per_layer_norm")
            self.core.set_per_layer(*table, matrix, norm, own.norm_eps, own.embedding_scale, own.scale)
        if spec.streams is not None:
            others = range(1, spec.streams.num_streams)
            into, out = ([self._matrix(f"{name}.{k}") for k in others] for name in ("stream_in", "stream_out"))
            self.core.set_streams(into, out)
        if (of := spec.connections) is not None:
            numbers = [self.parts.weight(name) for name in _mix("out_mix")]
            self.core.set_connections(of.num_streams, of.magnitude, of.eps, *numbers)
        if spec.num_positions:
            self.core.set_positions(*self.parts.rows("positions", spec.hidden_size))
        for i, layer in enumerate(spec.layers):
            self.core.add_layer(self._layer(spec.prefix_of(i), layer, places.get(i)))
        self.parts.embedding("embed", spec.hidden_size)
        head = -1
        if spec.has_logits:
            head = self._matrix("embed" if spec.tie_embeddings else "lm_head", keep_precise=True)
        has = {"final_norm": True, "embed_norm": spec.embed_norm, "head_norm": spec.head_dense}
        has |= {name + "_bias": spec.layer_norm and has[name] for name in has} | {"logits_bias": spec.logits_bias}
        vectors = {name: self.parts.weight(name) if is_there else -1 for name, is_there in has.items()}
        if spec.scaled_sums:
            vectors |= {
                "embed_scale": self.parts.weight("embed_scale"),
                "embed_offset": self.parts.vector("embed_offset", lambda: self._product("embed_bias", "embed_scale")),
            }
        screen = self.parts.screen(head) if spec.has_logits else None
        dense = self._matrix("head_dense") if spec.head_dense else -1
        self.core.finish(lm_head=head, screen=screen, head=dense, **vectors)

    def _layer(self, prefix: str, layer: LayerSpec, place: tuple[int, int] | None) -> dict[str, Any]:
        """Return the native form of a layer. ``place`` is group and slot of what the layer keeps."""
        packed: dict[str, Any] = {}
        vectors: list[str] = []
        norms = self.spec.norms_of(layer)
        if layer.stream is not None:
            packed |= {"stream": layer.stream, "stream_begin": self.parts.weight("stream_begin")}
        own = prefix
        if (aside := layer.aside) is not None:
            packed, prefix = packed | self._aside(prefix, aside), block_of(aside)
        if place is not None:
            packed |= {"group": place[0], "slot": place[1], "sliding_window": layer.sliding_window or 0}
            packed["parallel_mlp"] = self.spec.parallel_mlp
            packed |= {"rope": self._rope(layer.rope), "beside": layer.beside, "chunked": layer.chunked}
            packed["skips_spans"] = self.spec.spans_in_windows and layer.sliding_window is None
            packed["mixer_scale"] = self.spec.residual_scale * layer.mixer_scale
            packed |= {"kept_by_mixer": layer.kept[0]} if layer.kept is not None and norms.before_mixer else {}
            self.input_norm = self.input_norm if layer.beside else prefix + "attn_norm"
            names = self._norms({"attn_norm": norms.before_mixer, "post_attn_norm": norms.after_mixer})
            vectors += [name for name in names if not self._is_shared(layer, name)]
            packed |= self._gate_of(prefix + "attn_norm", layer.attn_norm_rank)
            if layer.recurrent is not None:
                packed["recurrent"] = self._recurrent(prefix + "state.", layer.recurrent)
            else:
                vectors += self._attention(prefix, layer, packed)
            if self.spec.scaled_sums and layer.adds_mixer:
                packed |= self._sum(prefix, "attn")
        if layer.has_mlp:
            packed |= self._sum(prefix, "mlp") if self.spec.scaled_sums else {}
            packed["mlp_scale"] = self.spec.residual_scale * layer.mlp_scale
            packed |= {} if layer.kept is None else {"kept_by_mlp": layer.kept[1]}
            names = self._norms({"mlp_norm": norms.before_mlp, "post_mlp_norm": norms.after_mlp})
            is_shared = self.spec.parallel_mlp and not self.spec.parallel_norm
            vectors += [name for name in names if not (is_shared and name.startswith("mlp_norm"))]
            packed |= self._gate_of(prefix + "mlp_norm", layer.mlp_norm_rank)
            if layer.moe is None:
                packed["mlp"] = self._mlp(prefix)
                packed |= {} if layer.gate_cutoff is None else {"gate_cutoff": layer.gate_cutoff}
                vectors += ["inner_mlp_norm"] if self.spec.inner_norms else []
                if self.spec.xielu:
                    numbers = partial(xielu_numbers, lambda name: self.weights[name].dequantize(), prefix)
                    packed["xielu"] = self.parts.vector(prefix + "xielu", numbers)
            else:
                packed["moe"] = self._moe(prefix, layer.moe)
            if layer.late_moe is not None:
                packed["late_moe"] = self._moe(prefix, layer.late_moe)
        if self.spec.per_layer is not None:
            packed |= {name: self._matrix(prefix + name) for name in ("per_layer_gate", "per_layer_out")}
            vectors.append("post_per_layer_norm")
        if self.spec.streams is not None:
            packed |= {name: self._matrix(prefix + name) for name in ("laurel_left", "laurel_right")}
            vectors += ["streams_norm", "laurel_norm", "streams_router", "streams_predict", "streams_correct"]
            vectors += ["streams_scale"] if self.spec.streams.scales_first else []
        vectors += [*_mix("attn_mix"), *_mix("mlp_mix")] if self.spec.connections is not None else []
        if self.spec.layer_scales:
            name = prefix + "layer_scale"
            packed["layer_scale"] = float(self.parts.table(name, self.weights[name].dequantize).ravel()[0])
        packed |= {name: self.parts.weight(prefix + name) for name in vectors}
        return packed if layer.aside is None else packed | self._of_block(own, prefix, packed)

    def _sum(self, prefix: str, part: str) -> dict[str, Any]:
        """Return the native form of a sum with scales."""
        name = prefix + part

        def offsets() -> F32:
            both = (self._product(f"{name}_{of}_bias", f"{name}_{of}_scale") for of in ("sum", "kept"))
            return np.add(*both)

        return {
            f"{part}_scales": self.parts.weight(f"{name}_sum_scale"),
            f"{part}_kept_scales": self.parts.weight(f"{name}_kept_scale"),
            f"{part}_offsets": self.parts.vector(f"{name}_offsets", offsets),
        }

    def _product(self, one: str, other: str) -> F32:
        """Return the product of two vectors."""
        return self.weights[one].dequantize() * self.weights[other].dequantize()

    def _aside(self, prefix: str, aside: AsideSpec) -> dict[str, Any]:
        """Return the native form of what a layer aside has of its own."""
        names = [f"{name}_{part}" for name in "qkv" for part in ("low", "high")] if aside.attention_rank else []
        names += ["mlp_low", "gate_high", "up_high"] if aside.mlp_rank else []
        return {name: self._matrix(prefix + name) for name in (*names, "aside")}

    def _of_block(self, prefix: str, block: str, packed: Mapping[str, Any]) -> dict[str, Any]:
        """Return the matrices of a block in ``packed`` with numbers of their own for one layer, whose adapters change
        them there alone. prefix, block: the beginnings of the names of the layer's weights and of those of the block.
        """

        def own(name: str) -> int:
            return self.parts.again(prefix + name, block + name)

        found: dict[str, Any] = {name: own(name) for name in packed if block + name in self.parts.matrices}
        *mlp, gate_bias, up_bias, down_bias = packed["mlp"]
        names = zip(("gate", "up", "down"), mlp, strict=True)
        matrices = [number if number < 0 else own(name) for name, number in names]
        return found | {"mlp": (*matrices, gate_bias, up_bias, down_bias)}

    def _gate_of(self, norm: str, rank: int) -> dict[str, int]:
        """Return the matrices of the gate of a norm, as precise as the output projection."""
        names = [f"{norm}_{part}" for part in ("low", "high")] if rank else []
        return {name.rpartition(".")[2]: self._matrix(name, keep_precise=True) for name in names}

    @staticmethod
    def _is_shared(layer: LayerSpec, norm: str) -> bool:
        """Return whether the layer uses the result that the layer before computed with this norm."""
        return layer.beside and norm.startswith("attn_norm")

    def _norms(self, has: Mapping[str, bool]) -> list[str]:
        """Return the names of the vectors of norms, of which ``has`` tells whether a layer has them."""
        names = [name for name, is_there in has.items() if is_there]
        return [*names, *(f"{name}_bias" for name in names)] if self.spec.layer_norm else names

    def _attention(self, prefix: str, layer: LayerSpec, packed: dict[str, Any]) -> list[str]:
        """Pack the matrices of attention into ``packed`` and return the names of its vectors."""
        spec = self.spec
        if spec.mla is not None:
            return self._latent(prefix, layer, spec.mla, packed)
        if self.scaled_keys and not layer.takes_qkv:
            source, norm = prefix, self.input_norm
            if layer.reads_layer is not None:  # its queries meet the keys of that layer
                source, norm = (f"layers.{layer.reads_layer}.{name}" for name in ("", "attn_norm"))
            both = cache(partial(key_scales, spec, layer, self.weights, source, norm))
            packed["q_scales"] = self.parts.vector(prefix + "q_scales", lambda: both()[0] * self._qk_scales(prefix))
            if layer.reads_layer is None:
                packed["k_scales"] = self.parts.vector(prefix + "k_scales", lambda: both()[1])
        elif spec.qk_scales:
            shape = spec.heads_of(layer).num_heads, 1
            packed["q_scales"] = self.parts.vector(prefix + "q_scales", lambda: np.tile(self._qk_scales(prefix), shape))
        if spec.key_scales:
            packed["k_scales"] = self.parts.vector(prefix + "k_scales", lambda: self._of_keys(prefix, layer))
        if layer.takes_qkv:
            packed["takes_qkv"] = True
        own = projections(layer)
        for name in (*own, "o", *(["attn_gate"] if spec.attn_gate else [])):
            packed[name] = self._matrix(prefix + name)
        if spec.slopes:  # scores are exponents of 2
            packed["slopes"] = self.parts.vector(prefix + "slopes", lambda: np.array(spec.slopes, np.float32) * _LOG2E)
        heads = spec.heads_of(layer)
        packed["heads"] = spec.head_shapes.index(heads)
        units = {"v_norm": heads.value_dim} if layer.unit_v and "k" in own else {}
        if layer.unit_qk_eps is not None:
            units |= {f"{name}_norm": heads.head_dim for name in ("qk" if layer.takes_qkv else own[:2])}
            packed["qk_eps"] = layer.unit_qk_eps
        packed |= {name: self._ones(prefix + name, size) for name, size in units.items()}
        if spec.qk_layer_norm is not None:
            counts = dict(zip("qk", (heads.num_heads, heads.num_kv_heads), strict=True))
            ends = ("_norm", "_norm_bias") if spec.qk_layer_norm.has_bias else ("_norm",)
            of_heads = {
                name + end: partial(self._of_each_head, prefix + name + end, counts[name])
                for name in own[:2]
                for end in ends
            }
            packed |= {name: self.parts.vector(prefix + name, make) for name, make in of_heads.items()}
            packed["centred_qk"] = 1
        if (growth := layer.query_growth) is not None:
            packed |= {"growth_interval": growth.interval, "growth_scale": growth.scale, "growth_offset": growth.offset}
        return [
            *([f"{name}_bias" for name in own] if spec.qkv_bias else []),
            *(["attn_gate_bias"] if spec.qkv_bias and spec.attn_gate else []),
            *([f"{name}_norm" for name in own[:2]] if spec.qk_norm and spec.qk_layer_norm is None else []),
            *(["o_bias"] if spec.o_bias else []),
            *(["sinks"] if layer.has_sinks else []),
            *(["inner_attn_norm"] if spec.inner_norms else []),
        ]

    def _of_keys(self, prefix: str, layer: LayerSpec) -> F32:
        """Return the factors of the keys of all heads, flat."""
        return self.weights[prefix + "key_scale"].dequantize().repeat(self.spec.heads_of(layer).head_dim)

    def _of_each_head(self, name: str, count: int) -> F32:
        """Return the numbers of a norm for each of so many heads, padded to whole vectors, flat."""
        values = self.weights[name].dequantize()
        each = np.broadcast_to(values.reshape(-1, values.shape[-1]), (count, values.shape[-1]))
        return np.pad(each, ((0, 0), (0, -values.shape[-1] % _VECTOR))).ravel()

    def _qk_scales(self, prefix: str) -> F32:
        """Return the factors of rotated queries that stand for those of queries and of keys, [head_dim] or [1]."""
        if not self.spec.qk_scales:
            return np.ones(1, np.float32)
        return self.weights[prefix + "q_norm"].dequantize() * self.weights[prefix + "k_norm"].dequantize()

    def _ones(self, name: str, size: int) -> int:
        """Pack the weight, all ones, of a norm that has none."""
        return self.parts.vector(name, lambda: np.ones(size, np.float32))

    def _latent(self, prefix: str, layer: LayerSpec, mla: MlaSpec, packed: dict[str, Any]) -> list[str]:
        """Return the arguments of latent attention, like `_attention`. Wk_b and Wv_b have a matrix per head, that of k
        transposed: floats, if not both are.
        """
        gate = ["attn_gate"] if self.spec.attn_gate else []
        for name in (*(["q_a"] if mla.q_rank else []), "q", "kv_a", *gate, "o"):
            packed[name] = self._matrix(prefix + name)
        heads = self.spec.num_heads
        for name in ("k_b", "v_b"):
            target = _target_of_heads(packed_format(self.weights[prefix + name].quant, self.weight_format))
            shape = (mla.kv_rank, mla.nope_dim) if name == "k_b" else (mla.value_dim, mla.kv_rank)
            of_heads = cache(partial(self._of_heads, prefix + name, shape, is_transposed=name == "k_b"))
            packed[name] = [
                self.parts.computed(f"{prefix}{name}.{head}", partial(_matrix_of, of_heads, head), shape, target)
                for head in range(heads)
            ]
        packed["kv_a_norm"] = self.parts.vector(
            prefix + "kv_a_norm", lambda: self.weights[prefix + "kv_a_norm"].dequantize() * np.float32(mla.kv_scale)
        )
        names = ["kv_a", *(["q_a"] if mla.q_rank else [])]
        biases = [f"{name}_bias" for name in names] if self.spec.qkv_bias else []
        norms = ["q_a_norm"] if mla.q_rank else []
        if self.spec.indexer_of(layer) is not None:
            packed["index_q"] = self._matrix(prefix + "index_q")
            for name in ("index_k", "index_weights"):
                packed[name] = self._matrix(prefix + name, weight_format="fp32")
            norms += ["index_k_norm", "index_k_norm_bias"]
        sinks = ["sinks"] if layer.has_sinks else []
        return [*norms, *biases, *sinks, *(["o_bias"] if self.spec.o_bias else [])]

    def _of_heads(self, name: str, shape: tuple[int, int], *, is_transposed: bool) -> F32:
        """Return the matrices of all heads: float32 [heads, rows, columns]."""
        rows, cols = shape[::-1] if is_transposed else shape
        found = self.weights[name].dequantize().reshape(self.spec.num_heads, rows, cols)
        return np.ascontiguousarray(found.swapaxes(1, 2) if is_transposed else found)

    def _moe(self, prefix: str, moe: MoeSpec) -> dict[str, Any]:
        packed: dict[str, Any] = {
            "router": self._router(prefix, moe),
            "experts": [self._mlp(f"{prefix}experts.{e}.") for e in range(moe.num_experts)],
            "experts_per_token": moe.experts_per_token,
            "norm_topk": moe.norm_topk,
            "sigmoid": moe.scoring == "sigmoid",
            "scale": moe.scale,
            "sum_eps": moe.sum_eps,
            "gate_limit": moe.gate_limit or 0.0,
            "softcap": moe.softcap or 0.0,
            "sparse_mix": -1.0 if moe.sparse_mix is None else moe.sparse_mix,
            "num_groups": moe.num_groups,
            "groups_per_token": moe.groups_per_token,
            "scales_inputs": moe.scales_inputs,
            "ranks_outputs": moe.ranks_outputs,
            "zeroes_groups": moe.zeroes_groups,
            "identities": moe.identities,
            "empties": moe.empties,
        }
        if moe.router is not None:
            packed |= self._router_mlp(prefix, moe.router)
        if moe.latent_size:
            packed |= {name: self._matrix(prefix + name) for name in ("latent_in", "latent_out")}
        names = [name for name, has in (("scores_bias", moe.scores_bias), ("router_bias", moe.router_bias)) if has]
        if moe.own_norms:
            names += ["expert_scales", "experts_norm", "post_experts_norm", "post_shared_norm"]
            packed["router_norm"] = self._ones(prefix + "router_norm", self.spec.hidden_size)
        packed |= {name: self.parts.weight(prefix + name) for name in names}
        if moe.shared_intermediate_size:
            packed["shared"] = self._mlp(prefix + "shared.")
            if moe.shared_gate:
                packed["shared_gate"] = self._matrix(prefix + "shared_gate", weight_format="fp32")
        return packed

    def _router_mlp(self, prefix: str, of: RouterSpec) -> dict[str, Any]:
        """Return the native form of the MLP of a router, whose matrices are as precise as the output projection."""
        names = ("router_in", "router_first", "router_second")
        packed = {name: self._matrix(prefix + name, keep_precise=True) for name in names}
        vectors = [*(f"{name}_bias" for name in names), "router_norm", *(["router_carry"] if of.carries else [])]
        return packed | {name: self.parts.weight(prefix + name) for name in vectors}

    def _router(self, prefix: str, moe: MoeSpec) -> int:
        """Pack the router, in float32, times the scale of its inputs."""
        name, size = prefix + "router", self.spec.hidden_size
        if not moe.own_norms:
            return self._matrix(name, weight_format="fp32")

        def scale() -> F32:
            return np.asarray(self.weights[prefix + "router_scale"].dequantize() * np.float32(size**-0.5))

        return self.parts.scaled(name, scale, (moe.num_choices, size))

    def _recurrent(self, prefix: str, spec: RecurrentSpec) -> dict[str, Any]:
        """Return the native form of a recurrent layer, whose rates and factors of the state come from matrices in
        float32.
        """
        packed: dict[str, Any] = {"least_step": spec.least_step, "z_scale": spec.scale_of("z")}
        packed["inner_eps"] = spec.inner_eps or 0.0
        packed["is_normed_first"] = spec.normed == "first"
        packed |= {"write_scale": spec.write_scale, "least_log": spec.least_log or 0.0}
        packed |= {"sigmoid_gate": spec.sigmoid_gate, "joint_norm": spec.joint_norm}
        packed["norm_eps"] = self.spec.norm_eps if spec.norm_eps is None else spec.norm_eps
        if spec.kind == "rg_lru":
            packed["gates"] = self._gates(prefix, spec)
        if spec.kind == "mixed_qkv":
            return packed | self._mixed(prefix, spec)
        for name, shape in spec.weight_names(self.spec.hidden_size):
            if name in GATES:
                continue
            if len(shape) == 2 and name not in ("conv", "a_log"):
                packed[name] = self._of_rates(prefix + name, name, shape, spec)
            else:
                own = "rate" if name in ("a_log", "a") else name
                packed[own] = self.parts.vector(prefix + own, partial(self._of_state, prefix, name, spec))
        return packed

    def _mixed(self, prefix: str, spec: RecurrentSpec) -> dict[str, Any]:
        """Return the native form of mixed_qkv. The second convolution has a matrix per head, like the heads of
        `_latent`, whose inputs are those of the first token, then those of the next.
        """
        parts = (*spec.parts, *spec.last_parts)
        packed: dict[str, Any] = {name: self._matrix(prefix + name) for name, _ in parts}
        if spec.in_bias:
            names = {in_bias_of(name): "late_bias" if name == "late_v" else in_bias_of(name) for name, _ in parts}
            packed |= {own: self.parts.weight(prefix + name) for name, own in names.items()}
        quant = self.weights[prefix + "heads_conv"].quant
        target, dim = _target_of_heads(packed_format(quant, self.weight_format)), spec.value_dim
        shape = dim, spec.heads_kernel * dim

        @cache
        def of_heads() -> F32:
            whole = self.weights[prefix + "heads_conv"].dequantize()
            return np.ascontiguousarray(whole.swapaxes(1, 2)).reshape(-1, *shape)

        packed["gates"] = [
            self.parts.computed(f"{prefix}gates.{head}", partial(_matrix_of, of_heads, head), shape, target)
            for head in range(spec.num_heads + spec.num_key_heads)
        ]
        for name, own in (("conv", "conv"), ("conv_bias", "conv_bias"), ("heads_conv_bias", "gates_bias")):
            packed[own] = self.parts.vector(prefix + own, partial(self._of_channels, prefix + name, spec))
        return packed

    def _of_channels(self, name: str, spec: RecurrentSpec) -> F32:
        """Return a vector of the convolutions of mixed_qkv, flat, with zeros for the values of the token before."""
        values = self.weights[name].dequantize().reshape(spec.num_mixed, -1).T
        return _by_part(np.pad(values, ((0, 0), (0, spec.num_late))), spec)

    def _gates(self, prefix: str, spec: RecurrentSpec) -> list[int]:
        """Pack the products of the gates of rg_lru, those of a block in one matrix, like the heads of `_latent`."""
        names = [prefix + name for name in GATES]
        targets = {packed_format(self.weights[name].quant, self.weight_format) for name in names}
        target = _target_of_heads(targets.pop() if len(targets) == 1 else "f32")

        @cache
        def of_blocks() -> F32:
            parts = [self.weights[name].dequantize().reshape(-1, spec.rank, spec.rank) for name in names]
            return np.concatenate(parts, axis=1)

        shape = 2 * spec.rank, spec.rank
        return [
            self.parts.computed(f"{prefix}gates.{block}", partial(_matrix_of, of_blocks, block), shape, target)
            for block in range(spec.num_blocks)
        ]

    def _of_rates(self, name: str, part: str, shape: tuple[int, ...], spec: RecurrentSpec) -> int:
        """Pack a matrix of a state. Matrices of rates are float32, times their scale; larger ones, of mamba1 and of
        decays by channel, are as precise as the output projection.
        """
        if (spec.kind == "mamba1" and part not in ("v", "z", "o")) or (spec.channel_decays and part[:2] == "dt"):
            return self._matrix(name, keep_precise=True)
        if shape[0] != spec.num_heads or part not in ("dt", "beta"):
            return self._matrix(name)
        if part == "dt" and spec.scales is not None:
            return self.parts.scaled(name, lambda: np.full(1, spec.scale_of(part), np.float32), shape[:2])  # type: ignore[arg-type]
        return self._matrix(name, weight_format="fp32")

    def _of_state(self, prefix: str, name: str, spec: RecurrentSpec) -> F32:
        """Return a vector of a state. The convolution has the scales of its channels."""
        values = self.weights[prefix + name].dequantize()
        match name:
            case "dt_in_bias":
                return values * np.float32(spec.scale_of("dt"))
            case "a_log":
                rates = np.asarray(np.exp(values))
                return _by_group(rates) if spec.kind == "mamba1" else rates.repeat(spec.num_decays // spec.num_heads)
            case "a":
                return np.float32(8) * softplus(values)
            case "conv":
                scales = [np.full(size, spec.scale_of(part), np.float32) for part, size in spec.parts]
                return _by_part(values.T * np.concatenate(scales), spec)
            case "conv_bias":
                return _by_part(values[None], spec)
        return values

    def _mlp(self, prefix: str) -> tuple[int, ...]:
        """Return the numbers of (gate, up, down, and the biases of each); −1 for none."""
        has = {"gate": self.spec.gated_mlp, "up": True, "down": True}
        matrices = [self._matrix(prefix + name) if has[name] else -1 for name in has]
        biases = [self.parts.weight(f"{prefix}{name}_bias") if has[name] and self.spec.mlp_bias else -1 for name in has]
        return (*matrices, *biases)

    def _rope(self, rope: RopeSpec | None) -> int:
        if rope is None:
            return -1
        if rope not in self.ropes:
            self.ropes[rope] = self.core.add_rope(list(rope.inv_freq), rope.scale, list(rope.axes))
        return self.ropes[rope]

    def _matrix(self, name: str, *, keep_precise: bool = False, weight_format: WeightFormat | None = None) -> int:
        quant, wanted = self.weights[name].quant, weight_format or self.weight_format
        return self.parts.matrix(name, packed_format(quant, wanted, keep_precise=keep_precise))


def _matrix_of(of_heads: Callable[[], F32], head: int) -> F32:
    found: F32 = of_heads()[head]
    return found


def _mix(name: str) -> tuple[str, ...]:
    """Return the names of the weights of a sum of streams."""
    return name, name + "_base", name + "_scale"


def _latent_sizes(spec: DecoderSpec) -> dict[str, int]:
    """Return the sizes of latent attention; none without it."""
    names = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "joins_latents")
    return {} if spec.mla is None else {name: int(getattr(spec.mla, name)) for name in names}


def _index_sizes(spec: DecoderSpec) -> dict[str, int]:
    """Return the sizes of an indexer; none without it."""
    names = ("num_heads", "head_dim", "topk")
    return {} if spec.indexer is None else {name: getattr(spec.indexer, name) for name in names}


def _more_heads(spec: DecoderSpec) -> list[tuple[int, int, int, int]]:
    """Return the heads of layers that differ from those of the model."""
    return [(*shape,) for shape in spec.head_shapes[1:]]


def _recurrent_sizes(spec: DecoderSpec) -> dict[str, int]:
    """Return the sizes of the recurrent layers; none without such layers. Raise ConfigError if they differ."""
    found = {layer.recurrent for layer in spec.layers if layer.recurrent is not None}
    if not found:
        return {}
    if len(found) > 1:
        raise ConfigError(f"the recurrent layers are of {len(found)} shapes; the native executor runs one, use NumPy")
    [recurrent] = found
    sizes = (
        "num_heads",
        "num_key_heads",
        "key_dim",
        "value_dim",
        "conv_kernel",
        "rank",
        "tiled",
        "channel_decays",
        "heads_kernel",
    )
    return {"kind": RECURRENT_KINDS.index(recurrent.kind)} | {name: getattr(recurrent, name) for name in sizes}


def _by_group(rates: F32) -> F32:
    """Return flat rates [channels, key_dim] as [groups][key_dim][_GROUP], below infinity also times steps."""
    padded = np.pad(np.minimum(rates, np.float32(2.0**64)), ((0, -len(rates) % _GROUP), (0, 0)))
    return np.ascontiguousarray(padded.reshape(-1, _GROUP, rates.shape[1]).swapaxes(1, 2)).ravel()


def _by_part(channels: F32, spec: RecurrentSpec) -> F32:
    """Return flat rows of channels, each part padded to a multiple of 64 (native/kernels/recurrent.h)."""
    ends = np.cumsum([size for _, size in spec.parts])[:-1]
    parts = np.split(channels, ends, axis=1)
    padded = [np.pad(part, ((0, 0), (0, -part.shape[1] % ROW_PADDING))) for part in parts]
    return np.ascontiguousarray(np.concatenate(padded, axis=1)).ravel()


def _bytes_text(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
