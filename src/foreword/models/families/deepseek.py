"""DeepSeek V2 to V3.2, GLM 4.7 Flash and 5, A.X K1 and K2, MiniCPM3: latent attention, with or without experts in
groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreword.models.config import INDEXED_LAYERS, USE_ITS_CONFIG, Config
from foreword.models.families.base import (
    ATTENTION_BIAS,
    DECODER,
    HIDDEN_ACT,
    NEXT_TOKEN_HEADS,
    NO_EXPERT_BIASES,
    Family,
    Rows,
    check_groups,
    decoder,
    num_layers,
    rope,
)
from foreword.models.keys import Key, of_gguf, only, only_in_gguf, table
from foreword.models.rope import ROTARY_DIM, rope_parameters, rope_spec
from foreword.models.spec import DecoderSpec, IndexerSpec, LayerSpec, MlaSpec, MoeSpec, NormPlaces, RopeSpec

_QUERY_DIM, _VALUE_DIM = "qk_head_dim", "v_head_dim"
_OWN: Mapping[str, str] = {}
_LENGTHS = ("*.attention.key_length", "*.attention.value_length")


def deepseek_v2(config: Config) -> DecoderSpec:
    return _deepseek(config, "deepseek_v2", grouped=config.value("topk_method") == "group_limited_greedy")


def deepseek_v3(config: Config) -> DecoderSpec:
    """Return the spec of V3; in a GGUF file also that of a V2, whose router has a softmax, and of a Youtu-LLM, all of
    whose layers are dense.
    """
    return _deepseek(config, "deepseek_v3", grouped=True)


def glm4_moe_lite(config: Config) -> DecoderSpec:
    """Return a spec like V3's, of which ``mlp_layer_types`` lists the layers with experts."""
    return _deepseek(config, "glm4_moe_lite", sparse_flags(config, 1), grouped=True)


def deepseek_v32(config: Config) -> DecoderSpec:
    """Return a spec like V3's with an indexer in each layer."""
    return with_indexers(config, "deepseek_v32", _sparse_after_dense(config))


def glm_moe_dsa(config: Config) -> DecoderSpec:
    """Return a spec like DeepSeek V3.2's, of which some layers take what an earlier one chose."""
    spec, takes = with_indexers(config, "glm_moe_dsa", _sparse_after_dense(config)), takes_chosen(config)
    layers = (replace(layer, takes_chosen=is_so) for layer, is_so in zip(spec.layers, takes, strict=True))
    return replace(spec, layers=tuple(layers))


def axk2(config: Config) -> DecoderSpec:
    """Return a spec like DeepSeek V3.2's with gates of norms and of what attention gives. A config without groups of
    experts has null for both of their numbers.
    """
    groups = {name: config.value(name) for name in ("n_group", "topk_group")}
    if list(groups.values()).count(None) == 1:
        given = " and ".join(f"{name} = {value!r:.80}" for name, value in groups.items())
        raise config.error(f"{given}, of which one alone is null", USE_ITS_CONFIG)
    spec, rank = with_indexers(config, "axk2", _sparse_by_frequency(config)), config.size(_NORM_RANK, most=1 << 16)
    assert spec.mla is not None
    layers = (
        replace(layer, attn_norm_rank=rank, mlp_norm_rank=rank, moe=replace(layer.moe, zeroes_groups=True))
        if layer.moe
        else replace(layer, attn_norm_rank=rank)
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers), attn_gate=True, mla=replace(spec.mla, joins_latents=True))


def _sparse_after_dense(config: Config) -> list[bool]:
    return sparse_flags(config, config.get("first_k_dense_replace", int))


