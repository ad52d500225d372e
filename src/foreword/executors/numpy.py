"""The reference executor: a decoder in float32 NumPy with a paged KV cache. Tests compare all others with it.

It follows the arithmetic of `foreword.models.spec` line by line. All tokens of a step go through the matrices together;
attention goes request by request and reads the cache only: exactly what `slot_mapping` wrote and block tables name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.arrays import F32, I32, I64, U8, Bools
from foreword.batch import InputBatch, visible
from foreword.executors.executor import Capability
from foreword.executors.functions import (
    ACTIVATIONS,
    FloatWeights,
    LoraFloats,
    LoraTokens,
    cap,
    gelu,
    layer_norm,
    product,
    rms_norm,
    rounded,
    sigmoid,
    softmax,
    softplus,
    xielu,
    xielu_numbers,
)
from foreword.executors.host import TransferPagedExecutor
from foreword.executors.inputs import check_whole, last_seen, step_adapters
from foreword.executors.numpy_recurrent import StateRun, recurrent_layer, state_runs
from foreword.executors.numpy_streams import NumpyConnections, NumpyStreams
from foreword.executors.pooling import Pooler
from foreword.models.lora import LoraAdapter
from foreword.models.pooling import PoolingSpec
from foreword.models.recurrent import RecurrentSpec
from foreword.models.spec import (
    SUM,
    AsideSpec,
    DecoderSpec,
    HeadShape,
    IndexerSpec,
    LayerSpec,
    MlaSpec,
    MoeSpec,
    PerLayerSpec,
    QueryGrowth,
    RopeSpec,
    RouterSpec,
    names_in_blocks,
    projections,
)
from foreword.models.weights import Weights


class NumpyCache:
    """A `BlockStore` of arrays in which layer ``groups[g].layers[j]`` of a model uses slot j. A block belongs to one
    group at a time, so all groups with keys share one pool. The numbers of states follow those of blocks; without
    ``num_states``, a state is in a block.

    keys, values: float32 [slots per block, num_blocks, numbers of a block in the layer with the most]: see `of_layer`.
    One array with latent attention, whose keys are its values. Behind the keys of a block are those of an indexer.
    states: float32 [slots per state, number, state_size], of recurrent layers; the first is that of number
    ``first_state``.
    """

    def __init__(self, spec: DecoderSpec, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        self.block_size, shape, self._index_size = block_size, (spec.num_slots, num_blocks), spec.index_size
        self.keys = np.zeros((*shape, block_size * spec.key_size), np.float32)
        has_values = spec.mla is None
        self.values = np.zeros((*shape, block_size * spec.value_size), np.float32) if has_values else self.keys
        self._of_blocks = (self.keys,) if spec.mla is not None else (self.keys, self.values)
        self.states = np.zeros((spec.num_state_slots, num_states or num_blocks, spec.state_size), np.float32)
        self.num_blocks, self.first_state = num_blocks, num_blocks if num_states else 0

    def of_layer(self, slot: int, heads: HeadShape) -> tuple[F32, F32]:
        """Return views of the keys and values of a layer: [num_blocks, block_size, num_kv_heads, head_dim or
        value_dim].
        """

        def of_dim(array: F32, dim: int) -> F32:
            shape = self.block_size, heads.num_kv_heads, dim
            return array[slot, :, : prod(shape)].reshape(-1, *shape)

        return of_dim(self.keys, heads.head_dim), of_dim(self.values, heads.value_dim)

    def index_keys(self, slot: int) -> F32:
        """Return a view of the keys of a layer's indexer: [num_blocks, block_size, index_size]."""
        size = self.block_size * self._index_size
        return self.keys[slot, :, -size:].reshape(-1, self.block_size, self._index_size)

    def copy_blocks(self, sources: I32, destinations: I32) -> None:
        for array, first, own in self._parts(sources):
            array[:, destinations[own] - first] = array[:, sources[own] - first]

    def zero_blocks(self, blocks: I32) -> None:
        for array, first, own in self._parts(blocks):
            array[:, blocks[own] - first] = 0

    @property
    def block_bytes(self) -> int:
        return sum(_bytes_of_one(array) for array, *_ in self._parts(np.zeros(1, np.int32)))

    @property
    def state_bytes(self) -> int:
        return _bytes_of_one(self.states) if self.first_state else 0

    def read_blocks(self, blocks: I32, data: U8) -> None:
        parts = [array[:, blocks - first].swapaxes(0, 1).reshape(len(blocks), -1)
                 for array, first, _ in self._parts(blocks)]  # fmt: skip
        data[:] = np.concatenate(parts, axis=1).view(np.uint8)

    def write_blocks(self, blocks: I32, data: U8) -> None:
        start = 0
        for array, first, _ in self._parts(blocks):
            slots, _, *shape = array.shape
            size = _bytes_of_one(array)
            part = np.ascontiguousarray(data[:, start : start + size]).view(np.float32)
            array[:, blocks - first] = part.reshape(len(blocks), slots, *shape).swapaxes(0, 1)
            start += size

    def _parts(self, blocks: I32) -> list[tuple[F32, int, Bools]]:
        """Return each array in which some of these blocks are, the number of its first one, and which ones they are."""
        is_block, everything = blocks < self.num_blocks, np.ones(len(blocks), np.bool_)
        if not self.first_state:
            return [(array, 0, everything) for array in (*self._of_blocks, self.states)]
        found = [*((array, 0, is_block) for array in self._of_blocks), (self.states, self.first_state, ~is_block)]
        return [part for part in found if part[2].any()]


