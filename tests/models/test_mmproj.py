"""Encoders of images in GGUF files: the same answers as from the directory that they were converted from."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

pytest.importorskip("PIL.Image", reason="needs the extra foreword[images]")

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError, ModelError, RequestError
from foreword.models.loader import load_model
from foreword.models.mmproj import mmproj_of
from foreword.models.quants import Quant
from foreword.models.vision_files import read_mmproj
from models import gguf_models, gguf_writer
from models.recorded import make
from models.seeing import CONVERSATIONS, recorded, write_seeing_model
from models.tiny import random_tensors

RECORDED = recorded()
OPTIONS = {"executor": "numpy", "max_model_len": 160, "block_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RENAMED = {"<image>": "<image_soft_token>", "<boi>": "<start_of_image>", "<eoi>": "<end_of_image>"}
PROJECTORS = {
    "idefics3": {"connector.modality_projection.proj.weight": "mm.model.fc.weight"},
    "gemma3": {
        "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight": "mm.soft_emb_norm.weight",
    },
}
BLOCK = {
    "layer_norm1": "ln1", "layer_norm2": "ln2", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down",
}  # fmt: skip
WHOLE = {
    "embeddings.patch_embedding": "v.patch_embd", "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}  # fmt: skip


def encoder_tensors(name, tensors):
    """The tensors of an encoder by the names of llama.cpp's converter, which adds 1 to one norm."""
    found = {}
    for key, value in tensors.items():
        own = re.sub(r"^(model\.)?(vision_tower|vision_model)\.(vision_model\.)?", "v/", key).removeprefix("model.")
        if own in PROJECTORS[name]:
            found[PROJECTORS[name][own]] = value + (1 if "norm" in own else 0)
        elif layer := re.fullmatch(r"v/encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", own):
            found[f"v.blk.{layer[1]}.{BLOCK[layer[2]]}.{layer[3]}"] = value
        elif (whole := re.fullmatch(r"v/(.+)\.(weight|bias)", own)) and whole[1] in WHOLE:
            found[f"{WHOLE[whole[1]]}.{whole[2]}"] = value
    return found


def write_encoder(path, name, record, tensors, more=()):
    own = record["files"]["config.json"]["vision_config"]
    vision = {
        "image_size": own["image_size"], "patch_size": own["patch_size"], "embedding_length": own["hidden_size"],
        "feed_forward_length": own["intermediate_size"], "block_count": own["num_hidden_layers"],
        "attention.head_count": own["num_attention_heads"], "projection_dim": 32,
    }  # fmt: skip
    if name == "idefics3":
        vision |= {"projector.scale_factor": 2, "preproc_image_size": 56}
    else:
        vision |= {"projector.scale_factor": 1}
    metadata = {
        "general.architecture": ("str", "clip"), "clip.has_vision_encoder": ("bool", True),
        "clip.projector_type": ("str", name), "clip.use_gelu": ("bool", True),
        "clip.vision.attention.layer_norm_epsilon": ("f32", own["layer_norm_eps"]),
        **{f"clip.vision.{key}": ("u32", value) for key, value in vision.items()},
        **{f"clip.vision.image_{key}": ("[f32]", [0.5] * 3) for key in ("mean", "std")},
    }  # fmt: skip
    arrays = {key: (Quant.F32, value.shape, gguf_writer.f32(value).ravel()) for key, value in tensors.items()}
    return gguf_writer.write(path, metadata | dict(more), arrays)


def decoder_tensors(tensors):
    """The tensors of a decoder by the names that it has alone."""
    own = {}
    for key, value in tensors.items():
        name = re.sub(r"^model\.(text_model|language_model)\.", "model.", key).removeprefix("language_model.")
        if name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")):
            own[name] = value
    return own


@pytest.fixture(scope="module", params=["idefics3", "gemma3"])
def pair(request, tmp_path_factory):
    """Name, record, directory, GGUF file of the decoder, and the tensors of the encoder."""
    name, place = request.param, tmp_path_factory.mktemp("mmproj")
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
    if name == "gemma3":
        tokens = [RENAMED.get(token, token) for token in tokens]
        for old, new in RENAMED.items():
            template = template.replace(old, new)
    more = {
        "tokenizer.ggml.tokens": ("[str]", tokens), "tokenizer.ggml.merges": ("[str]", ["~ ~"]),
        "tokenizer.ggml.token_type": ("[i32]", [1 if len(token) < 3 else 3 for token in tokens]),
        "tokenizer.ggml.eos_token_id": ("u32", 256), "tokenizer.chat_template": ("str", template),
    }  # fmt: skip
    if name == "gemma3":
        more["gemma3.attention.sliding_window_pattern"] = ("u32", 2)
    (place / "files").mkdir()
    file = gguf_models.write(place / "files" / "model.gguf", text, decoder_tensors(tensors), more)
    return name, record, folder, file, encoder_tensors(name, tensors)


def answers(model, **options):
    with LLM(model, **OPTIONS, **options) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, progress=False)
    return [(list(output.prompt_token_ids), output.outputs[0].token_ids) for output in outputs]


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general.architecture": ("str", "llama")}, "architecture 'llama' is not an encoder of images"),
        ({"clip.projector_type": ("str", "ldp")}, "projector 'ldp' is not supported. Supported are gemma3, idefics3"),
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


@pytest.mark.parametrize("kind", ["auto", "numpy"])
def test_the_path_of_an_encoder_is_checked_before_a_model_is_read(pair, tmp_path, kind):
    _, _, _, file, _ = pair
    for wrong in (5, ["a.gguf"], b"a.gguf"):
        with pytest.raises(ConfigError, match=re.escape(f"mmproj={wrong!r}: expected")):
            LLM(file, executor=kind, mmproj=wrong)
    for missing in (tmp_path / "none.gguf", str(tmp_path / "none.gguf")):
        with pytest.raises(ModelError, match=r"none\.gguf: cannot be"):
            LLM(file, executor=kind, mmproj=missing)
