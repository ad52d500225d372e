"""A decoder's forward pass on tensors: `foreword.models.spec` with the matrices of one input in one product.

A step reads and writes tensors only: what it needs of the batch is in `Step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, rms_norm, silu, softplus

from foreword.arrays import F32
from foreword.executors.functions import xielu_numbers
from foreword.executors.torch.activations import ACTIVATIONS
from foreword.executors.torch.attention import AttentionCall
from foreword.executors.torch.loras import Changeable, ProductChanges
from foreword.executors.torch.mixed_heads import MixedHeads, TakenHeads
from foreword.executors.torch.norms import Norm, norms_around
from foreword.executors.torch.recurrent import RecurrentLayer
from foreword.executors.torch.rotation import Rotation
from foreword.executors.torch.shard import Shard
from foreword.executors.torch.step import PagedStep, Step
from foreword.executors.torch.streams import Connection, PerLayerInputs, Streams, StreamUpdate, added
from foreword.executors.torch.weights import Linear, Loader
from foreword.models.spec import (
    SUM,
    AsideSpec,
    DecoderSpec,
    IndexerSpec,
    MlaSpec,
    MoeSpec,
    RouterSpec,
    block_of,
    projections,
)

Result = TypeVar("Result")
StepType = TypeVar("StepType", bound=Step)
StepType_contra = TypeVar("StepType_contra", bound=Step, contravariant=True)


class Mixer(Protocol[StepType_contra]):
    """The part of a layer that mixes tokens: attention, or a recurrence. products: those that adapters may change."""

    @property
    def products(self) -> Sequence[Changeable]: ...

    def __call__(self, h: Tensor, step: StepType_contra, /) -> Tensor:
        """Return the output [T, hidden] for the normed input [T, hidden]."""
        ...


MakeMixer = Callable[[DecoderSpec, int, Loader], Mixer[StepType_contra]]
"""Makes the mixer of a layer, by its number."""


class Decoder(Generic[StepType]):
    """Runs ``spec`` with weights of one dtype on one device.

    mixer: makes the mixer of each layer. products: those of all layers that adapters may change, as `Loras` takes them.
    compile: layers run through torch.compile in steps without adapters: all but mixers, which are made compiled, and
    experts, whose product compiles in bfloat16 alone.
    """

    def __init__(self, spec: DecoderSpec, load: Loader, mixer: MakeMixer[StepType], *, compile: bool = False) -> None:
        self.spec = spec
        self.embed = load("embed")
        self.positions = load("positions") if spec.num_positions else None
        self.embed_norm = Norm(spec, "embed_norm" if spec.embed_norm else None, load)
        self.embed_scales = [load(f"embed_{name}") for name in ("bias", "scale")] if spec.scaled_sums else None
        self.per_layer = None if spec.per_layer is None else PerLayerInputs(spec, spec.per_layer, load)
        self.streams = None if spec.streams is None else Streams(spec.streams, load)
        self.connections = spec.connections
        self.out_mix = None if spec.connections is None else Connection(spec, spec.connections, "out_mix", load)
        self.stream_begin = load("stream_begin") if spec.has_runs else None
        routed = Routed()
        self.layers = [
            Layer(spec, i, load, mixer, routed, compile=compile)
            if layer.aside is None
            else AsideLayer(spec, i, layer.aside, load, mixer)
            for i, layer in enumerate(spec.layers)
        ]
        self.head_dense = load.plain("head_dense") if spec.head_dense else None
        products: list[Changeable] = [p for layer in self.layers for p in layer.products]
        products += [] if self.per_layer is None else [self.per_layer.project]
        products += [] if self.streams is None else self.streams.products
        products += [] if self.head_dense is None else [self.head_dense]
        self.products = list({product.parts: product for product in products}.values())
        self.final_norm = Norm(spec, "final_norm", load)
        self.head_norm = Norm(spec, "head_norm" if spec.head_dense else None, load)
        self.head: Tensor | None = None
        if spec.has_logits:
            rows = load.shards.all.part(spec.vocab_size)
            tied = self.embed[rows.start : rows.stop]
            self.head = tied if spec.tie_embeddings else load("lm_head", split="outputs")
        self.head_bias = load("logits_bias")[rows.start : rows.stop] if spec.logits_bias else None

    def forward(self, step: StepType) -> Tensor:
        """Return the residual stream [T, hidden] after the last layer. The layers write keys, values and states."""
        x = embedding(step.input_ids, self.embed)
        if self.spec.embedding_scale != 1:
            x = x * self.spec.embedding_scale
        if step.embeds is not None:
            tokens, vectors = step.embeds
            x[tokens] = vectors.to(x.dtype)
        if self.positions is not None:
            x = x + embedding(step.positions, self.positions)
        x = self.embed_norm(x)
        if self.embed_scales is not None:
            bias, scale = self.embed_scales
            x = (x + bias) * scale
        inputs = None if self.per_layer is None else self.per_layer(x, step.input_ids, step.loras)
        h = first = x
        aside: Tensor | None = None  # the output of a layer that the next one reads
        streams = None if self.streams is None else self.streams.begin(x, step.loras)
        connected = None if self.connections is None else x[:, None].expand(-1, self.connections.num_streams, -1)
        late: Tensor | None = None  # what the experts of the layer before add
        of_runs = [] if self.stream_begin is None else [self.stream_begin, x]
        run = 1  # the stream that the layers compute
        for i, layer in enumerate(self.layers):
            if (stream := self.spec.layers[i].stream) is not None:
                of_runs[run] = self.final_norm(x) if i else x
                run, x = stream, of_runs[0] + of_runs[1]
            if isinstance(layer, AsideLayer):
                aside = layer(x, first, step)
                continue
            own = None if inputs is None else inputs[:, i]
            if connected is not None:
                connected = layer.connect(connected, step)
            elif streams is None:
                x, h, of_experts = layer(x, h, step, aside)
                aside = None
                x, late = x if late is None else x + late, of_experts
                x = layer.finish(x, own, step.loras)
            else:
                streams = layer.update(streams, own, step)
        if connected is not None and self.out_mix is not None:
            return self.out_mix.collapsed(connected)[0]
        return x if streams is None or self.streams is None else self.streams.merged(streams, step.loras)

    def hidden_states(self, x: Tensor) -> Tensor:
        """Return norm(x, final_norm)."""
        return self.final_norm(x)

    def logits(self, x: Tensor, tokens: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return the logits [L, V] of some tokens of the residual stream [T, hidden]: the rank's part of the
        vocabulary.
        """
        assert self.head is not None
        if self.head_dense is None or loras is None:
            x = x[tokens]
        y = self.hidden_states(x)
        if self.head_dense is not None:
            y = ACTIVATIONS[self.spec.activation](self.head_dense(y, loras))
            y = self.head_norm(y if loras is None else y[tokens])
        logits = _scaled(linear(y, self.head), self.spec.logit_scale)
        return cap(logits if self.head_bias is None else logits + self.head_bias, self.spec.final_softcap)


