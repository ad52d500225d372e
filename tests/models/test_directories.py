"""Directories of safetensors: shards, and configuration, index and weights that do not belong together."""

import json
import os
import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from talking_model import write_talking_model

from foreword import LLM
from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.families import FAMILIES
from foreword.models.families.base import SAFETENSORS_NAMES, Rows
from foreword.models.loader import load_model
from foreword.native import available
from models.pooling_models import POOLING
from models.quantized_checkpoints import draw_fp8
from models.recorded import TINY, assert_logits, make
from models.tiny import random_tensors, write_model, write_safetensors

NAMES = list(TINY["llama3"]["shapes"])
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def shards(tmp_path):
    """A model in two shards: its directory, and a function that writes its index with changes."""
    folder = make(tmp_path, "llama3")
    tensors = random_tensors(TINY["llama3"]["shapes"])
    (folder / "model.safetensors").unlink()
    for start, file in enumerate(FILES):
        write_safetensors(folder / file, {name: tensors[name] for name in NAMES[start::2]})

    def index(**changes):
        found = {name: FILES[i % 2] for i, name in enumerate(NAMES)} | changes
        found = {name: file for name, file in found.items() if file != ""}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))
        return folder

    return index


def test_a_model_in_shards_has_its_logits(shards):
    assert_logits(load_model(shards()), "llama3")


def test_a_tensor_is_read_from_the_shard_that_the_index_names(shards):
    folder = shards()
    tensors = random_tensors(TINY["llama3"]["shapes"])
    others = {NAMES[0]: np.zeros_like(tensors[NAMES[0]])} | {name: tensors[name] for name in NAMES[1::2]}
    write_safetensors(folder / FILES[1], others)
    assert_logits(load_model(folder), "llama3")


def test_an_absent_shard_is_named(shards):
    folder = shards()
    (folder / FILES[1]).unlink()
    with pytest.raises(ModelError, match=rf"{FILES[1]}: cannot be read \(No such file or directory\)"):
        load_model(folder)


def test_an_index_that_names_an_absent_file_is_refused(shards):
    with pytest.raises(ModelError, match=r"model-00003-of-00002\.safetensors: cannot be read"):
        load_model(shards(**{NAMES[4]: "model-00003-of-00002.safetensors"}))


def test_a_tensor_that_its_shard_lacks_is_named(shards):
    with pytest.raises(ModelError, match=rf"{FILES[1]}: lacks tensor '{NAMES[0]}', which model.* says it has"):
        load_model(shards(**{NAMES[0]: FILES[1]}))


def test_a_tensor_that_the_index_lacks_is_missing(shards):
    with pytest.raises(ModelError, match=rf"tensor {NAMES[2]} .* is missing"):
        load_model(shards(**{NAMES[2]: ""}))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b", 5, None, ["a"], {}])
def test_an_index_that_names_a_file_elsewhere_is_refused(shards, file):
    with pytest.raises(ModelError, match=r"index\.json: tensor 'x' is in .*, not in a file beside it"):
        load_model(shards(x=file))


def test_half_a_shard_is_refused(shards):
    folder = shards()
    data = (folder / FILES[0]).read_bytes()
    (folder / FILES[0]).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match=rf"{FILES[0]}: tensor .* does not fit bytes"):
        load_model(folder)


def changed(folder, config=(), **tensors):
    """llama3 with changes to its configuration and tensors; a tensor of None is left out."""
    tiny = TINY["llama3"]
    found = random_tensors(tiny["shapes"]) | {name.replace("__", "."): value for name, value in tensors.items()}
    found = {name: value for name, value in found.items() if value is not None}
    return write_model(folder / "model", {**tiny["config"], **dict(config)}, found)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.3\.\S+ is not part of a llama model as configured"),
        ({"num_hidden_layers": 5}, r"tensor model\.layers\.4\.\S+ \(layers\.4\.attn_norm\) is missing"),
        ({"vocab_size": 64}, r"tensor model\.embed_tokens\.weight \(embed\) has shape \(48, 32\), expected \(64, 32\)"),
        ({"intermediate_size": 80}, r"gate_proj\.weight \(layers\.0\.gate\) has shape \(40, 32\), expected \(80, 32\)"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight \(layers\.0\.k\) has shape \(16, 32\), expected \(32, 32\)"),
        ({"model_type": "qwen2"}, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias \(layers\.0\.q_bias\) is missing"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config says fp8, but no weight is stored so"),
    ],
)
def test_a_configuration_of_another_model_is_refused(tmp_path, config, message):
    with pytest.raises(ModelError, match=message):
        load_model(changed(tmp_path, config))