def _bytes_of_one(array: F32) -> int:
    """Return the bytes of a block in an array [slots, blocks, …]."""
    return array[:, 0].nbytes


class NumpyAdapters:
    """An `AdapterStore` of float32 factors."""

    def __init__(self) -> None:
        self._held: dict[int, LoraFloats] = {}

    def load(self, lora_id: int, adapter: LoraAdapter) -> int:
        self._held[lora_id] = floats = {
            name: (pair.a.dequantize(), np.float32(pair.scale) * pair.b.dequantize())
            for name, pair in adapter.pairs.items()
        }
        return sum(a.nbytes + b.nbytes for a, b in floats.values())

    def drop(self, lora_id: int) -> None:
        self._held.pop(lora_id, None)

    def of_step(self, batch: InputBatch) -> LoraTokens:
        """Return the adapters of a batch. Raise PlanError for a number without an adapter."""
        mapping = step_adapters(batch, self._held)
        if mapping is None:
            return ()
        return [(self._held[i], np.flatnonzero(mapping.tokens == i)) for i in mapping.active]


class NumpyStep(NamedTuple):
    """The inputs of the layers in a step. mrope: see `StepInputs`. seen: see `last_seen`; None if no token sees later
    ones. runs: of each recurrent KV group, by its number.
    """

    batch: InputBatch
    loras: LoraTokens
    mrope: I64 | None
    seen: I64 | None
    runs: Mapping[int, Sequence[StateRun]]

    def rotary_positions(self, rope: RopeSpec) -> I64:
        """Return the position by which each pair of a token is rotated: [T, 1] for all pairs, or [T, pairs]."""
        if rope.axes and self.mrope is not None:
            return self.mrope[list(rope.axes)].T
        return self.batch.positions[: self.batch.num_tokens, None]


