"""A.X K2: experts of groups that are not chosen, and configurations that are refused."""

from pathlib import Path

import numpy as np
import pytest

from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.families import FAMILIES
from foreword.models.loader import load_model
from models.recorded import TINY, make
from models.running import all_logits, in_chunks
from models.tiny import random_tensors, write_model

TEXT = TINY["axk2"]["token_ids"]


def logits(path, executor, biases, **changes):
    """Return those of the tiny model with four experts for each token, whose routers have these biases."""
    tensors = random_tensors(TINY["axk2"]["shapes"])
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = np.array(biases, "<f4")
    model = load_model(write_model(path, {**TINY["axk2"]["config"], "num_experts_per_tok": 4, **changes}, tensors))
    [found] = all_logits(model, [TEXT], in_chunks([TEXT], [len(TEXT)]), executor, block_size=4)
    return found


@pytest.mark.parametrize("executor", ["numpy", "native", "torch"])
def test_experts_of_other_groups_come_before_those_that_are_chosen_by_less_than_zero(tmp_path, executor):
    """The first group is the best, with numbers from −2 to −1. Those of the other one are zeros."""
    if executor == "torch":
        pytest.importorskip("torch", reason="needs the extra foreword[torch]")
    grouped = logits(tmp_path / "a", executor, [-2] * 4 + [-5] * 4, n_group=2, topk_group=1)
    plain = logits(tmp_path / "b", executor, [-5] * 4 + [0] * 4)
    np.testing.assert_allclose(grouped, plain, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"n_group": 4}, "n_group = 4 and topk_group = None, of which one alone is null"),
        ({"topk_group": 2}, "n_group = None and topk_group = 2, of which one alone is null"),
        ({"n_group": 3, "topk_group": 2}, "a token cannot take 2 experts of 2 of 3 groups of 8 experts"),
        ({"gated_norm_rank": 0}, "gated_norm_rank = 0 is not from 1"),
        ({"gated_norm_rank": None}, "gated_norm_rank = None is not supported"),
        ({"gated_norm_rank": 7}, r"W_down.weight \(layers.0.attn_norm_low\) has shape \(6, 32\), expected \(7, 32\)"),
        ({"q_lora_rank": None}, "q_lora_rank is null"),
        ({"moe_layer_freq": 2}, "first_k_dense_replace = 1 and moe_layer_freq = 2 say other layers"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"index_topk_freq": 4}, "index_topk_freq = 4 is not supported"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
    ],
)
def test_a_wrong_configuration_is_refused_with_key_and_value(tmp_path, changes, what):
    with pytest.raises(ModelError, match=what):
        load_model(make(tmp_path, "axk2", **changes))


@pytest.mark.parametrize(("dense", "freq", "sparse"), [(1, 1, [1, 2, 3]), (0, 2, [0, 2]), (2, 3, [3])])
def test_layers_with_experts_follow_from_two_numbers(dense, freq, sparse):
    config = {key: value for key, value in TINY["axk2"]["config"].items() if key != "mlp_layer_types"}
    config |= {"first_k_dense_replace": dense, "moe_layer_freq": freq}
    layers = FAMILIES["axk2"].read(Config(Path("config.json"), config)).layers
    assert [i for i, layer in enumerate(layers) if layer.moe] == sparse
    assert [i for i, layer in enumerate(layers) if layer.mlp_norm_rank] == sparse
