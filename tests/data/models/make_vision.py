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

import torch
import transformers
from safetensors import safe_open

from models.seeing import CONVERSATIONS, IMAGES, RECORDED, SIZES, image, recorded, write_seeing_model
from pytorch.vision_models import conversation_tokens, load, save, texts_of

NAMES = ("idefics3", "smolvlm", "gemma3")
NOT_FILES = ("model.safetensors",)


def record(name, folder):
    save(folder, name)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
    files = {
        path.name: json.loads(path.read_text()) if path.suffix == ".json" else path.read_text()
        for path in sorted(folder.iterdir())
        if path.name not in NOT_FILES
    }
    found = {"files": files, "shapes": shapes}
    write_seeing_model(folder, found)
    model, processor = load(folder)
    pixels, vectors = [], []
    for width, height in SIZES:
        given = processor.image_processor([[image(7, width, height)]], return_tensors="pt")
        tiles = given["pixel_values"].reshape(-1, *given["pixel_values"].shape[-3:]).numpy()
        pixels.append([len(tiles), hashlib.sha256(tiles.tobytes()).hexdigest()])
    for picture in IMAGES[0]:
        given = processor.image_processor([[picture]], return_tensors="pt")
        arguments = {"pixel_values": given["pixel_values"]}
        with torch.no_grad():
            one = model.get_image_features(**arguments, return_dict=True).pooler_output
        one = one if isinstance(one, torch.Tensor) else torch.cat(list(one))
        vectors.append([[float(f"{x:.7g}") for x in row] for row in one.reshape(-1, one.shape[-1])[::3].numpy()])
    texts = texts_of(folder, CONVERSATIONS)
    prompts, tokens = conversation_tokens(model, processor, texts, IMAGES)
    return {**found, "pixels": pixels, "vectors": vectors, "prompts": prompts, "tokens": tokens}


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