def with_indexers(config: Config, architecture: str, sparse: Sequence[bool]) -> DecoderSpec:
    """Return a spec like V3's with an indexer in each layer. sparse: which layers have experts."""
    kinds, indexed = config.sequence("layer_types"), ["indexed_attention"] * num_layers(config)
    if config.value("layer_types") is not None and kinds != indexed:
        raise config.error(f"layer_types {kinds!r:.80} is not {len(indexed)} of indexed_attention", USE_ITS_CONFIG)
    spec = _deepseek(config, architecture, sparse, grouped=True)
    indexer = IndexerSpec(
        config.size(_INDEX_HEADS, most=1 << 9), config.size(_INDEX_DIM, most=1 << 12), config.size(_INDEX_TOPK)
    )
    assert spec.mla is not None
    if not spec.mla.q_rank:
        raise config.error(f"{config.label('q_lora_rank')} is null, and the indexer reads its product", USE_ITS_CONFIG)
    if indexer.head_dim < spec.mla.rope_dim:
        rotated = config.label(ROTARY_DIM if config.prefix else "qk_rope_head_dim")
        reason = f"{config.label(_INDEX_DIM)} = {indexer.head_dim} is below {rotated} = {spec.mla.rope_dim}"
        raise config.error(reason, USE_ITS_CONFIG)
    return replace(spec, indexer=indexer)


def takes_chosen(config: Config) -> list[bool]:
    """Return whether each layer has no indexer: as ``indexer_types`` lists, else ``index_topk_pattern``, else in a
    period. Most GGUF files have no list: then the layers that have tensors of an indexer have one, but for GLM 5.2 and
    later, whose files may have such tensors everywhere.
    """
    count = num_layers(config)
    if config.prefix:
        return _takes_chosen_in_gguf(config, count)
    period, offset, lettered = max(config.count(_INDEX_FREQ), 1), config.count(_INDEX_OFFSET), _lettered(config)
    kinds = ["shared" if max(i - offset + 1, 0) % period else "full" for i in range(count)]
    if config.value(INDEXER_TYPES) is not None:
        kinds = list(config.sequence(INDEXER_TYPES))
        if len(kinds) != count or not all(kind in _INDEXERS.values() for kind in kinds):
            reason = f"{INDEXER_TYPES} = {kinds!r:.80} is not {count} of 'full' and 'shared'"
            raise config.error(reason, USE_ITS_CONFIG)
    elif lettered is not None:
        kinds = lettered
    return _taking(config, [kind == "full" for kind in kinds])


def _taking(config: Config, indexed: Sequence[bool]) -> list[bool]:
    """Return the opposite of ``indexed``. Raise ModelError if the first layer has no indexer."""
    if not indexed[0]:
        keys = (INDEXER_TYPES, _INDEX_LETTERS, _INDEX_FREQ, _INDEX_OFFSET)
        given = ", ".join(f"{config.label(key)} = {value!r:.80}" for key in keys if (value := config.value(key)))
        raise config.error(f"the first layer has no indexer, and none before it has one: {given}", USE_ITS_CONFIG)
    return [not has for has in indexed]


def _takes_chosen_in_gguf(config: Config, count: int) -> list[bool]:
    """Return the same for a GGUF file. As in llama.cpp, a model of 2^20 positions or more without a list is GLM 5.2: of
    four layers after the third, one has an indexer.
    """
    found, given = set(config.sequence(INDEXED_LAYERS)), config.value(INDEXER_TYPES)
    indexed = [i in found or not found for i in range(count)]
    if given is not None:
        listed = config.sequence(INDEXER_TYPES)
        if len(listed) < count or any(one not in (0, 1) or isinstance(one, float) for one in listed):
            reason = f"{config.label(INDEXER_TYPES)} = {listed!r:.80} is not a flag for each of {count} layers"
            raise config.error(reason, "Convert the model again")
        indexed = [bool(one) for one in listed[:count]]
    elif all(indexed) and config.size("max_position_embeddings") >= _POSITIONS_OF_52:
        indexed = [i < 3 or (i - 2) % 4 == 0 for i in range(count)]
    return _taking(config, indexed)


