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
LAYOUTS = {
    "mixtral": {}, "olmoe": {}, "qwen3-moe": {"num_experts": 6}, "lfm2-moe": {}, "qwen3-next": {}, "nemotron-h-moe": {},
    "lfm2": {"block_dim": 32, "block_ff_dim": 40, "full_attn_idxs": [1, 3]},
    "qwen3_5": None,
}  # fmt: skip
"""Keys that mlx_lm needs beside those of transformers; None if the model is the text_config of another."""


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


def layout(tiny, more):
    config = {**tiny["config"], **tiny["config"].get("rope_parameters", {}), **(more or {})}
    tensors = {name: mx.array(value) for name, value in random_tensors(tiny["shapes"]).items()}
    if more is None:
        config = {"model_type": config["model_type"].removesuffix("_text"), "text_config": config}
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
