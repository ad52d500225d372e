"""Streaming gives the text of decoding at once, in complete characters."""

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models

from foreword.errors import ModelError
from foreword.models.detokenizer import TokenBytes
from foreword.models.tokenizer import Tokenizer
from foreword.models.tokenizer_parts import TokenizerParts
from models import vocabularies

BYTE_LEVEL = Tokenizer.from_gguf(vocabularies.byte_level())
SENTENCE_PIECE = Tokenizer.from_gguf(vocabularies.sentence_piece())
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte-level", "sentence-piece"])
IDS = st.lists(st.integers(0, 400), max_size=40)
# Characters of two, three and four bytes: complete, truncated and mixed.
TORN = st.lists(
    st.sampled_from([0x41, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x99, 0x82, 0xED, 0xA0, 0xFF]), max_size=20
)


def streamed(tokenizer, ids, cuts, **options):
    """The text of each push, split at ``cuts``, and of `finish`."""
    detokenizer = tokenizer.detokenizer(**options)
    starts = sorted({0, *(cut for cut in cuts if cut < len(ids))})
    chunks = [ids[start:end] for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
    return [*map(detokenizer.push, chunks), detokenizer.finish()]


def byte_id(tokenizer, byte):
    name = vocabularies.BYTES[byte] if tokenizer is BYTE_LEVEL else f"<0x{byte:02X}>"
    return tokenizer.backend.token_to_id(name)


@BOTH
@given(ids=IDS, cuts=st.sets(st.integers(0, 40)), skip=st.booleans())
def test_streamed_text_is_the_text_decoded_at_once(tokenizer, ids, cuts, skip):
    assert "".join(streamed(tokenizer, ids, cuts, skip_special_tokens=skip)) == tokenizer.decode(ids, skip)


@BOTH
@given(data=TORN, cuts=st.sets(st.integers(0, 20)))
def test_invalid_bytes_decode_as_in_python(tokenizer, data, cuts):
    ids = [byte_id(tokenizer, byte) for byte in data]
    assert "".join(streamed(tokenizer, ids, cuts)) == bytes(data).decode("utf-8", "replace")


@given(ids=IDS)
def test_byte_level_text_equals_that_of_tokenizers(ids):
    ids = [i for i in ids if i < BYTE_LEVEL.vocab_size]
    for skip in (True, False):
        assert BYTE_LEVEL.decode(ids, skip) == BYTE_LEVEL.backend.decode(ids, skip_special_tokens=skip)


SPACED = Tokenizer.from_gguf(vocabularies.sentence_piece(**{"ggml.add_space_prefix": False}))


@pytest.mark.parametrize("tokenizer", [SENTENCE_PIECE, SPACED], ids=["prefix-space", "no-prefix-space"])
@given(ids=IDS, cuts=st.sets(st.integers(0, 40)), skip=st.booleans())
def test_sentence_piece_ids_decode_as_in_tokenizers_where_their_bytes_are_valid(tokenizer, ids, cuts, skip):
    """Tokenizers make every byte of an invalid run U+FFFD, also those that are characters."""
    ids = [i for i in ids if i < tokenizer.vocab_size]
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assume("�" not in expected)
    assert "".join(streamed(tokenizer, ids, cuts, skip_special_tokens=skip)) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tokenizer", [SENTENCE_PIECE, SPACED, BYTE_LEVEL], ids=["prefix", "no-prefix", "byte-level"])
@given(parts=st.lists(st.text(max_size=3) | IDS.map(lambda ids: ids[:2]), max_size=8), skip=st.booleans())
def test_characters_in_bytes_between_any_tokens_decode_as_in_tokenizers(tokenizer, parts, skip):
    ids = []
    for part in parts:
        known = [byte_id(tokenizer, byte) for byte in part.encode()] if isinstance(part, str) else part
        ids += [i for i in known if i < tokenizer.vocab_size]
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assume("�" not in expected)
    assert "".join(streamed(tokenizer, ids, range(len(ids)), skip_special_tokens=skip)) == expected


@given(text=st.text(alphabet="ab helo\néß日🙂▁", max_size=30))
def test_sentence_piece_text_equals_that_of_tokenizers(text):
    ids = SENTENCE_PIECE.encode(text)
    assert SENTENCE_PIECE.decode(ids) == SENTENCE_PIECE.backend.decode(ids) == text.replace("▁", " ")


@BOTH
@given(text=st.text(max_size=20))
def test_every_push_of_valid_text_is_complete_characters(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    pieces = streamed(tokenizer, ids, range(len(ids)))
    assert pieces[-1] == ""  # no incomplete character remains
    assert "".join(pieces).count("�") == text.count("�")


@BOTH
def test_a_character_of_four_tokens_is_emitted_with_the_last(tokenizer):
    ids = [byte_id(tokenizer, byte) for byte in "🙂".encode()]
    assert streamed(tokenizer, ids, range(4)) == ["", "", "", "🙂", ""]


@BOTH
def test_an_incomplete_character_at_the_end_becomes_one_replacement(tokenizer):
    ids = [byte_id(tokenizer, byte) for byte in "🙂".encode()[:3]]
    assert streamed(tokenizer, ids, range(3)) == ["", "", "", "�"]


@BOTH
def test_an_invalid_character_is_replaced_immediately(tokenizer):
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push([byte_id(tokenizer, 0xF0)]) == ""
    assert detokenizer.push([byte_id(tokenizer, 0x41)]) == "�A"


def test_special_tokens_are_decoded_only_on_request():
    ids = BYTE_LEVEL.encode("hello<|im_end|>")
    assert BYTE_LEVEL.decode(ids) == "hello"
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == "hello<|im_end|>"


@pytest.mark.parametrize("text", ["<tool>", "<é>", "  "])
def test_user_defined_tokens_are_text(text):
    tokenizer = Tokenizer.from_gguf(vocabularies.byte_level(user=(text,)))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spaces_between_added_tokens_are_left_out_on_request():
    backend = library(decoders.WordPiece("##", True))
    backend.add_special_tokens(["[SEP]"])
    backend.add_tokens(["<tool>"])
    tokenizer = Tokenizer(TokenizerParts(backend))
    ids = [
        backend.token_to_id(token) for token in ("talk", "[SEP]", "<tool>", "talk", "<tool>", "[SEP]", "[SEP]", "##ing")
    ]
    texts = {
        (False, True): "talk [SEP] <tool> talk <tool> [SEP] [SEP]ing",
        (False, False): "talk [SEP]<tool> talk <tool>[SEP][SEP]ing",
        (True, False): "talk <tool> talk <tool>ing",
    }
    for (skip, spaces), text in texts.items():
        options = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        assert "".join(streamed(tokenizer, ids, range(8), **options)) == text
        assert "".join(streamed(tokenizer, ids, (), **options)) == text
    assert backend.decode(ids, skip_special_tokens=False) == texts[False, True]


def test_ids_may_be_an_array():
    ids = np.array(BYTE_LEVEL.encode("hello 🙂"), np.int32)
    assert BYTE_LEVEL.decode(ids) == "hello 🙂"


@BOTH
def test_ids_outside_the_vocabulary_add_nothing(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size, 10**6]) == ""


def test_text_that_follows_a_prompt_keeps_its_first_space():
    ids = [SENTENCE_PIECE.backend.token_to_id("▁hello")]
    assert streamed(SENTENCE_PIECE, ids, ()) == ["hello", ""]
    assert streamed(SENTENCE_PIECE, ids, (), continues=True) == [" hello", ""]


@pytest.mark.parametrize(
    ("bytes_of_output", "text"),
    [(b"\x99\x82!", "🙂!"), (b"a", "a"), (b"\x99a", "a"), (b"\x99", ""), (b"", ""), (b" \x99", " \ufffd")],
)
def test_a_character_that_the_prompt_begins_is_completed_or_left_to_the_prompt(bytes_of_output, text):
    def ids(raw):
        return [BYTE_LEVEL.backend.token_to_id(vocabularies.BYTES[byte]) for byte in raw]

    prompt = [*BYTE_LEVEL.encode("hello "), *ids("🙂".encode()[:2])]
    for cuts in (range(8), ()):
        options = {"continues": True, "prompt": np.array(prompt, np.int32)}
        assert "".join(streamed(BYTE_LEVEL, ids(bytes_of_output), cuts, **options)) == text


def test_only_the_first_of_many_spaces_is_dropped():
    assert SENTENCE_PIECE.decode(SENTENCE_PIECE.encode("   a  ")) == "   a  "


def library(decoder):
    """A tokenizers.Tokenizer of a few tokens with this decoder."""
    tokens = ["▁the", "▁", "s", "##ing", "talk", "!", "n't", "<0xE9>", "é", "Ġ", ",", "▁▁", "[CLS]"]
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="s"))
    backend.decoder = decoder
    return backend


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.ByteLevel(),
        decoders.WordPiece("##", True),
        decoders.WordPiece("##", False),
        decoders.Metaspace("▁", "never"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ],
    ids=["ByteLevel", "WordPiece", "WordPiece-raw", "Metaspace", "ByteFallback", "Strip"],
)
@given(ids=st.lists(st.integers(0, 12), max_size=12))
def test_each_supported_decoder_gives_the_text_of_tokenizers(decoder, ids):
    ids = [0, *ids]  # a text does not begin inside a word
    backend = library(decoder)
    assert Tokenizer(TokenizerParts(backend)).decode(ids) == backend.decode(ids)


def test_an_unsupported_decoder_is_named():
    with pytest.raises(ModelError, match=r"CTC.*Supported are"):
        TokenBytes(library(decoders.CTC()))
    with pytest.raises(ModelError, match="no decoder"):
        TokenBytes(tokenizers.Tokenizer(models.BPE()))
    with pytest.raises(ModelError, match="Strip"):
        TokenBytes(library(decoders.Strip("x", 0, 3)))