def _lettered(config: Config) -> list[str] | None:
    """Return the types of ``index_topk_pattern``, a list of them or a string of their letters; None without it."""
    value = config.value(_INDEX_LETTERS)
    if value is None:
        return None
    listed = value if isinstance(value, str) else config.sequence(_INDEX_LETTERS)
    kinds = _INDEXERS if isinstance(value, str) else {kind: kind for kind in _INDEXERS.values()}
    found = [kinds[one] for one in listed if isinstance(one, str) and one in kinds]
    if len(found) != len(listed) or len(found) != num_layers(config):
        reason = f"{_INDEX_LETTERS} = {value!r:.80} is not {num_layers(config)} of F and S, or of 'full' and 'shared'"
        raise config.error(reason, USE_ITS_CONFIG)
    return found


def axk1(config: Config) -> DecoderSpec:
    """Return a spec like V3's, in which the output of experts passes through a norm."""
    spec = _deepseek(config, "axk1", _sparse_by_frequency(config), grouped=True)
    norms = NormPlaces(True, False, True, True)
    return replace(spec, layers=tuple(replace(layer, norms=norms if layer.moe else None) for layer in spec.layers))


def _sparse_by_frequency(config: Config) -> list[bool]:
    """Return whether each layer has experts: ``mlp_layer_types`` lists them, by default every ``moe_layer_freq``-th
    but the first ``first_k_dense_replace``. Raise ModelError for a list that the config contradicts.
    """
    freq, dense, count = config.size(_FREQUENCY), config.count("first_k_dense_replace"), num_layers(config)
    sparse = [i >= dense and i % freq == 0 for i in range(count)]
    if config.value("mlp_layer_types") is not None:
        listed = sparse_flags(config, dense)
        if listed != sparse and {_FREQUENCY, "first_k_dense_replace"} & config.values.keys():
            reason = f"first_k_dense_replace = {dense} and {_FREQUENCY} = {freq} say other layers than mlp_layer_types"
            raise config.error(reason, USE_ITS_CONFIG)
        sparse = listed
    return sparse


def layers_after_dense(config: Config, moe: MoeSpec | None) -> tuple[LayerSpec, ...]:
    """Return layers with one rotary embedding. All but the first ``first_k_dense_replace`` have experts."""
    rotary, dense = rope(config), config.get("first_k_dense_replace", int)
    return tuple(LayerSpec(rotary, moe=moe if i >= dense else None) for i in range(num_layers(config)))


def sparse_flags(config: Config, dense: int) -> list[bool]:
    """Return whether each layer has experts: ``mlp_layer_types`` lists them, by default all but the first ``dense``."""
    count, types = num_layers(config), config.sequence("mlp_layer_types")
    if config.value("mlp_layer_types") is None:
        types = ["dense" if i < dense else "sparse" for i in range(count)]
    if len(types) != count or not all(kind in ("dense", "sparse") for kind in types):
        raise config.error(f"mlp_layer_types {types!r:.80} is not {count} of dense and sparse", USE_ITS_CONFIG)
    return [kind == "sparse" for kind in types]


def _deepseek(config: Config, architecture: str, sparse: Sequence[bool] | None = None, *, grouped: bool) -> DecoderSpec:
    """Return a spec. ``sparse`` says which layers have experts; None: those after ``first_k_dense_replace`` layers."""
    config = with_mscale(config)
    mla = latent_sizes(config)
    rotary, dense = latent_rope(config, mla), config.get("first_k_dense_replace", int)
    is_sigmoid = config.value(GATING) == 2 if config.prefix else architecture != "deepseek_v2"
    has_experts = [i >= dense for i in range(num_layers(config))] if sparse is None else sparse
    moe = routed_experts(config, is_sigmoid=is_sigmoid, grouped=grouped) if any(has_experts) else None
    layers = tuple(LayerSpec(rotary, moe=moe if has else None) for has in has_experts)
    return decoder(config, architecture, layers, **latent_attention(config, mla))


def youtu(config: Config) -> DecoderSpec:
    """Return the spec of Youtu-LLM, which is a DeepSeek V3 without experts."""
    config, mla = with_mscale(config), latent_sizes(config)
    layers = (LayerSpec(latent_rope(config, mla)),) * num_layers(config)
    return decoder(config, "youtu", layers, **latent_attention(config, mla))


