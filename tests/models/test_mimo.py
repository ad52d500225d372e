"""MiMo V2 Flash: values of their own size, layers of two kinds, and the configuration that Xiaomi published."""

import json

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.loader import load_model
from foreword.models.spec import HeadShape
from models.gguf_models import expressible, write
from models.recorded import TINY, make
from models.tiny import random_tensors

TINY_CONFIG = TINY["mimo-v2"]["config"]
PUBLISHED = {
    "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "swa_rope_theta": 100.0,
    "rope_theta": 500.0, "partial_rotary_factor": 0.5, "layernorm_epsilon": 1e-5, "sliding_window_size": 5,
    "sliding_window": 5, "swa_num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_head_dim": 12,
    "swa_v_head_dim": 8, "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
    "n_shared_experts": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
OF_REFERENCE = ("layer_types", "mlp_layer_types", "rope_parameters", "rms_norm_eps")


def published(**changes):
    return {key: value for key, value in TINY_CONFIG.items() if key not in OF_REFERENCE} | PUBLISHED | changes


def test_layers_with_a_window_have_sinks_and_more_key_heads(tmp_path):
    spec = load_model(make(tmp_path, "mimo-v2")).spec
    assert [layer.has_sinks for layer in spec.layers] == [False, True, True, False]
    assert spec.head_shapes == (HeadShape(2, 12, 4, 8), HeadShape(4, 12, 4, 8))
    assert (spec.key_size, spec.value_size) == (48, 32)


def test_the_published_configuration_gives_the_spec_of_that_of_transformers(tmp_path):
    folder = make(tmp_path, "mimo-v2")
    want = load_model(folder).spec
    (folder / "config.json").write_text(json.dumps(published()))
    assert load_model(folder).spec == want


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_layer_pattern": [0, 1, 2, 0]}, r"hybrid_layer_pattern \[0, 1, 2, 0\] is not 4 of 0 and 1"),
        ({"moe_layer_freq": [0, 1]}, r"moe_layer_freq \[0, 1\] is not 4 of 0 and 1"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types says other layers than hybrid_layer_pattern"),
        ({"swa_head_dim": 16}, "swa_head_dim = 16 is not supported"),
        ({"swa_v_head_dim": 12}, "swa_v_head_dim = 12 is not supported"),
        ({"swa_num_attention_heads": 8}, "swa_num_attention_heads = 8 is not supported"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias = False is not supported"),
        ({"swa_num_key_value_heads": 3}, "4 heads are not a multiple of 3 key/value heads"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, changes, message):
    folder = make(tmp_path, "mimo-v2")
    (folder / "config.json").write_text(json.dumps(published(**changes)))
    with pytest.raises(ModelError, match=message):
        load_model(folder)


def test_a_layer_without_its_sinks_is_refused(tmp_path):
    tensors = random_tensors(TINY["mimo-v2"]["shapes"])
    del tensors["model.layers.1.self_attn.attention_sink_bias"]
    path = write(tmp_path / "model.gguf", expressible(TINY_CONFIG), tensors, {"mimo2.rope.dimension_count": ("u32", 6)})
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_sinks\.weight .* is missing"):
        load_model(path)


def test_gguf_files_may_list_layers_of_heads_for_further_tokens_and_lack_the_factor_of_values(tmp_path):
    config = expressible(TINY_CONFIG)
    tensors = random_tensors(TINY["mimo-v2"]["shapes"])
    usual = {"mimo2.rope.dimension_count": ("u32", 6)}
    more = {
        "mimo2.block_count": ("u32", 5), "mimo2.nextn_predict_layers": ("u32", 1),
        "mimo2.attention.head_count_kv": ("[i32]", [2, 4, 4, 2, 4]),
        "mimo2.attention.sliding_window_pattern": ("[i32]", [0, 1, 1, 0, 1]),
    }  # fmt: skip
    head = {"blk.4.nextn.eh_proj.weight": np.ones((32, 64), np.float32)}
    want = load_model(write(tmp_path / "a.gguf", config, tensors, usual)).spec
    assert load_model(write(tmp_path / "b.gguf", config, tensors, usual | more, head)).spec == want
    path = write(tmp_path / "c.gguf", config, tensors, usual | {"mimo2.attention.value_scale": ("f32", 1.0)})
    assert {layer.mixer_scale for layer in load_model(path).spec.layers} == {1.0}
