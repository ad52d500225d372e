"""Metadata of GGUF files of encoders of images: keys, types and values changed, in files written whole. Loaded and run.

An input is JSON: the name of a recorded tiny model, and key → [type, value].
"""

import json
from functools import cache
from pathlib import Path

import numpy as np

from foreword.executors.vision.encoder import ImageEncoder
from foreword.executors.vision.towers import numpy_tower
from foreword.models.tokenizer import Tokenizer
from foreword.models.vision_files import read_mmproj
from foreword.models.vision_spec import TileProcessing
from fuzz.target import Target
from fuzz.targets.gguf_metadata import mutate
from models.encoder_files import GEMMA4, QWEN, encoder_metadata, encoder_tensors, write_encoder
from models.tiny import random_tensors

RECORDED = json.loads((Path(__file__).parents[2] / "data" / "models" / "vision.json").read_text())["models"]
NAMES = ("idefics3", "gemma3", "lfm2-vl", *GEMMA4, *QWEN)
RENAMED = {
    "gemma3": {"<image>": "<image_soft_token>", "<boi>": "<start_of_image>", "<eoi>": "<end_of_image>"},
    **{key: {"<image>": "<|image|>", "<boi>": "<|image>", "<eoi>": "<image|>"} for key in GEMMA4},
}


def valid():
    return [json.dumps({"name": name, "metadata": encoder_metadata(name, of(name)[0])}).encode() for name in NAMES]


@cache
def of(name):
    """The configuration of the encoder of a tiny model, and its tensors."""
    record = RECORDED[name]
    own = {key: shape for key, shape in record["shapes"].items() if "language_model" not in key}
    return record["files"]["config.json"]["vision_config"], encoder_tensors(name, random_tensors(own))


def tokenizer(name, folder):
    """The tokenizer of a tiny model, with the tokens of its GGUF file."""
    text = json.dumps(RECORDED[name]["files"]["tokenizer.json"])
    for old, new in RENAMED.get(name, {}).items():
        text = text.replace(json.dumps(old), json.dumps(new))
    (folder / "tokenizer.json").write_text(text)
    return Tokenizer.from_directory(folder)


def read(data, folder):
    given = json.loads(data)
    name = given["name"]
    path = write_encoder(folder / "mmproj.gguf", name, RECORDED[name], of(name)[1], given["metadata"])
    loaded = read_mmproj(path, tokenizer(name, folder), 32)
    spec = loaded.spec
    encoder = ImageEncoder(loaded, numpy_tower(spec, loaded.weights), 0)
    is_square = isinstance(spec.processing, TileProcessing)
    side = spec.processing.tile_size if is_square else 2 * spec.patch_size * spec.factor
    encoder.vectors(np.zeros((1, 3, side, side), np.float32))


TARGET = Target(valid, read, mutate)
