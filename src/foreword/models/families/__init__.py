"""The supported model families: each builds a spec from a config and maps weight names, in about forty lines."""

from __future__ import annotations

from collections.abc import Mapping

from foreword.models.families import (
    apertus,
    bailing,
    bitnet,
    bloom,
    cohere,
    deepseek,
    delta,
    embedding_gemma2,
    ernie,
    falcon,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    granite,
    griffin,
    hrm,
    hunyuan,
    hunyuan4,
    jamba,
    kimi,
    layer_norms,
    lfm,
    llama,
    llama4,
    longcat,
    mamba,
    mamba_alone,
    mimo,
    minicpm,
    minimax,
    ministral,
    modern_bert,
    mosaic,
    nanochat,
    nemotron,
    olmo,
    phi,
    qwen,
    routed,
    starcoder,
    zamba,
    zaya,
)
from foreword.models.families.base import Family
from foreword.models.families.encoders import ENCODER_FAMILIES as ENCODER_FAMILIES
from foreword.models.families.vision import VISION_FAMILIES

FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES,
    **ernie.FAMILIES,
    **ministral.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **gemma3n.FAMILIES,
    **gemma4.FAMILIES,
    **embedding_gemma2.FAMILIES,
    **phi.FAMILIES,
    **olmo.FAMILIES,
    **glm.FAMILIES,
    **granite.FAMILIES,
    **starcoder.FAMILIES,
    **layer_norms.FAMILIES,
    **mamba.FAMILIES,
    **mamba_alone.FAMILIES,
    **jamba.FAMILIES,
    **kimi.FAMILIES,
    **griffin.FAMILIES,
    **zamba.FAMILIES,
    **hrm.FAMILIES,
    **nemotron.FAMILIES,
    **delta.FAMILIES,
    **lfm.FAMILIES,
    **gpt_oss.FAMILIES,
    **deepseek.FAMILIES,
    **minicpm.FAMILIES,
    **routed.FAMILIES,
    **mimo.FAMILIES,
    **longcat.FAMILIES,
    **modern_bert.FAMILIES,
    **hunyuan.FAMILIES,
    **hunyuan4.FAMILIES,
    **cohere.FAMILIES,
    **minimax.FAMILIES,
    **llama4.FAMILIES,
    **falcon_h1.FAMILIES,
    **gpt.FAMILIES,
    **bloom.FAMILIES,
    **mosaic.FAMILIES,
    **falcon.FAMILIES,
    **nanochat.FAMILIES,
    **bitnet.FAMILIES,
    **apertus.FAMILIES,
    **bailing.FAMILIES,
    **zaya.FAMILIES,
}
"""By ``model_type`` of a config.json."""

GGUF_FAMILIES: Mapping[str, Family] = {
    name: family for family in FAMILIES.values() if family.gguf for name in (family.gguf, *family.more_gguf)
}
"""By ``general.architecture`` of a GGUF file."""

TEXT_MODELS: Mapping[str, str] = {
    "llama4": "llama4_text",
    "aria": "aria_text",
    "cohere_compass": "cohere_compass_text",
    "mistral3": "mistral",
    **{name: f"{name}_text" for name in ("gemma3n", "gemma4_unified", "embedding_gemma2")},
    **{name: family.text for name, family in VISION_FAMILIES.items()},
}
"""``model_type`` of models of images and texts → the family of their text model, unless its configuration has another.
Without a `VisionFamily` it alone is run, and errors name the executor that runs the encoders.
"""
TEXT_PARTS: Mapping[str, str] = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Other names of families in the configuration of a text model."""
OF_CLASSES: Mapping[str, str] = {"BailingMoeV2ForCausalLM": "bailing_moe_v2"}
"""Names in ``architectures`` → the family, of models whose ``model_type`` is that of another family."""
