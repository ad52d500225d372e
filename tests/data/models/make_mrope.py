"""Record mrope.json: the logits transformers computes for tiny random decoders with M-RoPE, over text and an image.

Needs torch, transformers and safetensors, so it runs in an environment of its own:
    PYTHONPATH=tests python tests/data/models/make_mrope.py
The image is random vectors in the rows of ``embeds``, in a grid of rotary positions. Configurations are written as
those of the text family with the same weights, which the decoders of the vision-language models are.
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

from models.tiny import random_tensors

KEPT = 6
BEFORE, GRID, AFTER = 5, (1, 3, 4), 7
SIZES = {
    "vocab_size": 48, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 50.0}
MODELS = {
    "sections": (
        "qwen2", transformers.Qwen2VLTextConfig(**SIZES, rope_parameters={**ROPE, "mrope_section": [2, 3, 3]})
    ),
    "interleaved": (
        "qwen3",
        transformers.Qwen3VLTextConfig(
            **SIZES, head_dim=16, rope_parameters={**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        ),
    ),
}  # fmt: skip


def image_positions():
    """[3, T] rotary positions of text, an image and text, and the position after these."""
    at, out = BEFORE, [(p, p, p) for p in range(BEFORE)]
    out += [(at + t, at + h, at + w) for t in range(GRID[0]) for h in range(GRID[1]) for w in range(GRID[2])]
    at += max(GRID)
    out += [(p, p, p) for p in range(at, at + AFTER)]
    return np.array(out).T, at + AFTER


def record(model_type, config):
    config._attn_implementation = "eager"
    body = transformers.AutoModel.from_config(config)
    shapes = {f"model.{name}": list(tensor.shape) for name, tensor in body.state_dict().items()}
    shapes["lm_head.weight"] = [config.vocab_size, config.hidden_size]
    tensors = {name: torch.tensor(values) for name, values in random_tensors(shapes).items()}
    head = tensors.pop("lm_head.weight")
    body.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    positions, following = image_positions()
    rng = np.random.default_rng(1)
    ids = rng.integers(3, config.vocab_size, positions.shape[1])
    image = slice(BEFORE, BEFORE + int(np.prod(GRID)))
    ids[image] = 0
    vectors = np.round(rng.standard_normal((image.stop - image.start, config.hidden_size)) * 0.4, 4)
    embeds = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
    embeds[image] = torch.tensor(vectors, dtype=torch.float32)
    with torch.no_grad():
        places = torch.tensor(positions)[:, None]
        hidden = body.eval()(inputs_embeds=embeds[None], position_ids=places).last_hidden_state
        logits = (hidden[0, -KEPT:] @ head.T).numpy()
    written = {key: value for key, value in config.to_dict().items() if key in (*SIZES, "head_dim", "rms_norm_eps")}
    written |= {"model_type": model_type, "tie_word_embeddings": False, "rope_parameters": config.rope_parameters}
    return {
        "config": written, "shapes": shapes, "token_ids": ids.tolist(), "image": [image.start, image.stop],
        "vectors": vectors.tolist(), "positions": positions.tolist(), "delta": following - len(ids),
        "last_logits": [[float(f"{x:.7g}") for x in row] for row in logits],
    }  # fmt: skip


def main():
    recorded = {name: record(*model) for name, model in MODELS.items()}
    for name, found in recorded.items():
        print(f"{name}: logits vary by {np.std(found['last_logits']):.3f}")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in recorded.items())
    path = Path(__file__).parent / "mrope.json"
    path.write_text(f'{{"transformers": "{transformers.__version__}", "models": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
