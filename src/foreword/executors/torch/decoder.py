"""A decoder's forward pass on tensors: `foreword.models.spec` with the matrices of one input in one product.

A step reads and writes tensors only: what it needs of the batch is in `Step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm

from foreword.executors.torch.activations import ACTIVATIONS
from foreword.executors.torch.attention import AttentionCall
from foreword.executors.torch.grouped import grouped
from foreword.executors.torch.loras import ProductChanges
from foreword.executors.torch.recurrent import RecurrentLayer
from foreword.executors.torch.rotation import Rotation
from foreword.executors.torch.step import PagedStep, Step
from foreword.executors.torch.weights import Linear, Loader
from foreword.models.spec import Activation, DecoderSpec, MoeSpec

Result = TypeVar("Result")
StepType = TypeVar("StepType", bound=Step)
StepType_contra = TypeVar("StepType_contra", bound=Step, contravariant=True)


class Mixer(Protocol[StepType_contra]):
    """What mixes the tokens of a layer: attention, or a recurrence. products: those that adapters may change."""

    @property
    def products(self) -> Sequence[Linear]: ...

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
        self.layers = [Layer(spec, i, load, mixer, compile=compile) for i in range(spec.num_layers)]
        self.products = {p.parts: (p.outputs, p.inputs) for layer in self.layers for p in layer.products}
        self.final_norm = load("final_norm")
        self.head: Tensor | None = None
        if spec.has_logits:
            rows = load.shards.all.part(spec.vocab_size)
            tied = self.embed[rows.start : rows.stop]
            self.head = tied if spec.tie_embeddings else load("lm_head", split="outputs")

    def forward(self, step: StepType) -> Tensor:
        """Return the residual stream [T, hidden] after the last layer. The layers write keys, values and states."""
        x = embedding(step.input_ids, self.embed)
        if self.spec.embedding_scale != 1:
            x = x * self.spec.embedding_scale
        if step.embeds is not None:
            tokens, vectors = step.embeds
            x[tokens] = vectors.to(x.dtype)
        for layer in self.layers:
            x = layer(x, step)
        return x

    def hidden_states(self, x: Tensor) -> Tensor:
        """norm(x, final_norm)"""
        return norm(x, self.final_norm, self.spec.norm_eps)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [L, V] of the residual stream [L, hidden] at some tokens: the rank's part of the vocabulary."""
        assert self.head is not None
        return cap(linear(self.hidden_states(x), self.head), self.spec.final_softcap)


class Layer(Generic[StepType]):
    """One layer of a decoder. products: those that adapters may change."""

    def __init__(
        self, spec: DecoderSpec, index: int, load: Loader, mixer: MakeMixer[StepType], *, compile: bool
    ) -> None:
        layer, prefix = spec.layers[index], f"layers.{index}."
        self.eps = spec.norm_eps
        self.attn_norm, self.mlp_norm = load(prefix + "attn_norm"), load(prefix + "mlp_norm")
        self.post_attn_norm = load(prefix + "post_attn_norm") if spec.post_norms else None
        self.post_mlp_norm = load(prefix + "post_mlp_norm") if spec.post_norms else None
        self.mixer = mixer(spec, index, load)
        self.products = [*self.mixer.products]
        self.mlp: Mlp | Experts
        if layer.moe is None:
            self.mlp = Mlp(prefix, spec.activation, load)
            self.products += [self.mlp.gate_up, self.mlp.down]
        else:
            self.mlp = Experts(prefix, spec.activation, layer.moe, load)
        self._rest = compiled(Layer._after_mixer) if compile and layer.moe is None else Layer._after_mixer

    def __call__(self, x: Tensor, step: StepType) -> Tensor:
        a = self.mixer(norm(x, self.attn_norm, self.eps), step)
        return self._rest(self, x, a, step.loras)

    def _after_mixer(self, x: Tensor, a: Tensor, loras: ProductChanges | None) -> Tensor:
        """Return the layer's output. a: [T, hidden], the output of its mixer."""
        x = x + (a if self.post_attn_norm is None else norm(a, self.post_attn_norm, self.eps))
        m = self.mlp(norm(x, self.mlp_norm, self.eps), loras)
        return x + (m if self.post_mlp_norm is None else norm(m, self.post_mlp_norm, self.eps))


class AttentionWeights:
    """The matrices and norms of one layer's attention.

    index: of its keys and values among the layers with attention. norms: of queries and keys [head_dim], None if the
    model has none.
    """

    def __init__(self, spec: DecoderSpec, index: int, load: Loader) -> None:
        prefix = f"layers.{index}."
        self.spec, self.layer = spec, spec.layers[index]
        self.index = sum(layer.recurrent is None for layer in spec.layers[:index])
        names = ("q", "k", "v", "attn_gate") if spec.attn_gate else ("q", "k", "v")
        biases = "qkv" if spec.qkv_bias else ()
        self.inputs = load.linear(prefix, names, biases=biases, split="outputs", among=load.shards.heads)
        self.output = load.linear(prefix, ["o"], split="inputs", among=load.shards.heads)
        self.products = [self.inputs, self.output]
        self.norms = (load(prefix + "q_norm"), load(prefix + "k_norm")) if spec.qk_norm else None


