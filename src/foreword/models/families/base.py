"""Shared by all families: names of weights in files, and the parts of a spec that are read from common keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from foreword.arrays import F32
from foreword.errors import ModelError
from foreword.models.config import O_BIAS, USE_ITS_CONFIG, Config
from foreword.models.keys import WITHOUT_EFFECT, Key, Keys, of_gguf, only, only_in_gguf
from foreword.models.pooling import HeadLayer, HeadPooling, Pooling
from foreword.models.rope import ROPE_KEYS, ROTARY_DIM, model_length, rope_parameters, rope_spec
from foreword.models.spec import Activation, DecoderSpec, LayerSpec, MoeSpec, RopeSpec

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Functions of an MLP by their names in a config.json."""

SwappingVersions = Literal["before 0.19", "from 0.19", "never"]
"""The versions of PEFT that take the inputs of a parameter of all experts for outputs."""
IndexerRows = Literal["first", "as others", "last"]
"""The order of an indexer's rows in files: the rotated ones of a head are first, in halves; first, in the order of
those of queries and keys; or last, in halves.
"""
MAX_WINDOW = 2**31 - 1
_OF_HEADS = "*.nextn_predict_layers"
_SAME_AS_HEAD_DIM = ("v_head_dim", "head_dim_swa", "v_head_dim_swa")
SIZES = (
    Key("vocab_size", gguf="vocab_size"),
    Key("hidden_size", gguf="embedding_length"),
    Key("intermediate_size", gguf="feed_forward_length"),
    Key("num_hidden_layers", gguf="block_count"),
    Key("num_attention_heads", gguf="attention.head_count"),
    Key("max_position_embeddings", gguf="context_length"),
)
"""The keys of sizes that decoders and encoders have."""
DECODER = (
    *SIZES,
    Key("num_key_value_heads", gguf="attention.head_count_kv"),
    Key("head_dim", gguf="attention.key_length"),
    Key("v_head_dim", gguf="attention.value_length"),
    Key("head_dim_swa", gguf="attention.key_length_swa"),
    Key("v_head_dim_swa", gguf="attention.value_length_swa"),
    Key("rms_norm_eps", 1e-6, gguf="attention.layer_norm_rms_epsilon"),
    Key("tie_word_embeddings", False),
    *ROPE_KEYS,
    Key(O_BIAS, kind=bool),
    only("is_causal", True, gguf="attention.causal"),
    only("is_encoder_decoder", False),
    Key("pooling_type", gguf="pooling_type", kind=int),  # which the loader reads
    *(
        only_in_gguf(name, 0)
        for name in (
            *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attention.temperature_length"),
            "attention.temperature_scale",
            *("expert_count", "expert_used_count", "leading_dense_block_count", _OF_HEADS.removeprefix("*.")),
            *("router_logit_softcapping", "use_parallel_residual"),
        )
    ),
    *(
        only_in_gguf(name, 1, 0)
        for name in (
            *("attention.output_scale", "attention.value_scale", "embedding_scale", "logit_scale", "residual_scale"),
            *("expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_shared_count"),
            *("expert_weights_scale", "interleave_moe_layer_step"),
        )
    ),
    *(
        only_in_gguf(name, None)
        for name in (
            *("attn_logit_softcapping", "final_logit_softcapping"),
            *("attention.recurrent_layers", "rope.dimension_count_swa", "rope.dimension_sections"),
        )
    ),
)
"""Keys of every decoder."""

