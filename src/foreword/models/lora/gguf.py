"""Adapters in GGUF files, as llama.cpp converts them."""

from __future__ import annotations

import re
from pathlib import Path

from foreword.errors import ModelError
from foreword.models.families import GGUF_FAMILIES
from foreword.models.families.base import GGUF_NAMES, Family
from foreword.models.gguf import read_gguf
from foreword.models.lora.adapter import LoraAdapter, LoraPair, modules_of, pairs_of, unknown_module
from foreword.models.naming import interleaved, split_halves
from foreword.models.spec import DecoderSpec
from foreword.models.weights import Tensor

_TENSOR = re.compile(r"(.+)\.weight\.lora_([ab])")
_CONVERT_AGAIN = "Convert the adapter again"


def read_gguf_lora(path: Path, spec: DecoderSpec, family: Family) -> LoraAdapter:
    """The adapter of a file. ModelError as `foreword.models.lora.peft.read_peft`."""
    gguf = read_gguf(path)
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (kind := gguf.get(key, str, "")) != expected:
            raise ModelError(f"{path}: {key} is {kind!r:.80}, not {expected!r}. Give a LoRA adapter")
    architecture = gguf.get("general.architecture", str)
    if spec.state_size:
        fix = "Use the adapter's PEFT directory"
        raise ModelError(f"{path}: GGUF adapters for {spec.architecture!r} models are not supported. {fix}")
    if architecture != (family.gguf or "llama"):  # the Mistral models are "llama" there
        reason = f"is for the architecture {architecture!r:.80}, the model is {spec.architecture!r}"
        raise ModelError(f"{path}: {reason}. Use an adapter that was made for this model")
    if "adapter.alora.invocation_tokens" in gguf.metadata:
        raise ModelError(f"{path}: adapter.alora.invocation_tokens is not supported. Use a plain LoRA adapter")
    family = GGUF_FAMILIES[architecture]
    alpha = gguf.get("adapter.lora.alpha", float, 0.0)
    modules = modules_of(spec, {**GGUF_NAMES, **family.fused(spec)})
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in gguf.tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in modules:
            raise unknown_module(path, match[1] if match else name, modules)
        found.setdefault(match[1], {})[match[2]] = tensor
    pairs: dict[str, LoraPair] = {}
    for name, both in found.items():
        if len(both) != 2:
            raise ModelError(f"{path}: {name} has lora_{'a' if 'a' in both else 'b'} alone. {_CONVERT_AGAIN}")
        scale = alpha / both["a"].shape[0] if alpha else 1.0
        pairs |= pairs_of(path, name, modules[name], both["a"], both["b"], scale)
    if not pairs:
        raise ModelError(f"{path}: has no weights. {_CONVERT_AGAIN}")
    for name, rotated in interleaved(spec, family):
        if (pair := pairs.get(name)) is not None:
            pairs[name] = LoraPair(pair.a, split_halves(pair.b, spec.head_dim, rotated), pair.scale)
    return LoraAdapter(path, pairs)