def test_a_bias_that_the_model_does_not_add_is_refused_unless_it_is_zero(tmp_path):
    name = "model__layers__1__mlp__down_proj__bias"
    with pytest.raises(ModelError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.bias is not part of a llama model"):
        load_model(changed(tmp_path, **{name: np.ones(32, "<f4")}))
    assert_logits(load_model(changed(tmp_path, **{name: np.zeros(32, "<f4")})), "llama3")


def test_frequencies_and_heads_beside_the_model_are_left_out(tmp_path):
    extra = {
        "model__layers__0__self_attn__rotary_emb__inv_freq": np.ones(4, "<f4"),
        "score__weight": np.ones((2, 32), "<f4"),
    }
    assert_logits(load_model(changed(tmp_path, **extra)), "llama3")


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("gpt2", "transformer.h.{}.attn.bias"),
        ("codegen", "transformer.h.{}.attn.causal_mask"),
        ("gpt-neo", "transformer.h.{}.attn.attention.bias"),
        ("gpt-neox", "gpt_neox.layers.{}.attention.bias"),
    ],
)
def test_masks_beside_the_model_are_left_out(tmp_path, name, masks):
    """Checkpoints have a mask of 0 and 1 for each layer, and a number that stands for minus infinity."""
    tensors = random_tensors(TINY[name]["shapes"])
    for layer in range(4):
        mask = masks.format(layer)
        tensors |= {
            mask: np.tri(64, dtype="<f4")[None, None],
            f"{mask.rpartition('.')[0]}.masked_bias": np.full(1, -1e4, "<f4"),
        }
    assert_logits(load_model(write_model(tmp_path, TINY[name]["config"], tensors)), name)


def test_a_head_by_an_older_name_that_differs_from_the_embedding_is_used_whatever_the_configuration_says(tmp_path):
    tensors = random_tensors(TINY["gpt-neox"]["shapes"])
    older = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in tensors.items()}
    config = TINY["gpt-neox"]["config"] | {"tie_word_embeddings": True}
    assert_logits(load_model(write_model(tmp_path, config, older)), "gpt-neox")


@pytest.mark.parametrize(
    "name", ["zebra", "model__zebra__weight", "model__norm__scale", "v_head__weight", "model__embed_tokens__lora_A"]
)
def test_a_tensor_that_the_model_does_not_use_is_refused_wherever_it_is(tmp_path, name):
    with pytest.raises(ModelError, match=rf"tensor {re.escape(name.replace('__', '.'))} is not part of a llama model"):
        load_model(changed(tmp_path, **{name: np.ones((2, 32), "<f4")}))


def fused_tensors():
    """(tiny model, its tensor of several weights) of every decoder that has one: the one of its first such layer."""
    found = {}
    for name, tiny in TINY.items():
        family = FAMILIES[tiny["config"]["model_type"]]
        spec = family.read(Config(Path("config.json"), tiny["config"]))
        names = {**SAFETENSORS_NAMES, **family.names, **family.fused(spec)}
        for source in {rows.name for rows in names.values() if isinstance(rows, Rows)} & names.keys():
            tensor = re.escape(str(names[source])).replace(r"\{i\}", r"\d+").replace(r"\{e\}", r"\d+")
            held = next((one for one in tiny["shapes"] if re.fullmatch(tensor, one)), None)
            if held:
                found.setdefault((tiny["config"]["model_type"], source), (name, held))
    return sorted(found.values())


def test_decoders_with_tensors_of_several_weights_are_found():
    assert {name for name, _ in fused_tensors()} >= {"phi3", "qwen3_5", "granite-hybrid", "qwen3-next"}


@pytest.mark.parametrize(("name", "tensor"), fused_tensors())
def test_a_tensor_of_several_weights_that_is_longer_along_any_axis_is_refused_with_both_shapes(tmp_path, name, tensor):
    tensors = random_tensors(TINY[name]["shapes"])
    for axis in range(tensors[tensor].ndim):
        changed = {**tensors, tensor: np.concatenate([tensors[tensor]] * 2, axis)}
        with pytest.raises(ModelError, match=rf"tensor {re.escape(tensor)} .*shape \([\d, ]+\).*, expected \("):
            load_model(write_model(tmp_path, TINY[name]["config"], changed))