LAYER_NORMED = (
    *(key for key in DECODER if key.name != "rms_norm_eps"),
    only_in_gguf("attention.layer_norm_rms_epsilon", None),
)
"""The keys of decoders whose norms are LayerNorm."""
LAYER_NORM_EPS = Key("layer_norm_eps", 1e-5, gguf="attention.layer_norm_epsilon")
NO_ROTATION = tuple(only_in_gguf(name, None) for name in ("rope.freq_base", ROTARY_DIM.removeprefix("*.")))
"""The rotary keys of GGUF files, for decoders that have no rotary embedding."""
LEARNED_POSITIONS = (*(key for key in LAYER_NORMED if key not in ROPE_KEYS), *NO_ROTATION)
"""The keys of decoders whose norms are LayerNorm, and that have a vector for each position."""
CAUSAL_OR_NOT = Key("is_causal", True, (True, False), gguf="attention.causal", gguf_default=True)
"""The key of families whose decoders may let tokens see later ones, as models of embeddings do."""
HIDDEN_ACT = Key("hidden_act", "silu", tuple(ACTIVATIONS))
ATTENTION_BIAS = (Key("attention_bias", False),)
"""The keys of families whose products of attention may have biases."""
WITH_BIASES = (*ATTENTION_BIAS, Key("mlp_bias", False))
"""The keys of families whose products of attention, and of the MLP, may have biases."""
NO_EXPERT_BIASES = {f"experts.{name}_bias": 0.0 for name in ("gate", "up", "down")}
"""The `Family.constants` of families whose MLPs may have biases, while their experts have none."""
NEXT_TOKEN_HEADS = (of_gguf(_OF_HEADS, kind=int),)
"""The key of families whose heads for further tokens are run."""
NUM_FEATURES = of_gguf("*.n_deepstack_layers", kind=int)
"""The number of first layers to which the encoder of images of a GGUF file gives features; the loader reads it."""
CLIP_QKV = Key("clip_qkv", gguf="attention.clamp_kqv", kind=float)
"""The key of families whose queries, keys and values may be limited, see `limit_of`."""
WINDOWS = (Key("sliding_window", gguf="attention.sliding_window"), Key("layer_types"))
EXPERTS = (
    Key("num_experts", gguf="expert_count", kind=int),
    Key("num_local_experts", kind=int),
    Key("num_experts_per_tok", 2, gguf="expert_used_count"),
    Key("moe_intermediate_size", gguf="expert_feed_forward_length", kind=int),
    Key("norm_topk_prob", True, gguf="expert_weights_norm", gguf_default=True),
)
NORMED_EXPERTS = (*EXPERTS, Key("norm_topk_prob", True, (True,), gguf="expert_weights_norm", gguf_default=True))
"""The keys of families that always divide the probabilities of the chosen experts by their sum."""
LOCAL_EXPERTS = {"num_local_experts": "num_experts"}
"""The aliases of families whose reference also takes the number of experts by this name."""
SPARSE_LAYERS = (Key("decoder_sparse_step", 1), Key("mlp_only_layers"))
SHARED_EXPERT = Key("shared_expert_intermediate_size", gguf="expert_shared_feed_forward_length")

