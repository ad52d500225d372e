"""Encoders of images in GGUF files: the same answers as from the directory that they were converted from."""

from __future__ import annotations

import json
import math
import re
from dataclasses import astuple, replace

import numpy as np
import pytest

pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")

from foreword import LLM, SamplingParams
from foreword.engine.build import load
from foreword.errors import ConfigError, ModelError, RequestError
from foreword.models.gguf_names import mmproj_of
from foreword.models.loader import load_model
from foreword.models.vision_files import read_mmproj
from foreword.models.vision_spec import AreaProcessing, GridProcessing
from foreword.native import available
from models import gguf_models
from models.encoder_files import GEMMA4, LFM2, QWEN, encoder_tensors, write_encoder
from models.recorded import make
from models.running import FLOATS
from models.seeing import CONVERSATIONS, recorded, write_seeing_model
from models.tiny import random_tensors

RECORDED = recorded()
OPTIONS = {"executor": "numpy", "max_model_len": 160, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RENAMED = {"<image>": "<image_soft_token>", "<boi>": "<start_of_image>", "<eoi>": "<end_of_image>"}
RENAMED_GEMMA4 = {"<image>": "<|image|>", "<boi>": "<|image>", "<eoi>": "<image|>"}


def decoder_tensors(tensors):
    """The tensors of a decoder by the names that it has alone."""
    own = {}
    for key, value in tensors.items():
        name = re.sub(r"^model\.(text_model|language_model)\.", "model.", key).removeprefix("language_model.")
        parts = ("model.layers.", "model.embed_tokens", "model.norm.", "model.embedding_norm.", "lm_head.")
        if name.startswith((*parts, "model.per_layer_")):
            own[name] = value
    return own


@pytest.fixture(scope="module", params=["idefics3", "gemma3"])
def pair(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("mmproj"))


@pytest.fixture(scope="module", params=QWEN)
def qwen(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module", params=GEMMA4)
def gemma4(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("gemma4"))


@pytest.fixture(scope="module", params=LFM2)
def lfm2(request, tmp_path_factory):
    return made(request.param, tmp_path_factory.mktemp("lfm2"))


def made(name, place, has_sections=True):
    """Name, record, directory, GGUF file of the decoder, and the tensors of the encoder."""
    record = RECORDED[name]
    config = record["files"]["config.json"]
    text = {**config["text_config"], "query_pre_attn_scalar": 8}  # files have that of the width of a head
    record = {**record, "files": {**record["files"], "config.json": {**config, "text_config": text}}}
    tensors = random_tensors(record["shapes"])
    folder = write_seeing_model(place / "folder", record, tensors)
    vocabulary = record["files"]["tokenizer.json"]
    tokens = [*vocabulary["model"]["vocab"], *(one["content"] for one in vocabulary["added_tokens"])]
    tokens += ["~~", *(f"<unused{i}>" for i in range(len(tokens) + 1, text["vocab_size"]))]
    template = record["files"]["chat_template.jinja"]
    renamed = RENAMED if name == "gemma3" else RENAMED_GEMMA4 if name in GEMMA4 else {}
    tokens = [renamed.get(token, token) for token in tokens]
    for old, new in renamed.items():
        template = template.replace(old, new)
    more = {
        "tokenizer.ggml.tokens": ("[str]", tokens), "tokenizer.ggml.merges": ("[str]", ["~ ~"]),
        "tokenizer.ggml.token_type": ("[i32]", [1 if len(token) < 3 else 3 for token in tokens]),
        "tokenizer.ggml.eos_token_id": ("u32", 256), "tokenizer.chat_template": ("str", template),
    }  # fmt: skip
    if name == "gemma3":
        more["gemma3.attention.sliding_window_pattern"] = ("u32", 2)
    if name in QWEN:
        architecture = gguf_models.architecture_of(text)
        sections = [*text["rope_parameters"]["mrope_section"], 0]
        if has_sections:
            more[f"{architecture}.rope.dimension_sections"] = ("[i32]", sections)
        if name == "qwen3.5":
            more |= {"qwen35.rope.dimension_count": ("u32", 8), "qwen35.full_attention_interval": ("u32", 2)}
        elif name.startswith("qwen3"):
            more[f"{architecture}.n_deepstack_layers"] = ("u32", 1)
    (place / "files").mkdir()
    file = gguf_models.write(place / "files" / "model.gguf", text, decoder_tensors(tensors), more)
    return name, record, folder, file, encoder_tensors(name, tensors)


def answers(model, **options):
    with LLM(model, **OPTIONS, **options) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, progress=False)
    return [(list(output.prompt_token_ids), output.outputs[0].token_ids) for output in outputs]


@pytest.mark.one_in(2)
def test_an_encoder_in_a_file_gives_the_answers_of_the_directory(pair, tmp_path):
    name, record, folder, file, tensors = pair
    expected = answers(folder)
    given = write_encoder(tmp_path / "given.gguf", name, record, tensors)
    assert answers(file, mmproj=given) == expected
    beside = write_encoder(file.with_name("mmproj-model-f32.gguf"), name, record, tensors)
    try:
        assert answers(file.parent) == expected
        swapped = {
            re.sub("up|down", lambda m: {"up": "down", "down": "up"}[m[0]], key): x for key, x in tensors.items()
        }
        write_encoder(beside, name, record, swapped)  # as older files have it
        loaded = load_model(file)
        assert loaded.images.weights["layers.1.up"].shape == (48, 32)
        assert np.array_equal(loaded.images.weights["layers.1.up"].dequantize(), tensors["v.blk.1.ffn_up.weight"])
        beside.rename(file.with_name("mmproj-1.gguf"))
        write_encoder(file.with_name("mmproj-2.gguf"), name, record, tensors)
        reason = r"are 2 encoders of images: mmproj-1\.gguf, mmproj-2\.gguf\. Name one"
        with LLM(file, **OPTIONS) as llm, pytest.raises(RequestError, match=reason):
            llm.chat(CONVERSATIONS[1], GREEDY)
    finally:
        for path in file.parent.glob("mmproj*"):
            path.unlink()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", ["numpy", "native"])
def test_an_encoder_of_qwen_in_a_file_gives_the_answers_of_transformers(qwen, tmp_path, kind):
    name, record, folder, file, tensors = qwen
    if kind == "native" and not available():
        pytest.skip("needs the native module")
    given = write_encoder(tmp_path / "given.gguf", name, record, tensors)
    options = {**OPTIONS, "executor": kind, **FLOATS[kind]}
    with LLM(file, mmproj=given, **options) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == record["tokens"]
    of_file, of_folder = load_model(file, mmproj=given), load_model(folder)
    assert_same_encoder(of_file, of_folder, of_file.images.spec)


def assert_same_encoder(of_file, of_folder, ours, rtol=0, atol=0):
    """ours: the spec of the encoder of the file. rtol, atol: of the rotary frequencies of the decoder."""
    theirs = of_folder.images.spec  # files have numbers in float32
    for one, other in zip(astuple(ours.normalization), astuple(theirs.normalization), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7)
    tower = replace(ours.tower, norm_eps=theirs.tower.norm_eps)
    assert math.isclose(ours.tower.norm_eps, theirs.tower.norm_eps, rel_tol=1e-7)
    assert replace(ours, tower=tower, normalization=theirs.normalization) == theirs
    for one, other in zip(of_file.spec.layers, of_folder.spec.layers, strict=True):
        assert (one.rope is None) == (other.rope is None)
        if one.rope is not None and other.rope is not None:
            assert replace(one.rope, inv_freq=other.rope.inv_freq) == other.rope
            np.testing.assert_allclose(one.rope.inv_freq, other.rope.inv_freq, rtol=rtol, atol=atol)
    assert of_file.unread_keys == ()
    assert of_file.images.weights.keys() == of_folder.images.weights.keys()
    for key, tensor in of_file.images.weights.items():
        assert np.array_equal(tensor.dequantize(), of_folder.images.weights[key].dequantize()), key


PROCESSING = ("tile_size", "min_tiles", "max_tiles", "min_image_tokens", "max_image_tokens", "max_pixels_tolerance")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["numpy", "native"])
def test_an_encoder_of_lfm2_vl_in_a_file_gives_the_answers_of_transformers_with_its_processing(lfm2, tmp_path, kind):
    name, record, folder, file, tensors = lfm2
    if kind == "native" and not available():
        pytest.skip("needs the native module")
    given = write_encoder(tmp_path / "given.gguf", name, record, tensors)
    asked = {key: record["files"]["preprocessor_config.json"][key] for key in PROCESSING}
    with LLM(file, mmproj=given, **{**OPTIONS, "executor": kind, **FLOATS[kind]}) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, progress=False, mm_processor_kwargs=asked)
    assert [output.outputs[0].token_ids for output in outputs] == record["tokens"]
    of_file = load_model(file, mmproj=given)
    assert_same_encoder(of_file, load_model(folder), of_file.images.processing.spec(asked))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["numpy", "native"])
