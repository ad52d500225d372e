"""Encoders in GGUF files, against results recorded from transformers and the tokenizers of directories."""

import json
from functools import partial

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from foreword import LLM, PoolingParams
from foreword.errors import ModelError, UnsupportedModelError
from foreword.models.families.gguf_encoders import GGUF_ENCODER_FAMILIES
from foreword.models.loader import load_model
from foreword.models.quants import Quant, quantize_q8
from foreword.models.safetensors import read_safetensors
from foreword.models.tokenizer import Tokenizer
from models.encoder_gguf import bytes_of, unigrams, word_pieces, write_encoder_gguf
from models.pooling_models import POOLING
from models.running import FLOATS
from models.tiny import random_tensors, write_model

ENCODERS = ["bert", "roberta", "distilbert", "nomic-bert", "jina-embeddings-v3", "modernbert"]
VOCABULARY = bytes_of([chr(0x100 + i) for i in range(48)], bos=1, eos=2, unknown=3, padding=0)
KINDS = {"cls": 2, "last": 3, "mean": 1}


def gguf_of(path, name, **options):
    tiny = POOLING[name]
    return write_encoder_gguf(path, tiny["config"], random_tensors(tiny["shapes"]), VOCABULARY, **options)


def options_of(executor):
    return {key: value for key, value in FLOATS[executor].items() if key != "kv_format"}


def test_every_architecture_is_compared():
    assert len(GGUF_ENCODER_FAMILIES) == len(ENCODERS) - 2  # RoBERTa and DistilBERT are bert


@pytest.mark.parametrize("executor", FLOATS)
@pytest.mark.parametrize(
    ("name", "fuse"), [*((name, False) for name in ENCODERS), ("bert", True)], ids=[*ENCODERS, "bert, fused"]
)
def test_vectors_equal_those_of_transformers(tmp_path, name, fuse, executor):
    texts = POOLING[name]["texts"]
    for pooling, number in KINDS.items():
        path = gguf_of(tmp_path / "model.gguf", name, pooling=number, fuse=fuse)
        with LLM(str(path), executor=executor, **options_of(executor)) as llm:
            vectors = llm.embed([text["token_ids"] for text in texts], PoolingParams(normalize=False))
        for vector, text in zip(vectors, texts, strict=True):
            np.testing.assert_allclose(vector, text[pooling], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("executor", FLOATS)
def test_a_classifier_gives_the_results_of_transformers(tmp_path, executor):
    names = ["no", "maybe", "yes"]
    more = {"classifier.output_labels": ("[str]", names)}
    path = gguf_of(tmp_path / "model.gguf", "roberta-classifier", pooling=4, **more)
    texts = POOLING["roberta-classifier"]["texts"]
    with LLM(str(path), executor=executor, **options_of(executor)) as llm:
        assert llm.model.pooling.labels == tuple(names)
        outputs = llm.classify([text["token_ids"] for text in texts])
    for output, text in zip(outputs, texts, strict=True):
        exponents = np.exp(np.array(text["logits"]))
        np.testing.assert_allclose(output.outputs.probs, exponents / exponents.sum(), rtol=1e-4, atol=1e-5)


def test_matrices_may_have_any_number_format(tmp_path):
    def encode(matrix):
        padded = matrix if matrix.shape[1] % 32 == 0 else None
        if padded is None:
            return Quant.F16, matrix.astype("<f2").view(np.uint8)
        return Quant.Q8_0, quantize_q8(matrix.reshape(-1, 32))

    path = gguf_of(tmp_path / "model.gguf", "bert", pooling=1, encode=encode)
    with LLM(str(path)) as llm:
        [got] = llm.embed([POOLING["bert"]["texts"][0]["token_ids"]], PoolingParams(normalize=False))
    want = np.array(POOLING["bert"]["texts"][0]["mean"])
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)


