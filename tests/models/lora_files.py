"""Random LoRA adapters: as PEFT directories, as GGUF files, and merged into the tensors of a checkpoint."""

import json
import re

import numpy as np

from foreword.models.quants import Quant
from models import gguf_writer
from models.gguf_models import architecture_of, gguf_tensors
from models.tiny import write_safetensors

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj")
"""The ends of the names of linear layers of attention and of a dense MLP, in most families."""
NOT_CHANGED = (
    r"[qk]_norm\.|embed|word_emb|\.wte|\.wpe|lm_head|^output\.|conv1d|\.conv\.conv|altup|laurel|(?<!shared_)experts\."
    r"|block_sparse_moe\.(in|out)put_linear|shared_transformer|layers\.\d+\.linear\."
)
"""Parts of the names of other matrices: of embeddings and logits, convolutions, several streams, single experts,
and layers aside."""


def linear_modules(shapes, ends=("",)):
    """The linear layers among the tensors of a checkpoint: {module: (outputs, inputs)}. ends: of their names."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(tuple(f"{end}.weight" for end in ends))
        and len(shape) == 2
        and re.search(NOT_CHANGED, name) is None
    }


def is_turned(shapes, name):
    """Return whether a checkpoint has the matrix of a module as [in, out], as those of GPT-2."""
    rows, cols = shapes.get("transformer.h.0.attn.c_attn.weight", (1, 1))
    return cols == 3 * rows and ".c_" in name


def random_factors(shapes, rank=4, seed=1, ends=("",)):
    """{module: (A [rank, in], B [out, rank])}; rank: a number, or a function of the module."""
    rng = np.random.default_rng(seed)
    factors = {}
    for name, shape in sorted(linear_modules(shapes, ends).items()):
        rows, cols = shape[::-1] if is_turned(shapes, name) else shape
        r = rank(name) if callable(rank) else rank
        a, b = rng.standard_normal((r, cols)) / np.sqrt(cols), rng.standard_normal((rows, r)) / np.sqrt(r)
        factors[name] = a.astype("<f4"), b.astype("<f4")
    return factors


def merged(tensors, factors, scale):
    """The checkpoint with W + scale · B A. scale: a number, or a function of the module."""
    out = dict(tensors)
    for name, (a, b) in factors.items():
        change = b.astype(np.float64) @ a * (scale(name) if callable(scale) else scale)
        if is_turned({key: value.shape for key, value in tensors.items()}, name):
            change = change.T
        out[name + ".weight"] = (tensors[name + ".weight"] + change).astype("<f4")
    return out


def peft_tensors(factors):
    """The tensors by the names of the modules of transformers."""
    return {
        f"base_model.model.{of_module(name, factors)}.lora_{letter}.weight": factor
        for name, both in factors.items()
        for letter, factor in zip("AB", both, strict=True)
    }


def of_module(name, names):
    """The name that transformers has for a module of latent attention, and of the MLP beside it."""
    if not any("kv_a_proj_with_mqa" in other for other in names):
        return name
    name = re.sub(r"\.block_sparse_moe\.(\w+_proj)$", r".mlp.\1", name)
    return name.replace(".attention.dense", ".self_attn.o_proj").replace(".attention.", ".self_attn.")


def write_peft(folder, factors, **config):
    """A PEFT directory; rank and alpha are 4 and 8 unless ``config`` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({of_module(name, factors).rpartition(".")[2] for name in factors})
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    write_safetensors(folder / "adapter_model.safetensors", peft_tensors(factors))
    return folder


def gguf_parts(config, factors, alpha=8.0):
    """Metadata and tensors of the adapter as llama.cpp converts it: the rows of B are those of the weight, the inputs
    of A its columns.
    """
    architecture, tensors = architecture_of(config), {}
    for name, (a, b) in factors.items():
        weight = f"{name}.weight"
        if name.endswith("linear_attn.out_proj"):
            [(stem, a)] = gguf_tensors(config, {weight: a}).items()
            parts = {stem: b}
        else:
            parts = gguf_tensors(config, {weight: b.T if architecture == "gpt2" else b})
        for stem, part in parts.items():
            for letter, factor in (("a", a), ("b", part)) if stem != "rope_freqs.weight" else ():
                tensors[f"{stem}.lora_{letter}"] = Quant.F32, factor.shape, gguf_writer.f32(factor).ravel()
    metadata = {"general.architecture": ("str", architecture), "general.type": ("str", "adapter"),
                "adapter.type": ("str", "lora"), "adapter.lora.alpha": ("f32", alpha)}  # fmt: skip
    return metadata, tensors
