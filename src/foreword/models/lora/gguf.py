"""Adapters in GGUF files, as llama.cpp converts them."""

from __future__ import annotations

import re
from pathlib import Path

from foreword.errors import ModelError
from foreword.models.families import GGUF_FAMILIES
from foreword.models.families.base import Family
from foreword.models.gguf import read_gguf
from foreword.models.lora.adapter import LoraAdapter, LoraPair, factors_of, in_order, joined, modules_of, pairs_of
from foreword.models.spec import DecoderSpec

_TENSOR = re.compile(r"(.+)\.weight\.lora_([ab])")
_NOT_CHANGED = ("attn_k_b", "attn_v_b", "altup_proj", "altup_unembd_proj")
"""The ends of the names of matrices whose changes llama.cpp does not apply."""
_CONVERT_AGAIN = "Convert the adapter again"


def read_gguf_lora(path: Path, spec: DecoderSpec, family: Family) -> LoraAdapter:
    """Return the adapter of a file. Raise ModelError as `foreword.models.lora.peft.read_peft`."""
    gguf = read_gguf(path)
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (kind := gguf.get(key, str, "")) != expected:
            raise ModelError(f"{path}: {key} is {kind!r:.80}, not {expected!r}. Give a LoRA adapter")
    architecture = gguf.get("general.architecture", str)
    own = family.gguf or family.shared_gguf
    if own is None or family.is_scaled_in_gguf:
        reason = f"is for the architecture {architecture!r:.80}, and GGUF adapters for {spec.architecture!r} models"
        raise ModelError(f"{path}: {reason} are not supported. Use the adapter's PEFT directory")
    if architecture not in (own, *family.more_gguf):
        reason = f"is for the architecture {architecture!r:.80}, the model is {spec.architecture!r}"
        raise ModelError(f"{path}: {reason}. Use an adapter that was made for this model")
    if "adapter.alora.invocation_tokens" in gguf.metadata:
        raise ModelError(f"{path}: adapter.alora.invocation_tokens is not supported. Use a plain LoRA adapter")
    family = GGUF_FAMILIES[architecture]
    alpha = gguf.get("adapter.lora.alpha", float, 0.0)
    modules = modules_of(spec, family.names_in_gguf(spec), family.numbers(spec))
    modules = {name: module for name, module in modules.items() if not name.endswith(_NOT_CHANGED)}
    pairs: dict[str, LoraPair] = {}
    for name, (a, b) in factors_of(path, gguf.tensors, _TENSOR, modules, _CONVERT_AGAIN).items():
        rank = b.shape[-1]
        changes = pairs_of(path, name, modules[name], a, b, alpha / rank if alpha else 1.0)
        pairs = joined(path, pairs, changes, name)
    return in_order(
        LoraAdapter(path, pairs),
        spec,
        is_interleaved=family.gguf_interleaved,
        of_indexer=family.indexer_rows,
        is_tiled=family.gguf_tiled,
    )