def test_an_encoder_of_gemma4_in_a_file_gives_the_answers_of_transformers(gemma4, tmp_path, kind):
    name, record, folder, file, tensors = gemma4
    if kind == "native" and not available():
        pytest.skip("needs the native module")
    of_sounds = {"a.blk.0.attn_q.weight": np.zeros((2, 2), np.float32), "mm.a.fc.weight": np.zeros((2, 2), np.float32)}
    more = {"clip.has_audio_encoder": ("bool", True), "clip.audio.block_count": ("u32", 1)}
    given = write_encoder(tmp_path / "given.gguf", name, record, {**tensors, **of_sounds}, more)
    asked = {"max_soft_tokens": 70}  # files have that of the published models
    options = {**OPTIONS, "executor": kind, **FLOATS[kind], "max_model_len": 200}
    with LLM(file, mmproj=given, **options) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, progress=False, mm_processor_kwargs=asked)
    assert [output.outputs[0].token_ids for output in outputs] == record["tokens"]
    of_file, of_folder = load_model(file, mmproj=given), load_model(folder)
    assert of_file.images.spec.processing == AreaProcessing(**of_area(of_folder, 280))
    ours = of_file.images.processing.spec(asked)
    assert of_folder.images.spec.processing == ours.processing == AreaProcessing(**of_area(of_folder, 70))
    theirs = of_folder.images.spec
    prompt = replace(
        ours.prompt, **{key: getattr(theirs.prompt, key) for key in ("placeholder", "token", "begin", "end")}
    )
    ours = replace(ours, prompt=prompt, sees_all=theirs.sees_all)
    assert_same_encoder(of_file, of_folder, ours, rtol=1e-7, atol=1e-30)  # files have a factor for each frequency
    assert of_file.images.spec.sees_all == of_folder.images.spec.sees_all == (name == "gemma4-large")


