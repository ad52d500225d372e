"""The families of encoders of images."""

from __future__ import annotations

from collections.abc import Mapping

from foreword.models.families import gemma4_vision, lfm_vision, qwen_vision, siglip
from foreword.models.families.vision_base import VisionFamily

VISION_FAMILIES: Mapping[str, VisionFamily] = {
    **siglip.VISION_FAMILIES,
    **qwen_vision.VISION_FAMILIES,
    **lfm_vision.VISION_FAMILIES,
    **gemma4_vision.VISION_FAMILIES,
}
"""By ``model_type`` of a config.json."""
GGUF_VISION_FAMILIES: Mapping[str, VisionFamily] = {one.gguf: one for one in VISION_FAMILIES.values()}
"""By ``clip.projector_type`` of a GGUF file. Families with the same one read it in the same way."""
