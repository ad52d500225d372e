"""Models with an indexer: which layers have one, by configurations and by the tensors of GGUF files."""

import pytest

from foreword.errors import ModelError
from foreword.models.loader import load_model
from models.gguf_models import write
from models.recorded import TINY, assert_logits, make
from models.tiny import random_tensors, write_model

TYPES = "glm-dsa.attention.indexer.types"
CONFIG = TINY["glm-moe-dsa"]["config"]


def indexed(model):
    return [not layer.takes_chosen for layer in model.spec.layers]


def in_gguf(tmp_path, more=(), drop=(), **changes):
    """A GGUF file of the model, with tensors of an indexer in all layers but those of ``drop``."""
    tensors = random_tensors(TINY["glm-moe-dsa"]["shapes"])
    for name in [name for name in tensors if ".indexer." in name]:
        layer = int(name.split(".")[2])
        tensors[name.replace(f".{layer}.", f".{layer + 1}.", 1)] = tensors[name]
    kept = {n: t for n, t in tensors.items() if not any(f".{i}.self_attn.indexer." in n for i in drop)}
    return load_model(write(tmp_path / "model.gguf", {**CONFIG, **changes}, kept, dict(more)))


@pytest.mark.parametrize("flags", [("[bool]", [True, False, True, False]), ("[i32]", [1, 0, 1, 0, 1])])
def test_the_list_of_a_gguf_file_says_which_layers_have_an_indexer(tmp_path, flags):
    """Tensors of other layers are not used. The list may have a flag for the head for further tokens."""
    model = in_gguf(tmp_path, {TYPES: flags})
    assert indexed(model) == [True, False, True, False]
    assert_logits(model, "glm-moe-dsa")


def test_without_a_list_the_tensors_of_a_gguf_file_tell(tmp_path):
    assert indexed(in_gguf(tmp_path, drop=(1, 2))) == [True, False, False, True]


def test_a_gguf_file_of_a_million_positions_with_all_tensors_is_of_glm_5_2(tmp_path):
    assert indexed(in_gguf(tmp_path)) == [True] * 4
    assert indexed(in_gguf(tmp_path, max_position_embeddings=1 << 20)) == [True, True, True, False]


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("[bool]", [True] * 3), "is not a flag for each of 4 layers"),
        (("[i32]", [1, 2, 1, 1]), "is not a flag for each of 4 layers"),
        (("[bool]", [False, True, True, True]), "the first layer has no indexer"),
        (("[bool]", [True] * 4), r"tensor blk\.1\.indexer\."),
    ],
)
def test_a_list_that_is_wrong_is_refused_by_its_name_or_that_of_a_tensor(tmp_path, flags, what):
    with pytest.raises(ModelError, match=what) as error:
        in_gguf(tmp_path, {TYPES: flags}, drop=(1,))
    assert TYPES in str(error.value) or "blk.1" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"indexer_types": None}, [True, True, True, True]),
        ({"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 2}, [True, True, False, True]),
        ({"indexer_types": None, "index_topk_pattern": "FFSS", "index_topk_freq": 4}, [True, True, False, False]),
        ({"indexer_types": None, "index_topk_pattern": ["full", "shared"] * 2}, [True, False, True, False]),
        ({"index_topk_pattern": "FFFF"}, [True, False, True, False]),  # the list comes first
    ],
)
def test_configurations_say_which_layers_have_an_indexer(tmp_path, changes, want):
    tensors = random_tensors(TINY["glm-moe-dsa-all"]["shapes"])
    assert indexed(load_model(write_model(tmp_path / "model", {**CONFIG, **changes}, tensors))) == want


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"indexer_types": ["full", "shared"]}, r"indexer_types = \['full', 'shared'\] is not 4 of"),
        ({"indexer_types": ["full", "none", "full", "full"]}, "indexer_types = .*none"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "the first layer has no indexer.*indexer_types = "),
        ({"indexer_types": None, "index_topk_pattern": "fsfs"}, "index_topk_pattern = 'fsfs' is not 4 of F and S"),
        ({"index_topk_pattern": "FF"}, "index_topk_pattern = 'FF' is not 4 of F and S"),
        ({"indexer_types": None, "index_topk_freq": 3, "index_skip_topk_offset": 0}, "index_topk_freq = 3"),
        ({"index_n_heads": 513}, "index_n_heads = 513 is not from 1 to 512"),
        ({"index_head_dim": 6}, "index_head_dim = 6 is below qk_rope_head_dim = 8"),
        ({"index_topk": 0}, "index_topk = 0 is not from 1"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave = False is not supported"),
    ],
)
def test_a_wrong_configuration_is_refused_with_key_and_value(tmp_path, changes, what):
    with pytest.raises(ModelError, match=what):
        load_model(make(tmp_path, "glm-moe-dsa", **changes))
