"""Layers of a form of their own: two blocks of LongCat Flash, ModernBERT's decoder, XGLM, and biased outputs."""

import json

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.loader import load_model
from foreword.models.spec import NormPlaces, QKLayerNorm
from models.gguf_models import write
from models.recorded import TINY, make
from models.tiny import random_tensors, write_model


def read(tmp_path, name, **changes):
    folder = make(tmp_path, name)
    config = {key: value for key, value in {**TINY[name]["config"], **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder).spec


def test_the_experts_of_longcat_are_those_of_every_second_layer(tmp_path):
    spec = read(tmp_path, "longcat")
    assert [layer.late_moe is not None for layer in spec.layers] == [True, False] * 2
    assert all(layer.moe is None for layer in spec.layers)
    moe = spec.layers[0].late_moe
    assert (moe.num_experts, moe.identities, moe.num_choices) == (4, 3, 7)


def test_files_of_longcat_may_lack_the_weights_of_experts_that_do_nothing(tmp_path):
    tensors = random_tensors(TINY["longcat"]["shapes"])
    own = {name: value for name, value in tensors.items() if not any(f".experts.{e}." in name for e in (4, 5, 6))}
    assert len(own) < len(tensors)
    found, want = (
        load_model(write_model(tmp_path / name, TINY["longcat"]["config"], all_of)).weights
        for name, all_of in (("a", own), ("b", tensors))
    )
    assert found.keys() == want.keys()
    own["model.layers.0.mlp.experts.7.up_proj.weight"] = np.ones((12, 32), np.float32)
    with pytest.raises(ModelError, match=r"experts\.7\.up_proj\.weight is not part of a longcat_flash model"):
        load_model(write_model(tmp_path / "c", TINY["longcat"]["config"], own))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("longcat", {"num_hidden_layers": 3}, "num_hidden_layers = 3 is not twice num_layers = 2"),
        ("longcat", {"q_lora_rank": None}, "q_lora_rank = None is not supported"),
        ("longcat", {"zero_expert_type": "copy"}, "zero_expert_type = 'copy' is not supported"),
        ("modernbert-decoder", {"sliding_window": 12}, "sliding_window = 12 is not supported"),
        ("modernbert-decoder", {"norm_bias": True}, "norm_bias = True is not supported"),
        ("modernbert-decoder", {"classifier_activation": "relu"}, "classifier_activation = 'relu' is not hidden_act"),
        ("modernbert-decoder", {"local_attention": None, "sliding_window": -1}, "sliding_window = None, but some"),
        ("xglm", {"pad_token_id": 5}, "pad_token_id = 5 is not supported"),
        ("xglm", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ("gpt-neox-japanese", {"intermediate_multiple_size": 0}, "intermediate_multiple_size = 0 is not from 1"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, name, changes, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, name, **changes)


def test_older_configurations_of_modernbert_give_the_same_spec(tmp_path):
    """As published with Ettin: a base of each kind of layers, and the number of layers from one kind to the next."""
    layers = ["sliding_attention" if i % 3 else "full_attention" for i in range(4)]
    kinds = {"full_attention": 500.0, "sliding_attention": 100.0}
    new = read(
        tmp_path / "a",
        "modernbert-decoder",
        layer_types=layers,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in kinds.items()},
    )
    older = {"global_rope_theta": 500.0, "local_rope_theta": 100.0, "global_attn_every_n_layers": 3}
    absent = dict.fromkeys(("layer_types", "rope_parameters", "sliding_window"), "absent")
    assert read(tmp_path / "b", "modernbert-decoder", **older, **absent) == new
    assert [layer.sliding_window for layer in new.layers] == [None, 6, 6, None]
    assert new.layers[0].norms == NormPlaces(False, False, True, False)


def test_positions_of_xglm_follow_from_the_configuration_alone(tmp_path):
    tensors = random_tensors(TINY["xglm"]["shapes"])
    stored = {**tensors, "model.embed_positions.weights": np.zeros((66, 32), np.float32)}  # as older files have
    spec_and_weights = load_model(write_model(tmp_path / "model", TINY["xglm"]["config"], stored))
    table = spec_and_weights.weights["positions"].dequantize()
    angles = [(p + 2) / 10000 ** (j / 15) for p in (0, 63) for j in range(16)]
    want = np.concatenate([np.sin(angles).reshape(2, 16), np.cos(angles).reshape(2, 16)], axis=1)
    np.testing.assert_allclose(table[[0, 63]], want, atol=1e-6)


def test_norms_of_queries_and_keys_are_followed_where_a_model_has_them(tmp_path):
    assert read(tmp_path / "a", "persimmon").qk_layer_norm == QKLayerNorm(has_bias=True)
    assert read(tmp_path / "b", "persimmon-plain").qk_layer_norm is None
    for name in ("cohere-plus", "stablelm-normed"):
        assert read(tmp_path / name, name).qk_layer_norm == QKLayerNorm(of_heads=True)


def test_files_list_the_layers_of_exaone_with_a_window(tmp_path):
    tiny = TINY["exaone-moe"]
    slides = [True, False, True, False]
    more = {"exaone-moe.attention.sliding_window_pattern": ("[bool]", slides)}
    path = write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), more)
    layers = load_model(path).spec.layers
    assert [layer.sliding_window is not None for layer in layers] == slides
    assert [layer.rope is not None for layer in layers] == slides
    more = {"exaone-moe.expert_shared_feed_forward_length": ("u32", 7)}
    path = write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), more)
    with pytest.raises(ModelError, match=r"exaone-moe\.expert_shared_feed_forward_length = 7 is not supported"):
        load_model(path)