def of_area(model, most):
    side = model.images.spec.patch_size * model.images.spec.factor
    return {"multiple": side, "least_pixels": most * side**2, "most_pixels": most * side**2, "fills": True}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clip.vision.projector.scale_factor": ("u32", 1)}, "projector.scale_factor = 1 is not supported"),
        ({"clip.vision.attention.head_count": ("u32", 3)}, "head_dim 10 is not a multiple of 4"),
        ({"clip.vision.projector.scale_factor": ("u32", 64)}, r"max_soft_tokens = 280: 17920 patches in a row have"),
        ({"clip.vision.embedding_length": ("u32", 40)}, r"v\.patch_embd\.weight .* has shape"),
        ({"clip.vision.block_count": ("u32", 3)}, r"tensor v\.blk\.2\.ln1\.weight .* is missing"),
        ({"clip.has_audio_encoder": ("u32", 1)}, "clip.has_audio_encoder is 1, not of type bool"),
    ],
)
def test_an_encoder_of_gemma4_that_is_not_computed_is_refused_by_name(tmp_path, change, reason):
    name, record, _, file, tensors = made("gemma4", tmp_path)
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, change)
    with pytest.raises(ModelError, match=reason):
        load_model(file, mmproj=path)


def test_a_file_of_lfm2_vl_has_the_processing_of_the_published_configurations(lfm2, tmp_path):
    name, record, _, file, tensors = lfm2
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, {"clip.vision.image_resize_algo": None})
    spec = load_model(file, mmproj=path).images.spec
    grid = GridProcessing(512, 2, 10, 2 * 256 * 16**2, 8, has_whole=True)
    assert spec.processing == AreaProcessing(16, 64 * 16**2, 256 * 16**2, 16, grid)
    assert spec.normalization.resample == 2
    cubic = {"clip.vision.image_resize_algo": ("str", "bicubic")}
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, cubic)
    assert load_model(file, mmproj=path).images.spec.normalization.resample == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clip.vision.image_resize_algo": ("str", "nearest")}, "image_resize_algo = 'nearest' is not supported"),
        ({"clip.vision.image_resize_algo": ("u32", 2)}, "image_resize_algo is 2, not of type str"),
        ({"clip.vision.projector.scale_factor": ("u32", 3)}, "tile_size 512 is not a multiple of 24, the pixels of a"),
        ({"clip.vision.projector.scale_factor": ("u32", 4)}, r"(input_norm|mm\.1)\.weight .* has shape"),
        ({"clip.vision.attention.head_count": ("u32", 5)}, "hidden_size 32 is not a multiple of 5 heads"),
        ({"clip.vision.patch_size": ("u32", 16)}, r"v\.patch_embd\.weight .* has shape"),
        ({"clip.vision.image_mean": ("[f32]", [math.nan] * 3)}, r"image_mean is \[nan.*not three finite numbers"),
    ],
)
def test_an_encoder_of_lfm2_vl_that_is_not_computed_is_refused_by_name(lfm2, tmp_path, change, reason):
    name, record, _, file, tensors = lfm2
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, change)
    with pytest.raises(ModelError, match=reason):
        load_model(file, mmproj=path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mm.1.weight": None}, r"tensor mm\.1\.weight \(proj\) (is missing|.*has shape)"),
        ({"mm.2.weight": np.ones((64, 40), np.float32)}, "vectors have 64 numbers, the embeddings of the model 32"),
        ({"mm.1.bias": None}, r"tensor mm\.2\.bias is not part of"),
        ({"mm.input_norm.bias": None}, r"tensor mm\.input_norm\.bias .* is missing"),
        ({"mm.input_norm.weight": None}, r"tensor mm\.input_norm\.bias is not part of"),
        ({"v.position_embd.weight": np.ones((24, 32), np.float32)}, "num_patches = 24 is not a square"),
        ({"v.patch_embd.weight": np.ones((32, 192), np.float32)}, r"v\.patch_embd\.weight .* has shape \(32, 192\)"),
    ],
)
def test_damaged_tensors_of_lfm2_vl_are_refused_by_name(tmp_path, change, reason):
    name, record, _, file, tensors = made("lfm2-vl", tmp_path)
    found = {key: value for key, value in {**tensors, **change}.items() if value is not None}
    with pytest.raises(ModelError, match=reason):
        load_model(file, mmproj=write_encoder(tmp_path / "x.gguf", name, record, found))


