"""Names of models in Ollama's library → names that `foreword.models.loader.find_model` takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

HOSTS = ("hf.co/", "huggingface.co/")
"""Beginnings of names that are ids of the hub."""
LATEST = "latest"

_Sizes = Mapping[str, str]

# fmt: off
LIBRARY: Mapping[str, _Sizes] = MappingProxyType({
    "all-minilm": {"22m": "all-minilm-l6-v2"},
    "deepseek-r1": {
        "1.5b": "bartowski/DeepSeek-R1-Distill-Qwen-1.5B-GGUF:Q4_K_M",
        "7b": "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF:Q4_K_M",
    },
    "gemma3": {
        "1b": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M",
        "270m": "ggml-org/gemma-3-270m-it-GGUF:Q8_0",
        "4b": "ggml-org/gemma-3-4b-it-GGUF:Q4_K_M",
    },
    "granite4": {"tiny-h": "ibm-granite/granite-4.0-h-tiny-GGUF:Q4_K_M"},
    "llama3.1": {"8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M"},
    "llama3.2": {
        "3b": "bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        "1b": "bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    },
    "mistral": {"7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M"},
    "nomic-embed-text": {"v1.5": "nomic-ai/nomic-embed-text-v1.5-GGUF:F16"},
    "qwen2.5": {
        "7b": "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M",
        "3b": "Qwen/Qwen2.5-3B-Instruct-GGUF:Q4_K_M",
        "1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M",
        "0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M",
    },
    "qwen2.5-coder": {
        "7b": "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M",
        "1.5b": "qwen2.5-coder-1.5b",
        "0.5b": "qwen2.5-coder-0.5b",
    },
    "qwen3": {
        "8b": "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "4b": "Qwen/Qwen3-4B-GGUF:Q4_K_M",
        "1.7b": "Qwen/Qwen3-1.7B-GGUF:Q8_0",
        "0.6b": "Qwen/Qwen3-0.6B-GGUF:Q8_0",
        "30b-a3b": "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M",
    },
    "smollm2": {
        "1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
        "360m": "bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0",
        "135m": "bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0",
    },
})
"""Name → size → model. The first size is that of the tag "latest". The project pins none of the ids of the hub."""
# fmt: on

_TAG = re.compile(r"(?P<kind>-(?:instruct|it|chat))?(?:-(?P<format>(?:q\d|fp16|bf16|f16)\w*))?", re.IGNORECASE)


def from_ollama(name: str) -> str | None:
    """Return the model that a name of Ollama stands for; None for a name that is not known.

    ``name[:tag]``, where the tag is a size of `LIBRARY`, perhaps with "-instruct" and a format behind it, such as
    "llama3.2:1b-instruct-q8_0"; or an id of the hub behind "hf.co/". Without a tag, a name that Foreword has itself is
    its own, not Ollama's.
    """
    for host in HOSTS:
        if name.lower().startswith(host):
            return name[len(host) :]
    base, colon, tag = name.lower().removeprefix("library/").partition(":")
    sizes = LIBRARY.get(base)
    if sizes is None:
        return None
    if not colon or tag == LATEST:
        return next(iter(sizes.values()))
    for size, model in sizes.items():
        if tag == size:
            return model
        match = _TAG.fullmatch(tag[len(size) :]) if tag.startswith(f"{size}-") else None
        if match is not None:
            return _in_format(model, match["format"])
    return None


def _in_format(model: str, format: str | None) -> str | None:
    """Return a model in another format than its own; None for one that has only its own."""
    if format is None:
        return model
    if "/" not in model:
        return None
    return f"{model.partition(':')[0]}:{format.upper().replace('FP16', 'F16')}"
