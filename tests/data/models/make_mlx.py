"""Record mlx.json: matrices that MLX quantised, and the tensors that mlx_lm makes of tiny random models.

Needs mlx and mlx_lm, so it runs in an environment of its own:
    PYTHONPATH=tests python tests/data/models/make_mlx.py
"""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.utils import _get_classes

from models.tiny import random_tensors

HERE = Path(__file__).parent
FORMS = [("affine", bits, size) for bits, size in ((2, 32), (3, 64), (4, 64), (4, 128), (5, 32), (6, 64), (8, 128))]
FORMS += [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
ROPE = {"rope_theta": 500.0, "rope_scaling": None}
LAYOUTS = {
    "mixtral": {}, "olmoe": {}, "qwen3-moe": {"num_experts": 6}, "lfm2-moe": {}, "qwen3-next": {}, "nemotron-h-moe": {},
    "lfm2": {"block_dim": 32, "block_ff_dim": 40, "full_attn_idxs": [1, 3]},
    "qwen3_5": {}, "qwen3_5-moe": {}, "deepseek-v3": ROPE, "dots1": ROPE, "afmoe": ROPE, "laguna": {},
    "granite-moe": ROPE, "granite-hybrid": ROPE, "granite-hybrid-dense": ROPE, "falcon-h1": {}, "falcon-h1-normed": {},
    "gemma4-moe": {}, "phimoe-longrope": {}, "jamba": {}, "dbrx": {}, "minimax-m2": {**ROPE, "head_dim": 8,
    "shared_intermediate_size": 0, "rotary_dim": 4}, "solar-open": {**ROPE, "intermediate_size": 12,
    "first_k_dense_replace": 0, "head_dim": 8}, "bailing": {**ROPE, "norm_topk_prob": True, "first_k_dense_replace": 0},
    "exaone-moe": {**ROPE, "head_dim": 8},
    "llama4": {"rope_scaling": None, "num_experts_per_tok": 1, "attention_chunk_size": 8},
    "gpt-neox": {"rotary_emb_base": 500.0, "rotary_pct": 0.5}, "gptj": {}, "gpt2": {"n_ctx": 64}, "olmo-hybrid": {},
}  # fmt: skip
"""Keys that mlx_lm needs beside those of transformers."""
LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}


def matrix(mode, bits, size):
    random = np.random.default_rng(bits * size)
    given = mx.array(random.standard_normal((2, 128)) * 0.03 + 0.01).astype(mx.bfloat16)
    parts = mx.quantize(given, group_size=size, bits=bits, mode=mode)
    exact = [part.astype(mx.float32) if part.dtype == mx.bfloat16 else part for part in parts]
    values = mx.dequantize(*exact, group_size=size, bits=bits, mode=mode).astype(mx.float32)
    names = ("weight", "scales", "biases")[: len(parts)]
    stored = {
        name: np.array(part.view(mx.uint16) if part.dtype == mx.bfloat16 else part).tolist()
        for name, part in zip(names, parts, strict=True)
    }
    return {"mode": mode, "bits": bits, "group_size": size, **stored, "values": np.array(values).tolist()}


def as_on_the_hub(tensors, kind):
    """The tensors of a model under the names, and in the shapes, that its checkpoints have."""
    if kind == "gpt2":
        return {name.removeprefix("transformer."): value for name, value in tensors.items()}
    if kind == "llama4":
        return {f"language_model.{name}": value for name, value in tensors.items()}
    if kind != "qwen3_5_moe":
        return tensors
    out, experts = {}, {}
    for name, value in tensors.items():
        path, _, rest = name.partition(".experts.")
        e, _, matrix = rest.partition(".")
        if rest:
            experts.setdefault(path, {})[matrix, int(e)] = value
        else:
            out[name] = value
    for path, of in experts.items():
        gate, up, down = (
            np.stack([of[f"{name}_proj.weight", e] for e in range(len(of) // 3)]) for name in ("gate", "up", "down")
        )
        out |= {f"{path}.experts.gate_up_proj": np.concatenate([gate, up], 1), f"{path}.experts.down_proj": down}
    return out


def layout(tiny, more):
    config = {**tiny["config"], **tiny["config"].get("rope_parameters", {}), **more}
    kind = config["model_type"].removesuffix("_text")
    if kind.startswith("granite"):
        config["layer_types"] = [LAYERS[name] for name in config.get("layer_types", [])]
    if kind == "exaone_moe":
        config["is_moe_layer"] = [name == "sparse" for name in config["mlp_layer_types"]]
    if kind in ("falcon_h1", "granitemoehybrid", "nemotron_h"):
        config["time_step_limit"] = (0.0, float("inf"))
    tensors = {name: mx.array(value) for name, value in as_on_the_hub(random_tensors(tiny["shapes"]), kind).items()}
    if kind in ("qwen3_5", "qwen3_5_moe", "llama4"):
        config = {"model_type": kind, "text_config": config}
    model_class, arguments = _get_classes(config)
    made = model_class(arguments.from_dict(config)).sanitize(tensors)
    return {name: [list(value.shape), float(np.array(value, np.float64).sum())] for name, value in made.items()}


def main():
    tiny = json.loads((HERE / "tiny.json").read_text())["models"]
    found = {
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "matrices": [matrix(*form) for form in FORMS],
        "layouts": {name: layout(tiny[name], more) for name, more in LAYOUTS.items()},
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    (HERE / "mlx.json").write_text(f"{{{lines}}}\n")


if __name__ == "__main__":
    main()