def test_a_file_without_bounds_of_pixels_has_those_of_the_published_configurations(qwen, tmp_path):
    name, record, _, file, tensors = qwen
    without = {f"clip.vision.image_{end}_pixels": None for end in ("min", "max")}
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, without)
    processing = load_model(file, mmproj=path).images.spec.processing
    published = (65536, 16777216) if name.startswith("qwen3") else (3136, 12845056)
    assert (processing.least_pixels, processing.most_pixels) == published


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"clip.vision.attention.head_count": ("u32", 3)}, "hidden size 32 is not a multiple of 4 times 3 heads"),
        ({"clip.vision.block_count": ("u32", 3)}, r"tensor v\.blk\.2\.ln1\.weight .* is missing|for each of 3 layers"),
        (
            {"clip.vision.spatial_merge_size": ("u32", 3)},
            r"mm\.0\.weight .* has shape \(128, 128\), expected \(288, 288",
        ),
        ({"clip.vision.image_min_pixels": ("u32", 4096)}, "at least 4096 and at most 2048 pixels"),
        ({"clip.vision.patch_size": ("u32", 14)}, r"v\.patch_embd\.weight .* has shape"),
    ],
)
def test_an_encoder_of_qwen_that_is_not_computed_is_refused_by_name(qwen, tmp_path, change, reason):
    name, record, _, file, tensors = qwen
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, change)
    with pytest.raises(ModelError, match=reason):
        load_model(file, mmproj=path)


