"""Small models of images and texts without PyTorch: equal to what transformers recorded."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")

from cli.conftest import run_here as run_here
from foreword import LLM, SamplingParams
from foreword.cli.images import read_local_image
from foreword.engine.chat import num_chat_tokens
from foreword.engine.observer import EngineMetrics
from foreword.errors import ConfigError, ContextLengthError, RequestError
from foreword.executors.encoder import EncoderLayers
from foreword.executors.functions import FloatWeights
from foreword.executors.options import NativeOptions
from foreword.executors.vision.encoder import Grid, ImageEncoder
from foreword.executors.vision.processing import division_of, num_vectors, patches_of, text_of, tiles_of
from foreword.executors.vision.towers import native_tower, numpy_tower
from foreword.models.loader import load_model
from foreword.models.vision_spec import CropProcessing
from foreword.native import available
from models.recorded import TINY
from models.running import FLOATS, all_logits
from models.seeing import CONVERSATIONS, IMAGES, PART_A, SIZES, data_url, image, recorded, write_seeing_model
from models.tiny import random_tensors, write_model

RECORDED = recorded()
OPTIONS = {"max_model_len": 160, "block_size": 4}
SEEING_ALL = ("gemma3", "gemma3-crops", "gemma4-large", "qwen3-vl", "qwen3-vl-moe")
"""Models whose vectors see each other, or have features for later layers."""
MADE_SMALLER = ("gemma3", "gemma3-crops", "idefics3", "smolvlm", "lfm2-vl", "lfm2-vl-plain", "gemma4", "gemma4-large")
"""Models whose processors make images smaller, for which Pillow 13, with which they were recorded, rounds otherwise."""
GEMMA4 = ("gemma4", "gemma4-large")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("seeing")
    return {name: write_seeing_model(place / name, record) for name, record in RECORDED.items()}


def executors(name):
    """The kinds of executors that compute images of a model, each with the options of float32."""
    return [kind for kind in FLOATS if kind != "torch" or name not in SEEING_ALL]


@pytest.fixture(params=RECORDED)
def recorded_name(request):
    if request.param in MADE_SMALLER and int(version("pillow").partition(".")[0]) < 13:
        pytest.skip("earlier versions of Pillow make images smaller with other roundings than the recorded ones")
    return request.param


def test_tiles_are_those_of_the_processor_to_the_last_bit(folders, recorded_name):
    spec = load_model(folders[recorded_name]).images.spec
    tiles = [tiles_of(image(7, *size), spec) for size in SIZES]
    digests = (hashlib.sha256(b"".join(tile.tobytes() for tile in one)).hexdigest() for one in tiles)
    assert [list(one) for one in zip(map(len, tiles), digests, strict=True)] == RECORDED[recorded_name]["pixels"]
    side = spec.patch_size * spec.factor
    for size, one in zip(SIZES, tiles, strict=True):
        assert num_vectors(size, spec) == sum((tile.shape[1] // side) * (tile.shape[2] // side) for tile in one)


@pytest.mark.parametrize(("width", "height"), [(1, 200), (200, 1), (1, 199)])
def test_the_thinnest_image_has_a_whole_tile_across(folders, width, height):
    spec = load_model(folders["idefics3"]).images.spec
    tile = spec.processing.tile_size
    spec = replace(spec, processing=replace(spec.processing, longest=7 * tile))
    division = division_of((width, height), spec)
    assert (division.columns, division.rows) == ((7, 1) if width > height else (1, 7))
    assert [one.shape for one in tiles_of(image(7, width, height), spec)] == [(3, tile, tile)] * 8


@pytest.mark.parametrize(
    ("size", "crops"),
    [
        ((512, 512), []),
        ((614, 512), []),  # a ratio below 1.2
        ((640, 512), [(0, 0, 320, 512), (320, 0, 640, 512)]),
        ((500, 300), []),  # crops of 250 pixels
        ((300, 1001), [(0, 0, 300, 334), (0, 334, 300, 668), (0, 668, 300, 1001)]),
        ((4000, 400), [(i * 1000, 0, (i + 1) * 1000, 400) for i in range(4)]),
    ],
)
def test_an_image_has_the_crops_of_pan_and_scan_after_it_as_published(folders, size, crops):
    """With the numbers that transformers has for parameters that a configuration leaves out."""
    spec = load_model(folders["gemma3-crops"]).images.spec
    usual = replace(spec, processing=replace(spec.processing, crops=CropProcessing(256, 4, 1.2)))
    whole = replace(spec, processing=replace(spec.processing, crops=None))
    picture = image(7, *size)
    expected = [tiles_of(part, whole)[0] for part in (picture, *map(picture.crop, crops))]
    assert np.array_equal(tiles_of(picture, usual), expected)
    assert num_vectors(size, usual) == 16 * (1 + len(crops))


def test_pan_and_scan_has_the_numbers_of_transformers_where_the_configuration_has_none(tmp_path):
    files = {**RECORDED["gemma3"]["files"]}
    files["preprocessor_config.json"] = {**files["preprocessor_config.json"], "do_pan_and_scan": True}
    spec = load_model(write_seeing_model(tmp_path, {**RECORDED["gemma3"], "files": files})).images.spec
    assert spec.processing.crops == CropProcessing(256, 4, 1.2)


def test_vectors_are_those_of_the_encoder(folders, recorded_name):
    loaded = load_model(folders[recorded_name]).images
    towers = [numpy_tower(loaded.spec, loaded.weights)]
    if available():
        towers.append(native_tower(loaded.spec, loaded.weights, NativeOptions(weight_format="fp32")))
    for tower in towers:
        encoder = ImageEncoder(loaded, tower, 0)
        for picture, expected in zip(IMAGES[0], RECORDED[recorded_name]["vectors"], strict=True):
            tiles = tiles_of(picture, loaded.spec)
            found = np.concatenate([encoder.vectors(tile[None])[0] for tile in tiles])[::3]
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("layer", [0, 1])
def test_the_features_of_a_layer_are_its_states_without_the_last_norm(folders, layer):
    loaded = load_model(folders["qwen3-vl"]).images
    tower = replace(loaded.spec.tower, layers=loaded.spec.tower.layers[:2])
    spec = replace(loaded.spec, tower=tower, feature_layers=(layer,))
    towers = [numpy_tower(spec, loaded.weights)]
    if available():
        towers.append(native_tower(spec, loaded.weights, NativeOptions(weight_format="fp32")))
    x = np.random.default_rng(0).standard_normal((1, 16, tower.hidden_size), np.float32)
    places = np.stack(np.divmod(np.arange(16), 4), 1)
    until = [(layer + 1, False), (2, tower.has_final_norm)]
    wanted = [
        EncoderLayers(replace(tower, layers=tower.layers[:end], has_final_norm=normed), FloatWeights(loaded.weights))
        for end, normed in until
    ]
    for run in towers:
        for found, layers in zip(run(x, Grid(4, 4)), wanted, strict=True):
            expected = layers.run(x[0], places, np.array([0, 16]), None)
            np.testing.assert_allclose(found[0], expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.one_in(19)
@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in RECORDED for kind in executors(name)])
def test_conversations_with_images_get_the_tokens_of_transformers(folders, name, kind):
    small = {"num_blocks": 42, "watermark": 0.0, "async_scheduling": True, "prefix_caching": False}
    if name == "gemma3":  # two KV groups, and images that a step has whole
        small |= {"num_blocks": 50, "max_model_len": 96, "max_num_batched_tokens": 32, "reserve_full_prompt": False}
    if name == "qwen3.5":  # one of two layers is recurrent
        small |= {"num_blocks": 30, "max_model_len": 60}
    chunked = {"max_num_batched_tokens": 16, "check": "full"}
    if name in GEMMA4:  # images of 60 to 70 vectors; those of the large model are whole in a step
        chunked |= {"max_model_len": 240} | ({"max_num_batched_tokens": 75} if name == "gemma4-large" else {})
        small |= {"num_blocks": 100, "max_model_len": 168, "max_num_batched_tokens": 75, "reserve_full_prompt": False}
    for options in (chunked, small) if name != "gemma3-crops" else ({**chunked, "max_model_len": 400},):
        metrics = EngineMetrics()
        with LLM(folders[name], executor=kind, **FLOATS[kind], **{**OPTIONS, **options}, observers=[metrics]) as llm:
            waves = [llm.chat(CONVERSATIONS, GREEDY, progress=False) for _ in range(2)]
        for wave in waves:
            assert [list(output.prompt_token_ids) for output in wave] == without_vectors(name)
            assert [output.outputs[0].token_ids for output in wave] == RECORDED[name]["tokens"]
        if "num_blocks" in options:
            assert metrics.num_preemptions
        else:
            assert all(output.metrics.num_cached_tokens for output in waves[1])


@pytest.mark.parametrize("name", RECORDED)
def test_tokens_of_conversations_are_counted_without_encoding_images(folders, name, monkeypatch):
    with LLM(folders[name], executor="numpy", max_model_len=400, block_size=4) as llm:
        monkeypatch.setattr(llm.media.encoder.cache, "_encode", lambda image: pytest.fail("an image is encoded"))
        count = partial(num_chat_tokens, llm.tokenizer, params=GREEDY, options={}, media=llm.media)
        prompts = RECORDED[name]["prompts"]
        assert [count(messages=one, max_tokens=400) for one in CONVERSATIONS] == list(map(len, prompts))
        with pytest.raises(ContextLengthError, match="max_model_len is 4"):
            count(messages=CONVERSATIONS[0], max_tokens=4)
        place = llm.media.encoder.placeholders["image"]
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[1\]\.text .*the place of an image"):
            count(messages=[{"role": "user", "content": [PART_A, {"type": "text", "text": place}]}], max_tokens=400)


CROPS = RECORDED["gemma3-crops"]["files"]["preprocessor_config.json"]
CROPS = {key: value for key, value in CROPS.items() if "pan_and_scan" in key}


def test_values_of_the_processor_of_a_request_are_those_of_a_configuration(folders):
    with LLM(folders["gemma3"], executor="numpy", max_model_len=400, block_size=4) as llm:
        for asked, name in ((CROPS, "gemma3-crops"), ({}, "gemma3"), (None, "gemma3")):
            found = llm.chat(CONVERSATIONS, GREEDY, progress=False, mm_processor_kwargs=asked)
            assert [output.outputs[0].token_ids for output in found] == RECORDED[name]["tokens"]
    with LLM(folders["qwen2-vl"], executor="numpy", max_model_len=400, block_size=4) as llm:
        count = partial(num_chat_tokens, llm.tokenizer, params=GREEDY, max_tokens=400, media=llm.media)
        for size in ({"min_pixels": 4096, "max_pixels": 4096}, {"size": {"shortest_edge": 4096, "longest_edge": 4096}}):
            options = {"mm_processor_kwargs": size}
            [output] = llm.chat(CONVERSATIONS[1], GREEDY, progress=False, **options)
            assert output.prompt_token_ids.count(0) == 6 * 4  # patches of 14 × 14 pixels, an area of 4096
            assert count(messages=CONVERSATIONS[1], options=options) == len(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("gemma4", {"max_soft_tokens": 71}, r"max_soft_tokens = 71 is not one of 70, 140, 280, 560, 1120\)\. Give"),
        ("gemma4", {"max_soft_tokens": 560}, "max_soft_tokens = 560: 1120 patches in a row have 560 positions"),
        ("gemma4", {"max_soft_tokens": "70"}, "max_soft_tokens = '70': expected an integer from 1 to 16777216"),
        ("gemma4", {"patch_size": 4}, "patch_size = 4: is not a value of the model's processor"),
        ("gemma4", {"size": {"height": 9, "width": 9}}, "size = .*: is not a value of the model's processor"),
        ("lfm2-vl", {"min_image_tokens": 7}, r"images have at least 7 and at most 6 vectors\)\. Give"),
        ("lfm2-vl", {"max_image_tokens": 1 << 17}, "max_image_tokens = 131072 is not from 1 to 65536"),
        ("lfm2-vl", {"max_image_tokens": "6"}, "max_image_tokens = '6': expected an integer from 1 to 16777216"),
        ("lfm2-vl", {"tile_size": 33}, "tile_size 33 is not a multiple of 16, the pixels of a vector"),
        ("lfm2-vl", {"tile_size": 4096}, "max_tiles = 4 of tile_size 4096 have more than 16777216 pixels"),
        ("lfm2-vl", {"min_tiles": 5}, "min_tiles = 5 and max_tiles = 4 are not 2 or more, and in order"),
        ("lfm2-vl", {"min_tiles": 1}, "min_tiles = 1 and max_tiles = 4 are not 2 or more, and in order"),
        ("lfm2-vl", {"max_tiles": 65}, "max_tiles = 65: expected an integer from 1 to 64"),
        ("lfm2-vl", {"max_pixels_tolerance": 0}, "max_pixels_tolerance = 0: expected a finite number above 0"),
        ("lfm2-vl", {"use_thumbnail": 1}, "use_thumbnail = 1: expected true or false"),
        ("lfm2-vl", {"do_image_splitting": False, "max_tiles": 3}, "max_tiles = 3: has no effect without tiles"),
        ("lfm2-vl", {"size": {"height": 9, "width": 9}}, "size = .*: is not a value of the model's processor"),
        ("lfm2-vl", {"encoder_patch_size": 8}, "encoder_patch_size = 8: is not a value of the model's processor"),
        ("lfm2-vl", {"max_pixels": 900}, "max_pixels = 900: is not a value of the model's processor"),
        ("gemma3", {"do_pan_and_scan": "yes"}, r"kwargs\.do_pan_and_scan = 'yes': expected true or false"),
        ("gemma3", {"pan_and_scan_min_crop_size": 8}, "min_crop_size = 8: has no effect without pan and scan"),
        ("gemma3", {"pan_and_scan_max_num_crops": 65}, "max_num_crops = 65: expected an integer from 1 to 64"),
        ("gemma3", {"pan_and_scan_min_ratio_to_activate": math.nan}, "activate = nan: expected a finite number"),
        (
            "gemma3",
            {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 2},
            "2 is below pan_and_scan_max_num_crops 4",
        ),
        ("gemma3", {"size": {"height": 8, "width": 8}}, "size is .*, not that of the encoder, 28 × 28"),
        ("gemma3", {"max_pixels": 9}, r"mm_processor_kwargs\.max_pixels = 9: is not a value of the model's processor"),
        ("gemma3", {"image_mean": [0, 0, 0]}, r"mm_processor_kwargs\.image_mean = .*: is not a value of the model's"),
        ("gemma3", {"do_pan_and_scam": True}, r"do_pan_and_scam = True: is not a value .*do_pan_and_scan"),
        ("qwen2-vl", {"max_pixels": 9}, r"images have at least 256 and at most 9 pixels\)\. Give"),
        ("idefics3", {"max_image_size": {"longest_edge": 56}}, r"its processor: image_seq_len is 4, a tile has 16"),
        (
            "idefics3",
            {"size": {"longest_edge": 4097}},
            r"kwargs\.size = .*longest_edge, each an integer from 1 to 4096",
        ),
        ("idefics3", {"do_image_splitting": None}, r"kwargs\.do_image_splitting = None: expected true or false"),
        ("qwen2-vl", {"do_pan_and_scan": False}, "do_pan_and_scan = False: is not a value of the model's processor"),
        ("qwen2-vl", {"resample": True}, "resample = True: expected an integer from 0 to 5"),
        ("qwen2-vl", {"size": {"longest_edge": 900}}, "expected a mapping with longest_edge and shortest_edge"),
        ("qwen2-vl", {5: 1}, "the name 5 is not a text"),
        (
            "qwen2-vl",
            {"max_pixels": np.array([1, 2])},
            r"kwargs\.max_pixels = .*: expected an integer from 1 to 16777216",
        ),
        *(
            (
                "qwen2-vl",
                {"max_pixels": value},
                r"kwargs\.max_pixels = .*: expected an integer from 1 to 16777216\. Give",
            )
            for value in ("9", -1, 0, False, "", [], {}, None, 10**30, 1 << 25)
        ),
        ("qwen2-vl", [1], "mm_processor_kwargs = .*is not a mapping"),
    ],
)
def test_values_of_the_processor_that_the_model_does_not_follow_are_refused_by_name(folders, name, asked, reason):
    with LLM(folders[name], executor="numpy", **OPTIONS) as llm:
        for conversation in CONVERSATIONS[1:3]:
            with pytest.raises(RequestError, match=reason):
                llm.chat(conversation, GREEDY, mm_processor_kwargs=asked)


def without_vectors(name):
    """The recorded prompts; tokens that have vectors are 0 in an output."""
    special = RECORDED[name]["files"]["config.json"]
    token = special.get("image_token_id", special.get("image_token_index"))
    return [[0 if one == token else one for one in prompt] for prompt in RECORDED[name]["prompts"]]


@pytest.mark.parametrize("kind", [kind for kind in FLOATS if kind != "torch"])
def test_another_image_in_the_same_place_finds_no_cached_prefix(folders, kind):
    def ask(picture):
        return [{"role": "user", "content": [{"type": "text", "text": "0123"}, {"type": "image", "image": picture}]}]

    with LLM(folders["gemma3"], executor=kind, **FLOATS[kind], **OPTIONS) as llm:
        first, other, same = (llm.chat(ask(image(seed, 28, 28)), GREEDY, progress=False)[0] for seed in (5, 6, 5))
        assert llm.media.encoder.cache.num_bytes == 2 * 16 * 32 * 4
    assert other.metrics.num_cached_tokens < 16 < same.metrics.num_cached_tokens
    assert first.outputs[0].token_ids == same.outputs[0].token_ids


@pytest.mark.skipif(not available(), reason="needs the native module")
@pytest.mark.parametrize("name", ["gemma3", "gemma4-large"])
def test_spans_of_any_length_see_what_the_definition_says(folders, name):
    model = load_model(folders[name])
    rng = np.random.default_rng(3)
    texts, inputs = [], []
    for spans in ([(0, 1)], [(3, 20), (20, 24)], [(5, 61)], [(1, 14), (40, 90)], []):
        length = 100
        embeds = np.zeros((length + 1, model.spec.hidden_size + 1), np.float32)  # one token more than is computed
        is_token = np.ones(length + 1, np.bool_)
        for first, end in spans:
            is_token[first:end] = False
            embeds[first:end, :-1] = rng.standard_normal((end - first, model.spec.hidden_size))
            embeds[first:end, -1] = np.arange(end - first)[::-1]
        texts.append(np.where(is_token[:-1], rng.integers(5, 200, length), 0).tolist())
        inputs.append({"prompt_embeds": embeds, "prompt_is_token_id": is_token} if spans else {})
    whole = [[(i, 100) for i in range(len(texts))]]
    parts = [[(0, 40), (1, 24), (2, 61), (3, 30)], [(4, 100), (0, 60)], [(1, 76), (2, 39), (3, 70)]]
    expected = all_logits(model, texts, whole, "numpy", inputs=inputs)
    for chunks in (whole, parts):
        found = all_logits(model, texts, chunks, "native", block_size=8, inputs=inputs)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=3e-4 * np.abs(other).max())
    causal = replace(model, spec=model.spec.changed(sees_spans=False))
    plain = [{**one, "prompt_embeds": one["prompt_embeds"][:, :-1].copy()} if one else {} for one in inputs]
    others = all_logits(causal, texts, whole, "numpy", inputs=plain)
    assert [np.abs(a - b).max() > 1e-2 for a, b in zip(others, expected, strict=True)] == [
        False,
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("name", "file", "change", "reason"),
    [
        ("idefics3", "preprocessor_config.json", {"do_pan_and_scan": True}, "do_pan_and_scan = True is not supported"),
        (
            "gemma3-crops",
            "preprocessor_config.json",
            {"pan_and_scan_min_crop_size": 2},
            "pan_and_scan_min_crop_size 2 is below pan_and_scan_max_num_crops 3",
        ),
        (
            "gemma3",
            "preprocessor_config.json",
            {"size": {"height": 28, "width": 56}},
            "not that of the encoder, 28 × 28",
        ),
        ("gemma3", "config.json", {"mm_tokens_per_image": 10}, "mm_tokens_per_image"),
        ("gemma3", "config.json", {"boi_token_index": 3}, "its tokenizer has no special tokens of"),
        ("idefics3", "preprocessor_config.json", {"do_resize": False}, "do_resize = False is not supported"),
        ("idefics3", "preprocessor_config.json", {"size": {"height": 8, "width": 8}}, "not a longest_edge"),
        ("idefics3", "preprocessor_config.json", {"max_image_size": {"longest_edge": 35}}, "35 pixels have 5 patches"),
        ("idefics3", "preprocessor_config.json", {"image_std": [1, 0, 1]}, "image_std .* has a zero"),
        ("idefics3", "config.json", {"scale_factor": 3}, "tiles of 28 pixels have 4 patches along a side, not 3"),
        (
            "idefics3",
            "config.json",
            {"image_token_id": -1},
            "image_token_id -1 is not a token of its tokenizer, not that of",
        ),
        ("idefics3", "config.json", {"image_token_id": None}, "image_token_id = None is not supported"),
        ("idefics3", "config.json", {"image_token_id": 256}, "image_token_id 256 is that of '.*, not that of <image>"),
        ("idefics3", "preprocessor_config.json", {"image_mean": [0, 0, math.nan]}, "image_mean is .* finite numbers"),
        ("gemma3", "preprocessor_config.json", {"image_std": [1, math.inf, 1]}, "image_std is .*, not three finite"),
        ("gemma3", "preprocessor_config.json", {"rescale_factor": 1e300}, r"rescale_factor 1e\+300, .* not finite"),
        ("gemma3", "preprocessor_config.json", {"image_seq_length": 4}, "image_seq_length is 4, a tile has 16 vectors"),
        ("idefics3", "processor_config.json", {"image_seq_len": 5}, "image_seq_len is 5, a tile has 4 vectors"),
        ("idefics3", "preprocessor_config.json", None, "has no preprocessor_config.json"),
        ("qwen2-vl", "preprocessor_config.json", {"merge_size": 4}, "merge_size is 4, that of the encoder is 2"),
        ("qwen2-vl", "preprocessor_config.json", {"size": {"height": 9, "width": 9}}, "not pixels of shortest_edge"),
        ("qwen2-vl", "preprocessor_config.json", {"min_pixels": 9999}, "at least 9999 and at most 2048 pixels"),
        ("qwen2-vl", "preprocessor_config.json", {"min_pixels": 0}, "min_pixels = 0 is not from 1 to 16777216"),
        ("qwen2-vl", "preprocessor_config.json", {"max_pixels": False}, "max_pixels is False, not of type int"),
        ("gemma3", "preprocessor_config.json", {"pan_and_scan_max_num_crops": 65}, "crops = 65 is not from 1 to 64"),
        ("qwen2-vl", "config.json", {"image_token_id": 3}, "its tokenizer has no token of image_token_id"),
        ("qwen3-vl", "config.json", {"vision_config": {"depth": 2}}, "deepstack_visual_indexes has 8, not an integer"),
        ("gemma4", "preprocessor_config.json", {"patch_size": 8}, "patch_size is 8, that of the encoder is 4"),
        (
            "gemma4",
            "preprocessor_config.json",
            {"pooling_kernel_size": 3},
            "pooling_kernel_size is 3, that of the encoder is 2",
        ),
        ("gemma4", "preprocessor_config.json", {"max_soft_tokens": 90}, "max_soft_tokens = 90 is not one of 70, 140"),
        ("gemma4", "preprocessor_config.json", {"do_rescale": False}, "do_rescale = False is not supported"),
        ("gemma4", "preprocessor_config.json", {"do_normalize": 1}, "do_normalize is 1, not of type bool"),
        ("gemma4", "config.json", {"boi_token_id": 3}, "its tokenizer has no special tokens of image_token_id, boi_"),
        ("lfm2-vl", "config.json", {"vision_feature_layer": -2}, "vision_feature_layer = -2 is not supported"),
        ("lfm2-vl", "config.json", {"projector_hidden_act": "tanh"}, "projector_hidden_act = 'tanh' is not supported"),
        ("lfm2-vl", "config.json", {"projector_bias": False}, r"multi_modal_projector\.linear_1\.bias is not part of"),
        ("lfm2-vl", "config.json", {"projector_hidden_size": 48}, r"linear_1\.weight .* has shape \(40, 128\)"),
        ("lfm2-vl", "config.json", {"image_token_id": 3}, "its tokenizer has no token of image_token_id"),
        ("lfm2-vl", "config.json", {"downsample_factor": 4}, "downsample_factor is 2, that of the encoder is 4"),
        (
            "lfm2-vl",
            "preprocessor_config.json",
            {"encoder_patch_size": 16},
            "encoder_patch_size is 16, .* encoder is 8",
        ),
        ("lfm2-vl", "preprocessor_config.json", {"tile_size": 40}, "tile_size 40 is not a multiple of 16"),
        ("lfm2-vl", "preprocessor_config.json", {"min_tiles": 1}, "min_tiles = 1 and max_tiles = 4 are not 2 or more"),
        ("lfm2-vl", "preprocessor_config.json", {"min_image_tokens": 9}, "at least 9 and at most 6 vectors"),
        ("lfm2-vl", "preprocessor_config.json", {"do_normalize": False}, "do_normalize = False is not supported"),
        ("lfm2-vl", "preprocessor_config.json", {"use_thumbnail": "no"}, "use_thumbnail is 'no', not of type bool"),
        ("lfm2-vl", "processor_config.json", {"use_image_special_tokens": 1}, "special_tokens is 1, not of type bool"),
    ],
)
def test_images_that_are_not_computed_are_refused_by_name_and_texts_are_not(tmp_path, name, file, change, reason):
    record = RECORDED[name]
    files = {**record["files"], file: {**record["files"][file], **(change or {})}}
    if change is None:
        del files[file]
    write_seeing_model(tmp_path, {**record, "files": files})
    with LLM(tmp_path, executor="numpy", **OPTIONS) as llm:
        with pytest.raises(RequestError, match=rf"messages\[0\]\.content\[0\].*the model takes no image: .*{reason}"):
            llm.chat(CONVERSATIONS[0], GREEDY)
        assert llm.chat(CONVERSATIONS[2], GREEDY, progress=False)[0].outputs[0].token_ids == record["tokens"][2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_clipped_linears": False}, r"self_attn\.o_proj\.bounds|\.bounds is not part of a gemma4 encoder"),
        ({"standardize": True}, r"tensor vision\.std_bias \(std_bias\) is missing"),
        ({"num_key_value_heads": 3}, "2 heads are not a multiple of num_key_value_heads = 3"),
        ({"num_key_value_heads": 1}, r"k_proj\.linear\.weight .* has shape"),
        ({"head_dim": 18}, "head_dim 18 is not a multiple of 4"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters .* are not supported"),
        ({"hidden_activation": "tanh"}, "hidden_activation = 'tanh' is not supported"),
        ({"pooling_kernel_size": 1}, "pooling_kernel_size is 2, that of the encoder is 1"),
        ({"position_embedding_size": 139}, "max_soft_tokens = 70: 140 patches in a row have 139 positions"),
        ({"position_embedding_size": 500}, r"position_embedding_table .* has shape \(2, 560, 32\)"),
        ({"patch_size": 4096}, "patch_size is 4, that of the encoder is 4096"),
    ],
)
def test_an_encoder_of_gemma4_that_is_not_computed_is_refused_by_name(tmp_path, change, reason):
    files = {**RECORDED["gemma4"]["files"]}
    config = files["config.json"]
    files["config.json"] = {**config, "vision_config": {**config["vision_config"], **change}}
    folder = write_seeing_model(tmp_path, {**RECORDED["gemma4"], "files": files})
    assert re.search(reason, load_model(folder).no_images)


def test_bounds_that_are_missing_and_inputs_of_layers_of_another_token_are_refused_by_name(tmp_path):
    record = RECORDED["gemma4"]
    tensors = random_tensors(record["shapes"])
    del tensors["model.vision_tower.encoder.layers.1.mlp.up_proj.output_max"]
    reason = load_model(write_seeing_model(tmp_path / "bounds", record, tensors)).no_images
    assert "tensor vision.encoder.layers.1.mlp.up_proj.bounds (layers.1.up_bounds) is missing" in reason
    config = record["files"]["config.json"]
    own = {**config, "text_config": {**config["text_config"], "pad_token_id": 3}}
    files = {**record["files"], "config.json": own}
    reason = load_model(write_seeing_model(tmp_path / "padding", {**record, "files": files})).no_images
    assert "text_config.pad_token_id is 3, not 0" in reason


def test_the_number_of_positions_must_be_a_square_and_patches_rows_of_pixels(tmp_path):
    record = RECORDED["lfm2-vl"]
    config = record["files"]["config.json"]
    own = {**config, "vision_config": {**config["vision_config"], "num_patches": 24}}
    files = {**record["files"], "config.json": own}
    reason = load_model(write_seeing_model(tmp_path / "positions", {**record, "files": files})).no_images
    assert "vision_config.num_patches = 24 is not a square" in reason
    tensors = random_tensors(record["shapes"])
    key = "model.vision_tower.embeddings.patch_embedding.weight"
    for damaged in (tensors[key][:, :-1], tensors[key][:-1]):
        folder = write_seeing_model(tmp_path / "patches", record, {**tensors, key: damaged.copy()})
        assert re.search(r"patch_embedding\.weight .* has shape", load_model(folder).no_images)
    del tensors["model.multi_modal_projector.layer_norm.bias"]
    reason = load_model(write_seeing_model(tmp_path / "norm", record, tensors)).no_images
    assert "tensor multi_modal_projector.layer_norm.bias (proj_norm_bias) is missing" in reason


def test_an_image_has_no_text_around_its_vectors_if_its_processor_says_so(tmp_path, folders):
    files = {**RECORDED["lfm2-vl"]["files"]}
    files["processor_config.json"] = {**files["processor_config.json"], "use_image_special_tokens": False}
    folder = write_seeing_model(tmp_path, {**RECORDED["lfm2-vl"], "files": files})
    spec, usual = (load_model(one).images.spec for one in (folder, folders["lfm2-vl"]))
    for size in SIZES:
        assert (
            text_of(size, spec) == "<image>" * num_vectors(size, spec) == re.sub(r"<\|.*?\|>", "", text_of(size, usual))
        )


@pytest.mark.parametrize("name", RECORDED)
def test_keys_of_encoders_that_nothing_reads_are_listed_and_no_others(folders, tmp_path, name):
    files = {**RECORDED[name]["files"]}
    config, images = files["config.json"], files["preprocessor_config.json"]
    tower = {**config["vision_config"], "zebra": 1}
    files["config.json"] = {**config, "zebra": 2, "vision_config": tower}
    files["preprocessor_config.json"] = {**images, "zebra": 3}
    files["processor_config.json"] = {**files["processor_config.json"], "zebra": 4}
    found = load_model(write_seeing_model(tmp_path, {**RECORDED[name], "files": files})).unread_keys
    added = ["vision_config.zebra", "preprocessor_config.json: zebra", "processor_config.json: zebra", "zebra"]
    assert found == (*load_model(folders[name]).unread_keys, *added)
    assert all(key.startswith("tokenizer_config.json: ") for key in load_model(folders[name]).unread_keys)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
@pytest.mark.parametrize("end", ["weight", "bias"])
def test_queries_keys_and_values_in_one_tensor_with_further_rows_are_refused_with_both_shapes(tmp_path, name, end):
    tensors = random_tensors(RECORDED[name]["shapes"])
    key = next(one for one in tensors if one.endswith(f"visual.blocks.0.attn.qkv.{end}"))
    tensors[key] = np.concatenate([tensors[key], tensors[key][:8]])
    reason = load_model(write_seeing_model(tmp_path, RECORDED[name], tensors)).no_images
    assert re.search(rf"blocks\.0\.attn\.qkv\.{end} has shape \(104,.*, expected \(96,", reason)


@pytest.mark.parametrize(("name", "key"), [("qwen2-vl", "hidden_size"), ("qwen3-vl", "out_hidden_size")])
def test_an_encoder_of_another_width_than_the_decoder_is_refused_by_its_key(tmp_path, name, key):
    files = RECORDED[name]["files"]
    config = {**files["config.json"], "vision_config": {**files["config.json"]["vision_config"], key: 64}}
    record = {**RECORDED[name], "files": {**files, "config.json": config}}
    reason = load_model(write_seeing_model(tmp_path, record)).no_images
    assert f"vision_config.{key} 64 is not the hidden_size of the decoder, 32" in reason


def test_a_model_whose_text_alone_is_run_names_the_executor_of_its_encoders(tmp_path, run_here):
    name, tiny = "gemma3n", TINY["gemma3n"]
    tensors = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in random_tensors(tiny["shapes"]).items()
    }
    outer = {"model_type": name, "text_config": tiny["config"], "vision_config": {"hidden_size": 4}, "vocab_size": 48}
    folder = write_model(tmp_path / "model", outer, tensors)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<image>{% endfor %}")
    reason = "this executor runs its text model alone; executor='transformers' runs its encoders, too"
    with LLM(folder, executor="numpy", max_model_len=60, block_size=4) as llm:
        with pytest.raises(RequestError, match=f"the model takes no image: {reason}"):
            llm.chat(CONVERSATIONS[1], GREEDY)
        with pytest.raises(ConfigError, match=f"takes no images: {reason}"):
            read_local_image(llm, Path("a.png"), "--image")
    status, shown, error = run_here("models", "info", folder)
    assert status == 0, error
    assert reason in " ".join(shown.split())


@pytest.mark.skipif("torch" not in FLOATS, reason="needs PyTorch")
@pytest.mark.parametrize(
    ("name", "reason"), [("gemma3", "see later ones of their image"), ("qwen3-vl", "are added in later layers, too")]
)
def test_an_executor_that_does_not_compute_what_images_need_refuses_them(folders, name, reason):
    message = rf"takes no image: its vectors {reason}, which executor 'torch' does not.* use 'native' or 'numpy'"
    with (
        LLM(folders[name], executor="torch", **FLOATS["torch"], **OPTIONS) as llm,
        pytest.raises(RequestError, match=message),
    ):
        llm.chat(CONVERSATIONS[0], GREEDY)


@pytest.mark.parametrize(("name", "place"), [("idefics3", "<image>"), ("gemma3", "<boi>")])
def test_the_place_of_an_image_in_the_text_of_a_message_is_refused_with_the_message(folders, name, place):
    begin = {"role": "user", "content": [PART_A, {"type": "text", "text": "what"}]}
    answer, part = {"role": "assistant", "content": f"a{place}"}, {"type": "text", "text": f"{place} b"}
    with LLM(folders[name], executor="numpy", **OPTIONS) as llm:
        for messages, field in (
            ([begin, answer, CONVERSATIONS[2][0]], r"messages\[1\]\.content"),
            ([{"role": "user", "content": [PART_A, part]}], r"messages\[0\]\.content\[1\]\.text"),
        ):
            with pytest.raises(RequestError, match=f"^{field} = .*: has {place}, the place of .*Leave {place} out"):
                llm.chat(messages, GREEDY, progress=False)


def test_an_image_of_a_span_must_fit_in_a_step(folders):
    with (
        LLM(folders["gemma3"], executor="numpy", **OPTIONS, max_num_batched_tokens=15) as llm,
        pytest.raises(RequestError, match=r"more positions than the 15 of a step.*max_num_batched_tokens"),
    ):
        llm.chat(CONVERSATIONS[1], GREEDY)


@pytest.mark.parametrize(
    ("name", "sizes", "most", "field", "reason"),
    [
        ("qwen2-vl", [(300, 200)], 5, 0, r"'300 × 200 pixels': becomes 6 vectors: max_model_len is 5"),
        ("idefics3", [(100, 84)], 19, 0, r"'100 × 84 pixels': becomes 20 vectors: max_model_len is 19"),
        ("gemma3", [(28, 28), (90, 9)], 20, 1, r"'90 × 9 pixels': .* 16 vectors, and those before it 16: .* is 20"),
    ],
)
def test_images_that_do_not_fit_are_refused_before_any_is_encoded(
    folders, monkeypatch, name, sizes, most, field, reason
):
    content = [{"type": "image", "image": image(1, *size)} for size in sizes]
    with LLM(folders[name], executor="numpy", max_model_len=most, block_size=4) as llm:
        monkeypatch.setattr(llm.media.encoder.cache, "_encode", None)
        with pytest.raises(ContextLengthError, match=reason) as found:
            llm.chat([{"role": "user", "content": content}], GREEDY)
    assert found.value.field == f"messages[0].content[{field}]"
    assert found.value.num_tokens > found.value.max_model_len == most


def test_the_images_of_a_command_are_seen(folders, tmp_path, run_here):
    file = tmp_path / "a.png"
    PART_A["image"].save(file)
    given = ("-m", folders["idefics3"], "--executor", "numpy", "--max-model-len", 160, "--image", file, "--json")
    status, shown, error = run_here("run", "what", *given, "--max-tokens", 4, "--ignore-eos")
    assert status == 0, error
    with LLM(folders["idefics3"], executor="numpy", **OPTIONS) as llm:
        [output] = llm.chat(
            [{"role": "user", "content": [PART_A, {"type": "text", "text": "what"}]}],
            SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
            progress=False,
        )
    assert str(output.outputs[0].token_ids) in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (data_url(PART_A["image"]), r"cannot be read \(.*Give the path of a file"),
        ("http://localhost/a.png", "file not found. Give the path of a file"),
        ("none.png", "file not found. Give the path of a file"),
        ("damaged.png", "60 × 40 pixels': is damaged"),
        ("text.png", "5 bytes': is not an image"),
    ],
)
def test_the_image_of_a_command_is_a_file_that_errors_name_and_no_url(folders, tmp_path, monkeypatch, given, reason):
    monkeypatch.chdir(tmp_path)
    PART_A["image"].save("a.png")
    Path("damaged.png").write_bytes(Path("a.png").read_bytes()[:2000])
    Path("text.png").write_text("hello")
    path = Path(given)
    with (
        LLM(folders["idefics3"], executor="numpy", **OPTIONS) as llm,
        pytest.raises(RequestError, match=f"--image '{re.escape(str(path)[:70])}.*{reason}"),
    ):
        read_local_image(llm, path, "--image")


def test_directories_of_the_older_form_give_the_same_answers(tmp_path):
    """Qwen's with the keys of the text model beside vision_config, Gemma's and LFM2-VL's with a further prefix of
    names.
    """
    record = RECORDED["qwen2.5-vl"]
    config = record["files"]["config.json"]
    text = dict(config["text_config"])
    rope = text.pop("rope_parameters")
    section = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": section}
    del flat["text_config"]
    qwen = write_seeing_model(
        tmp_path / "qwen",
        {**record, "files": {**record["files"], "config.json": flat}},
        {
            name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
            for name, tensor in random_tensors(record["shapes"]).items()
        },
    )
    gemma, lfm = (
        write_seeing_model(
            tmp_path / name,
            RECORDED[name],
            {
                key.replace("vision_tower.", "vision_tower.vision_model."): tensor
                for key, tensor in random_tensors(RECORDED[name]["shapes"]).items()
            },
        )
        for name in ("gemma3", "lfm2-vl")
    )
    for folder, name in ((qwen, "qwen2.5-vl"), (gemma, "gemma3"), (lfm, "lfm2-vl")):
        with LLM(folder, executor="numpy", **OPTIONS) as llm:
            outputs = llm.chat(CONVERSATIONS[:2], GREEDY, progress=False)
        assert [output.outputs[0].token_ids for output in outputs] == RECORDED[name]["tokens"][:2]


def test_pixels_beyond_the_whole_patches_of_a_tile_are_in_none(folders):
    images = load_model(folders["idefics3"]).images
    assert images is not None
    spec = replace(images.spec, patch_size=14, factor=3)
    assert spec.num_vectors(384, 384) == 81  # 27 patches along a side, as of SmolVLM with 2.2 B
    pixels = np.random.default_rng(1).random((2, 3, 31, 44), np.float32)
    assert np.array_equal(patches_of(pixels, 14), patches_of(pixels[:, :, :28, :42], 14))
