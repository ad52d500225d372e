"""The special parts of Gemma 4: heads and keys per layer, inputs of layers, and its vocabulary in a
file.
"""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from foreword.errors import ConfigError, ModelError
from foreword.models.loader import load_model
from foreword.models.spec import HeadShape
from foreword.models.tokenizer import Tokenizer
from models.recorded import TINY, assert_logits, make
from models.running import EXECUTORS
from models.tiny import random_tensors, write_model


def test_the_last_layers_read_the_keys_of_the_last_one_of_their_kind(tmp_path):
    spec = load_model(make(tmp_path, "gemma4")).spec
    assert [layer.reads_layer for layer in spec.layers] == [None] * 4 + [2, 3]
    places = spec.places()
    assert (places[4], places[5]) == (places[2], places[3])
    assert sorted(i for group in spec.kv_groups() for i in group.layers) == [0, 1, 2, 3]
    assert spec.head_shapes == (HeadShape(2, 8, 4, 8), HeadShape(1, 12, 4, 12))
    assert [layer.intermediate_size for layer in spec.layers] == [40] * 4 + [80] * 2


@pytest.mark.parametrize("executor", EXECUTORS)
def test_keys_and_values_of_layers_that_read_others_are_left_out(tmp_path, executor):
    """Published files have them."""
    tiny = TINY["gemma4"]
    more = {"k_proj.weight": (16, 32), "v_proj.weight": (16, 32), "k_norm.weight": (8,)}
    tensors = random_tensors(tiny["shapes"])
    tensors |= {f"model.layers.4.self_attn.{name}": np.ones(shape, "<f4") for name, shape in more.items()}
    assert_logits(load_model(write_model(tmp_path / "model", tiny["config"], tensors)), "gemma4", executor)


def test_the_text_model_of_a_model_of_images_and_sounds_is_run_from_its_published_configuration(tmp_path):
    """Which has the heads of full layers as keys of its own, and bidirectional attention to images."""
    tiny = TINY["gemma4"]
    text = {name: value for name, value in tiny["config"].items() if name != "per_layer_config"}
    text |= {"global_head_dim": 12, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"}
    tensors = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in random_tensors(tiny["shapes"]).items()
    }
    tensors |= {f"model.{name}.weight": np.ones((2, 2), "<f4") for name in ("vision_tower.a", "embed_audio.b")}
    outer = {"model_type": "gemma4", "text_config": text, "vocab_size": text["vocab_size"]}
    assert_logits(load_model(write_model(tmp_path / "model", outer, tensors)), "gemma4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6 of 6 layers"),
        ({"num_kv_shared_layers": 5}, "some of them have no layer of their kind before them"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"per_layer_config": {"6": {"head_dim": 12}}}, "per_layer_config has '6', which is not a layer"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "of layer 1 is not of head_dim and num_key_value_heads"),
        ({"per_layer_config": {"1": {"head_dim": 12}}}, "layers of a kind have other heads"),
        ({"per_layer_config": {i: {"num_key_value_heads": 3} for i in "135"}}, "4 heads are not a multiple of 3"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input = -1 is not from 1"),
        ({"attention_bias": True}, r"tensor model\.layers\.0\.self_attn\.q_proj\.bias .* is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0},
                              "sliding_attention": {"rope_type": "default"}}},
         "partial_rotary_factor = 2.0 is not above 0"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(make(tmp_path, "gemma4", **changes))


def test_more_experts_per_token_than_there_are_are_refused(tmp_path):
    with pytest.raises(ModelError, match="top_k_experts = 5 of 4 experts"):
        load_model(make(tmp_path, "gemma4-moe", top_k_experts=5))


def test_a_key_head_of_full_layers_is_not_divided_among_processes(tmp_path):
    shards = pytest.importorskip("foreword.executors.torch.shard")
    two = shards.Shards(0, 2)
    with pytest.raises(ConfigError, match=r"must divide the model's 4 heads and 1 and 2 key heads; use one of 1"):
        two.spec(load_model(make(tmp_path, "gemma4")).spec)
    assert two.spec(load_model(make(tmp_path, "gemma4-plain")).spec).head_shapes == (
        HeadShape(1, 8, 2, 8),
        HeadShape(1, 16, 2, 16),
    )


MERGES = ["a b", "▁ ab", "\n \n", "b \n", "▁ ▁"]
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "\n", "▁", "ab", "▁ab", "\n\n", "b\n", "▁▁", "<|turn>"]
TOKENS += [f"<0x{i:02X}>" for i in range(256)]


def test_the_vocabulary_of_a_file_is_byte_fallback_with_the_files_merges(tmp_path):
    """As the tokenizer.json of the model has it; but no token crosses the end of a run of line feeds."""
    kinds = [3, 3, 3, 3, *[1] * 9, 4, *[6] * 256]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.token_type": np.array(kinds, np.int32), "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.add_bos_token": True,
        }
    )  # fmt: skip
    own = Backend(models.BPE({token: i for i, token in enumerate(TOKENS)}, [tuple(m.split(" ")) for m in MERGES],
                             unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # fmt: skip
    own.normalizer, own.decoder = normalizers.Replace(" ", "▁"), decoders.ByteFallback()
    for text in (" ab ab", "ab\n\n\nab", "  é ab", "a\na"):
        ids = tokenizer.encode(text)
        assert ids == [2, *own.encode(text.replace("b\n", "b|\n")).ids] if "b\n" not in text else ids[0] == 2
        assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.encode("ab\n\n") == [2, TOKENS.index("ab"), TOKENS.index("\n\n")]
    assert tokenizer.encode("<|turn>ab") == [2, TOKENS.index("<|turn>"), TOKENS.index("ab")]
    assert json.dumps(tokenizer.unread_keys) == "[]"