def test_queries_keys_and_values_in_one_tensor_with_further_rows_are_refused_with_both_shapes(tmp_path):
    name, record, _, file, tensors = made("qwen3-vl", tmp_path)
    for key in ("v.blk.0.attn_qkv.weight", "v.blk.0.attn_qkv.bias"):
        rows = len(tensors[key])
        more = {**tensors, key: np.concatenate([tensors[key], tensors[key][:8]])}
        path = write_encoder(tmp_path / "x.gguf", name, record, more)
        with pytest.raises(ModelError, match=rf"tensor {key} has shape \({rows + 8},.*, expected \({rows},"):
            load_model(file, mmproj=path)


def test_an_encoder_of_another_model_of_its_family_is_refused(tmp_path):
    name, record, _, file, tensors = made("qwen3-vl", tmp_path)
    other = {**tensors, "mm.2.weight": np.zeros((64, 128), np.float32), "mm.2.bias": np.zeros(64, np.float32)}
    wide = write_encoder(tmp_path / "wide.gguf", name, record, other)
    with pytest.raises(ModelError, match=r"its vectors have 64 numbers, .* of the model 32\. Give the mmproj"):
        load_model(file, mmproj=wide)
    less = {"clip.vision.is_deepstack_layers": ("[bool]", [False, False])}
    without = {key: value for key, value in tensors.items() if "deepstack" not in key}
    path = write_encoder(file.with_name("mmproj-x.gguf"), name, record, without, less)
    reason = "its encoder has features for 0 layers, the decoder takes 1. Use encoder and decoder of the same model"
    with pytest.raises(ModelError, match=re.escape(f"{path}: {reason}")):
        load_model(file, mmproj=path)
    assert reason in load_model(file).no_images  # the file beside it
    (tmp_path / "other").mkdir()
    _, _, _, older, _ = made("qwen2-vl", tmp_path / "other")
    with pytest.raises(ModelError, match="its encoder has features for 1 layers, the decoder takes 0"):
        load_model(older, mmproj=write_encoder(tmp_path / "whole.gguf", name, record, tensors))


def test_metadata_that_contradict_an_encoder_or_have_another_type_are_refused_by_name(tmp_path):
    name, record, _, file, tensors = made("qwen3-vl", tmp_path)
    for key, value, reason in (
        ("clip.has_vision_encoder", ("bool", False), "has_vision_encoder = False is not supported"),
        ("clip.has_vision_encoder", ("u32", 1), "has_vision_encoder is 1, not of type bool"),
        ("clip.has_text_encoder", ("bool", True), "has_text_encoder = True is not supported"),
        ("clip.has_llava_projector", ("str", "x"), "has_llava_projector is 'x', not of type bool"),
        ("clip.use_silu", ("bool", True), "use_gelu and clip.use_silu are both true"),
        ("clip.vision.is_deepstack_layers", ("[str]", ["no", "no"]), "is_deepstack_layers is .*each of 2 layers"),
        ("clip.vision.is_deepstack_layers", ("[bool]", [True]), "is_deepstack_layers is .*each of 2 layers"),
        ("clip.vision.projection_dim", ("u32", 1), "projection_dim = 1, the embeddings of the model have 32"),
        ("clip.vision.projection_dim", ("str", "x"), "projection_dim is 'x', not of type int"),
        ("clip.vision.image_size", ("[i32]", [1]), "image_size is .*, not of type int"),
    ):
        path = write_encoder(tmp_path / "x.gguf", name, record, tensors, {key: value})
        with pytest.raises(ModelError, match=reason):
            load_model(file, mmproj=path)
    patch = "v.patch_embd.weight"
    other = {f"{patch}.7" if key == f"{patch}.1" else key: value for key, value in tensors.items()}
    with pytest.raises(ModelError, match=rf"{patch}"):
        load_model(file, mmproj=write_encoder(tmp_path / "x.gguf", name, record, other))