def minicpm3(config: Config) -> DecoderSpec:
    mla, count, hidden = latent_sizes(config), num_layers(config), config.size("hidden_size")
    depth = config.positive("scale_depth", math.sqrt(count))
    return decoder(
        config,
        "minicpm3",
        (LayerSpec(latent_rope(config, mla)),) * count,
        embedding_scale=config.positive("scale_emb"),
        residual_scale=depth / math.sqrt(count),
        logit_scale=config.size("dim_model_base", hidden) / hidden,
        **latent_attention(config, mla),
    )


def latent_sizes(config: Config) -> MlaSpec:
    """Return the sizes of the heads.

    GGUF files have them as ``…_mla``; older ones in place of the lengths of one head.
    """
    if config.prefix:
        rope_dim = config.size(ROTARY_DIM)
        query, value = (
            config.size(k if config.value(k) else old)
            for k, old in zip((_QUERY_DIM, _VALUE_DIM), _LENGTHS, strict=True)
        )
        if query <= rope_dim:
            raise config.error(f"{query} dimensions of a head, of which {rope_dim} are rotated", USE_ITS_CONFIG)
        nope = query - rope_dim
    else:
        rope_dim, nope = config.size("qk_rope_head_dim"), config.size("qk_nope_head_dim")
        value = config.size(_VALUE_DIM, nope)
        for key, wanted in ((_QUERY_DIM, nope + rope_dim), ("num_key_value_heads", config.size("num_attention_heads"))):
            if (given := config.optional(key, int)) not in (None, wanted):
                raise config.refused(key, given)
    q_rank = 0 if config.value("q_lora_rank") is None else config.size("q_lora_rank", most=1 << 16)
    if wrong := next((size for size in (nope, rope_dim, value) if size > 1 << 14), None):
        raise config.error(f"a head of {wrong} dimensions", USE_ITS_CONFIG)
    kv_rank = config.size("kv_lora_rank", most=1 << 16)
    return MlaSpec(q_rank, kv_rank, nope_dim=nope, rope_dim=rope_dim, value_dim=value)


def latent_rope(config: Config, mla: MlaSpec) -> RopeSpec:
    return rope_spec(config, mla.rope_dim, rope_parameters(config))


def latent_attention(config: Config, mla: MlaSpec) -> dict[str, Any]:
    """Return the differences of latent attention.

    With yarn, the scale of scores has the square of m(mscale_all_dim).
    """
    parameters, scale = rope_parameters(config), 1.0
    rules = Config(config.path, parameters)
    if parameters.get("rope_type", "default") != "default" and (all_dims := rules.get("mscale_all_dim", float, 0.0)):
        scale = (1 + 0.1 * all_dims * math.log(max(1.0, rules.positive("factor")))) ** 2
    return latent(mla, scale)


def latent(mla: MlaSpec, scale: float = 1.0) -> dict[str, Any]:
    """Return the differences of latent attention, whose scores have this factor beside that of their dimensions."""
    scale *= (mla.nope_dim + mla.rope_dim) ** -0.5
    return {"mla": mla, "num_kv_heads": 1, "head_dim": mla.rope_dim + mla.kv_rank, "query_scale": scale}


def with_mscale(config: Config) -> Config:
    """Return the config with both scales of yarn, which are equal. A GGUF file has one number, a tenth of them."""
    scaling = config.value("rope_scaling")
    if not config.prefix or not isinstance(scaling, dict) or "yarn_log_multiplier" not in scaling:
        return config
    own = {key: value for key, value in scaling.items() if key != "yarn_log_multiplier"}
    mscale = 10 * Config(config.path, scaling).positive("yarn_log_multiplier")
    return config.with_values({"rope_scaling": {**own, "mscale": mscale, "mscale_all_dim": mscale}})