class PagedLayer(AttentionWeights):
    """Attention of one layer over paged keys and values, for its normed input [T, hidden]."""

    def __init__(self, spec: DecoderSpec, index: int, load: Loader, *, compile: bool) -> None:
        super().__init__(spec, index, load)
        self._call = AttentionCall(self.index, spec.query_scale, self.layer.sliding_window, softcap=spec.attn_softcap)
        q, k, v = map(len, self.inputs.outputs[:3])
        self._ends = q + k, q + k + v  # of q with k, and of v, in the outputs of ``inputs``
        self._heads = spec.num_heads, spec.num_kv_heads
        self._qk_norm: Tensor | None = None  # [heads of q and k, head_dim]
        if self.norms is not None:
            norms = zip(self.norms, self._heads, strict=True)
            self._qk_norm = torch.cat([weight.expand(count, -1) for weight, count in norms])
        self._project = compiled(PagedLayer._projected) if compile else PagedLayer._projected

    def __call__(self, h: Tensor, step: PagedStep) -> Tensor:
        rope = self.layer.rope
        q, k, v, gate = self._project(self, h, None if rope is None else step.rotations[rope], step.loras)
        step.attention.write(self.index, k, v)
        a = step.attention.attend(self._call, q).flatten(1)
        return self.output(a * gate.sigmoid() if self.spec.attn_gate else a, step.loras)

    def _projected(
        self, h: Tensor, rotation: Rotation | None, loras: ProductChanges | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values [T, heads, head_dim], and the gate [T, heads · head_dim], or 0 columns without one."""
        spec = self.spec
        qk, v, gate = self.inputs(h, loras).tensor_split(self._ends, dim=1)
        qk = qk.unflatten(1, (-1, spec.head_dim))
        if self._qk_norm is not None:
            qk = rms_norm(qk, (spec.head_dim,), None, spec.norm_eps) * self._qk_norm
        if rotation is not None:
            qk = rotation(qk)
        q, k = qk.split(self._heads, dim=1)
        return q, k, v.unflatten(1, (-1, spec.head_dim)), gate


def paged_mixer(spec: DecoderSpec, index: int, load: Loader, *, compile: bool = False) -> Mixer[PagedStep]:
    """Make the mixer of a layer. compile: its projections run through torch.compile in steps without adapters."""
    recurrent = spec.layers[index].recurrent
    if recurrent is not None:
        return RecurrentLayer(recurrent, spec, index, load)
    return PagedLayer(spec, index, load, compile=compile)


class Mlp:
    """(act(h Wgate) * (h Wup)) Wdown"""

    def __init__(self, prefix: str, activation: Activation, load: Loader) -> None:
        self.activation = activation
        self.gate_up = load.linear(prefix, ["gate", "up"], split="outputs")
        self.down = load.linear(prefix, ["down"], split="inputs")

    def __call__(self, h: Tensor, loras: ProductChanges | None) -> Tensor:
        return self.down(gated(self.gate_up(h, loras), self.activation), loras)


class Experts:
    """Each token through its chosen experts, weighted by the router, and the shared expert if there is one.

    The router computes in float32. Of equal probabilities the expert with the lowest number comes first.
    """

    def __init__(self, prefix: str, activation: Activation, moe: MoeSpec, load: Loader) -> None:
        self.moe, self.activation = moe, activation
        self.router = load(prefix + "router", torch.float32)
        experts = [f"{prefix}experts.{e}." for e in range(moe.num_experts)]
        self.gate_up = load.stacked(experts, ["gate", "up"], split="outputs")
        self.down = load.stacked(experts, ["down"], split="inputs")
        self.shard = load.shards.all
        self.numbers = torch.arange(moe.num_experts, device=load.device)
        self.shared: Mlp | None = None
        if moe.shared_intermediate_size:
            self.shared = Mlp(prefix + "shared.", activation, load)
            self.shared_gate = load(prefix + "shared_gate")

    def __call__(self, h: Tensor, loras: ProductChanges | None) -> Tensor:
        count = self.moe.experts_per_token
        weights, chosen = linear(h.float(), self.router).softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights, chosen = weights[:, :count], chosen[:, :count]
        if self.moe.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)  # of pairs of a token and one of its experts
        ends = torch.searchsorted(experts, self.numbers, right=True).int()
        inner = gated(grouped(h[order // count], self.gate_up, ends), self.activation)
        outputs = torch.empty(len(order), h.shape[1], dtype=h.dtype, device=h.device)
        outputs[order] = grouped(inner, self.down, ends)
        out = self.shard.sum((outputs.view(-1, count, h.shape[1]) * weights[..., None].to(h.dtype)).sum(1))
        if self.shared is not None:
            out += self.shared(h, loras) * linear(h, self.shared_gate).sigmoid()
        return out


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """``function`` through torch.compile, for tensors of any sizes, unless its last argument, the adapters, is one."""
    fast = torch.compile(function, dynamic=True)
    return lambda *arguments: (fast if arguments[-1] is None else function)(*arguments)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last axis."""
    return rms_norm(x, weight.shape, weight, eps)


def cap(x: Tensor, limit: float | None) -> Tensor:
    """limit * tanh(x / limit); x itself for None."""
    return x if limit is None else limit * torch.tanh(x / limit)


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up of [N, gate and up]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up