class ScaledSum:
    """A sum with scales and biases, of the vectors NAME_sum_bias and so on: see `foreword.models.spec`."""

    def __init__(self, name: str, load: Loader) -> None:
        self.bias, self.scale, self.kept_bias, self.kept_scale = (load(f"{name}_{part}") for part in SUM)

    def __call__(self, x: Tensor, branch: Tensor) -> Tensor:
        return (branch + self.bias) * self.scale + (x + self.kept_bias) * self.kept_scale


class PlainSum:
    """A sum with one factor of the branch, after its norm."""

    def __init__(self, norm: Norm, scale: float) -> None:
        self.norm, self.scale = norm, scale

    def __call__(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + _scaled(self.norm(branch), self.scale)


@dataclass(slots=True)
class Routed:
    """The r of the last router that has run: see `RouterSpec`."""

    r: Tensor | None = None


class Layer(Generic[StepType]):
    """One layer of a decoder. products: those that adapters may change. routed: what its router reads, and replaces."""

    def __init__(
        self, spec: DecoderSpec, index: int, load: Loader, mixer: MakeMixer[StepType], routed: Routed, *, compile: bool
    ) -> None:
        layer, prefix = spec.layers[index], spec.prefix_of(index)
        norms = spec.norms_of(layer)
        mixer_scale, mlp_scale = (spec.residual_scale * x for x in (layer.mixer_scale, layer.mlp_scale))
        self.kept, self.adds_mixer = layer.kept, layer.adds_mixer
        self.products: list[Changeable] = []
        self.mixer: Mixer[StepType] | None = None
        self.attn_norm: Norm | None = None
        if layer.has_mixer:
            before, after = norms_around(
                *(spec, prefix + "attn_norm", prefix + "post_attn_norm", load),
                has_before=norms.before_mixer and not layer.beside,
                has_after=norms.after_mixer,
                gate_rank=layer.attn_norm_rank,
            )
            self.attn_norm = None if layer.beside else before
            has_scales = spec.scaled_sums and layer.adds_mixer
            self._add_mixer = ScaledSum(prefix + "attn", load) if has_scales else PlainSum(after, mixer_scale)
            self.mixer = mixer(spec, index, load)
            self.products += [*before.products, *self.mixer.products]
        self.mlp: Mlp | Experts | None = None
        if layer.has_mlp:
            has_norm = spec.parallel_norm or not spec.parallel_mlp
            before, after = norms_around(
                *(spec, prefix + "mlp_norm", prefix + "post_mlp_norm", load),
                has_before=norms.before_mlp and has_norm,
                has_after=norms.after_mlp,
                gate_rank=layer.mlp_norm_rank,
            )
            self.mlp_norm = before if has_norm else None
            self._add_mlp = ScaledSum(prefix + "mlp", load) if spec.scaled_sums else PlainSum(after, mlp_scale)
            self.is_parallel = spec.parallel_norm
            if layer.moe is None:
                self.mlp = Mlp(prefix, spec, load, layer.gate_cutoff)
            else:
                self.mlp = Experts(prefix, spec, layer.moe, load, routed)
            self.products += [*before.products, *self.mlp.products]
        self.per_layer: tuple[Linear, Linear, Norm] | None = None
        if spec.per_layer is not None:
            gate, out = (load.plain(f"{prefix}per_layer_{name}") for name in ("gate", "out"))
            self.per_layer = gate, out, Norm(spec, prefix + "post_per_layer_norm", load)
            self.products += [gate, out]
        self.activation = ACTIVATIONS[spec.activation]
        self.streams = None if spec.streams is None else StreamUpdate(spec, spec.streams, prefix, load)
        self.products += [] if self.streams is None else self.streams.products
        names = [] if spec.connections is None else [prefix + "attn_mix", prefix + "mlp_mix"]
        self.connections = [Connection(spec, of, name, load) for name in names if (of := spec.connections)]
        self.scale = load(prefix + "layer_scale") if spec.layer_scales else None
        self._input: Callable[[Tensor], Tensor] = rounded if spec.rounds_inputs else lambda h: h
        self.late = None if layer.late_moe is None else Experts(prefix, spec, layer.late_moe, load, routed)
        self.products += [] if self.late is None else self.late.products
        self._rest = compiled(Layer._after_mixer) if compile and layer.experts is None else Layer._after_mixer

    def __call__(
        self, x: Tensor, h: Tensor, step: StepType, aside: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the layer's output, the input of its mixer, or what the mixer gives if this is not added, and what its
        late experts add. h: the second of these of the layer before. aside: see `AsideSpec`.
        """
        if self.attn_norm is not None:
            h = self._input(self.attn_norm(x if aside is None else x + aside, step.loras))
        a = None if self.mixer is None else self.mixer(h, step)
        if a is not None and not self.adds_mixer:
            return x, a, None
        x, late = self._rest(self, x, h, a, step.loras)
        return x, h, late

    def _after_mixer(
        self, x: Tensor, h: Tensor, a: Tensor | None, loras: ProductChanges | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output, and what its late experts add. h, a: [T, hidden], the input and the output of its
        mixer.
        """
        before, late = x, None
        if a is not None:
            x = x if self.kept is None else _scaled(h, self.kept[0])
            x = self._add_mixer(x, a)
        if self.mlp is not None:
            h = h if self.mlp_norm is None else self._input(self.mlp_norm(before if self.is_parallel else x, loras))
            m = self._of_mlp(x, h, loras)
            late = None if self.late is None else self.late(x, h, loras)
            x = x if self.kept is None else _scaled(h, self.kept[1])
            x = self._add_mlp(x, m)
        return x, late

    def _of_mlp(self, x: Tensor, h: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return what the MLP or the experts make of h, the residual stream x after the norm."""
        assert self.mlp is not None
        return self.mlp(h, loras) if isinstance(self.mlp, Mlp) else self.mlp(x, h, loras)

    def connect(self, streams: Tensor, step: StepType) -> Tensor:
        """Return the streams [T, streams, hidden] of hyper-connections after the layer."""
        assert self.attn_norm is not None
        assert self.mlp_norm is not None
        assert self.mixer is not None
        to_attention, to_mlp = self.connections
        x, factors = to_attention.collapsed(streams)
        streams = added(streams, factors, self.mixer(self.attn_norm(x, step.loras), step))
        x, factors = to_mlp.collapsed(streams)
        return added(streams, factors, self._of_mlp(x, self.mlp_norm(x, step.loras), step.loras))

    def update(self, streams: Tensor, inputs: Tensor | None, step: StepType) -> Tensor:
        """Return the streams [streams, T, hidden] after the layer. inputs: of this layer alone, [T, size]."""
        of = self.streams
        assert of is not None
        assert self.attn_norm is not None
        assert self.mixer is not None
        predicted = of.predict(streams, step.loras)
        x = predicted[0]
        h = self.attn_norm(x)
        x = self._add_mixer(x, self.mixer(h, step))
        x, _ = self._after_mixer((x + of.laurel(h, step.loras)) * 0.5**0.5, h, None, step.loras)
        streams = of.correct(predicted, x, step.loras)
        first = streams[0] if of.scale is None else streams[0] * of.scale
        return torch.cat([streams[:1], streams[1:] + self._of_inputs(first, inputs, step.loras)])

    def _of_inputs(self, x: Tensor, inputs: Tensor | None, loras: ProductChanges | None) -> Tensor:
        assert self.per_layer is not None
        assert inputs is not None
        gate, out, norm = self.per_layer
        return norm(out(self.activation(gate(x, loras)) * inputs, loras))

    def finish(self, x: Tensor, inputs: Tensor | None, loras: ProductChanges | None) -> Tensor:
        """Return the input of the next layer. inputs: of this layer alone, [T, size]."""
        if self.per_layer is not None:
            x = x + self._of_inputs(x, inputs, loras)
        return x if self.scale is None else x * self.scale


class AsideLayer(Generic[StepType]):
    """A layer whose output the next layer reads beside the residual stream: see `AsideSpec`. products: those that
    adapters may change.
    """

    def __init__(
        self, spec: DecoderSpec, index: int, aside: AsideSpec, load: Loader, mixer: MakeMixer[StepType]
    ) -> None:
        prefix, block = f"layers.{index}.", block_of(aside)
        self.attn_norm, self.mlp_norm = (Norm(spec, block + name, load) for name in ("attn_norm", "mlp_norm"))
        self.mixer, self.gate = mixer(spec, index, load), Gate(spec)
        self.inputs = load.of_block(block, prefix, ["gate", "up"], split="outputs")
        self.down = load.of_block(block, prefix, ["down"], split="inputs")
        self.low = LowRank(load, prefix, ["mlp"], [["gate", "up"]]) if aside.mlp_rank else None
        self.output = load.linear(prefix, ["aside"])
        self.products: list[Changeable] = [*self.mixer.products, self.inputs, self.down, self.output]
        self.products += [] if self.low is None else self.low.products

    def __call__(self, x: Tensor, first: Tensor, step: StepType) -> Tensor:
        """Return [T, hidden]. first: the input of the first layer."""
        u, loras = self.mlp_norm(self.mixer(self.attn_norm(torch.cat([x, first], dim=1)), step)), step.loras
        gate_up = self.inputs(u, loras)
        gate_up = gate_up if self.low is None else gate_up + self.low(u, loras)
        return self.output(self.down(self.gate(gate_up), loras), loras)


class LowRank:
    """Products with two matrices each, NAME_low and those of ``outputs``, OUTPUT_high; their outputs side by side.
    products: those that adapters may change, which are all.
    """

    def __init__(
        self,
        load: Loader,
        prefix: str,
        names: Sequence[str],
        outputs: Sequence[Sequence[str]],
        among: Shard | None = None,
    ) -> None:
        self.low = load.linear(prefix, [f"{name}_low" for name in names])
        high = ([f"{name}_high" for name in of_one] for of_one in outputs)
        self.high = [load.linear(prefix, of_one, split="outputs", among=among) for of_one in high]
        self.products = [self.low, *self.high]

    def __call__(self, x: Tensor, loras: ProductChanges | None) -> Tensor:
        parts = self.low(x, loras).split([len(rows) for rows in self.low.outputs], dim=1)
        return torch.cat([high(part, loras) for high, part in zip(self.high, parts, strict=True)], dim=1)


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1 else x * scale


def cache_index(spec: DecoderSpec, index: int) -> int:
    """Return which of the layers that write keys and values has those that a layer reads."""
    reads = spec.layers[index].reads_layer
    before = spec.layers[: index if reads is None else reads]
    return sum(layer.has_attention and layer.reads_layer is None for layer in before)


def rounded(x: Tensor) -> Tensor:
    """Return x of each token in 8 bits: see `foreword.executors.functions.rounded`."""
    scale = 127 / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return ((x.float() * scale).round() / scale).to(x.dtype)


class LastInput:
    """The input of the last product of attention or an MLP: with a norm, and rounded, if the model has these."""

    def __init__(self, spec: DecoderSpec, norm: str, load: Loader) -> None:
        self.eps, self.weight = spec.norm_eps, load(norm) if spec.inner_norms else None
        self.is_rounded = spec.rounds_inputs

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.weight is None else rms_norm(x, self.weight.shape, self.weight, self.eps)
        return rounded(x) if self.is_rounded else x


class AttentionWeights:
    """The matrices and norms of one layer's attention.

    index: of the keys and values that it reads, among the layers that write some. norms: of queries and keys,
    [head_dim] each, or of all heads together; None if the model has none. qk_eps: of these norms. query_scales:
    [head_dim], factors of rotated queries, those of the keys included, or None. sinks, slopes: [heads], or None. ends:
    of queries, keys and values in the outputs of ``inputs``.
    """

    def __init__(self, spec: DecoderSpec, index: int, load: Loader) -> None:
        prefix = spec.prefix_of(index)
        self.spec, self.layer = spec, spec.layers[index]
        self.index, self.heads = cache_index(spec, index), spec.heads_of(self.layer)
        projected = projections(self.layer)
        self.low: LowRank | None = None
        if (aside := self.layer.aside) is not None:
            if aside.attention_rank:
                self.low = LowRank(load, prefix, projected, [[name] for name in projected], load.shards.heads)
            own, prefix = prefix, block_of(aside)
        names = (*projected, "attn_gate") if spec.attn_gate else projected
        biases = names if spec.qkv_bias else ()
        self.inputs: Linear | TakenHeads
        if aside is not None:
            self.inputs = load.of_block(prefix, own, names, split="outputs", among=load.shards.heads)
            self.output = load.of_block(prefix, own, ["o"], split="inputs", among=load.shards.heads)
        else:
            if self.layer.takes_qkv:
                self.inputs = TakenHeads(self.heads, load.shards.heads, load)
            else:
                self.inputs = load.linear(prefix, names, biases=biases, split="outputs", among=load.shards.heads)
            o_biases = "o" if spec.o_bias else ()
            self.output = load.linear(prefix, ["o"], biases=o_biases, split="inputs", among=load.shards.heads)
        own_inputs = [self.inputs] if isinstance(self.inputs, Linear) else []
        self.products: list[Changeable] = [*own_inputs, self.output]
        self.products += [] if self.low is None else self.low.products
        self.ends = tuple(accumulate(map(len, self.inputs.outputs[: len(projected) or None])))
        self.norms: tuple[Tensor, ...] | None = None
        self.norm_biases: tuple[Tensor, ...] | None = None
        self.qk_eps = spec.norm_eps
        if spec.qk_norm:
            of = spec.qk_layer_norm
            read: Callable[[str], Tensor] = load.among_heads if of is not None and of.of_heads else load
            self.norms = tuple(read(f"{prefix}{name}_norm") for name in projected[:2])
            if of is not None and of.has_bias:
                self.norm_biases = tuple(load(f"{prefix}{name}_norm_bias") for name in projected[:2])
        if self.layer.unit_qk_eps is not None:
            ones = torch.ones(self.heads.head_dim, dtype=load.dtype, device=load.device)
            self.norms, self.qk_eps = (ones, ones), self.layer.unit_qk_eps
        if spec.key_scales:
            assert self.norms is not None  # which such models have
            of_keys = load.among_heads(prefix + "key_scale")[:, None]
            self.norms = self.norms[0], self.norms[1] * of_keys
        self.query_scales = load(prefix + "q_norm") * load(prefix + "k_norm") if spec.qk_scales else None
        self.sinks = load.among_heads(prefix + "sinks") if self.layer.has_sinks else None
        self.slopes: Tensor | None = None
        if spec.slopes:
            part = load.shards.heads.part(len(spec.slopes))
            self.slopes = torch.tensor(spec.slopes[part.start : part.stop], device=load.device)
        self.last_input = LastInput(spec, prefix + "inner_attn_norm", load)

    def gated(self, a: Tensor, gate: Tensor) -> Tensor:
        """Return attention's outputs [T, heads, value_dim] times their gates, if there are any, as the input of the
        last product [T, heads · value_dim].
        """
        if self.spec.attn_gate:
            factors = softplus(gate) if self.spec.softplus_gates else gate.sigmoid()
            a = a * factors.unflatten(1, (a.shape[1], -1))
        return self.last_input(a.flatten(1))


class PagedLayer(AttentionWeights):
    """Attention of one layer over paged keys and values, for its normed input [T, hidden]."""

    def __init__(self, spec: DecoderSpec, index: int, load: Loader, *, compile: bool) -> None:
        super().__init__(spec, index, load)
        window, softcap = self.layer.sliding_window, spec.attn_softcap
        window, chunk = (None, window) if self.layer.chunked else (window, None)
        self._call = AttentionCall(
            self.index, spec.query_scale, window, chunk, softcap, sinks=self.sinks, slopes=self.slopes
        )
        self._writes = self.layer.reads_layer is None
        self._width = self.ends[min(1, len(self.ends) - 1)]  # queries and keys in the outputs of ``inputs``
        self._heads = [self.heads.num_heads, *([self.heads.num_kv_heads] if self._writes else [])]
        self._qk_norm, self._qk_norm_bias = self._of_heads(self.norms), self._of_heads(self.norm_biases)
        self._project = compiled(PagedLayer._projected) if compile else PagedLayer._projected

    def _of_heads(self, parts: tuple[Tensor, ...] | None) -> Tensor | None:
        """Return what norms of queries and keys have, for each of their heads: [heads of q and k, head_dim]."""
        if parts is None:
            return None
        each = zip(parts, self._heads, strict=True)
        return torch.cat([part.reshape(-1, self.heads.head_dim).expand(count, -1) for part, count in each])

    def __call__(self, h: Tensor, step: PagedStep) -> Tensor:
        rope = self.layer.rope
        q, k, v, gate = self._project(self, h, None if rope is None else step.rotations[rope], step.loras)
        if self.query_scales is not None:
            q = q * self.query_scales
        if self.layer.query_growth is not None:
            q = q * step.growths[self.layer.query_growth]
        if self._writes:
            step.attention.write(self.index, k, v)
        a = step.attention.attend(self._call, q)
        return self.output(self.gated(a, gate), step.loras)

    def _projected(
        self, h: Tensor, rotation: Rotation | None, loras: ProductChanges | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries and keys [T, heads, head_dim], values [T, heads, value_dim], and the gates [T, heads ·
        value_dim] or [T, heads], or 0 columns without any. Without keys of its own, a layer has no heads of keys and
        values.
        """
        spec, layer, dim, num_heads = self.spec, self.layer, self.heads.head_dim, self.heads.num_heads
        flat, gate = self.inputs(h, loras).tensor_split(self.ends[-1:], dim=1)
        flat = flat if self.low is None else flat + self.low(h, loras)
        qk, v = flat.tensor_split([self._width], dim=1)
        qk = qk.unflatten(1, (-1, dim))
        v = qk[:, num_heads:] if layer.values_are_keys else v.unflatten(1, (-1, self.heads.value_dim))
        if layer.unit_v:
            v = rms_norm(v, v.shape[2:], None, spec.norm_eps)
        if self._qk_norm is not None:
            if spec.qk_layer_norm is not None:
                qk = layer_norm(qk, (dim,), None, None, self.qk_eps)
            elif spec.joint_qk_norm:
                parts = qk.split(self._heads, dim=1)
                qk = torch.cat([rms_norm(part, part.shape[1:], None, self.qk_eps) for part in parts], dim=1)
            else:
                qk = rms_norm(qk, (dim,), None, self.qk_eps)
            qk = qk * self._qk_norm if self._qk_norm_bias is None else qk * self._qk_norm + self._qk_norm_bias
        if (limit := spec.clip_qkv) is not None:
            qk, v = qk.clamp(-limit, limit), v.clamp(-limit, limit)
        if rotation is not None:
            qk = rotation(qk)
        return qk[:, :num_heads], qk[:, num_heads:], v, gate


class ByHead:
    """The matrices of all heads, one below the other: `Changeable`. weight: [heads, rows, columns]."""

    num_experts = 0

    def __init__(self, name: str, heads: int, load: Loader) -> None:
        whole = load(name)
        self.parts, self.outputs, self.inputs = (name,), (range(len(whole)),), range(whole.shape[1])
        self.weight = whole.unflatten(0, (heads, -1))


class Indexer:
    """The indexer of one layer but for the matrix of its queries: see `IndexerSpec`. Its small matrices are floats."""

    def __init__(self, of: IndexerSpec, prefix: str, load: Loader) -> None:
        self.of, name = of, prefix + "index_k_norm"
        self.inputs = load.linear(prefix, ["index_k", "index_weights"], dtype=load.dtype)
        self._norm, self._norm_bias = load(name), load(name + "_bias")

    def heads(self, q: Tensor, h: Tensor, loras: ProductChanges | None) -> tuple[Tensor, Tensor]:
        """Return the queries and, behind them, the key, [T, heads + 1, head_dim], unrotated; and the weights of the
        queries' heads [T, heads]. q: the output of their matrix, [T, heads · head_dim].
        """
        key, weights = self.inputs(h, loras).split([self.of.head_dim, self.of.num_heads], dim=1)
        key = layer_norm(key, key.shape[1:], self._norm, self._norm_bias, self.of.norm_eps)
        return torch.cat([q.unflatten(1, (self.of.num_heads, -1)), key[:, None]], dim=1), weights


class LatentWeights:
    """The weights of latent attention of one layer, and what it computes around attention: see `MlaSpec`.

    indexer: of the layer, None without one.
    """

    def __init__(self, spec: DecoderSpec, mla: MlaSpec, index: int, load: Loader) -> None:
        prefix = spec.prefix_of(index)
        self.mla, self.rope, self._heads = mla, spec.layers[index].rope, spec.num_heads
        self.scale = spec.query_scale
        self.sinks = load(prefix + "sinks") if spec.layers[index].has_sinks else None
        self.index = cache_index(spec, index)
        biases = (*(["q_a"] if mla.q_rank else []), "kv_a") if spec.qkv_bias else ()
        own = spec.indexer_of(spec.layers[index])
        self.indexer = None if own is None else Indexer(own, prefix, load)
        gate, index_q = ["attn_gate"] if spec.attn_gate else [], [] if own is None else ["index_q"]
        beside_keys, beside_queries = ([], gate) if mla.joins_latents else (gate, index_q)
        self.inputs = load.linear(prefix, ["q_a" if mla.q_rank else "q", "kv_a", *beside_keys], biases=biases)
        self.q = load.linear(prefix, ["q", *beside_queries]) if mla.q_rank else None
        self.index_q = load.linear(prefix, index_q) if mla.joins_latents and index_q else None
        self.q_norm = load(prefix + "q_a_norm") if mla.q_rank else None
        self.kv_norm = load(prefix + "kv_a_norm") * mla.kv_scale
        self.k_b, self.v_b = (ByHead(prefix + name, spec.num_heads, load) for name in ("k_b", "v_b"))
        self._output = load.linear(prefix, ["o"], biases=["o"] if spec.o_bias else ())
        queries = [product for product in (self.q, self.index_q) if product is not None]
        indexers = [] if self.indexer is None else [self.indexer.inputs]
        self.products: list[Changeable] = [self.inputs, *queries, *indexers, self.k_b, self.v_b, self._output]

    def heads(self, h: Tensor, loras: ProductChanges | None) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return the queries and, behind them, the key, which is the value too, [T, heads + 1, head_dim], unrotated;
        the gates before the sigmoid, [T, heads] or [T, heads · value_dim], or without columns if there are none; and
        those of the indexer, if there is one: its queries and key as the former, and the weights of its queries' heads
        [T, heads].
        """
        mla, index = self.mla, None
        num_queries = len(self.inputs.outputs[0])
        ends = (num_queries, num_queries + mla.rope_dim + mla.kv_rank)
        q, k, gates = self.inputs(h, loras).tensor_split(ends, dim=1)
        if self.q is not None:
            assert self.q_norm is not None
            u = rms_norm(q, self.q_norm.shape, self.q_norm, mla.norm_eps)
            q = self.q(torch.cat([u, q], dim=1) if mla.joins_latents else u, loras)
            q, beside = q.tensor_split([len(self.q.outputs[0])], dim=1)
            gates = beside if mla.joins_latents else gates
            if self.indexer is not None:
                index_q = beside if self.index_q is None else self.index_q(u, loras)
                index = self.indexer.heads(index_q, h, loras)
        q = q.unflatten(1, (self._heads, -1))
        c = torch.cat(
            [k[:, : mla.rope_dim], rms_norm(k[:, mla.rope_dim :], self.kv_norm.shape, self.kv_norm, mla.norm_eps)], 1
        )
        nope = q[..., mla.rope_dim :]
        absorbed = torch.einsum("thn,hnc->thc", nope, self.k_b.weight)
        if loras is not None:
            absorbed = loras.apply_by_head(absorbed, nope, *self.k_b.parts, is_turned=True)
        return torch.cat([torch.cat([q[..., : mla.rope_dim], absorbed], -1), c[:, None]], 1), gates, index

    def output(self, a: Tensor, gates: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return [T, hidden] of what attention gives, [T, heads, head_dim]. gates: as `heads` returns them."""
        latents = a[..., self.mla.rope_dim :]
        out = torch.einsum("thc,hvc->thv", latents, self.v_b.weight)
        if loras is not None:
            out = loras.apply_by_head(out, latents, *self.v_b.parts, is_turned=False)
        if gates.shape[1]:
            out = out * gates.sigmoid().reshape(len(out), self._heads, -1)
        return self._output(out.flatten(1), loras)


class LatentLayer(LatentWeights):
    """Latent attention of one layer over paged keys, for its normed input [T, hidden]."""

    def __init__(self, spec: DecoderSpec, mla: MlaSpec, index: int, load: Loader) -> None:
        super().__init__(spec, mla, index, load)
        self._call = AttentionCall(self.index, self.scale, sinks=self.sinks, is_chosen=spec.indexer is not None)

    def __call__(self, h: Tensor, step: PagedStep) -> Tensor:
        heads, gates, index = self.heads(h, step.loras)
        rotation = None if self.rope is None else step.rotations[self.rope]
        heads = heads if rotation is None else rotation(heads)
        query, key = heads.split([self._heads, 1], dim=1)
        step.attention.write(self.index, key, key)
        if self.indexer is not None and index is not None:
            of_index, weights = index
            of_index = of_index if rotation is None else rotation.of_other_heads(of_index)
            step.attention.choose(self.index, of_index[:, -1], of_index[:, :-1], weights, self.indexer.of.topk)
        return self.output(step.attention.attend(self._call, query), gates, step.loras)


def paged_mixer(spec: DecoderSpec, index: int, load: Loader, *, compile: bool = False) -> Mixer[PagedStep]:
    """Make the mixer of a layer. compile: its projections run through torch.compile in steps without adapters."""
    recurrent = spec.layers[index].recurrent
    if recurrent is not None and recurrent.kind == "mixed_qkv":
        return MixedHeads(recurrent, spec, index, load)
    if recurrent is not None:
        return RecurrentLayer(recurrent, spec, index, load)
    if spec.mla is not None:
        return LatentLayer(spec, spec.mla, index, load)
    return PagedLayer(spec, index, load, compile=compile)


class Mlp:
    """Computes (act(h Wgate) * (h Wup)) Wdown, or without a gate act(h Wup) Wdown, with biases if ``mlp_bias``. inputs:
    its first product. cutoff: `LayerSpec.gate_cutoff`.
    """

    def __init__(self, prefix: str, spec: DecoderSpec, load: Loader, cutoff: float | None = None) -> None:
        numbers = xielu_numbers(lambda name: load.weights[name].dequantize(), prefix) if spec.xielu else None
        self.gate, self.last_input = Gate(spec, cutoff, numbers), LastInput(spec, prefix + "inner_mlp_norm", load)
        names, biases = ["gate", "up"] if spec.gated_mlp else ["up"], spec.mlp_bias
        self.inputs = load.linear(prefix, names, biases=names if biases else (), split="outputs")
        self.down = load.linear(prefix, ["down"], biases=["down"] if biases else (), split="inputs")
        self.products = [self.inputs, self.down]

    def __call__(self, h: Tensor, loras: ProductChanges | None) -> Tensor:
        return self.down(self.last_input(self.gate(self.inputs(h, loras))), loras)


class RouterMlp:
    """The MLP of a router, in float32: see `RouterSpec`. products: those that adapters may change."""

    def __init__(self, prefix: str, spec: DecoderSpec, of: RouterSpec, load: Loader, routed: Routed) -> None:
        names = [f"{prefix}router_{name}" for name in ("in", "first", "second")]
        self.products = [load.linear("", [name], dtype=torch.float32) for name in names]
        self._biases = [load(name + "_bias", torch.float32) for name in names]
        self._norm, self._eps = load(prefix + "router_norm", torch.float32), spec.norm_eps
        self._carry = load(prefix + "router_carry", torch.float32) if of.carries else None
        self._routed = routed

    def __call__(self, h: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return the input of the last matrix of the router [T, size], for the layer's input [T, hidden]."""
        (into, *others), (bias, *biases) = self.products, self._biases
        r = into(h, loras) + bias
        if self._carry is not None and self._routed.r is not None:
            r = r + self._routed.r * self._carry
        self._routed.r = r
        u = rms_norm(r, r.shape[1:], self._norm, self._eps)
        for matrix, own in zip(others, biases, strict=True):
            u = gelu(matrix(u, loras) + own)
        return u


class Experts:
    """Each token through its chosen experts, weighted by the router, and the shared expert if there is one.

    The router computes in float32. Of equal probabilities the expert with the lowest number comes first.
    """

    def __init__(self, prefix: str, spec: DecoderSpec, moe: MoeSpec, load: Loader, routed: Routed) -> None:
        self.moe, self.gate = moe, Gate(spec, limit=moe.gate_limit)
        self.router = load.linear(prefix, ["router"], dtype=torch.float32)
        self.products: list[Changeable] = [self.router]
        self.router_mlp = None if moe.router is None else RouterMlp(prefix, spec, moe.router, load, routed)
        self.products += [] if self.router_mlp is None else self.router_mlp.products
        self.scores_bias = load(prefix + "scores_bias", torch.float32) if moe.scores_bias else None
        self.router_bias = load(prefix + "router_bias", torch.float32) if moe.router_bias else None
        self.norms: tuple[Norm, ...] | None = None  # for the experts' input and output, and the shared one's output
        if moe.own_norms:
            names = ("experts_norm", "post_experts_norm", "post_shared_norm")
            self.norms, self.eps = tuple(Norm(spec, prefix + name, load) for name in names), spec.norm_eps
            self.router_scale = load(prefix + "router_scale", torch.float32) * spec.hidden_size**-0.5
            self.expert_scales = load(prefix + "expert_scales", torch.float32)
        self.latent: tuple[Linear, Linear] | None = None
        if moe.latent_size:
            into, out = (load.plain(f"{prefix}latent_{name}") for name in ("in", "out"))
            self.latent = into, out
            self.products += [into, out]
        experts, parts = prefix + "experts.{e}.", ["gate", "up"] if spec.gated_mlp else ["up"]
        self.gate_up = load.experts(experts, moe.num_experts, parts, split="outputs")
        self.down = load.experts(experts, moe.num_experts, ["down"], split="inputs")
        self.products += [self.gate_up, self.down]
        self.biases: tuple[Tensor, Tensor] | None = None  # [experts, outputs] of both
        if spec.mlp_bias:
            self.biases = (
                load.expert_biases(self.gate_up, split="outputs"),
                load.expert_biases(self.down, split="inputs"),
            )
        self.shard = load.shards.all
        self.numbers = torch.arange(moe.num_experts, device=load.device)
        self.shared: Mlp | None = None
        if moe.shared_intermediate_size:
            self.shared = Mlp(prefix + "shared.", spec, load)
            self.shared_gate = load.plain(prefix + "shared_gate") if moe.shared_gate else None
            self.products += [*self.shared.products, *([self.shared_gate] if self.shared_gate else [])]

    def __call__(self, x: Tensor, h: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return the output of the layer for h, the residual stream x after the norm."""
        count = self.moe.experts_per_token
        routed, inputs = h.float(), h
        if self.norms is not None:
            routed, inputs = rms_norm(x.float(), x.shape[1:], self.router_scale, self.eps), self.norms[0](x)
        if self.router_mlp is not None:
            routed = self.router_mlp(routed, loras)
        scores = self.router(routed, loras)
        scores = cap(scores if self.scores_bias is None else scores + self.scores_bias, self.moe.softcap)
        if self.moe.sparse_mix is not None:
            chosen, weights = _sparsely_mixed(scores, count, self.moe.sparse_mix)
        else:
            probs = scores.softmax(-1) if self.moe.scoring == "softmax" else scores.sigmoid()
            ranked = scores if self.moe.ranks_outputs else probs
            order = ranked if self.router_bias is None else ranked + self.router_bias
            if self.moe.num_groups > 1:
                least = 0.0 if self.moe.zeroes_groups else float("-inf")
                order = order.masked_fill(~self._chosen_groups(order), least)
            chosen = order.sort(dim=-1, descending=True, stable=True).indices[:, :count]
            weights = probs.gather(1, chosen)
        if self.moe.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + self.moe.sum_eps)
        weights = weights * self.moe.scale
        if self.norms is not None:
            weights = weights * self.expert_scales[chosen]
        kept: Tensor | None = None  # [T, 1]: the sum of the weights of experts whose output is their input
        if self.moe.identities:
            is_kept = (chosen >= self.moe.num_experts) & (chosen < self.moe.num_experts + self.moe.identities)
            kept, weights = (weights * is_kept).sum(-1, keepdim=True), weights.masked_fill(is_kept, 0)
        if self.moe.empties:
            weights = weights.masked_fill(chosen >= self.moe.num_experts, 0)
        if self.moe.identities or self.moe.empties:
            chosen = chosen.clamp(max=self.moe.num_experts - 1)
        experts, order = chosen.flatten().sort(stable=True)  # the pairs of a token and one of its experts
        ends = torch.searchsorted(experts, self.numbers, right=True).int()
        tokens = order // count
        inputs = (inputs if self.latent is None else self.latent[0](h, loras))[tokens]
        if self.moe.scales_inputs:
            inputs = inputs * weights.flatten()[order, None].to(h.dtype)
            weights = torch.ones_like(weights)
        inner = self.gate_up(inputs, ends, experts, tokens, loras)
        inner = self.gate(inner if self.biases is None else inner + self.biases[0][experts])
        down = self.down(inner, ends, experts, tokens, loras)
        outputs = torch.empty_like(down)
        outputs[order] = down if self.biases is None else down + self.biases[1][experts]
        out = self.shard.sum((outputs.view(-1, count, outputs.shape[1]) * weights[..., None].to(h.dtype)).sum(1))
        if kept is not None:
            out = out + h * kept.to(h.dtype)
        if self.latent is not None:
            out = self.latent[1](out, loras)
        if self.norms is not None:
            out = self.norms[1](out)
        if self.shared is not None:
            shared = self.shared(h, loras)
            if self.norms is not None:
                shared = self.norms[2](shared)
            out += shared if self.shared_gate is None else shared * self.shared_gate(h, loras).sigmoid()
        return out

    def _chosen_groups(self, order: Tensor) -> Tensor:
        """Return [T, experts], whether each expert is in a group from which the token may choose experts."""
        groups = order.unflatten(1, (self.moe.num_groups, -1))
        if self.moe.router_bias:
            scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
        else:
            scores = groups.amax(-1)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.moe.groups_per_token]
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, value=True)
        return taken.repeat_interleave(groups.shape[-1], dim=1)


def _sparsely_mixed(scores: Tensor, count: int, mix: float) -> tuple[Tensor, Tensor]:
    """Return the experts of each token and their weights, both [T, count], by `MoeSpec.sparse_mix`."""
    left, chosen, weights = scores, [], []
    for _ in range(count):
        top, best = left.sort(dim=-1, descending=True, stable=True)
        top, best = top[:, :1], best[:, :1]
        is_far = (top - scores) / torch.maximum(scores.abs(), top) > mix
        weights.append(1 / torch.exp(left - top).masked_fill(is_far, 0).sum(-1, keepdim=True))
        chosen.append(best)
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(chosen, 1), torch.cat(weights, 1)


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return ``function`` through torch.compile, for tensors of any sizes, unless its last argument, the adapters, is
    one.
    """
    fast = torch.compile(function, dynamic=True)
    return lambda *arguments: (fast if arguments[-1] is None else function)(*arguments)


def cap(x: Tensor, limit: float | None) -> Tensor:
    """Return limit * tanh(x / limit), and x itself for None."""
    return x if limit is None else limit * torch.tanh(x / limit)


class Gate:
    """Computes from the first product of an MLP [N, gate and up] act(gate) * up, or what the spec has in its place;
    without a gate act(up). xielu: the numbers of `xielu_numbers`. limit: `MoeSpec.gate_limit`.
    """

    def __init__(
        self, spec: DecoderSpec, cutoff: float | None = None, xielu: F32 | None = None, limit: float | None = None
    ) -> None:
        self.cutoff, self.xielu, self.limit = cutoff, None if xielu is None else xielu.tolist(), limit
        self.activation, self.is_gated, self.clamp = ACTIVATIONS[spec.activation], spec.gated_mlp, spec.clamped_gate
        self.scale = spec.gate_scale

    def __call__(self, gate_up: Tensor) -> Tensor:
        if self.xielu is not None:
            above, below, beta, eps = self.xielu
            curve = torch.expm1(gate_up.clamp(max=eps)) - gate_up
            return torch.where(gate_up > 0, above * gate_up * gate_up, below * curve) + beta * gate_up
        if not self.is_gated:
            return self.activation(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is not None:
            return silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)
        if self.cutoff is not None:
            least = gate.mean(-1, keepdim=True) + self.cutoff * gate.std(-1, correction=0, keepdim=True)
            gate = torch.relu(gate - least)
        if self.clamp is None:
            return self.activation(_scaled(gate, self.scale)) * up
        gate = gate.clamp(max=self.clamp.limit)
        return gate * torch.sigmoid(self.clamp.alpha * gate) * (up.clamp(-self.clamp.limit, self.clamp.limit) + 1)
