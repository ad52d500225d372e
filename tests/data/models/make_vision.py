"""Record vision.json: what transformers makes of images with a tiny random model of each family that runs natively.

Needs torch, transformers, safetensors, Pillow and num2words, so it runs in an environment of its own:
    PYTHONPATH=tests python tests/data/models/make_vision.py [NAME...]
Models that are not named keep their record, unless none is named.
Weights are not recorded: `models.tiny.random_tensors` draws them again from the names and shapes.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open

from models.seeing import CONVERSATIONS, IMAGES, RECORDED, SIZES, image, recorded, write_seeing_model
from pytorch.vision_models import conversation_tokens, load, save, texts_of

NAMES = (
    "idefics3",
    "smolvlm",
    "gemma3",
    "gemma3-crops",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen3.5",
    "lfm2-vl",
    "lfm2-vl-plain",
    "gemma4",
    "gemma4-large",
)
NOT_FILES = ("model.safetensors",)
ARGUMENTS = ("pixel_values", "image_grid_thw", "spatial_shapes", "pixel_attention_mask", "image_position_ids")
"""Of encoders of images."""


def tiles_of(given, processor):
    """The tiles, each [3, height, width], of what a processor gives; of patches, the first frame."""
    values = given["pixel_values"].numpy()
    is_padded = "image_position_ids" in given
    if "spatial_shapes" in given or is_padded:  # patches with the channels last, in rows that are padded
        p = processor.patch_size if is_padded else processor.encoder_patch_size
        places = given["image_position_ids"] if is_padded else ()
        grids = [(one.amax(0) + 1).flip(0).tolist() for one in places] or given["spatial_shapes"].tolist()
        cut = [rows[: r * c].reshape(r, c, p, p, 3) for rows, (r, c) in zip(values, grids, strict=True)]
        return [one.transpose(4, 0, 2, 1, 3).reshape(3, len(one) * p, -1) for one in cut]
    if "image_grid_thw" not in given:
        return values.reshape(-1, *values.shape[-3:])
    [[_, rows, columns]] = given["image_grid_thw"].tolist()
    m, p = processor.merge_size, processor.patch_size
    cut = values.reshape(rows // m, columns // m, m, m, 3, processor.temporal_patch_size, p, p)[..., 0, :, :]
    return np.ascontiguousarray(cut.transpose(4, 0, 2, 5, 1, 3, 6)).reshape(1, 3, rows * p, columns * p)


def record(name, folder):
    save(folder, name)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
    files = {
        path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()
        for path in sorted(folder.iterdir())
        if path.name not in NOT_FILES
    }
    made = {"files": files, "shapes": shapes}
    write_seeing_model(folder, made)
    model, processor = load(folder)
    pixels, vectors = [], []
    for width, height in SIZES:
        given = processor.image_processor([[image(7, width, height)]], return_tensors="pt")
        tiles = tiles_of(given, processor.image_processor)
        pixels.append([len(tiles), hashlib.sha256(b"".join(tile.tobytes() for tile in tiles)).hexdigest()])
    for picture in IMAGES[0]:
        given = processor.image_processor([[picture]], return_tensors="pt")
        arguments = {key: given[key] for key in ARGUMENTS if key in given}
        with torch.no_grad():
            found = model.get_image_features(**arguments, return_dict=True)
        parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        parts = [part if isinstance(part, torch.Tensor) else torch.cat(list(part)) for part in parts]
        one = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], 1)
        vectors.append([[float(f"{x:.7g}") for x in row] for row in one[::3].numpy()])
    texts = texts_of(folder, CONVERSATIONS)
    prompts, tokens = conversation_tokens(model, processor, texts, IMAGES)
    return {**made, "pixels": pixels, "vectors": vectors, "prompts": prompts, "tokens": tokens}


def main():
    made = recorded() if RECORDED.exists() else {}
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            made[name] = record(name, Path(folder))
        print(f"{name}: {len({tuple(one) for one in made[name]['tokens']})} different answers")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in made.items())
    RECORDED.write_text(f'{{"transformers": "{transformers.__version__}", "models": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
