"""Keys of tokenizer_config.json and generation_config.json: followed, refused by name, or listed as unread."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers

from foreword import LLM, SamplingParams
from foreword.errors import ModelError
from foreword.models.loader import load_model
from foreword.models.tokenizer import Tokenizer
from models import vocabularies
from models.gguf_models import write
from models.recorded import TINY, make
from models.tiny import random_tensors

PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": False}


def directory(tmp_path, backend=None, **config):
    """A directory with the small byte-level vocabulary, whose token 2 is <tool>, and such a tokenizer_config.json."""
    backend = backend or Tokenizer.from_gguf(vocabularies.byte_level()).backend
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def read(tmp_path, **config):
    return Tokenizer.from_directory(directory(tmp_path, **config))


def test_flags_of_added_tokens_are_followed(tmp_path):
    text = "he <tool> he"
    plain = read(tmp_path, added_tokens_decoder={"2": {"content": "<tool>", **PLAIN}}).encode(text)
    [at] = np.flatnonzero(np.array(plain) == 2)
    left = read(tmp_path, added_tokens_decoder={"2": {"content": "<tool>", **PLAIN, "lstrip": True}})
    assert left.encode(text) == plain[: at - 1] + plain[at:]
    right = read(tmp_path, added_tokens_decoder={"2": {"content": "<tool>", **PLAIN, "rstrip": True}})
    assert right.encode(text) == plain[: at + 1] + plain[at + 2 :]
    special = read(tmp_path, added_tokens_decoder={"2": {"content": "<tool>", **PLAIN, "special": True}})
    assert special.decode(special.encode(text)) == "he  he"


def test_an_added_token_gets_its_id(tmp_path):
    size = read(tmp_path).vocab_size
    tokenizer = read(tmp_path, added_tokens_decoder={str(size): {"content": "<new>", **PLAIN}})
    assert tokenizer.encode("<new>") == [size]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"split_special_tokens": True}, "split_special_tokens = True is not supported"),
        (
            {"added_tokens_decoder": {"7": {"content": "<tool>"}}},
            "added_tokens_decoder gives '<tool>' the id 7, tokenizer.json 2",
        ),
        ({"added_tokens_decoder": {"x": {"content": "<tool>"}}}, "added_tokens_decoder is .*, not tokens by id"),
        ({"added_tokens_decoder": ["<tool>"]}, "added_tokens_decoder is .*, not tokens by id"),
        ({"additional_special_tokens": ["<new>"]}, "the special token '<new>' is not in tokenizer.json"),
        ({"extra_special_tokens": {"image_token": "<new>"}}, "the special token '<new>' is not in tokenizer.json"),
        ({"additional_special_tokens": [5]}, "additional_special_tokens is .*, not tokens"),
        ({"add_prefix_space": True}, "add_prefix_space = True, in tokenizer.json it is False"),
        ({"add_prefix_space": "yes"}, "add_prefix_space is 'yes', not of type bool"),
    ],
)
def test_what_contradicts_the_tokenizer_is_refused(tmp_path, config, message):
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {message}"):
        read(tmp_path, **config)


@pytest.mark.parametrize(
    ("config", "unread"),
    [
        ({"clean_up_tokenization_spaces": False, "legacy": False, "padding_side": "left", "model_max_length": 3}, ()),
        ({"add_prefix_space": False, "additional_special_tokens": ["<tool>"], "zebra": None}, ()),
        ({"add_bos_token": False, "bos_token": "<|im_start|>"}, ()),
        ({"add_bos_token": True, "bos_token": "<|im_start|>"}, ("add_bos_token",)),
        ({"clean_up_tokenization_spaces": True, "zebra": 1}, ("clean_up_tokenization_spaces", "zebra")),
    ],
)
def test_keys_without_influence_are_listed_unless_they_ask_for_nothing(tmp_path, config, unread):
    assert read(tmp_path, **config).unread_keys == tuple(f"tokenizer_config.json: {name}" for name in unread)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"add_eos_token": True}, [4, 2]),
        ({"add_eos_token": True, "auto_map": None}, [4]),
        ({"add_eos_token": False}, [4]),
        ({"add_bos_token": True, "bos_token": {"content": "<tool>"}}, [2, 4]),
    ],
)
def test_a_tokenizer_of_the_model_s_own_code_adds_the_tokens_of_its_configuration(tmp_path, config, ids):
    own = {"eos_token": "<tool>", "auto_map": {"AutoTokenizer": ["a.Slow", "a.Fast"]}, **config}
    tokenizer = read(tmp_path, **own)
    [plain] = read(tmp_path).encode("h")
    assert tokenizer.encode("h") == [plain if token == 4 else token for token in ids]
    listed = ("tokenizer_config.json: add_eos_token",) if len(ids) == 1 and config["add_eos_token"] else ()
    assert tokenizer.unread_keys == listed


@pytest.mark.parametrize(
    ("config", "text"),
    [({}, "éa"), ({"do_lower_case": False}, "Éa"), ({"strip_accents": True}, "ea"), ({"do_lower_case": True}, "éa")],
)
def test_the_normalizer_of_bert_does_what_the_configuration_says(tmp_path, config, text):
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    backend.decoder = Tokenizer.from_gguf(vocabularies.byte_level()).backend.decoder
    tokenizer = Tokenizer.from_directory(directory(tmp_path, backend, **config))
    assert tokenizer.backend.normalizer.normalize_str("Éa") == text


def generation(tmp_path, **values):
    folder = make(tmp_path, "llama3")
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_beams": 4}, "num_beams = 4 is not supported"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size = 3 is not supported"),
        ({"forced_bos_token_id": 3}, "forced_bos_token_id = 3 is not supported"),
        ({"sequence_bias": [[[3], 2.0]]}, "sequence_bias = .* is not supported"),
        ({"min_new_tokens": 3}, "min_new_tokens = 3 is not supported"),
        ({"bad_words_ids": [[3, 4]]}, "bad_words_ids of several tokens are not applied"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens is .*, not token ids"),
        ({"suppress_tokens": [48]}, "suppressed token id 48 is not below vocab_size 48"),
    ],
)
def test_a_rule_of_generation_that_is_not_applied_is_refused(tmp_path, values, message):
    with pytest.raises(ModelError, match=message):
        load_model(generation(tmp_path, **values))


def test_suggested_sampling_and_unknown_keys_are_listed(tmp_path):
    values = {"temperature": 0.6, "top_k": 20, "do_sample": True, "num_beams": 1, "bad_words_ids": None, "zebra": 1,
              "max_length": 4096, "eos_token_id": 2, "transformers_version": "5", "use_cache": True}  # fmt: skip
    model = load_model(generation(tmp_path, **values))
    suggested = model.generation.suggested
    assert suggested.values == {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_length": 4096}
    assert suggested.source.endswith("generation_config.json")
    assert suggested.without_parameter() == {"max_length": 4096}
    assert model.unread_keys == ("generation_config.json: zebra",)


def outputs(path):
    with LLM(str(path), executor="numpy", kv_cache_bytes=1 << 20) as llm:
        return llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0].outputs[0]


def test_suppressed_tokens_are_never_written(tmp_path):
    first, second, *_ = outputs(make(tmp_path, "llama3")).token_ids
    for values in ({"suppress_tokens": [first]}, {"bad_words_ids": [[first]]}):
        assert first not in outputs(generation(tmp_path, **values)).token_ids
    assert outputs(generation(tmp_path, begin_suppress_tokens=[first])).token_ids[0] != first
    assert outputs(generation(tmp_path, begin_suppress_tokens=[second])).token_ids[0] == first


def test_a_gguf_file_suppresses_tokens_and_suggests_sampling(tmp_path):
    tiny = TINY["llama-linear-tied"]

    def gguf(**more):
        return write(tmp_path / "model.gguf", tiny["config"], random_tensors(tiny["shapes"]), more)

    first = outputs(gguf()).token_ids[0]
    more = {"tokenizer.ggml.suppress_tokens": ("[i32]", [first]), "general.sampling.top_k": ("i32", 20),
            "tokenizer.ggml.zebra": ("u32", 1), "tokenizer.ggml.fim_pad_token_id": ("u32", 1)}  # fmt: skip
    path = gguf(**more)
    assert first not in outputs(path).token_ids
    model = load_model(path)
    assert (model.generation.suggested.values, model.unread_keys) == ({"top_k": 20}, ("tokenizer.ggml.zebra",))
    assert model.generation.suggested.source == str(path)


def test_a_gguf_file_that_adds_separators_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.add_sep_token = True is not supported"):
        Tokenizer.from_gguf(vocabularies.byte_level(**{"ggml.add_sep_token": True}))