class NumpyExecutor(TransferPagedExecutor):
    """Runs ``spec`` with ``weights``. Dequantised weights are kept, so it holds the whole model in float32.

    pooling: of pooling requests; None: the last token, without a head.
    """

    cache: NumpyCache
    adapters: NumpyAdapters
    capabilities = TransferPagedExecutor.capabilities | {
        Capability.LORA, Capability.POOLING, Capability.RECURRENT_STATE, Capability.DRAFTED_STATES,
    }  # fmt: skip
    block_layout = "numpy float32"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int,
        num_states: int = 0,
        pooling: PoolingSpec | None = None,
    ) -> None:
        super().__init__(
            NumpyCache(spec, num_blocks, block_size, num_states),
            NumpyAdapters(),
            pooler=Pooler(pooling or PoolingSpec(), weights),
            hidden_size=spec.hidden_size,
            extra_size=spec.extra_size,
            mrope_dims=spec.mrope_dims,
            prefix_lm=spec.prefix_lm,
        )
        self.num_blocks, self.block_size, self.num_states = num_blocks, block_size, num_states
        self.spec, self.weight = spec, FloatWeights(weights, names_in_blocks(spec))
        self.groups, self.places = spec.kv_groups(), spec.places()
        self._last: F32 = np.zeros((0, spec.hidden_size), np.float32)  # the residual stream of the last step
        # The keys that the last indexer chose for each request of a step: [its tokens, keys].
        self._chosen: list[Bools] = []
        # The outputs of the last layer of kind mixed_qkv, and the r of the last router (`RouterSpec`), of a step.
        self._qkv: F32 = np.zeros((0, 0), np.float32)
        self._routed: F32 | None = None

    def compute(self, batch: InputBatch, logits_indices: I64) -> F32:
        """Compute the batch, write its keys and values, and return the logits [L, V] at ``logits_indices``."""
        spec, T = self.spec, batch.num_tokens
        if not spec.is_causal:
            check_whole(batch)
        embeds, mrope = self.inputs_of(batch)
        has_spans = embeds is not None and embeds[1].shape[1] > spec.hidden_size
        seen = last_seen(batch, embeds if has_spans else None)
        runs = {
            g: state_runs(batch, g, self.cache.first_state) for g, group in enumerate(self.groups) if group.recurrent
        }
        step = NumpyStep(batch, self.adapters.of_step(batch), mrope, seen, runs)
        x = self.weight("embed")[batch.input_ids[:T]] * np.float32(spec.embedding_scale)  # [T, hidden]
        if embeds is not None:
            tokens, vectors = embeds
            x[tokens] = vectors[:, : spec.hidden_size]
        if spec.num_positions:
            x = x + self.weight("positions")[batch.positions[:T]]
        if spec.embed_norm:
            x = self.norm(x, "embed_norm")
        if spec.scaled_sums:
            x = (x + self.weight("embed_bias")) * self.weight("embed_scale")
        inputs = None
        if spec.per_layer is not None:
            inputs = self.per_layer_inputs(x, batch.input_ids[:T], spec.per_layer, step.loras)
        h = first = x
        aside: F32 | None = None  # the output of a layer that the next one reads
        streams = None if spec.streams is None else NumpyStreams(self, spec.streams, x, step.loras)
        connections = None if spec.connections is None else NumpyConnections(self, spec.connections, x)
        of_runs = [self.weight("stream_begin"), x] if spec.has_runs else []
        run = 1  # the stream that the layers compute
        late: F32 | None = None  # what the experts of the layer before add
        self._routed = None
        for i, layer in enumerate(spec.layers):
            p, norms = spec.prefix_of(i), spec.norms_of(layer)
            if layer.stream is not None:
                of_runs[run] = self.norm(x, "final_norm") if i else x
                run, x = layer.stream, of_runs[0] + of_runs[1]
            if layer.aside is not None:
                aside = self.aside(x, first, p, layer, layer.aside, *self.places[i], step)
                continue
            if streams is not None:
                x = streams.predict(p)
            if connections is not None:
                x = connections.collapsed(p + "attn_mix")
            before, own_late = x, None
            if layer.has_mixer:
                if not layer.beside:
                    x_mixer = x if aside is None else x + aside
                    h, aside = self.input(x_mixer, p + "attn_norm", has_norm=norms.before_mixer), None
                    h = self.gated_norm(h, p + "attn_norm", step.loras) if layer.attn_norm_rank else h
                if layer.recurrent is None and spec.mla is not None:
                    a = self.latent_attention(h, p, layer, spec.mla, *self.places[i], step)
                elif layer.recurrent is None:
                    a = self.attention(h, p, layer, *self.places[i], step)
                else:
                    group, slot = self.places[i]
                    a = self.recurrent(h, p, layer.recurrent, slot, step.runs[group], step.loras)
                if not layer.adds_mixer:
                    self._qkv = a
                    continue
                x = x if layer.kept is None else h * np.float32(layer.kept[0])
                if connections is None:
                    x = self.sum(x, a, p, "attn", layer.mixer_scale, has_norm=norms.after_mixer)
                else:
                    connections.add(a)
                    x = connections.collapsed(p + "mlp_mix")
                if streams is not None:
                    x = (x + streams.laurel(h, p)) * np.float32(0.5**0.5)
            if layer.has_mlp:
                if spec.parallel_norm or not spec.parallel_mlp:
                    x_mlp = before if spec.parallel_norm else x
                    h = self.input(x_mlp, p + "mlp_norm", has_norm=norms.before_mlp)
                    h = self.gated_norm(h, p + "mlp_norm", step.loras) if layer.mlp_norm_rank else h
                if layer.moe is None:
                    m = self.mlp(h, p, step.loras, layer.gate_cutoff)
                else:
                    m = self.experts(x, h, p, layer.moe, step.loras)
                if layer.late_moe is not None:
                    own_late = self.experts(x, h, p, layer.late_moe, step.loras)
                x = x if layer.kept is None else h * np.float32(layer.kept[1])
                if connections is None:
                    x = self.sum(x, m, p, "mlp", layer.mlp_scale, has_norm=norms.after_mlp)
                else:
                    connections.add(m)
            x, late = x if late is None else x + late, own_late
            if streams is not None:
                x = streams.correct(x, p)
            if inputs is not None:
                gate = ACTIVATIONS[spec.activation](self.linear(x, p + "per_layer_gate", step.loras))
                own = self.linear(gate * inputs[:, i], p + "per_layer_out", step.loras)
                own = self.norm(own, p + "post_per_layer_norm")
                if streams is None:
                    x = x + own
                else:
                    streams.values[1:] += own
            if spec.layer_scales:
                x = x * self.weight(p + "layer_scale")
            if embeds is not None and has_spans and i < spec.num_features:
                tokens, vectors = embeds
                x[tokens] += vectors[:, (1 + i) * spec.hidden_size : (2 + i) * spec.hidden_size]
        if connections is not None:
            x = connections.collapsed("out_mix")
        self._last = x if streams is None else streams.merged()
        if not spec.has_logits:
            return np.zeros((0, spec.vocab_size), np.float32)
        h = self.hidden_states(logits_indices)  # [L, hidden]
        if spec.head_dense:
            dense = self.linear(h, "head_dense", _of_rows(step.loras, logits_indices))
            h = self.norm(ACTIVATIONS[spec.activation](dense), "head_norm")
        logits = h @ self.weight("embed" if spec.tie_embeddings else "lm_head").T * np.float32(spec.logit_scale)
        if spec.logits_bias:
            logits = logits + self.weight("logits_bias")
        return cap(logits, spec.final_softcap)

    def hidden_states(self, tokens: I64) -> F32:
        """Return norm(x, final_norm) [N, hidden] at tokens of the last step."""
        return self.norm(self._last[tokens], "final_norm")

    def per_layer_inputs(self, x: F32, input_ids: I32, of: PerLayerSpec, loras: LoraTokens) -> F32:
        """Return the separate inputs of each layer, for the input x of the first one, [T, layers, size]."""
        shape = len(x), -1, of.size
        own = self.weight("per_layer_embed")[np.where(input_ids < of.vocab_size, input_ids, 0)].reshape(shape)
        of_x = rms_norm(self.linear(x, "per_layer_in", loras).reshape(shape), of.norm_eps)
        of_x = of_x * self.weight("per_layer_norm")
        inputs: F32 = np.float32(of.scale) * (of_x + np.float32(of.embedding_scale) * own)
        return inputs

    def norm(self, x: F32, name: str) -> F32:
        """Apply a norm of the residual stream over the last axis."""
        eps = self.spec.norm_eps
        if self.spec.layer_norm:
            return layer_norm(x, self.weight(name), self.weight(name + "_bias"), eps)
        return rms_norm(x, eps) * self.weight(name)

    def sum(self, x: F32, branch: F32, p: str, part: str, scale: float, *, has_norm: bool) -> F32:
        """Return x + residual_scale · scale · branch, where the branch passes through the norm first if it has one; or
        the sum of both with scales and biases, if the model has these. part: "attn" or "mlp", of the layer ``p``.
        """
        if self.spec.scaled_sums:
            bias, factor, kept_bias, kept = (self.weight(f"{p}{part}_{name}") for name in SUM)
            return (branch + bias) * factor + (x + kept_bias) * kept
        normed = self.norm(branch, f"{p}post_{part}_norm") if has_norm else branch
        return x + np.float32(self.spec.residual_scale * scale) * normed

    def linear(self, x: F32, name: str, loras: LoraTokens) -> F32:
        """See `product`."""
        return product(x, name, self.weight, loras)

    def biased(self, x: F32, name: str, loras: LoraTokens, *, has_bias: bool) -> F32:
        """Return `linear`, plus the bias."""
        out = self.linear(x, name, loras)
        return out + self.weight(name + "_bias") if has_bias else out

    def project(self, h: F32, name: str, head_dim: int, loras: LoraTokens) -> F32:
        """Project [T, hidden] to [T, heads, head_dim], plus the bias if the model has one."""
        return self.biased(h, name, loras, has_bias=self.spec.qkv_bias).reshape(len(h), -1, head_dim)

    def aside(
        self, x: F32, first: F32, p: str, layer: LayerSpec, aside: AsideSpec, group: int, slot: int, step: NumpyStep
    ) -> F32:
        """Run a layer aside: see `AsideSpec`. first: the input of the first layer. Return [T, hidden]."""
        both = np.concatenate([x, first], axis=-1)
        h = rms_norm(both, self.spec.norm_eps) * self.weight(p + "attn_norm")
        a = self.attention(h, p, layer, group, slot, step)
        u = self.input(a, p + "mlp_norm", has_norm=True)
        m = self.mlp(u, p, step.loras, has_low_rank=aside.mlp_rank > 0)
        return self.linear(m, p + "aside", step.loras)

    def low_rank(self, x: F32, low: str, high: str, loras: LoraTokens) -> F32:
        """Return x Wlow Whigh, by their names."""
        return self.linear(self.linear(x, low, loras), high, loras)

    def attention(self, h: F32, p: str, layer: LayerSpec, group: int, slot: int, step: NumpyStep) -> F32:
        """Run the attention block of the layer on its normed input h. Return [T, hidden]."""
        spec, loras = self.spec, step.loras
        num_kv_heads, head_dim, num_heads, value_dim = spec.heads_of(layer)
        dims = {"q": head_dim, "k": head_dim, "v": value_dim}
        heads = {name: self.project(h, p + name, dims[name], loras) for name in projections(layer)}
        if layer.takes_qkv:
            ends = num_heads * head_dim, (num_heads + num_kv_heads) * head_dim
            parts = zip(dims.items(), np.split(self._qkv, ends, axis=1), strict=True)
            heads = {name: part.reshape(len(h), -1, dim) for (name, dim), part in parts}
        if layer.aside is not None and layer.aside.attention_rank:
            for name, values in heads.items():
                values += self.low_rank(h, f"{p}{name}_low", f"{p}{name}_high", loras).reshape(values.shape)
        if layer.values_are_keys:
            heads["v"] = heads["k"]
        for name in {"q", "k"} & heads.keys():
            if spec.qk_norm:
                heads[name] = self.head_norm(heads[name], f"{p}{name}_norm")
            heads[name] = self.clipped(heads[name])
            if layer.unit_qk_eps is not None:
                heads[name] = rms_norm(heads[name], layer.unit_qk_eps)
            if layer.rope is not None:
                heads[name] = rotate(heads[name], step.rotary_positions(layer.rope), layer.rope)
            if spec.qk_scales:
                heads[name] = heads[name] * self.weight(f"{p}{name}_norm")
        if spec.key_scales:
            heads["k"] = heads["k"] * self.weight(p + "key_scale")[:, None]
        q = heads["q"]
        if layer.query_growth is not None:
            q = q * query_growth(step.batch.positions[: len(q)], layer.query_growth)[:, None, None]
        if "k" in heads:
            v = rms_norm(heads["v"], spec.norm_eps) if layer.unit_v else self.clipped(heads["v"])
            self.write(heads["k"], v, layer, group, slot, step.batch)
        sinks = self.weight(p + "sinks").reshape(num_kv_heads, -1, 1, 1) if layer.has_sinks else None
        a = self.attend(q, layer, group, slot, step, sinks)
        if spec.attn_gate:
            gate = self.biased(h, p + "attn_gate", loras, has_bias=spec.qkv_bias)
            gate = softplus(gate) if spec.softplus_gates else sigmoid(gate)
            a = a * gate.reshape(len(h), num_heads, -1)
        a = self.last_input(a.reshape(len(h), -1), p + "inner_attn_norm")
        return self.biased(a, p + "o", loras, has_bias=spec.o_bias)

    def latent_attention(
        self, h: F32, p: str, layer: LayerSpec, mla: MlaSpec, group: int, slot: int, step: NumpyStep
    ) -> F32:
        """Run the latent attention block of the layer on its normed input h. Return [T, hidden]."""
        loras, heads, r, has_bias = step.loras, self.spec.num_heads, mla.rope_dim, self.spec.qkv_bias
        u = of_queries = h
        if mla.q_rank:
            y = self.biased(h, p + "q_a", loras, has_bias=has_bias)
            u = of_queries = rms_norm(y, mla.norm_eps) * self.weight(p + "q_a_norm")
            of_queries = np.concatenate([u, y], axis=-1) if mla.joins_latents else u
        q = self.linear(of_queries, p + "q", loras).reshape(len(h), heads, -1)
        k = self.biased(h, p + "kv_a", loras, has_bias=has_bias)
        normed = np.float32(mla.kv_scale) * rms_norm(k[:, r:], mla.norm_eps) * self.weight(p + "kv_a_norm")
        c = np.concatenate([k[:, :r], normed], axis=-1)[:, None]
        k_b, v_b = (self.weight(p + name).reshape(heads, -1, mla.kv_rank) for name in ("k_b", "v_b"))
        absorbed = np.einsum("thn,hnc->thc", q[..., r:], k_b)
        for pairs, tokens in loras:
            if (name := p + "k_b") in pairs:
                down, up = pairs[name]
                absorbed[tokens] += np.einsum("thn,hnr->thr", q[tokens, :, r:], up.reshape(heads, -1, len(down))) @ down
        query = np.concatenate([q[..., :r], absorbed], axis=-1)
        if layer.rope is not None:
            at = step.rotary_positions(layer.rope)
            query, c = rotate(query, at, layer.rope), rotate(c, at, layer.rope)
        self.write(c, c, layer, group, slot, step.batch)
        if (indexer := self.spec.indexer_of(layer)) is not None:
            self._chosen = self.choose(h, u, p, layer, indexer, group, slot, step)
        sinks = self.weight(p + "sinks").reshape(1, -1, 1, 1) if layer.has_sinks else None
        a = self.attend(query, layer, group, slot, step, sinks)
        out = np.einsum("thc,hvc->thv", a[..., r:], v_b)
        for pairs, tokens in loras:
            if (name := p + "v_b") in pairs:
                down, up = pairs[name]
                out[tokens] += np.einsum("thr,hvr->thv", a[tokens, :, r:] @ down.T, up.reshape(heads, -1, len(down)))
        if self.spec.attn_gate:
            gates = sigmoid(self.linear(of_queries if mla.joins_latents else h, p + "attn_gate", loras))
            out = out * gates.reshape(len(h), heads, -1)
        return self.biased(out.reshape(len(h), -1), p + "o", loras, has_bias=self.spec.o_bias)

    def choose(
        self, h: F32, u: F32, p: str, layer: LayerSpec, of: IndexerSpec, group: int, slot: int, step: NumpyStep
    ) -> list[Bools]:
        """Write the keys of the layer's indexer. Return those that it chooses for each request: [its tokens, keys]. u:
        see `MlaSpec`.
        """
        batch, loras = step.batch, step.loras
        q = self.linear(u, p + "index_q", loras).reshape(len(h), of.num_heads, of.head_dim)
        weight, bias = (self.weight(f"{p}index_k_norm{end}") for end in ("", "_bias"))
        key = layer_norm(self.linear(h, p + "index_k", loras), weight, bias, of.norm_eps)[:, None]
        if layer.rope is not None:
            at = step.rotary_positions(layer.rope)
            q, key = rotate(q, at, layer.rope), rotate(key, at, layer.rope)
        weights = self.linear(h, p + "index_weights", loras)
        keys = self.cache.index_keys(slot)
        self.write_rows(group, batch, (keys, key[:, 0]))
        chosen = []
        for b in range(batch.num_reqs):
            start, end, length = batch.query_start_loc[b], batch.query_start_loc[b + 1], int(batch.seq_lens[b])
            past = keys[batch.block_table[group][b, : -(-length // self.block_size)]].reshape(-1, of.head_dim)[:length]
            products = np.maximum(np.einsum("thd,sd->ths", q[start:end], past, optimize=True), np.float32(0))
            scores = np.einsum("th,ths->ts", weights[start:end], products)
            seen = visible(batch.positions[start:end], length, None)
            order = np.argsort(-np.where(seen, scores, -np.inf), axis=-1, kind="stable")[:, : of.topk]
            taken = np.zeros(scores.shape, np.bool_)
            np.put_along_axis(taken, order, True, axis=-1)
            chosen.append(taken & seen)
        return chosen

    def head_norm(self, x: F32, name: str) -> F32:
        """Apply the norm of queries or keys [T, heads, head_dim]: to each head, or to all heads together."""
        if (of := self.spec.qk_layer_norm) is not None:
            bias = self.weight(name + "_bias") if of.has_bias else None
            return layer_norm(x, self.weight(name), bias, self.spec.norm_eps)
        flat = x.reshape(len(x), -1) if self.spec.joint_qk_norm else x
        return (rms_norm(flat, self.spec.norm_eps) * self.weight(name)).reshape(x.shape)

    def clipped(self, x: F32) -> F32:
        """Return queries, keys or values within the limit, if the model has one."""
        limit = self.spec.clip_qkv
        return x if limit is None else np.clip(x, np.float32(-limit), np.float32(limit))

    def input(self, x: F32, norm: str, *, has_norm: bool) -> F32:
        """Return the input of attention or an MLP: with a norm before it if it has one, and rounded if the model rounds
        inputs.
        """
        h = self.norm(x, norm) if has_norm else x
        return rounded(h) if self.spec.rounds_inputs else h

    def gated_norm(self, h: F32, norm: str, loras: LoraTokens) -> F32:
        """Return the output of a norm times its gate."""
        low = ACTIVATIONS["silu"](self.linear(h, norm + "_low", loras))
        return h * sigmoid(self.linear(low, norm + "_high", loras))

    def last_input(self, x: F32, norm: str) -> F32:
        """Return the input of the last product of attention or an MLP: as `input`, with an inner norm."""
        h = rms_norm(x, self.spec.norm_eps) * self.weight(norm) if self.spec.inner_norms else x
        return rounded(h) if self.spec.rounds_inputs else h

    def recurrent(
        self, h: F32, p: str, spec: RecurrentSpec, slot: int, runs: Sequence[StateRun], loras: LoraTokens
    ) -> F32:
        """Run a recurrent layer on its normed input h. Return [T, hidden]."""

        def weight(name: str) -> F32:
            return self.weight(f"{p}state.{name}")

        def product(x: F32, name: str, tokens: slice) -> F32:
            return self.linear(x, f"{p}state.{name}", _of_rows(loras, np.arange(tokens.start, tokens.stop)))

        return recurrent_layer(h, weight, product, spec, self.spec.norm_eps, self.cache.states[slot], runs)

    def write(self, k: F32, v: F32, layer: LayerSpec, group: int, slot: int, batch: InputBatch) -> None:
        """Write the keys [T, key heads, head_dim] and values [T, key heads, value_dim] of a layer to their slots."""
        keys, values = self.cache.of_layer(slot, self.spec.heads_of(layer))
        self.write_rows(group, batch, (keys, k), (values, v))

    def write_rows(self, group: int, batch: InputBatch, *pairs: tuple[F32, F32]) -> None:
        """Write the rows of tokens [T, …] of each pair to their slots in its view of the cache [num_blocks, block_size,
        …].
        """
        slots = batch.slot_mapping[group][: batch.num_tokens]
        written = slots >= 0
        at = np.divmod(slots[written], self.block_size)
        for cached, rows in pairs:
            cached[at] = rows[written]

    def attend(self, q: F32, layer: LayerSpec, group: int, slot: int, step: NumpyStep, sinks: F32 | None) -> F32:
        """Attend from each request to its own blocks: [T, heads, head_dim] becomes [T, heads, value_dim].

        sinks: [key heads, heads per key head, 1, 1].
        """
        spec, batch = self.spec, step.batch
        heads = spec.heads_of(layer)
        keys, values = self.cache.of_layer(slot, heads)
        out = np.empty((*q.shape[:2], heads.value_dim), np.float32)
        per_kv = heads.num_heads // heads.num_kv_heads
        block_size = self.block_size
        for b in range(batch.num_reqs):
            start, end, length = batch.query_start_loc[b], batch.query_start_loc[b + 1], int(batch.seq_lens[b])
            blocks = batch.block_table[group][b, : -(-length // block_size)]
            past_k = keys[blocks].reshape(-1, *keys.shape[2:])[:length]  # [S, kv_heads, head_dim]
            past_v = values[blocks].reshape(-1, *values.shape[2:])[:length]  # [S, kv_heads, value_dim]
            query = q[start:end].reshape(end - start, heads.num_kv_heads, per_kv, heads.head_dim)
            scores = np.einsum("tgqd,sgd->gqts", query, past_k, optimize=True) * np.float32(spec.query_scale)
            scores = cap(scores, spec.attn_softcap)
            at = batch.positions[start:end]
            if spec.slopes:
                slopes = np.array(spec.slopes, np.float32).reshape(heads.num_kv_heads, per_kv, 1, 1)
                scores = scores + slopes * (np.arange(length) - at[:, None]).astype(np.float32)
            mask = visible(at, length, layer.sliding_window) if spec.indexer is None else self._chosen[b]
            if not spec.is_causal:
                distance = np.abs(at[:, None] - np.arange(length))
                mask = distance < (length if layer.sliding_window is None else layer.sliding_window)
            if layer.chunked and layer.sliding_window is not None:
                mask &= np.arange(length) >= (at - at % layer.sliding_window)[:, None]
            has_spans = layer.sliding_window is not None or not spec.spans_in_windows
            if step.seen is not None and has_spans:  # tokens of a span or range have equal values
                own = step.seen[start:end]
                mask[:, length - len(own) :] |= own[:, None] == own
                if layer.sliding_window is not None:
                    mask &= np.arange(length) > at[:, None] - layer.sliding_window
            weights = softmax(np.where(mask, scores, np.float32(-np.inf)), sinks)
            out[start:end] = np.einsum("gqts,sgd->tgqd", weights, past_v, optimize=True).reshape(-1, *out.shape[1:])
        return out

    def mlp(
        self,
        h: F32,
        prefix: str,
        loras: LoraTokens,
        cutoff: float | None = None,
        *,
        limit: float | None = None,
        has_low_rank: bool = False,
    ) -> F32:
        """Return (act(h Wgate) * (h Wup)) Wdown, or without a gate act(h Wup) Wdown, with biases if ``mlp_bias``.
        `LayerSpec.gate_cutoff` explains ``cutoff``, and `MoeSpec.gate_limit` ``limit``. has_low_rank: products of low
        rank are added to gate and up.
        """
        act, clamp = ACTIVATIONS[self.spec.activation], self.spec.clamped_gate

        def part(x: F32, name: str) -> F32:
            out = self.biased(x, prefix + name, loras, has_bias=self.spec.mlp_bias)
            if has_low_rank and name != "down":
                out = out + self.low_rank(x, prefix + "mlp_low", f"{prefix}{name}_high", loras)
            return out

        up = part(h, "up")
        if clamp is not None:
            gate = np.minimum(part(h, "gate"), np.float32(clamp.limit))
            up = np.clip(up, np.float32(-clamp.limit), np.float32(clamp.limit))
            inner = gate * sigmoid(np.float32(clamp.alpha) * gate) * (up + 1)
        elif limit is not None:
            inner = ACTIVATIONS["silu"](np.minimum(part(h, "gate"), np.float32(limit)))
            inner = inner * np.clip(up, np.float32(-limit), np.float32(limit))
        elif cutoff is not None:
            gate = part(h, "gate")
            least = gate.mean(-1, keepdims=True) + np.float32(cutoff) * gate.std(-1, keepdims=True)
            inner = act(np.maximum(gate - least, np.float32(0))) * up
        elif self.spec.gated_mlp:
            inner = act(np.float32(self.spec.gate_scale) * part(h, "gate")) * up
        else:
            inner = xielu(up, xielu_numbers(self.weight, prefix)) if self.spec.xielu else act(up)
        return part(self.last_input(inner, prefix + "inner_mlp_norm"), "down")

    def experts(self, x: F32, h: F32, prefix: str, moe: MoeSpec, loras: LoraTokens) -> F32:
        """Run each token through its chosen experts, weighted by the router, and through the shared expert if there is
        one.

        h: the residual stream x after the norm.
        """
        routed = inputs = h
        if moe.own_norms:
            scale = self.weight(prefix + "router_scale") * np.float32(self.spec.hidden_size**-0.5)
            routed = rms_norm(x, self.spec.norm_eps) * scale
            inputs = self.norm(x, prefix + "experts_norm")
        if moe.router is not None:
            routed = self.routed(h, prefix, moe.router, loras)
        scores = self.linear(routed, prefix + "router", loras)  # [T, experts]
        if moe.scores_bias:
            scores = scores + self.weight(prefix + "scores_bias")
        scores = cap(scores, moe.softcap)
        if moe.sparse_mix is not None:
            chosen, weights = sparsely_mixed(scores, moe.experts_per_token, moe.sparse_mix)
        else:
            probs = softmax(scores) if moe.scoring == "softmax" else sigmoid(scores)
            ranked = scores if moe.ranks_outputs else probs
            order = ranked + self.weight(prefix + "router_bias") if moe.router_bias else ranked
            if moe.num_groups > 1:
                order = np.where(chosen_groups(order, moe), order, 0 if moe.zeroes_groups else -np.inf)
            chosen = np.argsort(-order, axis=-1, kind="stable")[:, : moe.experts_per_token]
            weights = np.take_along_axis(probs, chosen, -1)
        if moe.norm_topk:
            weights = weights / (weights.sum(-1, keepdims=True) + np.float32(moe.sum_eps))
        weights = weights * np.float32(moe.scale)
        if moe.own_norms:
            weights = weights * self.weight(prefix + "expert_scales")[chosen]
        if moe.latent_size:
            inputs = self.linear(h, prefix + "latent_in", loras)
        out = np.zeros_like(inputs)
        for e in np.unique(chosen[chosen < moe.num_experts + moe.identities]):
            token, nth = np.nonzero(chosen == e)
            weight, expert, own = weights[token, nth, None], f"{prefix}experts.{e}.", _of_rows(loras, token)
            if e >= moe.num_experts:
                out[token] += weight * inputs[token]
            elif moe.scales_inputs:
                out[token] += self.mlp(weight * inputs[token], expert, own, limit=moe.gate_limit)
            else:
                out[token] += weight * self.mlp(inputs[token], expert, own, limit=moe.gate_limit)
        if moe.latent_size:
            out = self.linear(out, prefix + "latent_out", loras)
        if moe.own_norms:
            out = self.norm(out, prefix + "post_experts_norm")
        if moe.shared_intermediate_size:
            shared = self.mlp(h, prefix + "shared.", loras)
            if moe.own_norms:
                shared = self.norm(shared, prefix + "post_shared_norm")
            gate = sigmoid(self.linear(h, prefix + "shared_gate", loras)) if moe.shared_gate else np.float32(1)
            out += shared * gate
        return out

    def routed(self, h: F32, prefix: str, of: RouterSpec, loras: LoraTokens) -> F32:
        """Return the input of the last matrix of a router: see `RouterSpec`."""
        own = self.biased(h, prefix + "router_in", loras, has_bias=True)
        if of.carries and self._routed is not None:
            own = own + self._routed * self.weight(prefix + "router_carry")
        self._routed = own
        u = rms_norm(own, self.spec.norm_eps) * self.weight(prefix + "router_norm")
        for name in ("router_first", "router_second"):
            u = gelu(self.biased(u, prefix + name, loras, has_bias=True))
        return u


def _of_rows(loras: LoraTokens, tokens: I64) -> LoraTokens:
    """Return the adapters of rows that are of these tokens, in place of the tokens of a step."""
    return [(pairs, np.flatnonzero(np.isin(tokens, own))) for pairs, own in loras]


def sparsely_mixed(scores: F32, count: int, mix: float) -> tuple[I64, F32]:
    """Return the experts of each token and their weights, both [T, count], by `MoeSpec.sparse_mix`."""
    left, chosen, weights = scores.copy(), [], []
    for _ in range(count):
        best = np.argmax(left, axis=-1, keepdims=True)
        top = np.take_along_axis(left, best, -1)
        with np.errstate(invalid="ignore", divide="ignore"):  # zeros are not far from each other
            is_far = (top - scores) / np.maximum(np.abs(scores), top) > np.float32(mix)
        weights.append(1 / np.where(is_far, np.float32(0), np.exp(left - top)).sum(-1, keepdims=True))
        chosen.append(best)
        np.put_along_axis(left, best, -np.inf, axis=-1)
    return np.concatenate(chosen, axis=-1), np.concatenate(weights, axis=-1)


def chosen_groups(order: F32, moe: MoeSpec) -> npt.NDArray[np.bool_]:
    """Return [T, experts], whether each expert is in a group from which the token may choose experts."""
    groups = np.sort(order.reshape(len(order), moe.num_groups, -1), axis=-1)
    scores = groups[..., -2:].sum(-1) if moe.router_bias else groups[..., -1]
    best = np.argsort(-scores, axis=-1, kind="stable")[:, : moe.groups_per_token]
    taken = np.zeros(scores.shape, bool)
    np.put_along_axis(taken, best, True, axis=-1)
    return np.repeat(taken, groups.shape[-1], axis=-1)


def query_growth(positions: I64, growth: QueryGrowth) -> F32:
    """Return the factors of queries at positions [T]."""
    return np.asarray(1 + growth.scale * np.log1p((positions + growth.offset) // growth.interval), np.float32)


def rotate(x: F32, positions: I64, rope: RopeSpec) -> F32:
    """Rotate the pairs (j, j + n) of the first 2n dimensions of [T, heads, head_dim] by positions * inv_freq[j].

    positions: [T, 1] for all pairs, or [T, n].
    """
    n = len(rope.inv_freq)
    angle = positions.astype(np.float32) * np.asarray(rope.inv_freq, np.float32)  # [T, n]
    cos, sin = (np.float32(rope.scale) * f(angle)[:, None, :] for f in (np.cos, np.sin))
    first, second, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
