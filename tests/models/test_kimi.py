"""Keys that only configurations of Kimi Linear and Ling 3.0 have, and the rates of decays in their GGUF files."""

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.loader import load_model
from models.gguf_models import write
from models.recorded import TINY, assert_logits, make
from models.tiny import random_tensors, write_model

OWN = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 10, "num_heads": 4, "short_conv_kernel_size": 4}
OF_PARTS = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")


def with_part(tmp_path, **changes):
    """A directory of Kimi Linear whose configuration has the keys of its delta-nets in a part, as published ones."""
    config = {key: value for key, value in TINY["kimi-linear"]["config"].items() if key not in OF_PARTS}
    config |= {"linear_attn_config": OWN | changes, "first_k_dense_replace": 1, "rope_theta": 1e4, "mla_use_nope": True}
    return write_model(tmp_path / "own", config, random_tensors(TINY["kimi-linear"]["shapes"]))


def test_the_part_of_a_published_configuration_says_the_same(tmp_path):
    model = load_model(with_part(tmp_path))
    assert (model.spec, model.unread_keys) == (load_model(make(tmp_path, "kimi-linear")).spec, ())
    assert_logits(model, "kimi-linear")


@pytest.mark.parametrize("layers", [[2, 3, 4], [4], [0, 2, 4], ["2", 4], [2, 5]])
def test_lists_that_do_not_have_each_layer_once_are_refused(tmp_path, layers):
    reason = "linear_attn_config: full_attn_layers and kda_layers are not the numbers 1 to 4, each in one of them"
    with pytest.raises(ModelError, match=reason):
        load_model(with_part(tmp_path, full_attn_layers=layers))


@pytest.mark.parametrize("key", ["use_full_rank_gate", "gate_lower_bound"])
def test_keys_of_other_delta_nets_are_refused(tmp_path, key):
    with pytest.raises(ModelError, match=f"linear_attn_config: {key} = 3 is not supported"):
        load_model(with_part(tmp_path, **{key: 3}))


@pytest.mark.parametrize(
    "changes", [dict.fromkeys(OF_PARTS[2:]), {"head_dim": 6, "short_conv_kernel_size": 2, "linear_conv_kernel_dim": 4}]
)
def test_sizes_of_delta_nets_come_before_those_of_attention(tmp_path, changes):
    """Published configurations have the latter alone. transformers saves both, with other values in the latter."""
    assert_logits(load_model(make(tmp_path, "bailing-hybrid", **changes)), "bailing-hybrid")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bailing-hybrid", {"kda_lower_bound": 0.5}, "kda_lower_bound = 0.5 is not below zero"),
        ("bailing-hybrid", {"no_kda_lora": False}, "no_kda_lora = False is not supported"),
        ("bailing-hybrid", {"expert_swiglu_limit_list": [7.0]}, "expert_swiglu_limit_list = .* is not supported"),
        ("kimi-linear", {"mla_use_nope": False}, "mla_use_nope = False is not supported"),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func = 'softmax' is not"),
    ],
)
def test_values_that_are_not_computed_are_refused(tmp_path, name, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, name, **changes))


@pytest.mark.parametrize(("name", "sign"), [("kimi-linear", -1), ("bailing-hybrid", 1)])
def test_rates_of_the_wrong_sign_in_a_gguf_file_are_refused(tmp_path, name, sign):
    tiny = TINY[name]
    wrong = np.full((4, 1), -sign, np.float32)
    path = write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), (), {"blk.0.ssm_a": wrong})
    with pytest.raises(ModelError, match=r"rates of layer 0 \(ssm_a\) are not all (above|below) zero"):
        load_model(path)
