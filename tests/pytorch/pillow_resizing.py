"""Image processors of transformers that need torchvision, with Pillow's filters in place of its own.

All but the resizing is theirs: sizes, tiles, normalization, patches and the text of an image.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import transformers as hf
from PIL import Image
from transformers import image_processing_backends


def _resize(images, size, interpolation=None, antialias=True):
    """Images [n, 3, height, width] or one of them, resized to (height, width) by a filter of Pillow, by its number."""
    if images.ndim == 3:
        return _resize(images[None], size, interpolation)[0]
    pictures = (Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images)
    resized = [np.array(picture.resize(size[::-1], resample=interpolation)) for picture in pictures]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def _normalize(images, mean, std, inplace=False):
    return (images - mean[:, None, None]) / std[:, None, None]


def processor_by_pillow(folder, name):
    """The processor of a directory. name: of its module and, with other capitals, of its classes."""
    functional = ModuleType("torchvision.transforms.v2.functional")
    functional.resize, functional.normalize = _resize, _normalize
    functional.InterpolationMode = SimpleNamespace(BILINEAR=2, LANCZOS=1, BICUBIC=3)
    names = functional.__name__.split(".")
    parents = [".".join(names[:end]) for end in range(1, len(names))]
    stand_ins = {parent: ModuleType(parent) for parent in parents} | {functional.__name__: functional}
    stand_ins[parents[-1]].functional = functional
    processing = importlib.import_module(f"transformers.models.{name}.processing_{name}")
    names = [f"transformers.models.{name}.image_processing_{name}", *stand_ins]
    before = {one: sys.modules.pop(one, None) for one in names}
    sys.modules.update(stand_ins)
    try:
        module = importlib.import_module(names[0])
    finally:
        for one, old in before.items():
            sys.modules.pop(one, None)
            if old is not None:
                sys.modules[one] = old
    camel = "".join(part.capitalize() for part in name.split("_"))
    own = {"tvF": functional, "pil_torch_interpolation_mapping": {number: number for number in range(6)}}

    class ByPillow(getattr(module, f"{camel}ImageProcessor")):
        def preprocess(self, *images, **options):
            with patch.multiple(image_processing_backends, create=True, **own):
                return super().preprocess(*images, **options)

    images = ByPillow.from_pretrained(folder)
    kind = unchecked(getattr(processing, f"{camel}Processor"))
    return kind(image_processor=images, tokenizer=hf.AutoTokenizer.from_pretrained(folder))


def unchecked(kind):
    """A class of processors that takes parts of any class, or none."""

    class Unchecked(kind):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    Unchecked.__name__ = kind.__name__
    return Unchecked
