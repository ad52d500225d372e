"""ZAYA: what its configuration and its router have of their own."""

import numpy as np
import pytest

from foreword.models.loader import load_model
from models.recorded import TINY, make
from models.running import EXECUTORS, all_logits, in_chunks
from models.tiny import random_tensors, write_model


def test_a_type_beside_the_rotary_parameters_of_both_kinds_of_layers_has_no_effect(tmp_path):
    """The published configuration has one, which transformers removes."""
    parameters = TINY["zaya"]["config"]["rope_parameters"]
    beside = make(tmp_path, "zaya", rope_parameters={**parameters, "rope_type": "yarn"})
    assert load_model(beside).spec == load_model(make(tmp_path, "zaya")).spec


def test_each_layer_of_a_file_is_two_and_keeps_keys_beside_a_state(tmp_path):
    spec = load_model(make(tmp_path, "zaya")).spec
    assert [layer.sliding_window for layer in spec.layers if layer.has_attention] == [None, 7, 7, None]
    assert [group.layers for group in spec.kv_groups() if group.recurrent] == [(0, 2, 4, 6)]
    [state] = {layer.recurrent.state_size for layer in spec.layers if layer.recurrent}
    assert state == 3 * (4 * 12 + 2 * 12 + 12)  # three tokens: q, k, and late values


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_token_whose_router_skips_its_experts_depends_on_none(tmp_path, executor):
    tiny, found = TINY["zaya"], []
    for factor in (1, 3):
        tensors = random_tensors(tiny["shapes"])
        for name in tensors:
            if name.endswith("gate.balancing_biases"):
                tensors[name][-1] = 5
            elif ".experts." in name:
                tensors[name] *= factor
        folder = write_model(tmp_path / str(factor), tiny["config"], tensors)
        chunks = in_chunks([tiny["token_ids"]], [9, 1])
        found += all_logits(load_model(folder), [tiny["token_ids"]], chunks, executor, block_size=4)
    np.testing.assert_array_equal(*found)
