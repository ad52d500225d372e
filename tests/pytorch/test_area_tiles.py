"""Images of LFM2-VL and Gemma 4: sizes, tiles, texts and positions are those of transformers, at any size."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs the extra foreword[torch]")
pytest.importorskip("transformers", reason="needs the extra foreword[transformers]")
pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")

from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from foreword.executors.vision.encoder import resizing
from foreword.executors.vision.processing import _grids, _within_area, division_of, text_of, tiles_of
from foreword.models.tokenizer import Tokenizer
from foreword.models.vision_files import read_processing
from foreword.models.vision_spec import AreaProcessing
from models.seeing import image, recorded, write_seeing_model
from pytorch.pillow_resizing import processor_by_pillow

OPTIONS = [
    {},
    {"do_image_splitting": False},
    {"use_thumbnail": False},
    {"min_image_tokens": 1, "max_image_tokens": 40, "max_pixels_tolerance": 0.4},
    {"min_tiles": 3, "max_tiles": 3, "tile_size": 64},
    {"min_tiles": 1, "max_tiles": 1},
]
SIDES = st.one_of(st.integers(1, 64), st.integers(65, 4000), st.sampled_from([512, 704, 720, 736, 1024]))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The processor of transformers and ours, with the numbers of the published models."""
    record = recorded()["lfm2-vl"]
    files = {**record["files"], "preprocessor_config.json": {}}
    config = files["config.json"]
    files["config.json"] = {**config, "vision_config": {**config["vision_config"], "patch_size": 16}}
    folder = write_seeing_model(tmp_path_factory.mktemp("lfm2"), {**record, "files": files})
    ours = read_processing(folder, Tokenizer.from_directory(folder).added_token_ids, 32)
    assert ours is not None
    return processor_by_pillow(folder, "lfm2_vl"), ours


def theirs(processor, size, options):
    """The rows and columns of the tiles of an image, 1 if it has none, its size as one tile, and its text."""
    how = {name: options.get(name, value) for name, value in processor.image_processor.to_dict().items()}
    if not how["do_image_splitting"]:
        how |= {"min_tiles": 1, "max_tiles": 1}
    width, height = size
    images, sizes = processor.image_processor, {"width": width, "height": height}

    def call(function, *names):
        return function(**sizes, **{name: how[name] for name in names})

    factors = ("downsample_factor", "max_image_tokens", "encoder_patch_size")
    is_large = call(images._is_image_too_large, *factors, "max_pixels_tolerance")
    whole = call(images.smart_resize, *factors, "min_image_tokens")
    columns = rows = 1
    if is_large and not how["min_tiles"] == how["max_tiles"] == 1:
        columns, rows, *_ = call(images._get_grid_layout, "min_tiles", "max_tiles", "tile_size")
    given = {"image_rows": [rows], "image_cols": [columns], "image_sizes": [whole[::-1]]}
    text = processor.replace_image_token(given, 0, use_image_special_tokens=True, **options)
    return rows, columns, whole, text


@pytest.mark.parametrize("options", OPTIONS, ids=json.dumps)
@given(width=SIDES, height=SIDES)
def test_tiles_and_texts_of_images_of_any_size_are_those_of_transformers(both, options, width, height):
    processor, ours = both
    spec = ours.spec(options)
    rows, columns, (across, down), text = theirs(processor, (width, height), options)
    found = division_of((width, height), spec)
    assert (max(found.rows, 1), max(found.columns, 1)) == (rows, columns)
    if found.of_whole:
        assert found.of_whole == (across // 32) * (down // 32)
    assert text_of((width, height), spec) == text


@pytest.mark.parametrize("most", [70, 140, 280, 560, 1120])
@given(width=SIDES, height=SIDES, patch=st.sampled_from([16, 14, 5]), factor=st.integers(2, 4))
def test_sizes_of_images_of_gemma4_are_those_of_transformers(width, height, most, patch, factor):
    area = most * (patch * factor) ** 2
    found = _within_area((width, height), AreaProcessing(patch * factor, area, area, fills=True))
    assert found[::-1] == get_aspect_ratio_preserving_size(height, width, patch, most * factor**2, factor)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=json.dumps)
@pytest.mark.parametrize("size", [(1, 1), (2, 1400), (1400, 2), (736, 736), (520, 1060), (1100, 480)])
def test_pixels_of_images_with_the_published_numbers_are_those_of_transformers(both, options, size):
    processor, ours = both
    spec, picture = ours.spec(options), image(7, *size)
    given = processor.image_processor([[picture]], return_tensors="pt", **options)
    tiles, patches = tiles_of(picture, spec), given["pixel_values"].numpy()
    assert [[one.shape[1] // 16, one.shape[2] // 16] for one in tiles] == given["spatial_shapes"].tolist()
    for tile, rows in zip(tiles, patches, strict=True):
        cut = tile.reshape(3, tile.shape[1] // 16, 16, -1, 16).transpose(1, 3, 2, 4, 0).reshape(-1, 768)
        assert np.array_equal(cut, rows[: len(cut)])
        assert not rows[len(cut) :].any()


def test_grids_are_in_the_order_of_transformers(both):
    """The last of the nearest grids counts, so that the whole order matters."""
    images = both[0].image_processor
    for most in range(1, 24):
        for least in range(1, most + 1):
            assert _grids(least, most) == images._target_ratios(least, most)


@given(st.integers(1, 90), st.integers(2, 90), st.integers(1, 40), st.integers(0, 99))
def test_positions_are_resized_as_by_pytorch(rows, columns, side, seed):
    """In a single column PyTorch repeats the first row, but in a single row no column; a vector of LFM2-VL has at least
    two columns of patches.
    """
    table = np.random.default_rng(seed).standard_normal((side, side, 3), np.float32)
    found = resizing(columns, side) @ (resizing(rows, side) @ table.reshape(side, -1)).reshape(rows, side, 3)
    square = torch.from_numpy(table).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(
        square, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
    )
    np.testing.assert_allclose(found, expected[0].permute(1, 2, 0).numpy(), rtol=0, atol=1e-4)
