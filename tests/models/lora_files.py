"""Random LoRA adapters: as PEFT directories, as GGUF files, and merged into the tensors of a checkpoint."""

import json

import numpy as np

from foreword.models.quants import Quant
from models import gguf_writer
from models.gguf_models import (
    BLOCK,
    GPT,
    INTERLEAVED,
    architecture_of,
    gpt_tensors,
    head_dim_of,
    interleave,
    separate,
    usual,
)
from models.tiny import write_safetensors

LINEAR = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "self_attn.g_proj", "attn.Wqkv"),
    *("self_attn.out_proj", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "mlp.c_fc", "mlp.c_proj"),
    *("shared_mlp.input_linear", "shared_mlp.output_linear"),
    *("query_key_value", ".dense", "dense_h_to_4h", "dense_4h_to_h", ".attn.c_attn", ".attn.c_proj"),
    *("mlp.c_fc_0", "mlp.c_fc_1", ".attention.wqkv", ".attention.wo"),
    *("mlp.fc1", "mlp.fc2", "mlp.fc_in", "mlp.fc_out", ".attn.out_proj", ".attention.out_proj", ".fc1", ".fc2"),
)


SEPARATE = {"internlm2", "bailingmoe"}
"""The architectures whose files have queries, keys and values apart, of a checkpoint that has them in one tensor."""


def linear_modules(shapes, ends=LINEAR):
    """The attention and dense MLP layers among the tensors of a checkpoint: {module: (outputs, inputs)}."""
    has_experts = any("block_sparse_moe" in n or "experts" in n for n in shapes)  # then shared_mlp is one, too
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.removesuffix(".weight").endswith(ends)
        and "expert" not in name
        and ("linear_attn" not in name or any("linear_attn" in end for end in ends))
        and not (has_experts and "shared_mlp" in name)
    }


def is_turned(shapes, name):
    """Return whether a checkpoint has the matrix of a module as [in, out], as those of GPT-2."""
    rows, cols = shapes.get("transformer.h.0.attn.c_attn.weight", (1, 1))
    return cols == 3 * rows and ".c_" in name


def random_factors(shapes, rank=4, seed=1, ends=LINEAR):
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
    return {
        f"base_model.model.{name}.lora_{letter}.weight": factor
        for name, both in factors.items()
        for letter, factor in zip("AB", both, strict=True)
    }


def write_peft(folder, factors, **config):
    """A PEFT directory; rank and alpha are 4 and 8 unless ``config`` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".")[2] for name in factors})
    written = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(written | config))
    write_safetensors(folder / "adapter_model.safetensors", peft_tensors(factors))
    return folder


def gguf_parts(config, factors, alpha=8.0):
    """Metadata and tensors of the adapter as llama.cpp converts it."""
    architecture, config = architecture_of(config), usual(config)
    head_dim = head_dim_of(config)
    tensors = {}
    for name, (a, b) in factors.items():
        if architecture in GPT:
            turned = b.T if architecture == "gpt2" else b
            [(stem, b)] = gpt_tensors(usual(config), {f"{name}.weight": turned}).items()
            for letter, factor in (("a", a), ("b", b)):
                tensors[f"{stem}.lora_{letter}"] = Quant.F32, factor.shape, gguf_writer.f32(factor).ravel()
            continue
        _, _, layer, *rest = name.split(".")
        if architecture in SEPARATE and rest[-1] in ("wqkv", "query_key_value"):
            for stem, part in separate(config, layer, b, by_head=rest[-1] == "wqkv").items():
                for letter, factor in (("a", a), ("b", part)):
                    tensors[f"{stem}.lora_{letter}"] = Quant.F32, factor.shape, gguf_writer.f32(factor).ravel()
            continue
        if architecture in INTERLEAVED and name.endswith(("q_proj", "k_proj")):
            b = interleave(b, head_dim)
        for letter, factor in (("a", a), ("b", b)):
            stem = f"blk.{layer}.{BLOCK['.'.join(rest)]}.weight.lora_{letter}"
            tensors[stem] = Quant.F32, factor.shape, gguf_writer.f32(factor).ravel()
    metadata = {"general.architecture": ("str", architecture), "general.type": ("str", "adapter"),
                "adapter.type": ("str", "lora"), "adapter.lora.alpha": ("f32", alpha)}  # fmt: skip
    return metadata, tensors