def test_a_decoder_without_sections_takes_no_vectors_of_rows_and_columns(tmp_path):
    name, record, _, file, tensors = made("qwen2-vl", tmp_path, has_sections=False)
    with pytest.raises(ModelError, match="the rotary positions of the decoder have no sections"):
        load_model(file, mmproj=write_encoder(tmp_path / "x.gguf", name, record, tensors))


def test_a_decoder_of_more_sections_than_the_places_of_vectors_have_numbers_takes_no_images(tmp_path):
    folder = write_seeing_model(tmp_path, RECORDED["qwen3-vl-moe"])
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= {"mrope_section": [1] * 4, "mrope_interleaved": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert "the rotary positions of the decoder have 4 sections" in load_model(folder).no_images


@pytest.mark.parametrize("experts", ["gate_up_proj", "down_proj"])
def test_experts_in_one_tensor_are_read_in_either_order_of_their_dimensions(tmp_path, experts):
    record = RECORDED["qwen3-vl-moe"]
    tensors = random_tensors(record["shapes"])
    folder = write_seeing_model(tmp_path / "as_saved", record, tensors)
    turned = {key: x.swapaxes(1, 2).copy() if key.endswith(experts) else x for key, x in tensors.items()}
    other = write_seeing_model(tmp_path / "as_published", record, turned)
    assert [one[1] for one in answers(other)] == [one[1] for one in answers(folder)] == record["tokens"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": ("str", "llama")}, "architecture 'llama' is not an encoder of images"),
        (
            {"clip.projector_type": ("str", "ldp")},
            "projector 'ldp' is not supported. Supported are gemma3, gemma4v, idefics3, lfm2, qwen2",
        ),
        ({"clip.use_gelu": ("bool", False)}, "hidden_act = 'quick_gelu' is not supported"),
        ({"clip.vision.attention.head_count": ("u32", 5)}, "hidden_size 32 is not a multiple of 5 heads"),
        ({"clip.vision.block_count": ("u32", 3)}, r"tensor v\.blk\.2\.ln1\.weight .* is missing"),
        ({"clip.vision.image_mean": ("[f32]", [math.nan] * 3)}, r"image_mean is \[nan.*not three finite numbers"),
        ({"clip.vision.image_std": ("[f32]", [math.inf] * 3)}, r"image_std is \[inf.*not three finite numbers"),
        ({"clip.vision.feed_forward_length": ("u32", 40)}, r"v\.blk\.0\.ffn_up\.weight .* has shape \(48, 32\)"),
    ],
)
def test_an_encoder_that_is_not_computed_is_refused_by_name(pair, tmp_path, change, reason):
    name, record, _, file, tensors = pair
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, change)
    with pytest.raises(ModelError, match=reason):
        load_model(file, mmproj=path)


def test_a_pool_that_does_not_divide_the_patches_is_refused_by_its_key(pair, tmp_path):
    name, record, _, file, tensors = pair
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, {"clip.vision.projector.scale_factor": ("u32", 3)})
    side = r"projector\.scale_factor 3 does not divide the 4 patches along a side"
    with pytest.raises(ModelError, match=side if name == "gemma3" else "tiles of 28 pixels have 4 patches"):
        load_model(file, mmproj=path)


def test_a_key_of_an_encoder_that_nothing_reads_is_listed(pair, tmp_path):
    name, record, _, file, tensors = pair
    plain = load_model(file, mmproj=write_encoder(tmp_path / "plain.gguf", name, record, tensors))
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, {"clip.vision.zebra": ("u32", 3)})
    assert load_model(file, mmproj=path).unread_keys == (*plain.unread_keys, "clip.vision.zebra")
    assert not any(key.startswith("clip.") for key in plain.unread_keys)


def test_an_encoder_of_another_model_is_refused_with_the_tokens_that_are_missing(pair, tmp_path):
    name, record, _, _, tensors = pair
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors)
    of_model = {"idefics3": "no <image>", "gemma3": "no <image_soft_token> and no <start_of_image> and no <end_of_"}
    with pytest.raises(ModelError, match=f"has {of_model[name]}.*Give the mmproj of this model"):
        read_mmproj(path, load_model(make(tmp_path, "llama3")).tokenizer, 32)