# Canonical name without layer and expert → name in a file; {i} is the layer, {e} the expert.
SAFETENSORS_LAYER = _LAYER = "model.layers.{i}."
_ENDS = {"": "weight", "_bias": "bias"}
SAFETENSORS_NAMES: Mapping[str, str] = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "final_norm_bias": "model.norm.bias",
    "lm_head": "lm_head.weight",
    "head.0": "score.weight",
    "attn_norm": _LAYER + "input_layernorm.weight",
    "attn_norm_bias": _LAYER + "input_layernorm.bias",
    "mlp_norm": _LAYER + "post_attention_layernorm.weight",
    "mlp_norm_bias": _LAYER + "post_attention_layernorm.bias",
    **{name: f"{_LAYER}self_attn.{name}_proj.weight" for name in "qkvo"},
    **{f"{name}_bias": f"{_LAYER}self_attn.{name}_proj.bias" for name in "qkvo"},
    **{f"{name}_norm": f"{_LAYER}self_attn.{name}_norm.weight" for name in "qk"},
    "qkv": _LAYER + "self_attn.qkv_proj.weight",
    "qkv_bias": _LAYER + "self_attn.qkv_proj.bias",
    "gate_up": _LAYER + "mlp.gate_up_proj.weight",
    "gate_up_bias": _LAYER + "mlp.gate_up_proj.bias",
    "router": _LAYER + "mlp.gate.weight",
    "shared_gate": _LAYER + "mlp.shared_expert_gate.weight",
    **{name: f"{_LAYER}mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"{_LAYER}mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
    **{f"experts.{name}": f"{_LAYER}mlp.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"shared.{name}": f"{_LAYER}mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")},
}
SPARSE_MOE = _LAYER + "block_sparse_moe."
SPARSE_MOE_NAMES: Mapping[str, str] = {
    "router": SPARSE_MOE + "gate.weight",
    **{
        f"experts.{name}": f"{SPARSE_MOE}experts.{{e}}.{part}.weight"
        for name, part in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}
"""The names of the router and of the experts of Mixtral, which other families have, too."""
SPARSE_MOE_RENAMED = {".mlp.gate.": ".block_sparse_moe.gate."}
"""Their `Family.renamed`."""
GGUF_LAYER = _BLOCK = "blk.{i}."
GGUF_NAMES: Mapping[str, str] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "final_norm_bias": "output_norm.bias",
    "lm_head": "output.weight",
    "attn_norm": _BLOCK + "attn_norm.weight",
    "attn_norm_bias": _BLOCK + "attn_norm.bias",
    "post_attn_norm": _BLOCK + "post_attention_norm.weight",
    "mlp_norm": _BLOCK + "ffn_norm.weight",
    "mlp_norm_bias": _BLOCK + "ffn_norm.bias",
    "post_mlp_norm": _BLOCK + "post_ffw_norm.weight",
    **{name: f"{_BLOCK}attn_{name}.weight" for name in "qkv"},
    "o": _BLOCK + "attn_output.weight",
    "o_bias": _BLOCK + "attn_output.bias",
    **{f"{name}_bias": f"{_BLOCK}attn_{name}.bias" for name in "qkv"},
    **{f"{name}_norm": f"{_BLOCK}attn_{name}_norm.weight" for name in "qk"},
    "qkv": _BLOCK + "attn_qkv.weight",
    "qkv_bias": _BLOCK + "attn_qkv.bias",
    "gate_up": _BLOCK + "ffn_up.weight",
    "router": _BLOCK + "ffn_gate_inp.weight",
    "scores_bias": _BLOCK + "ffn_gate_inp.bias",
    "router_bias": _BLOCK + "exp_probs_b.bias",
    **{name: f"{_BLOCK}attn_{part}.weight" for name, part in (("q_a", "q_a"), ("kv_a", "kv_a_mqa"))},
    **{name: f"{_BLOCK}attn_{name}.weight" for name in ("q_a_norm", "kv_a_norm", "k_b", "v_b")},
    "sinks": _BLOCK + "attn_sinks.weight",
    "shared_gate": _BLOCK + "ffn_gate_inp_shexp.weight",
    **{name: f"{_BLOCK}ffn_{name}.weight" for name in ("gate", "up", "down")},
    **{f"{name}_bias": f"{_BLOCK}ffn_{name}.bias" for name in ("gate", "up", "down")},
    **{f"experts.{name}": f"{_BLOCK}ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
    **{f"experts.{name}_bias": f"{_BLOCK}ffn_{name}_exps.bias" for name in ("gate", "up", "down")},
    **{f"shared.{name}": f"{_BLOCK}ffn_{name}_shexp.weight" for name in ("gate", "up", "down")},
}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) of a tensor that stacks several weights along its rows: ``qkv`` or ``gate_up``.

    period: these of every ``period`` rows, where the weights alternate head by head. None: the tensor ends where the
    last of its weights does.
    """

    name: str
    start: int
    stop: int
    period: int | None = None


def _score_head(config: Config, labels: int) -> tuple[HeadLayer, ...]:
    return (HeadLayer(config.size("hidden_size"), labels, bias=False),)


@dataclass(frozen=True, slots=True)
class Family:
    """The description of one family of models: how its files are read.

    title: its name on pages. spec: its `DecoderSpec` from a config. keys: those of the config, all of them. aliases:
    the key of each other name that a config.json may have for it, beside `Key.own`.
    names: where its safetensors differ from `SAFETENSORS_NAMES`. renamed: parts of names in other checkpoints of it,
    with what they are in ``names``. joined: by the end of the name of a tensor, the ends of those that are its rows in
    other checkpoints; one end with {row} stands for those of vectors that are a row each. unused: beginnings of the
    names of tensors that are left out: of heads that are not run, and of what its reference leaves out.
    pooling: of a directory that names none. projection: a matrix that makes vectors of the states of tokens, or of
    pooled ones: its module, and the key of the config with the size of a vector. head: of a classifier, from the config
    and its number of labels; head_pooling: which states it takes.
    constants: weights that no file has, by their one number, or by a function of their shape; names of experts begin
    with ``experts.``. computed: the same, by canonical names, from a spec. optional: as constants, of weights that some
    files have. norms_less_one: safetensors hold norm weights as w − 1. interleaved: they hold q and k rows in
    interleaved rotary order; interleaved_key: the key of a config.json that says whether they do. indexer_rows: the
    order of those of an indexer, in safetensors and GGUF files.
    gguf: the architecture's name in GGUF files, if it has one; more_gguf: other names; shared_gguf: that of another
    family, which its GGUF files have if it has none. gguf_names: where its GGUF files differ from `GGUF_NAMES`.
    gguf_numbers: keys of their metadata with a number for each layer {i}, which is the tensor blk.{i}.KEY in
    ``gguf_names``. gguf_joined: as joined, of their tensors. gguf_interleaved: they hold q and k rows in interleaved
    rotary order. gguf_tiled: they hold value heads of states in the order of `RecurrentSpec.tiled`.
    transposed: ends of the names of safetensors of floats that are [in, out], or a stack of such matrices.
    transposed_experts: safetensors with all experts of a layer in one tensor of floats hold each as [in, out]; None:
    some do, which their shapes say. peft_swaps_experts: the versions of PEFT that take the inputs of such a tensor for
    its outputs. experts_in_rows: the ends of the names of tensors that have the matrices of all experts one below the
    other; those of an expert e are read by names with experts.{e} in place of experts.mlp and with .weight at the end.
    fused: weights that are rows of another tensor, and names that depend on the spec, of all weights or, by their whole
    names, of those of one layer. gguf_fused: these of GGUF files; None: the same. numbers: the layer of its files of
    each layer of a spec, see `in_parts`; {part} in names is the number of a layer among those of one layer of the
    files. tied: beginnings of names of safetensors that stand for the tensors of others. changed: as fused, of what
    adapters change, where it is not what has a tensor; idle: linear layers that adapters change although no token
    reaches them → those of the same shape.
    is_scaled_in_gguf: weights of GGUF files are multiplied by the numbers of the spec already.
    scaled_by_mlx: the config of a checkpoint by MLX, whose weights are multiplied by numbers of the config. is_scaled:
    they are multiplied so, and those of adapters are not.
    """

    title: str
    spec: Callable[[Config], DecoderSpec]
    keys: Keys
    aliases: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    constants: Mapping[str, float | Callable[[tuple[int, ...]], F32]] = field(default_factory=dict)
    computed: Callable[[DecoderSpec], Mapping[str, F32]] = lambda spec: {}
    optional: Mapping[str, float] = field(default_factory=dict)
    unused: tuple[str, ...] = ("score.",)
    pooling: Pooling = "last"
    projection: tuple[str, str] | None = None
    head: Callable[[Config, int], tuple[HeadLayer, ...]] = _score_head
    head_pooling: Callable[[Config], HeadPooling] = lambda config: "last"
    norms_less_one: bool = False
    interleaved: bool = False
    interleaved_key: str = ""
    indexer_rows: IndexerRows = "first"
    gguf: str | None = None
    more_gguf: tuple[str, ...] = ()
    shared_gguf: str | None = None
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_numbers: tuple[str, ...] = ()
    gguf_joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_interleaved: bool = False
    gguf_tiled: bool = False
    transposed: tuple[str, ...] = ()
    transposed_experts: bool | None = False
    peft_swaps_experts: SwappingVersions = "before 0.19"
    experts_in_rows: tuple[str, ...] = ()
    fused: Callable[[DecoderSpec], Mapping[str, str | Rows]] = lambda spec: {}
    gguf_fused: Callable[[DecoderSpec], Mapping[str, str | Rows]] | None = None
    numbers: Callable[[DecoderSpec], Sequence[int]] = lambda spec: range(spec.num_layers)
    tied: Callable[[DecoderSpec], Mapping[str, str]] = lambda spec: {}
    changed: Callable[[DecoderSpec], Mapping[str, str | Rows]] = lambda spec: {}
    idle: Callable[[DecoderSpec], Mapping[str, str]] = lambda spec: {}
    is_scaled_in_gguf: bool = False
    scaled_by_mlx: Callable[[Config], Config] | None = None
    is_scaled: bool = False

    def names_in_gguf(self, spec: DecoderSpec) -> Mapping[str, str | Rows]:
        """Return the tensor of a GGUF file, or rows of one, for each canonical weight."""
        return {**GGUF_NAMES, **self.gguf_names, **(self.gguf_fused or self.fused)(spec)}

    @property
    def gguf_scales(self) -> tuple[str, ...]:
        """The ends of the names of the tensors of a GGUF file that are factors of the model."""
        names = (name for name in self.gguf_names.values() if isinstance(name, str) and name.endswith(".scale"))
        return tuple(name.removeprefix(GGUF_LAYER) for name in names)

    @property
    def other_names(self) -> Mapping[str, str]:
        """The key of each name that a config.json may have in place of that of the key."""
        return {**{key.own: name for name, key in self.keys.items() if key.own}, **self.aliases}

    def in_directory(self, config: Config) -> Family:
        """Return the family with the order of q and k rows that a config.json says."""
        if not self.interleaved_key:
            return self
        return replace(self, interleaved=replace(config, keys=self.keys).get(self.interleaved_key, bool))

    def by_mlx(self, config: Config) -> tuple[Family, Config]:
        """Return the family and the config of a checkpoint by MLX with convolutions, whose norms are whole, and whose
        weights may have been multiplied. Raise ModelError as ``scaled_by_mlx``.
        """
        if self.scaled_by_mlx is not None:
            config = replace(config, values=self.scaled_by_mlx(replace(config, keys=self.keys)).values)
        return replace(self, norms_less_one=False, is_scaled=self.scaled_by_mlx is not None), config

    def read(self, config: Config) -> DecoderSpec:
        """Return the spec of a config, with ``longer`` set if longer requests use other rotary frequencies. ModelError
        for a key with a value that the family does not compute.
        """
        config = replace(config, keys=self.keys)
        if not config.prefix:
            config = self._with_usual_names(config)
        config.check()
        spec, longest = self.spec(config), config.size("max_position_embeddings")
        if spec.max_model_len >= longest:
            return spec
        return replace(spec, longer=self.spec(replace(config, served_length=longest)))

    def _with_usual_names(self, config: Config) -> Config:
        """Return the config by the usual names of keys. Raise ModelError for a value under a usual name in whose place
        the reference reads only the own name, if the value would change the spec.
        """
        only_own = {key.name: key.own for key in self.keys.values() if key.own and not key.is_alias}
        given = {name: value for name in only_own if (value := config.values.get(name)) is not None}
        values = {name: value for name, value in config.values.items() if name not in given}
        usual = replace(config, values=values).with_usual_names(self.other_names)
        for name, value in given.items():
            if not self._is_same(usual, usual.with_values({name: value})):
                reason = f"{name} = {value!r:.80} has no effect in the reference, which reads {only_own[name]}"
                raise config.error(reason, USE_ITS_CONFIG)
        return usual

    def _is_same(self, config: Config, other: Config) -> bool:
        """Return whether another config is valid and has the spec of the config."""
        try:
            other.check()
            return self.spec(other) == self.spec(config)
        except ModelError:
            return False


def decoder(
    config: Config,
    architecture: str,
    layers: tuple[LayerSpec, ...],
    act: str | None = "hidden_act",
    eps: str = "rms_norm_eps",
    same_as_head_dim: Sequence[str] = _SAME_AS_HEAD_DIM,
    **differences: Any,
) -> DecoderSpec:
    """Return a Llama-like spec of a config's common keys, with ``differences``. act: the activation's key; None: it is
    SiLU. eps: the key of the norms. same_as_head_dim: other widths of heads, which are refused if they differ.
    """
    dim, heads = head_dim(config), config.size("num_attention_heads")
    for key in () if "mla" in differences else same_as_head_dim:
        if (size := config.optional(key, int)) not in (None, dim):
            raise config.refused(key, size)
    spec: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": config.size("vocab_size"),
        "hidden_size": config.size("hidden_size"),
        "intermediate_size": differences.get("intermediate_size") or config.size("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": differences.get("num_kv_heads") or kv_heads(config, heads),
        "head_dim": dim,
        "max_model_len": differences.get("max_model_len") or model_length(config),
        "layers": layers,
        "norm_eps": differences.get("norm_eps") or config.positive(eps),
        "query_scale": dim**-0.5,
        "activation": ACTIVATIONS[config.get(act, str)] if act else "silu",
        "tie_embeddings": config.get("tie_word_embeddings", bool),
        "is_causal": config.get("is_causal", bool, True),
        **_biases(config),
    }
    made = DecoderSpec(**{**spec, **differences})
    is_as_usual = made.is_causal or "is_causal" in differences  # otherwise windows reach to both sides
    if not is_as_usual and any(layer.sliding_window is not None for layer in layers):
        raise config.error("is_causal = False is not supported with a sliding window", USE_ITS_CONFIG)
    for shape in made.head_shapes:
        if shape.num_heads % shape.num_kv_heads:
            labels = [config.label(key) for key in ("num_attention_heads", "num_key_value_heads")]
            counts = f"{shape.num_heads} heads are not a multiple of {shape.num_kv_heads} key/value heads"
            reason = f"{counts} ({' and '.join(labels)})"
            raise config.error(reason, USE_ITS_CONFIG)
    return made


def fused_rows(spec: DecoderSpec) -> dict[str, Rows]:
    """Return the rows of queries, keys and values in one tensor, of gate and up in another if the MLP has a gate, and
    of their biases.
    """
    heads, ff = spec.own_heads, spec.intermediate_size
    q, k, v = (
        n * dim for n, dim in ((heads.num_heads, heads.head_dim), heads[:2], (heads.num_kv_heads, heads.value_dim))
    )
    sizes = {"qkv": {"q": q, "k": k, "v": v}, **({"gate_up": {"gate": ff, "up": ff}} if spec.gated_mlp else {})}
    found: dict[str, Rows] = {}
    for source, parts in sizes.items():
        start = 0
        for name, size in parts.items():
            found |= {name + end: Rows(source + end, start, start + size) for end in ("", "_bias")}
            start += size
    return found


def by_head(*sizes: tuple[str, int], source: str = "qkv") -> dict[str, Rows]:
    """Return rows, and those of biases, of a tensor in which weights alternate, each with so many rows at a time."""
    period, start, found = sum(size for _, size in sizes), 0, dict[str, Rows]()
    for name, size in sizes:
        found |= {name + end: Rows(source + end, start, start + size, period) for end in ("", "_bias")}
        start += size
    return found


def in_parts(count: int) -> Callable[[DecoderSpec], Sequence[int]]:
    """Return `Family.numbers` of files in which each layer is as many of a spec."""
    return lambda spec: [i // count for i in range(spec.num_layers)]


def module_names(
    layer: str, inner: Mapping[str, str], others: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return the names of weights and biases of modules of a layer, and of other modules."""
    modules = {name: layer + module for name, module in inner.items()} | dict(others)
    return {name + end: f"{module}.{part}" for name, module in modules.items() for end, part in _ENDS.items()}


def _biases(config: Config) -> dict[str, bool]:
    """Return which products have biases, by the keys that the family has. GGUF files may have those of attention
    without that of its last product.
    """
    every, attention, mlp = (
        key in config.keys and config.get(key, bool) for key in ("use_bias", "attention_bias", "mlp_bias")
    )
    has_last = config.get(O_BIAS, bool, True)
    return {"qkv_bias": attention or every, "o_bias": has_last and (attention or every), "mlp_bias": mlp or every}


def kv_heads(config: Config, heads: int) -> int:
    """Return the key/value heads of the layers that have any: GGUF files may list the number of each layer."""
    value = config.value("num_key_value_heads")
    if not isinstance(value, list):
        return heads if value is None else config.size("num_key_value_heads")
    are_counts = value and all(type(n) is int and n >= 0 for n in value)
    found = (set(value) - {0} or {heads}) if are_counts else set()
    if len(found) != 1:
        reason = f"{config.label('num_key_value_heads')} {value!r:.80} are not one number or 0 each"
        raise config.error(reason, USE_ITS_CONFIG)
    return min(int(*found), 1 << 28)


def head_dim(config: Config) -> int:
    """Return the width of a head: the key, else the hidden size over the number of heads."""
    default = max(1, config.size("hidden_size") // config.size("num_attention_heads"))
    return config.size("head_dim", default, most=1 << 16)


def num_layers(config: Config) -> int:
    """Return the number of layers. GGUF files count those of heads for further tokens, too."""
    num = config.size("num_hidden_layers", most=4096)
    of_heads = config.value(_OF_HEADS) or 0 if config.prefix else 0
    if not 0 <= of_heads < num:
        raise config.error(f"{of_heads} of {num} layers are of heads for further tokens", USE_ITS_CONFIG)
    return num - of_heads


def part_of(config: Config, name: str, keys: Keys) -> Config:
    """Return a part of a config that is an object of its own, with the keys that may be in it. Raise ModelError for
    other keys with a value, unless they have no effect anywhere.
    """
    values = {} if config.value(name) is None else config.value(name)
    if not isinstance(values, Mapping):
        raise config.error(f"{name} is {values!r:.80}, not an object", USE_ITS_CONFIG)
    part = Config(config.path, values, keys=keys, part=f"{name}: ")
    part.check()
    for key, value in values.items():
        if key not in keys and key not in WITHOUT_EFFECT and value not in (None, "", False):
            raise part.refused(key, value)
    return part


def limit_of(config: Config, key: str) -> float | None:
    """Return the largest magnitude of queries, keys and values; None without one. In a GGUF file 0 says so, too."""
    is_given = config.value(key) is not None and not (config.prefix and config.value(key) == 0)
    return config.positive(key) if is_given else None


def rope(config: Config, layer_type: str = "") -> RopeSpec:
    """Return the rotary embedding of all layers, or of those of a type where types have their own."""
    return rope_spec(config, head_dim(config), rope_parameters(config, layer_type))


def normed_after_rotation(rotary: RopeSpec, eps: float) -> LayerSpec:
    """Return a layer whose rotated queries and keys have norms without weights, as such norms before the rotation: the
    scale of the rotation has no effect, but in their eps.
    """
    return LayerSpec(replace(rotary, scale=1.0), unit_qk_eps=eps / rotary.scale**2)


def layers_of(config: Config, kind: str, rule: Callable[[int], bool], *, other: str = "full_attention") -> list[bool]:
    """Return whether each layer is of a kind and not of the other: from ``layer_types`` if present, else by a rule."""
    count = num_layers(config)
    types = config.sequence("layer_types")
    if config.value("layer_types") is None:
        types = [kind if rule(i) else other for i in range(count)]
    if len(types) != count or not all(one in (kind, other) for one in types):
        reason = f"layer_types {types!r:.80} is not {count} of {other} and {kind}"
        raise config.error(reason, "Use a model whose layers are of these types")
    return [one == kind for one in types]


def sliding_flags(config: Config, key: str, count: int) -> Sequence[bool]:
    """Return whether each layer slides, as a GGUF file lists it; empty if it does not."""
    listed = config.sequence(key)
    if listed and (len(listed) != count or not all(isinstance(slide, bool) for slide in listed)):
        raise config.error(f"{config.label(key)} {listed!r:.80} is not {count} flags", USE_ITS_CONFIG)
    return listed


def windows(config: Config, sliding: Callable[[int], bool], *, is_optional: bool = True) -> tuple[int | None, ...]:
    """Return the sliding window of each layer (None: full). ``sliding`` is the rule where the config has no types.
    is_optional: without a window all layers are full; otherwise the model is refused then.
    """
    window = config.optional("sliding_window", int)
    if window is not None and window > MAX_WINDOW:
        raise config.error(f"sliding_window = {window} is above {MAX_WINDOW}", USE_ITS_CONFIG)
    may_slide = has_window(config) or not is_optional
    slides = layers_of(config, "sliding_attention", lambda i: may_slide and sliding(i))
    if any(slides) and (window or 0) <= 0:
        raise config.error(f"sliding_window = {window}, but some layers are sliding", USE_ITS_CONFIG)
    return tuple(window if slide else None for slide in slides)


def has_window(config: Config) -> bool:
    """Return whether a config has a sliding window. In a GGUF file 0 says that it has none."""
    window = config.value("sliding_window")
    return window is not None and not (config.prefix and window == 0)


def same_window(config: Config, *, slides: bool = True) -> int | None:
    """Return the sliding window of all layers, which is that of the config if ``slides``. Raise ModelError for
    ``layer_types`` that say otherwise: the reference implementations of these families do not read the key.
    """
    spans = windows(config, lambda i: slides)
    wanted = config.optional("sliding_window", int) if slides else None
    if any(span != (wanted or None) for span in spans):
        raise config.refused("layer_types", config.sequence("layer_types"))
    return spans[0]


def experts(config: Config, *, shared: bool = False) -> MoeSpec:
    """Return the experts of all layers. shared: with one that every token uses."""
    moe = MoeSpec(
        num_experts=config.size(_number_of_experts(config)),
        experts_per_token=config.size("num_experts_per_tok"),
        intermediate_size=config.size(
            "intermediate_size" if config.value("moe_intermediate_size") is None else "moe_intermediate_size"
        ),
        norm_topk=config.get("norm_topk_prob", bool),
        shared_intermediate_size=config.count("shared_expert_intermediate_size") if shared else 0,
    )
    if moe.experts_per_token > moe.num_experts:
        reason = f"{config.label('num_experts_per_tok')} = {moe.experts_per_token} of {moe.num_experts} experts"
        raise config.error(reason, USE_ITS_CONFIG)
    return moe


def _number_of_experts(config: Config) -> str:
    """Return the key that has it."""
    is_local = config.value("num_experts") is None and config.value("num_local_experts") is not None
    return "num_local_experts" if is_local else "num_experts"


def check_groups(config: Config, moe: MoeSpec) -> None:
    """Raise ModelError for groups of experts that are not equal, or have fewer than a token takes."""
    size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or moe.groups_per_token > moe.num_groups or moe.experts_per_token > moe.groups_per_token * size:
        groups = f" of {moe.groups_per_token} of {moe.num_groups} groups" if moe.num_groups > 1 else ""
        reason = f"a token cannot take {moe.experts_per_token} experts{groups} of {moe.num_experts} experts"
        raise config.error(reason, USE_ITS_CONFIG)


def sparse_layers(config: Config, *, shared: bool = False) -> list[MoeSpec | None]:
    """Return the experts of each layer: every ``decoder_sparse_step``-th has them, but for ``mlp_only_layers``, and
    none has where their number is 0. shared: see `experts`.
    """
    moe = experts(config, shared=shared) if config.count(_number_of_experts(config)) else None
    count = num_layers(config)
    step, dense = config.size("decoder_sparse_step"), config.indices("mlp_only_layers", count)
    return [moe if i not in dense and (i + 1) % step == 0 else None for i in range(count)]
