"""The supported model families: each builds a spec from a config and maps weight names, in about forty lines."""

from __future__ import annotations

from collections.abc import Mapping

from foreword.models.families import gemma, hybrid, llama, phi, qwen
from foreword.models.families.base import Family
from foreword.models.families.encoders import ENCODER_FAMILIES as ENCODER_FAMILIES
from foreword.models.families.hybrid import NOT_IN_GGUF as NOT_IN_GGUF

FAMILIES: Mapping[str, Family] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **gemma.FAMILIES,
    **phi.FAMILIES,
    **hybrid.FAMILIES,
}
"""By ``model_type`` of a config.json."""

GGUF_FAMILIES: Mapping[str, Family] = {family.gguf: family for family in FAMILIES.values() if family.gguf}
"""By ``general.architecture`` of a GGUF file."""