@pytest.mark.parametrize(
    ("model", "names", "chosen"),
    [
        ("a-Q8_0.gguf", ["a-Q8_0.gguf", "mmproj-a-f16.gguf", "mmproj-a-Q8_0.gguf"], "mmproj-a-Q8_0.gguf"),
        ("a-Q4_K_M.gguf", ["mmproj-a-Q8_0.gguf", "mmproj-a-BF16.gguf", "mmproj-a-f32.gguf"], "mmproj-a-BF16.gguf"),
        ("a.gguf", ["mmproj-x.gguf", "a.gguf"], "mmproj-x.gguf"),
        ("a.gguf", ["mmproj-x.gguf", "mmproj-y.gguf"], None),
        ("a.gguf", ["b.gguf", "mmproj-x.txt"], None),
        ("d/a-f16.gguf", ["d/mmproj-x.gguf", "mmproj-x-f16.gguf"], "d/mmproj-x.gguf"),
        ("d/a-f16.gguf", ["mmproj-x.gguf"], None),
        ("d/a-f16-00001-of-00002.gguf", ["mmproj-x.gguf", "e/mmproj-y.gguf"], "mmproj-x.gguf"),
        ("d/a-f16-00001-of-00002.gguf", ["mmproj-x-f16.gguf", "mmproj-x-Q8_0.gguf"], "mmproj-x-f16.gguf"),
        ("d/a-f16-00001-of-00002.gguf", ["mmproj-x.gguf", "d/mmproj-y.gguf"], "d/mmproj-y.gguf"),
        ("d/e/a-f16-00001-of-00002.gguf", ["mmproj-x.gguf"], None),
    ],
)
def test_the_encoder_of_the_format_of_the_model_or_of_a_usual_one_is_chosen(model, names, chosen):
    assert mmproj_of(model, names) == chosen


def test_a_directory_takes_no_encoder_in_a_file_and_a_missing_file_is_named(pair, tmp_path):
    _, _, folder, file, _ = pair
    with pytest.raises(ModelError, match="takes no encoder of images from a GGUF file"):
        load_model(folder, mmproj=tmp_path / "x.gguf")
    with pytest.raises(ModelError, match=r"none\.gguf: cannot be"):
        load_model(file, mmproj=tmp_path / "none.gguf")


@pytest.mark.one_in(2)
def test_a_loaded_model_takes_the_encoder_of_the_options_in_place_of_its_own(pair, tmp_path):
    name, record, folder, file, tensors = pair
    path = write_encoder(tmp_path / "x.gguf", name, record, tensors, {"clip.vision.zebra": ("u32", 3)})
    first = write_encoder(tmp_path / "first.gguf", name, record, tensors, {"clip.vision.lion": ("u32", 3)})
    plain = load_model(file)
    for given in (plain, load_model(file, mmproj=first)):
        made = load(given, "numpy", {"mmproj": str(path)}).loaded
        assert made.unread_keys == (*plain.unread_keys, "clip.vision.zebra")
        assert made.images.weights.keys() == load_model(file, mmproj=first).images.weights.keys()
    assert answers(plain, mmproj=path) == answers(folder)
    with pytest.raises(ModelError, match="takes no encoder of images from a GGUF file"):
        load(load_model(folder), "numpy", {"mmproj": str(path)})
    with pytest.raises(ModelError, match=r"none\.gguf: cannot be"):
        load(plain, "auto", {"mmproj": str(tmp_path / "none.gguf")})


@pytest.mark.parametrize("kind", ["auto", "numpy"])
def test_the_path_of_an_encoder_is_checked_before_a_model_is_read(pair, tmp_path, kind):
    _, _, _, file, _ = pair
    for wrong in (5, ["a.gguf"], b"a.gguf"):
        with pytest.raises(ConfigError, match=re.escape(f"mmproj={wrong!r}: expected")):
            LLM(file, executor=kind, mmproj=wrong)
    for missing in (tmp_path / "none.gguf", str(tmp_path / "none.gguf")):
        with pytest.raises(ModelError, match=r"none\.gguf: cannot be"):
            LLM(file, executor=kind, mmproj=missing)
