"""LongCat Flash: two blocks of latent attention per layer, and experts beside both, some of which do nothing."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.families.base import Family, check_groups, decoder, in_parts
from foreword.models.families.deepseek import (
    LATENT_KEYS,
    LATENT_NAMES,
    latent_attention,
    latent_rope,
    latent_rows,
    latent_sizes,
    with_mscale,
)
from foreword.models.keys import Key, only, table
from foreword.models.spec import DecoderSpec, LayerSpec, MoeSpec

_BLOCKS = 2


def longcat_flash(config: Config) -> DecoderSpec:
    """Return a spec with a layer for each block. The experts of a layer read the input of the MLP of its first block,
    and are added after its second. Queries and latents have factors, the first of which is one of the scores.
    """
    count = config.size("num_layers", most=4096)
    if config.value("num_hidden_layers") not in (None, _BLOCKS * count):
        reason = f"num_hidden_layers = {config.value('num_hidden_layers')!r:.80} is not twice num_layers = {count}"
        raise config.error(reason, USE_ITS_CONFIG)
    config = with_mscale(config)
    mla, hidden = latent_sizes(config), config.size("hidden_size")
    if not mla.q_rank:
        raise config.refused("q_lora_rank", config.value("q_lora_rank"))
    if config.value("head_dim") not in (None, mla.rope_dim):  # by which the reference rotates
        raise config.refused("head_dim", config.value("head_dim"))
    mla = replace(mla, kv_scale=(hidden / mla.kv_rank) ** 0.5)
    moe = MoeSpec(
        num_experts=config.size("n_routed_experts", most=1 << 16),
        experts_per_token=config.size("num_experts_per_tok"),
        intermediate_size=config.size("moe_intermediate_size"),
        norm_topk=False,
        router_bias=True,
        scale=config.positive("routed_scaling_factor"),
        identities=config.count("zero_expert_num"),
    )
    check_groups(config, moe)
    first = LayerSpec(latent_rope(config, mla), late_moe=moe)
    own = latent_attention(config, mla)
    own["query_scale"] *= (hidden / mla.q_rank) ** 0.5
    return decoder(config, "longcat_flash", (first, replace(first, late_moe=None)) * count, **own)


_LAYER = "model.layers.{i}."
FAMILIES = {
    "longcat_flash": Family(
        "LongCat Flash: latent attention",
        longcat_flash,
        table(
            *(LATENT_KEYS, [Key("num_layers", 28), Key("num_hidden_layers", kind=int)]),
            [
                Key("intermediate_size", 12288, own="ffn_hidden_size", is_alias=True),
                Key("moe_intermediate_size", 2048, own="expert_ffn_hidden_size", is_alias=True),
                Key("num_experts_per_tok", 12, own="moe_topk", is_alias=True),
            ],
            [Key("n_routed_experts", 512), Key("zero_expert_num", 256), Key("routed_scaling_factor", 6.0)],
            [only("zero_expert_type", "identity"), only("mla_scale_q_lora", True), only("mla_scale_kv_lora", True)],
            [only("norm_topk_prob", False), only("router_bias", False), only("attention_method", "MLA")],
            rms_norm_eps=1e-5,
            rope_theta=10_000_000.0,
        ),
        aliases={"num_local_experts": "n_routed_experts"},
        names={
            **{
                name: template.replace(".self_attn.", ".self_attn.{part}.")
                for name, template in LATENT_NAMES.items()
                if ".self_attn." in template
            },
            "q": _LAYER + "self_attn.{part}.q_b_proj.weight",
            "o": _LAYER + "self_attn.{part}.o_proj.weight",
            "o_bias": _LAYER + "self_attn.{part}.o_proj.bias",
            "attn_norm": _LAYER + "input_layernorm.{part}.weight",
            "mlp_norm": _LAYER + "post_attention_layernorm.{part}.weight",
            **{name: f"{_LAYER}mlps.{{part}}.{name}_proj.weight" for name in ("gate", "up", "down")},
            "router": _LAYER + "mlp.router.classifier.weight",
            "router_bias": _LAYER + "mlp.router.e_score_correction_bias",
        },
        unused=("score.", "model.mtp"),
        interleaved=True,
        fused=lambda spec: {name: rows for name, rows in latent_rows(spec).items() if name != "q"},
        numbers=in_parts(_BLOCKS),
    )
}