def routed_experts(config: Config, names: Mapping[str, str] = _OWN, *, is_sigmoid: bool, grouped: bool) -> MoeSpec:
    """Return the experts of all sparse layers. names: of the family's keys, see `routed_keys`. is_sigmoid: whether the
    router has a sigmoid and a bias; else a softmax. grouped: whether they may be in groups.
    """

    def key(usual: str) -> str:
        return names.get(usual, usual)

    inner = config.size("moe_intermediate_size")
    moe = MoeSpec(
        num_experts=config.size(key("n_routed_experts"), most=1 << 16),
        experts_per_token=config.size("num_experts_per_tok"),
        intermediate_size=inner,
        norm_topk=config.get("norm_topk_prob", bool),
        shared_intermediate_size=config.count(key("n_shared_experts")) * inner,
        shared_gate=False,
        scoring="sigmoid" if is_sigmoid else "softmax",
        router_bias=is_sigmoid,
        scale=config.positive(key("routed_scaling_factor")),
        sum_eps=1e-20,
        num_groups=config.size("n_group", 1) if grouped else 1,
        groups_per_token=config.size("topk_group", 1) if grouped else 1,
    )
    check_groups(config, moe)
    return moe


_LAYER = "model.layers.{i}."
_ATTN, _MLP = _LAYER + "self_attn.", _LAYER + "mlp."
ROUTED_NAMES = {
    "router_bias": _MLP + "gate.e_score_correction_bias",
    **{
        f"shared.{name}{end}": f"{_MLP}shared_experts.{name}_proj.{part}"
        for name in ("gate", "up", "down")
        for end, part in (("", "weight"), ("_bias", "bias"))
    },
}
"""The names of `routed_experts` in safetensors."""
LATENT_NAMES = {
    "q_a": _ATTN + "q_a_proj.weight",
    "q_a_norm": _ATTN + "q_a_layernorm.weight",
    "kv_a": _ATTN + "kv_a_proj_with_mqa.weight",
    "kv_a_norm": _ATTN + "kv_a_layernorm.weight",
    "kv_b": _ATTN + "kv_b_proj.weight",
    "q_a_bias": _ATTN + "q_a_proj.bias",
    "kv_a_bias": _ATTN + "kv_a_proj_with_mqa.bias",
    **ROUTED_NAMES,
}
INDEXED_NAMES = {
    **LATENT_NAMES,
    "index_q": _ATTN + "indexer.wq_b.weight",
    "index_k": _ATTN + "indexer.wk.weight",
    "index_k_norm": _ATTN + "indexer.k_norm.weight",
    "index_k_norm_bias": _ATTN + "indexer.k_norm.bias",
    "index_weights": _ATTN + "indexer.weights_proj.weight",
}
_INDEXER_IN_GGUF = {
    "index_q": "blk.{i}.indexer.attn_q_b.weight",
    "index_k": "blk.{i}.indexer.attn_k.weight",
    "index_k_norm": "blk.{i}.indexer.k_norm.weight",
    "index_k_norm_bias": "blk.{i}.indexer.k_norm.bias",
    "index_weights": "blk.{i}.indexer.proj.weight",
}
_ATTN_NORM, _MLP_NORM = _LAYER + "input_layernorm.", _LAYER + "post_attention_layernorm."
_AXK2_NAMES = {
    **INDEXED_NAMES,
    "q_gate": _ATTN + "q_b_proj.weight",
    "attn_norm": _ATTN_NORM + "norm.weight",
    **{
        f"{norm}_norm_{part}": f"{name}{own}.weight"
        for norm, name in (("attn", _ATTN_NORM), ("mlp", _MLP_NORM))
        for part, own in (("low", "W_down"), ("high", "W_up"))
    },
}
_Q_B = {"q": _ATTN + "q_b_proj.weight"}
_Q_B_IN_GGUF = {"q": "blk.{i}.attn_q_b.weight"}


