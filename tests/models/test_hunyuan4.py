"""Hunyuan 4: names of tensors in its files, layers with an indexer, and configurations that are refused."""

from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.families import FAMILIES
from foreword.models.loader import load_model
from models.recorded import TINY, assert_logits, make
from models.tiny import random_tensors, write_model

CONFIG = TINY["hy-v4"]["config"]
MODULES = {
    ".hc_pre.hc_attn_layer.hc_": ".attn_hc.",
    ".hc_pre.hc_mlp_layer.hc_": ".ffn_hc.",
    ".hc_pre.hc_head.hc_head_": ".hc_head.hc_",
    ".learnable_sink_param": ".sinks",
    ".linear_gate.": ".gate_proj.",
}
"""The parts of names that transformers writes, with those of its modules."""
INSIDE = {
    ".hc_pre.hc_attn_layer.hc_": ".hc_attn_layer.hc_pre.hc_",
    ".hc_pre.hc_mlp_layer.hc_": ".hc_mlp_layer.hc_pre.hc_",
    ".hc_pre.hc_head.hc_head_": ".hc_head.hc_head_",
}
"""The same, with other names that transformers reads."""


def renamed(name, parts):
    for part, own in parts.items():
        name = name.replace(part, own)
    return name


@pytest.mark.parametrize("parts", [MODULES, INSIDE])
def test_a_checkpoint_may_have_other_names(tmp_path, parts):
    tensors = random_tensors(TINY["hy-v4"]["shapes"])
    others = {renamed(name, parts): values for name, values in tensors.items()}
    further = {"model.mtp_layers.0.eh_proj.weight": np.ones((32, 64), "<f4")}
    assert_logits(load_model(write_model(tmp_path / "a", CONFIG, others | further)), "hy-v4")
    key = next(name for name in others if name not in tensors)
    with pytest.raises(ModelError, match="are the same weight"):
        load_model(write_model(tmp_path / "b", CONFIG, {**tensors, key: others[key]}))


def test_experts_may_have_a_tensor_each(tmp_path):
    tensors = random_tensors(TINY["hy-v4"]["shapes"])
    for name in [name for name in tensors if ".mlp.experts." in name]:
        stacked, prefix = tensors.pop(name), name.rpartition(".")[0]
        parts = ("gate", "up") if name.endswith("gate_up_proj") else ("down",)
        for e, matrix in enumerate(stacked):
            halves = zip(parts, np.split(matrix, len(parts)), strict=True)
            tensors |= {f"{prefix}.{e}.{part}_proj.weight": np.ascontiguousarray(half) for part, half in halves}
    assert_logits(load_model(write_model(tmp_path / "model", CONFIG, tensors)), "hy-v4")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hc_mult": 0}, "hc_mult = 0 is not from 1"),
        ({"hc_mult": 17}, "hc_mult = 17 is not from 1 to 16"),
        ({"hc_mult": 3}, r"hc_head.hc_base \(out_mix_base\) has shape|\(layers.0.attn_mix\) has shape"),
        ({"hc_magnitude": -1.0}, "hc_magnitude = -1.0 is not above zero"),
        ({"hc_eps": -0.1}, "hc_eps = -0.1 is not above zero"),
        ({"swiglu_limit": 0.0}, "swiglu_limit = 0.0 is not above zero"),
        ({"swiglu_limit": -1.0}, "swiglu_limit = -1.0 is not above zero"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "the first layer has no indexer"),
        ({"indexer_types": ["full", "full"]}, "indexer_types = .* is not 4 of 'full' and 'shared'"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"index_topk_freq": 1}, "index_topk_freq = 1 is not supported"),
        ({"rope_interleave": True}, "rope_interleave = True is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ({"q_lora_rank": None}, "q_lora_rank is null"),
        ({"index_head_dim": 6}, "index_head_dim = 6 is below qk_rope_head_dim = 8"),
    ],
)
def test_a_wrong_configuration_is_refused_with_key_and_value(tmp_path, changes, what):
    with pytest.raises(ModelError, match=what):
        load_model(make(tmp_path, "hy-v4", **changes))


def test_without_lists_one_of_four_layers_has_an_indexer_and_all_but_the_first_have_experts():
    config = {key: value for key, value in CONFIG.items() if not key.endswith("_types")} | {"num_hidden_layers": 10}
    layers = FAMILIES["hy_v4"].read(Config(Path("config.json"), config)).layers
    assert [i for i, layer in enumerate(layers) if not layer.takes_chosen] == [0, 1, 5, 9]
    assert [i for i, layer in enumerate(layers) if not layer.moe] == [0]
