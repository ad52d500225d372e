"""Jamba: layers of the first Mamba, and of attention without rotation, with an MLP or experts each."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import EXPERT_LAYERS, USE_ITS_CONFIG, Config
from foreword.models.families.base import DECODER, LOCAL_EXPERTS, NO_ROTATION, Family, decoder, module_names, num_layers
from foreword.models.families.mamba1 import MAMBA1, MAMBA1_NAMES_IN_GGUF, fused_mamba1, mamba1, mamba1_names
from foreword.models.families.states import mixed_layers
from foreword.models.keys import Key, only, table
from foreword.models.rope import ROPE_KEYS
from foreword.models.spec import DecoderSpec, MoeSpec


def jamba(config: Config) -> DecoderSpec:
    """Return a spec. A period and an offset say which layers have attention, and another pair which ones have experts.
    GGUF files have the number of key/value heads of each layer, and a router in each layer with experts.
    """
    count, moe = num_layers(config), _experts(config)
    if config.prefix:
        heads, sparse = config.value("num_key_value_heads"), config.indices(EXPERT_LAYERS, count)
        attends = [n != 0 for n in heads] if isinstance(heads, list) else [True] * count
        is_sparse = [i in sparse for i in range(count)]
    else:
        config.optional("num_key_value_heads", int)  # no list
        attends, is_sparse = (_every(config, part, count) for part in ("attn", "expert"))
    recurrent = None if all(attends) else mamba1(config, config.positive("rms_norm_eps"))
    layers = mixed_layers(config, attends, recurrent, None)
    if moe is not None:
        layers = tuple(replace(layer, moe=moe if has else None) for layer, has in zip(layers, is_sparse, strict=True))
    return decoder(config, "jamba", layers, max_model_len=config.size("max_position_embeddings"))


def _every(config: Config, part: str, count: int) -> list[bool]:
    """Return whether each layer is one of those with attention or with experts."""
    period, offset = config.size(f"{part}_layer_period"), config.count(f"{part}_layer_offset")
    if offset >= period:
        raise config.error(f"{part}_layer_offset = {offset} of {part}_layer_period = {period}", USE_ITS_CONFIG)
    return [i % period == offset for i in range(count)]


def _experts(config: Config) -> MoeSpec | None:
    """Return the experts, whose probabilities keep their sum. With one expert, or none, layers have an MLP."""
    if config.count("num_experts") < 2:
        return None
    moe = MoeSpec(
        num_experts=config.size("num_experts", most=1 << 16),
        experts_per_token=config.size("num_experts_per_tok"),
        intermediate_size=config.size("intermediate_size"),
        norm_topk=False,
    )
    if moe.experts_per_token > moe.num_experts:
        label = config.label("num_experts_per_tok")
        reason = f"{label} = {moe.experts_per_token} of {moe.num_experts} experts"
        raise config.error(reason, USE_ITS_CONFIG)
    return moe


_MLP = "model.layers.{i}.feed_forward."
_OF_MLP = {name: f"{name}_proj" for name in ("gate", "up", "down")}
_KEYS = (
    *(key for key in DECODER if key not in ROPE_KEYS),
    *NO_ROTATION,
    only("hidden_act", "silu", "swish"),
    only("sliding_window", None),
    Key("num_key_value_heads", 8, gguf="attention.head_count_kv", kind=object),
    *MAMBA1,
    Key("num_experts", 16, gguf="expert_count", gguf_default=1),
    Key("num_experts_per_tok", 2, gguf="expert_used_count", gguf_default=1),
    *(Key("attn_layer_period", 8), Key("attn_layer_offset", 4)),
    *(Key("expert_layer_period", 2), Key("expert_layer_offset", 1)),
    Key(EXPERT_LAYERS, kind=list),
)
FAMILIES = {
    "jamba": Family(
        "Jamba: Mamba and attention layers, with or without experts",
        jamba,
        table(_KEYS),
        aliases=LOCAL_EXPERTS,
        names={
            **mamba1_names("mamba"),
            "mlp_norm": "model.layers.{i}.pre_ff_layernorm.weight",
            "final_norm": "model.final_layernorm.weight",
            **module_names(_MLP, _OF_MLP),
            "router": _MLP + "router.weight",
            **{f"experts.{name}": f"{_MLP}experts.{{e}}.{part}.weight" for name, part in _OF_MLP.items()},
        },
        fused=fused_mamba1,
        gguf="jamba",
        gguf_names=MAMBA1_NAMES_IN_GGUF,
    )
}