def latent_rows(spec: DecoderSpec) -> dict[str, Any]:
    """Return the rows of k_b and v_b, which alternate head by head, and the name of q if it has two matrices."""
    assert spec.mla is not None
    nope, period = spec.mla.nope_dim, spec.mla.nope_dim + spec.mla.value_dim
    rows = {"k_b": Rows("kv_b", 0, nope, period), "v_b": Rows("kv_b", nope, period, period)}
    return {**rows, **(_Q_B if spec.mla.q_rank else {})}


def _axk2_rows(spec: DecoderSpec) -> dict[str, Any]:
    """Return the same of A.X K2, in which rows of q and of gates alternate head by head, too; and the names of the
    norms before experts.
    """
    assert spec.mla is not None
    size = spec.mla.nope_dim + spec.mla.rope_dim
    period = size + spec.mla.value_dim
    rows = {"q": Rows("q_gate", 0, size, period), "attn_gate": Rows("q_gate", size, period, period)}
    norms = {f"layers.{i}.mlp_norm": _MLP_NORM + "norm.weight" for i, layer in enumerate(spec.layers) if layer.moe}
    return {**latent_rows(spec), **rows, **norms}


def fused_latent_in_gguf(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.mla is not None
    return _Q_B_IN_GGUF if spec.mla.q_rank else {}


GATING, _FREQUENCY = "*.expert_gating_func", "moe_layer_freq"
INTERLEAVED = Key("rope_interleave", True, (True, False))
_NORM_RANK = "gated_norm_rank"
_INDEX_HEADS, _INDEX_DIM, _INDEX_TOPK = "index_n_heads", "index_head_dim", "index_topk"
INDEXER_TYPES, _INDEX_LETTERS = "indexer_types", "index_topk_pattern"
_INDEX_FREQ, _INDEX_OFFSET = "index_topk_freq", "index_skip_topk_offset"
_POSITIONS_OF_52 = 1 << 20
_INDEXERS = {"F": "full", "S": "shared"}
"""The types of indexers by their letters."""
LATENT_KEYS = (
    *(*DECODER, HIDDEN_ACT, *ATTENTION_BIAS),
    *(of_gguf(name, kind=int) for name in _LENGTHS),
    *(only_in_gguf(f"attention.{part}_length_swa", None) for part in ("key", "value")),
    Key("head_dim"),
    Key("num_key_value_heads", gguf="attention.head_count_kv", kind=int),
    *(Key("q_lora_rank", 1536, gguf="attention.q_lora_rank"), Key("kv_lora_rank", 512, gguf="attention.kv_lora_rank")),
    *(
        Key("qk_nope_head_dim", 128),
        Key("qk_rope_head_dim", 64),
        Key(_QUERY_DIM, gguf="attention.key_length_mla", kind=int),
    ),
    Key(_VALUE_DIM, 128, gguf="attention.value_length_mla"),
)
ROUTED_EXPERTS = (
    *(
        Key("first_k_dense_replace", 0, gguf="leading_dense_block_count", gguf_default=0),
        Key("topk_group", gguf="expert_group_used_count", kind=int),
    ),
    *(
        Key("n_group", gguf="expert_group_count", kind=int),
        Key("n_shared_experts", 2, gguf="expert_shared_count", gguf_default=0),
    ),
    Key("n_routed_experts", 64, gguf="expert_count"),
    Key("num_experts_per_tok", gguf="expert_used_count", kind=int),
    Key("moe_intermediate_size", 1407, gguf="expert_feed_forward_length"),
    Key("norm_topk_prob", False, gguf="expert_weights_norm", gguf_default=False),
    Key("routed_scaling_factor", 1.0, gguf="expert_weights_scale", gguf_default=1.0),
)
"""Keys of `routed_experts`, and of the layers that have them."""


LOCAL_ROUTED = {"num_local_experts": "n_routed_experts"}
"""The aliases of families whose reference also takes the number of `routed_experts` by this name."""


def routed_keys(names: Mapping[str, str], *without: str) -> tuple[Key, ...]:
    """Return `ROUTED_EXPERTS` with other names of keys, by their names there, and without those that a family lacks."""
    return tuple(replace(key, name=names.get(key.name, key.name)) for key in ROUTED_EXPERTS if key.name not in without)


_DEEPSEEK = (*LATENT_KEYS, *ROUTED_EXPERTS)
SCORING = (only("scoring_func", "sigmoid"), only("topk_method", "noaux_tc"))
_ROUTING = (only(_FREQUENCY, 1), *SCORING)
"""Keys of the models' own configurations, which transformers does not read: it computes these values."""
_V3 = {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
}
INDEXED = (
    *(*_DEEPSEEK, Key("mlp_layer_types"), Key("layer_types"), only("rope_interleave", True)),
    Key(_INDEX_HEADS, 64, gguf="attention.indexer.head_count"),
    Key(_INDEX_DIM, 128, gguf="attention.indexer.key_length"),
    Key(_INDEX_TOPK, 2048, gguf="attention.indexer.top_k"),
)
_INDEXED_EVERYWHERE = (
    *(only("indexer_rope_interleave", False), only_in_gguf("attention.indexer.types", None)),
    *(only(_INDEX_FREQ, 1), *(only(name, None) for name in (INDEXER_TYPES, _INDEX_LETTERS))),
)
_V32 = (
    *(*INDEXED, *_ROUTING, *NEXT_TOKEN_HEADS, Key("num_nextn_predict_layers", 1, kind=int)),
    of_gguf(GATING, kind=int, gguf_default=2),
)
_V32_ALIASES = {**LOCAL_ROUTED, "num_experts": "n_routed_experts"}
FAMILIES = {
    "deepseek_v2": Family(
        "DeepSeek V2: latent attention",
        deepseek_v2,
        table(
            (*_DEEPSEEK, Key("mlp_bias", False)),
            [Key("topk_method", "greedy", ("greedy", "group_limited_greedy")), only("norm_topk_prob", False)],
        ),
        aliases={"num_experts": "n_routed_experts"},
        shared_gguf="deepseek2",
        names=LATENT_NAMES,
        constants=NO_EXPERT_BIASES,
        interleaved=True,
        fused=latent_rows,
    ),
    "deepseek_v3": Family(
        "DeepSeek V3 and R1, GGUF files of Kimi K2: latent attention",
        deepseek_v3,
        table(
            *(_DEEPSEEK, _ROUTING, NEXT_TOKEN_HEADS, [INTERLEAVED, Key("num_nextn_predict_layers", 1, kind=int)]),
            [of_gguf(GATING, kind=int)],
            **_V3,
        ),
        aliases=LOCAL_ROUTED,
        names=LATENT_NAMES,
        interleaved=True,
        interleaved_key=INTERLEAVED.name,
        fused=latent_rows,
        gguf="deepseek2",
        gguf_fused=fused_latent_in_gguf,
        gguf_interleaved=True,
    ),
    "deepseek_v32": Family(
        "DeepSeek V3.2: latent attention to the keys that an indexer chooses",
        deepseek_v32,
        table(_V32, _INDEXED_EVERYWHERE, **_V3),
        aliases=_V32_ALIASES,
        names=INDEXED_NAMES,
        interleaved=True,
        fused=latent_rows,
        gguf="deepseek32",
        gguf_names=_INDEXER_IN_GGUF,
        gguf_fused=fused_latent_in_gguf,
        gguf_interleaved=True,
    ),
    "glm_moe_dsa": Family(
        "GLM 5: latent attention to the keys that an indexer chooses",
        glm_moe_dsa,
        table(
            *(_V32, [Key(INDEXER_TYPES, gguf="attention.indexer.types"), Key(_INDEX_LETTERS)]),
            [Key(_INDEX_FREQ, 1), Key(_INDEX_OFFSET, 2), Key(INDEXED_LAYERS, kind=list)],
            [only("indexer_rope_interleave", True)],
            **{**_V3, "n_group": 1, "topk_group": 1},
            rms_norm_eps=1e-5,
            q_lora_rank=2048,
            qk_nope_head_dim=192,
            v_head_dim=256,
            index_n_heads=32,
        ),
        aliases=_V32_ALIASES,
        names=INDEXED_NAMES,
        interleaved=True,
        indexer_rows="as others",
        fused=latent_rows,
        gguf="glm-dsa",
        gguf_names=_INDEXER_IN_GGUF,
        gguf_fused=fused_latent_in_gguf,
        gguf_interleaved=True,
    ),
    "glm4_moe_lite": Family(
        "GLM 4.7 Flash: latent attention",
        glm4_moe_lite,
        table(
            *(_DEEPSEEK, _ROUTING, NEXT_TOKEN_HEADS, [INTERLEAVED, Key("mlp_layer_types")]),
            [only("first_k_dense_replace", 1), Key("num_nextn_predict_layers", 1, kind=int)],
            rms_norm_eps=1e-5,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            moe_intermediate_size=1536,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=4,
            routed_scaling_factor=1.8,
        ),
        aliases={**LOCAL_ROUTED, "head_dim": "qk_rope_head_dim"},
        shared_gguf="deepseek2",
        names=LATENT_NAMES,
        interleaved=True,
        interleaved_key=INTERLEAVED.name,
        fused=latent_rows,
    ),
    "axk1": Family(
        "A.X K1: latent attention",
        axk1,
        table(
            *(_DEEPSEEK, [INTERLEAVED, Key("mlp_layer_types"), Key(_FREQUENCY, 1)]),
            first_k_dense_replace=1,
            moe_intermediate_size=2048,
            n_group=8,
            topk_group=4,
            n_routed_experts=192,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            routed_scaling_factor=2.5,
        ),
        aliases=LOCAL_ROUTED,
        names={**LATENT_NAMES, "post_mlp_norm": _LAYER + "post_mlp_layernorm.weight"},
        renamed={".mlp.post_mlp_layernorm.": ".post_mlp_layernorm."},
        unused=("score.", "model.layers.0.post_mlp_layernorm."),
        optional={"router_bias": 0.0},
        interleaved=True,
        interleaved_key=INTERLEAVED.name,
        fused=latent_rows,
    ),
    "axk2": Family(
        "A.X K2: latent attention to the keys that an indexer chooses",
        axk2,
        table(
            *(INDEXED, _INDEXED_EVERYWHERE, SCORING, [Key(_FREQUENCY, 1), Key(_NORM_RANK, 16)]),
            first_k_dense_replace=1,
            moe_intermediate_size=512,
            n_routed_experts=128,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=8,
            routed_scaling_factor=2.5,
            q_lora_rank=384,
            kv_lora_rank=128,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=64,
            index_n_heads=16,
        ),
        aliases=LOCAL_ROUTED,
        names=_AXK2_NAMES,
        renamed={".mlp.fc1.": ".W_down.", ".mlp.fc2.": ".W_up.", ".self_attn.q_gate_proj.": ".self_attn.q_b_proj."},
        interleaved=True,
        fused=_axk2_rows,
    ),
    "youtu": Family(
        "Youtu-LLM: latent attention",
        youtu,
        table([*LATENT_KEYS, INTERLEAVED], tie_word_embeddings=True),
        shared_gguf="deepseek2",
        names=LATENT_NAMES,
        interleaved=True,
        interleaved_key=INTERLEAVED.name,
        fused=latent_rows,
    ),
    "minicpm3": Family(
        "MiniCPM3: latent attention",
        minicpm3,
        table(
            *(
                LATENT_KEYS,
                [Key("scale_emb", 12.0), Key("scale_depth", 1.4), Key("dim_model_base", 256), Key("mlp_bias", False)],
            ),
            kv_lora_rank=256,
            q_lora_rank=768,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
            v_head_dim=None,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        names=LATENT_NAMES,
        fused=latent_rows,
        gguf="minicpm3",
        gguf_fused=fused_latent_in_gguf,
    ),
}
