"""The pre-tokenizers of GGUF files: by name, by vocabulary, and as the tokenizers of the models have them."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from foreword.models.pre_tokenizers import PRESETS, preset_of_vocabulary
from foreword.models.tokenizer import Tokenizer
from models import vocabularies


def words_of(tokenizer, text):
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)]


def without_name(**more):
    metadata = vocabularies.byte_level(**more)
    del metadata["tokenizer.ggml.pre"]
    return metadata


def test_a_file_without_a_pre_tokenizer_gets_a_warning_and_the_default():
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre.*outputs may be poor.*--pre-tokenizer NAME"):
        tokenizer = Tokenizer.from_gguf(without_name())
    assert words_of(tokenizer, "\n\n12") == ["\n", "\n", "12"]


def test_the_default_pre_tokenizer_splits_off_symbols_and_groups_of_three_digits():
    words = [word for word, _ in PRESETS["default"].pre_tokenizer().pre_tokenize_str("a, b 12345$$x")]
    assert words == ["a", ",", "Ġb", "Ġ", "123", "45", "$$", "x"]


@pytest.mark.parametrize(
    ("token", "place", "pre"),
    [("<|endoftext|>", 0, "smollm"), ("<|endoftext|>", 151643, "qwen2"), ("<|begin_of_text|>", 128000, "llama-bpe"),
     ("<|endoftext|>", 1, None), ("<s>", 0, None)],
)  # fmt: skip
def test_a_well_known_vocabulary_tells_its_pre_tokenizer(token, place, pre):
    assert preset_of_vocabulary(["a"] * place + [token]) == pre


def test_a_well_known_vocabulary_needs_no_name():
    tokenizer = Tokenizer.from_gguf(without_name(control=("<|endoftext|>", "<|im_end|>")))
    assert words_of(tokenizer, "\n\n12") == ["\n\n", "1", "2"]


PRE_TOKENIZERS = json.loads((Path(__file__).parents[1] / "data" / "models" / "pre_tokenizers.json").read_text())
"""The pre-tokenizers in the tokenizer.json of public models, and the names that GGUF files have for them."""
WORDS = st.text(st.sampled_from("aZé'sTlL 1٣½_-$/.,\t\r\n日テ한ǅʰ\u0301\u00a0\u3000🙂"), max_size=12)


@pytest.mark.parametrize("model", PRE_TOKENIZERS)
@given(text=WORDS)
def test_a_name_stands_for_the_pre_tokenizer_of_its_model(model, text):
    recorded = PRE_TOKENIZERS[model]
    want = KNOWN[model].pre_tokenize_str(text)
    for name in recorded["names"]:
        assert PRESETS[name].pre_tokenizer().pre_tokenize_str(text) == want, name
        assert PRESETS[name].nfc == (recorded["normalizer"] == {"type": "NFC"})


def pre_tokenizer_of(recorded):
    plain = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return tokenizers.Tokenizer.from_str(
        json.dumps({**plain, "pre_tokenizer": recorded["pre_tokenizer"]})
    ).pre_tokenizer


KNOWN = {model: pre_tokenizer_of(recorded) for model, recorded in PRE_TOKENIZERS.items()}


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("tekken", "HelloWorld12 it's", ["Hello", "World", "1", "2", "Ġit", "'s"]),
        ("seed-coder", "x;\n\ny", ["x", ";", "ĊĊ", "y"]),
        ("deepseek-coder", "ab\n12+3", ["ab", "Ċ", "1", "2", "+", "3"]),
        ("smaug-bpe", "\n\n1234", ["ĊĊ", "123", "4"]),
        ("stablelm2", "I'M 12", ["I", "'M", "Ġ", "1", "2"]),
        ("command-r", "a12", ["a", "1", "2"]),
        ("olmo", "a12", ["a", "12"]),
        ("qwen35", "ab\u0e33 12", ["ab\u0e33", "\u0120", "1", "2"]),
        ("qwen35", "a\u0e34\u0301b .\u0301", ["a\u0e34\u0301b", "\u0120.", "\u0301"]),
        ("deepseek-llm", "it's 12 a", ["it", "'", "s", "\u0120", "1", "2", "\u0120a"]),
        ("deepseek-llm", "Éé\u0562 ab", ["Éé", "\u0562", "\u0120ab"]),
        ("jais-2", "a     b", ["a", 4 * "\u0120", "\u0120b"]),
        ("minicpm5", "a1234", ["a", "123", "4"]),
        ("bailingmoe", "a\n\nb", ["a", "\u010a\u010a", "b"]),
        ("exaone-moe", "a b;\n\n", ["a\u0120b", ";\u010a", "\u010a"]),
        ("laguna", "x;\n\ny", ["x", ";", "\u010a\u010a", "y"]),
        ("youtu", "ab日本12", ["ab", "日本", "1", "2"]),
        ("tiny_aya", "aB12345", ["a", "B", "12", "345"]),
        ("kimi-k2", "a日b1234", ["a", "日", "b", "123", "4"]),
        ("afmoe", "a12345 +x", ["a", "12", "345", "\u0120+", "x"]),
        ("falcon", "a`1234", ["a", "`", "123", "4"]),
        ("bloom", "a b, c1", ["a", "\u0120b", ",", "\u0120c1"]),
        ("viking", "c12", ["c", "1", "2"]),
    ],
)
def test_other_names_split_as_llama_cpp_does(pre, text, words):
    spans = [place for _, place in PRESETS[pre].pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:end].replace(" ", "\u0120").replace("\n", "\u010a") for start, end in spans] == words


IN_THREES = {"tiny_aya": r"\d{1,3}(?=(?:\d{3})*\b)", "afmoe": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"}
"""Digits in threes from the right as one pattern, whose time is quadratic in the number of digits."""


@pytest.mark.parametrize("pre", IN_THREES)
@given(text=st.text(st.sampled_from("1234567890½٣abA _.,\n"), max_size=16))
def test_digits_are_split_in_threes_from_the_right(pre, text):
    own = PRESETS[pre].patterns
    first = tokenizers.pre_tokenizers.Split(tokenizers.Regex(IN_THREES[pre]), "isolated")
    rest = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in own[3:]]
    want = tokenizers.pre_tokenizers.Sequence([first, *rest]).pre_tokenize_str(text)
    found = PRESETS[pre].pre_tokenizer().pre_tokenize_str(text)
    assert [place for _, place in found] == [place for _, place in want]


@given(text=st.text(st.sampled_from("  \t\n\ra;1\u3000"), max_size=20))
def test_runs_of_spaces_are_those_of_one_pattern(text):
    """The pattern of Jais 2 as its tokenizer has it takes quadratic time."""
    [own] = PRESETS["jais-2"].patterns
    slow = own.replace(r"(?<![^\S\r\n])", "")
    assert slow != own
    want = tokenizers.pre_tokenizers.Split(tokenizers.Regex(slow), "isolated").pre_tokenize_str(text)
    found = PRESETS["jais-2"].pre_tokenizer().pre_tokenize_str(text)
    assert [place for _, place in found] == [place for _, place in want]


OF_LLAMA_CPP = """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx deepseek-coder
    deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon falcon-h1 falcon3 gemma4
    gigachat glm4 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m granite-embed-multi-97m grok-2
    hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano
    joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2
    midm-2.0 minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe
    sarvam-moe seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya
    trillion ufakzeka viking whitespace youtu
"""
"""The names that llama.cpp's loader of vocabularies has (src/llama-vocab.cpp of commit 00ad355e)."""
OF_OTHER_MODELS = {
    "chameleon",
    "granite-embed-multi-311m",
    "sarvam-moe",
    "spark2_5",
    "superbpe",
    "ufakzeka",
    "whitespace",
}
"""Those of models that are not supported."""


def test_every_name_of_llama_cpp_is_supported_but_those_of_models_that_are_not():
    own_kind = {"gemma4"}  # a tokenizer.ggml.model of its own
    assert set(OF_LLAMA_CPP.split()) - PRESETS.keys() == OF_OTHER_MODELS | own_kind


@pytest.mark.parametrize("repeated", ["hello", "he"])
def test_of_equal_texts_the_first_id_is_encoded_and_every_id_decoded(repeated):
    metadata = vocabularies.byte_level()
    first = metadata["tokenizer.ggml.tokens"].index(repeated)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], repeated]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], np.int32(1))
    tokenizer, last = Tokenizer.from_gguf(metadata), len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.encode(repeated) == [first]
    assert tokenizer.decode([first, last]) == 2 * repeated
    assert tokenizer.vocab_size == last + 1
