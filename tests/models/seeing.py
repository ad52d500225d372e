"""Images and conversations about them, and recorded tiny models of images and texts as directories."""

import base64
import json
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image as pillow

from models.tiny import random_tensors, write_safetensors

RECORDED = Path(__file__).parents[1] / "data" / "models" / "vision.json"


def image(seed, width, height):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return pillow.fromarray(pixels)


def data_url(picture):
    file = BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


A, B = image(0, 60, 40), image(1, 30, 84)
PART_A = {"type": "image", "image": A}
CONVERSATIONS = [
    [{"role": "user", "content": [PART_A, {"type": "text", "text": "what"}, {"type": "image", "image": B}]}],
    [{"role": "system", "content": "brief"}, {"role": "user", "content": [{"type": "text", "text": "see "}, PART_A]}],
    [{"role": "user", "content": "no image"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(A)}}]}],
    [{"role": "user", "content": [{"type": "image", "image": B}]}],
    [{"role": "user", "content": [PART_A, {"type": "text", "text": "what"}, PART_A]}],
]
IMAGES = [[A, B], [A], [], [A], [B], [A, A]]
"""The images of each conversation."""
SIZES = [(60, 40), (30, 84), (28, 28), (5, 3), (100, 1), (1, 90), (57, 57), (300, 200), (29, 28), (45, 45)]
"""Widths and heights of images whose tiles are recorded."""


def recorded():
    """Name → record of a tiny model, see data/models/make_vision.py."""
    return json.loads(RECORDED.read_text())["models"]


def write_seeing_model(folder, record, tensors=None):
    """A directory of the model of a record; its weights are drawn from a seed, or ``tensors``. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in record["files"].items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    tensors = random_tensors(record["shapes"]) if tensors is None else tensors
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