@pytest.mark.parametrize("name", ["gpt-neox", "bloom", "persimmon"])
def test_a_bias_of_several_weights_that_lacks_a_number_is_refused_with_its_shape(tmp_path, name):
    tensors = random_tensors(TINY[name]["shapes"])
    bias = next(key for key in tensors if key.endswith("query_key_value.bias"))
    folder = write_model(tmp_path, TINY[name]["config"], {**tensors, bias: tensors[bias][:-1]})
    with pytest.raises(ModelError, match=rf"{bias} \(layers\.0\.q_bias\) has shape \({len(tensors[bias]) - 1},\)"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "tensor"), [("roberta", "embeddings.position_embeddings.weight"), ("modernbert", "layers.0.mlp.Wi.weight")]
)
def test_a_tensor_of_an_encoder_with_further_rows_is_refused_with_both_shapes(tmp_path, name, tensor):
    """Rows of positions begin behind those of padding, as many as the configuration says."""
    tensors = random_tensors(POOLING[name]["shapes"])
    rows, width = tensors[tensor].shape
    tensors[tensor] = np.concatenate([tensors[tensor], tensors[tensor][:2]])
    with pytest.raises(ModelError, match=rf"{tensor} has shape \({rows + 2}, {width}\), expected \({rows}, {width}\)"):
        load_model(write_model(tmp_path, POOLING[name]["config"], tensors))


def test_an_encoder_refuses_tensors_that_it_does_not_use_and_leaves_out_heads(tmp_path):
    shapes = POOLING["bert"]["shapes"]
    for name, is_left_out in (("pooler.dense.weight", True), ("cls.predictions.bias", True), ("embeddings.x", False)):
        tensors = random_tensors(shapes) | {name: np.ones((2, 32), "<f4")}
        folder = write_model(tmp_path / name, POOLING["bert"]["config"], tensors)
        with nullcontext() if is_left_out else pytest.raises(ModelError, match=f"tensor {name} is not part of a bert"):
            load_model(folder)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("<i4", "dtype 'I32' is not supported. Use weights in F32, F16, BF16"),
        ("|u1", "dtype 'F8_E4M3' is not supported"),
    ],
)
def test_a_weight_of_a_type_that_is_no_weight_is_named(tmp_path, dtype, message):
    folder = changed(tmp_path, model__norm__weight=np.ones(32, dtype))
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor 'model\.norm\.weight': {message}"):
        load_model(folder)


@pytest.mark.parametrize("name", ["input_layernorm", "self_attn.q_proj"])
def test_a_quantised_tensor_of_another_shape_is_named(tmp_path, name):
    parts = draw_fp8(np.random.default_rng(0), 8, 32, (8, 32))
    parts = {f"model.layers.2.{name}.{part}": array for part, array in parts.items()}
    folder = changed(tmp_path, {"quantization_config": {"quant_method": "fp8"}}, **parts)
    with pytest.raises(ModelError, match=rf"tensor model\.layers\.2\.{name}\.weight .*has shape \(8, 32\), expected"):
        load_model(folder)


@pytest.mark.skipif(not available(), reason="the native module is not built")
def test_an_engine_on_weights_with_a_nan_is_not_made(tmp_path):
    parts = draw_fp8(np.random.default_rng(0), 32, 32, (32, 32))
    parts["weight"][31, 31] = 0x7F
    parts = {f"model.layers.2.self_attn.q_proj.{part}": array for part, array in parts.items()}
    folder = changed(tmp_path, {"quantization_config": {"quant_method": "fp8"}}, **parts)
    with pytest.raises(ModelError, match=r"tensor 'model\.layers\.2\.self_attn\.q_proj\.weight': holds a NaN"):
        LLM(str(folder), executor="native", max_model_len=64)


READ = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "chat_template.json", "model.safetensors", "model.safetensors.index.json",
)  # fmt: skip


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("kind", ["pipe", "device", "endless"])
def test_a_file_without_an_end_is_refused_and_not_read(tmp_path, name, kind):
    """A pipe would be waited for, and a device or a huge file of zeros would fill the memory."""
    folder = write_talking_model(tmp_path / "model")
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with file.open("wb") as opened:
            opened.truncate(1 << 42)
    with pytest.raises(ModelError, match=re.escape(str(file))):
        load_model(folder)
