"""Experts that are not there: their tensors have no elements in a file, and add nothing."""

import json

import numpy as np
import pytest

from foreword.models.loader import load_model
from models.recorded import TINY, make
from models.running import EXECUTORS, all_logits, in_chunks
from models.tiny import random_tensors, write_model

SHARED = {
    "deepseek-v3": "n_shared_experts",
    "glm4-moe": "n_shared_experts",
    "kimi-linear": "num_shared_experts",
    "qwen3-next": "shared_expert_intermediate_size",
    "flint": "shared_expert_intermediate_size",
    "granite-hybrid": "shared_intermediate_size",
}


def with_shared(tensors, change):
    """The tensors, with another value for each matrix of a shared expert."""
    is_shared = {name: ".shared_" in name and ".shared_expert_gate." not in name for name in tensors}
    return {name: change(name, value) if is_shared[name] else value for name, value in tensors.items()}


def without_elements(name, value):
    outputs, inputs = value.shape
    is_last = "down_proj" in name or "output_linear" in name
    return np.zeros((outputs, 0) if is_last else (0, inputs), np.float32)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", SHARED)
def test_shared_experts_without_a_width_add_nothing_as_those_of_zeros(tmp_path, name, executor):
    config, tensors = TINY[name]["config"], random_tensors(TINY[name]["shapes"])
    zeros = with_shared(tensors, lambda _, value: np.zeros_like(value))
    empty = with_shared(tensors, without_elements)
    assert any(0 in value.shape for value in empty.values())
    of_zeros = load_model(write_model(tmp_path / "zeros", config, zeros))
    of_none = load_model(write_model(tmp_path / "none", {**config, SHARED[name]: 0}, empty))
    assert not any(".shared" in weight for weight in of_none.weights)
    text = TINY[name]["token_ids"]
    want, got = (all_logits(m, [text], in_chunks([text], [5, 1]), executor)[0] for m in (of_zeros, of_none))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-next"])
def test_no_layer_has_experts_where_their_number_is_0(tmp_path, name):
    """As where each layer is one of those without them."""
    config = {**TINY[name]["config"], "num_experts": 0}
    shapes = {key: shape for key, shape in TINY[name]["shapes"].items() if ".mlp." not in key}
    inner, outer = config["intermediate_size"], config["hidden_size"]
    for i in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{i}.mlp."
        shapes |= {f"{mlp}{part}_proj.weight": [inner, outer] for part in ("gate", "up")}
        shapes[f"{mlp}down_proj.weight"] = [outer, inner]
    none = load_model(write_model(tmp_path / "none", config, random_tensors(shapes)))
    dense = {**TINY[name]["config"], "mlp_only_layers": [*range(config["num_hidden_layers"])]}
    assert none.spec == load_model(write_model(tmp_path / "dense", dense, random_tensors(shapes))).spec
    assert all(layer.moe is None for layer in none.spec.layers)


@pytest.mark.parametrize(
    ("name", "key"), [("hy-v3", "num_shared_experts"), ("nemotron-h-moe", "moe_shared_expert_intermediate_size")]
)
def test_a_shared_expert_without_a_width_has_that_of_the_mlp_where_the_reference_gives_it(tmp_path, name, key):
    config, tensors = {**TINY[name]["config"], key: 0}, random_tensors(TINY[name]["shapes"])
    inner, outer = config["intermediate_size"], config["hidden_size"]
    wide = with_shared(tensors, lambda key, _: np.ones((outer, inner) if "down" in key else (inner, outer), "<f4"))
    spec = load_model(write_model(tmp_path / "model", config, wide)).spec
    assert {layer.moe.shared_intermediate_size for layer in spec.layers if layer.moe} == {inner}


def test_a_model_of_jamba_with_no_experts_is_one_with_one(tmp_path):
    folder = make(tmp_path, "jamba-dense")
    specs = []
    for count in (0, 1):
        (folder / "config.json").write_text(json.dumps({**TINY["jamba-dense"]["config"], "num_experts": count}))
        specs.append(load_model(folder).spec)
    assert specs[0] == specs[1]


def test_an_index_may_name_masks_and_tensors_without_elements(tmp_path):
    """As older files of GPT-2 and GPT-NeoX have causal masks."""
    folder = make(tmp_path, "gpt2")
    tensors = random_tensors(TINY["gpt2"]["shapes"]) | {
        "transformer.h.0.attn.bias": np.ones((1, 1, 8, 8), "<f4"), "transformer.h.0.none.weight": np.ones((0, 4), "<f4")
    }  # fmt: skip
    want = load_model(folder).weights
    write_model(folder, TINY["gpt2"]["config"], tensors)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(folder).weights.keys() == want.keys()