def test_the_keys_of_the_files_of_nomic_ai_are_read(tmp_path):
    """They are those of the code that came with these files."""
    tiny = POOLING["nomic-bert"]
    tensors = random_tensors(tiny["shapes"])
    sizes = tiny["config"]
    config = {
        "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "n_embd": sizes["hidden_size"],
        "n_head": sizes["num_attention_heads"], "n_inner": sizes["intermediate_size"], "n_layer": 3,
        "n_positions": 8192, "max_trained_positions": 24, "rotary_scaling_factor": 2, "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12, "prenorm": False, "qkv_proj_bias": False, "vocab_size": 48, "type_vocab_size": 2,
    }  # fmt: skip
    folder = write_model(tmp_path / "model", config, tensors)
    assert load_model(folder).unread_keys == ()
    with LLM(str(folder), executor="numpy") as llm:
        assert llm.model.spec.max_model_len == 24
        for text in tiny["texts"]:
            [vector] = llm.embed([text["token_ids"]], PoolingParams(pooling="mean", normalize=False))
            np.testing.assert_allclose(vector, text["mean"], rtol=1e-5, atol=2e-5)
    folder = write_model(tmp_path / "other", {**config, "prenorm": True}, tensors)
    with pytest.raises(ModelError, match="prenorm = True is not supported"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bert", {"pooling": 5}, r"bert\.pooling_type = 5 is not supported"),
        ("bert", {"pooling": 4}, r"tensor cls\.weight \(head\.0\) is missing"),
        ("modernbert", {"pooling": 4}, "a classifier of this family is not supported"),
        ("nomic-bert", {"attention.causal": ("bool", True)}, r"nomic-bert\.attention\.causal = True is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, name, options, message):
    path = gguf_of(tmp_path / "model.gguf", name, **options)
    with pytest.raises(ModelError, match=message):
        load_model(path)


def test_an_unknown_architecture_names_the_encoders(tmp_path):
    path = gguf_of(tmp_path / "model.gguf", "bert")
    path.write_bytes(path.read_bytes().replace(b"bert", b"bort"))
    with pytest.raises(UnsupportedModelError, match=r"'bort' is not supported.* bert, .*nomic-bert"):
        load_model(path)


TEXTS = [
    "The cat",
    "don't!! stop",
    "  two  spaces\tand\nlines ",
    "Ünïcödé, 漢字 and ﬁ",
    "unknown ☃ here",
    "",
    "cat[MASK]",
]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "un", "##known", "##code", "stop", "don",
          "t", "'", "!", ",", "two", "space", "and", "line", "here", "漢", "字", "[", "##]", "[unused0]"]  # fmt: skip


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_are_those_of_the_directory(tmp_path, lowercase):
    pieces = PIECES if lowercase else [*PIECES, "The", "Ü", "##n"]
    backend = Backend(models.WordPiece({text: i for i, text in enumerate(pieces)}, unk_token="[UNK]"))
    backend.add_special_tokens(PIECES[:5])
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.save(str(tmp_path / "tokenizer.json"))
    own = tokenizer_of(word_pieces(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert own.encode(text) == backend.encode(text).ids
        assert own.encode(text, add_special_tokens=False) == backend.encode(text, add_special_tokens=False).ids
        encoded = backend.encode(text, "the cats")
        assert own.encode_pair(text, "the cats") == (encoded.ids, encoded.type_ids.index(1))
    assert own.eos_ids == ()


def test_unigrams_are_those_of_the_directory(tmp_path):
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -3.1), ("▁cat", -4.0), ("s", -5.0),
              ("▁", -3.5), ("t", -6.0), ("c", -6.5), ("a", -6.1), ("▁c", -5.2), ("at", -5.0), ("h", -7.0), ("e", -6.2),
              ("<mask>", 0.0)]  # fmt: skip
    backend = Backend(models.Unigram(pieces, 3, False))
    backend.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    backend.save(str(tmp_path / "tokenizer.json"))
    metadata = unigrams(tmp_path / "tokenizer.json")
    own = tokenizer_of(metadata)
    for text in ["the cats", " the  cat ", "", "hat ☃", "cat<mask>s"]:
        assert own.encode(text) == backend.encode(text).ids
        assert own.encode_pair(text, "a cat") == (backend.encode(text, "a cat").ids, None)
    metadata["tokenizer.ggml.add_space_prefix"] = ("bool", False)
    with pytest.raises(ModelError, match="add_space_prefix = False is not supported"):
        tokenizer_of(metadata)


def of_pieces(stored, types, **more):
    tokens = {"tokenizer.ggml.tokens": ("[str]", stored), "tokenizer.ggml.token_type": ("[i32]", types)}
    ids = {"unknown": 1, "cls": 2, "seperator": 3}
    return {"tokenizer.ggml.model": ("str", "bert"), **tokens, **more} | {
        f"tokenizer.ggml.{name}_token_id": ("u32", i) for name, i in ids.items()
    }


def test_word_pieces_that_begin_no_word_or_are_added(tmp_path):
    """▁ alone is ##▁; tokens that users add are stored as first tokens of words."""
    pieces = {text: i for i, text in enumerate([*PIECES[:5], "a", "##▁", "##b", "<x>"])}
    backend = Backend(models.WordPiece(pieces, unk_token="[UNK]"))
    backend.add_special_tokens(PIECES[:5])
    backend.add_tokens(["<x>"])
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    own = tokenizer_of(of_pieces([*PIECES[:5], "▁a", "▁", "b", "▁<x>"], [3] * 5 + [1] * 3 + [4]))
    for text in ["a▁b", "ab<x>a", "x"]:
        assert own.encode(text, add_special_tokens=False) == backend.encode(text).ids


UNIGRAMS = {
    "tokenizer.ggml.model": ("str", "t5"),
    "tokenizer.ggml.tokens": ("[str]", ["<s>", "</s>", "x", "▁a"]),
    "tokenizer.ggml.token_type": ("[i32]", [3, 3, 1, 1]),
    "tokenizer.ggml.scores": ("[f32]", [0.0, 0.0, -1.0, -2.0]),
}

UNKNOWN = {"tokenizer.ggml.unknown_token_id": ("u32", 2)}
CHARACTERS = "tokenizer.ggml.precompiled_charsmap"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (of_pieces([*PIECES[:5], ""], [3] * 5 + [1]), r"tokenizer\.ggml\.tokens\[5\] is empty"),
        (
            {k: v for k, v in of_pieces(["x"] * 5, [3] * 5).items() if "unknown" not in k},
            r"unknown_token_id is missing, and no token is \[UNK\]",
        ),
        (UNIGRAMS, "unknown_token_id is missing, and no token is <unk>"),
        (
            {**UNIGRAMS, "tokenizer.ggml.scores": ("[f32]", [0.0, 0.0, float("nan"), -2.0])},
            r"tokenizer\.ggml\.scores\[2\] is nan, not a finite number",
        ),
        (
            {**UNIGRAMS, **UNKNOWN, CHARACTERS: ("[i32]", [0, 0, 0, 255, 0, 0, 0, 0])},
            r"precompiled_charsmap has 8 bytes, which hold no trie of 4278190080 bytes",
        ),
        ({**UNIGRAMS, **UNKNOWN, CHARACTERS: ("str", "abc")}, "precompiled_charsmap is 'abc', not a list of bytes"),
    ],
)
def test_vocabularies_that_would_fail_in_requests_are_refused(metadata, message):
    with pytest.raises(ModelError, match=message):
        tokenizer_of(metadata)


def tokenizer_of(metadata):
    read = {key: np.array(value) if kind in ("[i32]", "[f32]") else value for key, (kind, value) in metadata.items()}
    return Tokenizer.from_gguf(read, of_encoder=True)


@pytest.mark.model
def test_a_real_model_has_the_vectors_of_its_directory(tmp_path, minilm_path):
    folder = minilm_path.parent
    tensors = {name: tensor.dequantize() for name, tensor in read_safetensors(minilm_path).items()}
    config = json.loads((folder / "config.json").read_text())
    vocabulary = word_pieces(folder / "tokenizer.json")
    path = write_encoder_gguf(tmp_path / "minilm.gguf", config, tensors, vocabulary, pooling=1)
    texts = ["A cat sits outside.", "Ünïcödé 漢字 don't!! e-mail@x.y \t tab", ""]
    make = partial(LLM, executor="numpy")
    with make(str(path)) as own, make(str(folder)) as other:
        for got, want in zip(own.encode(texts), other.encode(texts), strict=True):
            assert got.prompt_token_ids == want.prompt_token_ids
            np.testing.assert_allclose(got.outputs.data, want.outputs.data, atol=1e-6)
