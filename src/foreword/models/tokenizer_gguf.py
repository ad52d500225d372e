"""Tokenizers from the vocabulary in GGUF metadata.

The file holds tokens, their types and either merges (byte-level BPE), scores (SentencePiece, Unigram) or neither
(WordPiece); of the pre-tokenizer of byte-level BPE it holds only the name. A wrong pre-tokenizer still gives plausible
ids, so an unknown name is an error, and a file without a name gets a warning unless its vocabulary is well known.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from foreword.errors import ModelError
from foreword.models.files import T, typed_value
from foreword.models.gguf import Strings
from foreword.models.pre_tokenizers import PRESETS, Preset, preset_of_vocabulary
from foreword.models.tokenizer_parts import TokenizerParts, panics_caught, surrounding, turn_ends

_TEMPLATE = "tokenizer.chat_template"
_TOKENS = ("bos", "eos", "eot", "eom", "unknown", "padding", "separator", "seperator", "cls", "mask")
_KNOWN = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_space_prefix", "suppress_tokens"),
    *("add_bos_token", "add_eos_token", "add_sep_token", "token_type_count", "added_tokens"),
    *("remove_extra_whitespaces", "precompiled_charsmap"),
    *(f"{name}_token_id" for name in (*_TOKENS, "prefix", "suffix", "middle")),
    "tokenizer.huggingface.json",
}


class _Type(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def build_from_gguf(metadata: Mapping[str, object], *, of_encoder: bool = False) -> TokenizerParts:
    """Return the tokenizer of a GGUF file. ModelError names the wrong key, or the vocabulary type and the supported
    ones. of_encoder: it surrounds a text, and each of two texts, by the tokens of their beginnings and ends.
    """
    tokens = _list(metadata, "tokens")
    types = _numbers(metadata, "token_type", len(tokens))
    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    kind = _get(metadata, "model", str)
    build = _BUILDERS.get(kind)
    if build is None:
        known = ", ".join(f"{name!r} ({what})" for name, (what, _) in _BUILDERS.items())
        fix = "Use the model's directory with its tokenizer.json"
        raise ModelError(f"metadata tokenizer.ggml.model is {kind!r}; supported are {known}. {fix}")
    try:
        with panics_caught():
            backend, add_bos = build[1](metadata, tokens, types)
            _add_tokens(backend, tokens, types)
            first = _flagged(metadata, "add_bos_token", add_bos, ids["bos"])
            last = _flagged(metadata, "add_eos_token", False, ids["eos"])
            if of_encoder:
                backend.post_processor = _around_texts(metadata, tokens)
            elif first or last:
                backend.post_processor = surrounding([(tokens[i], i) for i in first], [(tokens[i], i) for i in last])
    except ModelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"the vocabulary in the file is inconsistent: {error}. Convert the model again") from None
    ends = [i for i in (ids["eos"], ids["eot"], ids["eom"], *turn_ends(backend)) if i is not None]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: tokens[i] for key, name in named.items() if (i := ids[name]) is not None}
    templates = _chat_templates(metadata)
    if not of_encoder and _get(metadata, "add_sep_token", bool, False):
        raise ModelError("metadata tokenizer.ggml.add_sep_token = True is not supported. Use the model's directory")
    return TokenizerParts(
        backend,
        ids["bos"],
        tuple(dict.fromkeys(ends)),
        templates,
        special,
        repeated=_repeated(tokens),
        unread=tuple(sorted(key for key in metadata if key.startswith("tokenizer.") and not _is_known(key))),
    )


def _is_known(key: str) -> bool:
    """Return whether a key of the metadata is read, or changes no token of a text."""
    name = key.removeprefix("tokenizer.ggml.")
    return name in _KNOWN or key.startswith(_TEMPLATE) or name.startswith("fim_")


def _flagged(metadata: Mapping[str, object], key: str, default: bool, token_id: int | None) -> list[int]:
    """Return the token, if there is one and the file says that it is added."""
    return [] if token_id is None or not _get(metadata, key, bool, default) else [token_id]


def _byte_level(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Return the backend, and whether a text begins with the bos token by default."""
    preset = _preset(metadata, tokens)
    # Building from Python's objects takes half the time of building from JSON.
    merges = _Merges(_list(metadata, "merges"))
    backend = Tokenizer(models.BPE(_first_ids(tokens), merges, ignore_merges=preset.whole_words_first))
    if preset.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = preset.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, preset.add_bos


class _Merges(Sequence[Any]):
    """The merges of a file as pairs of texts, each made when it is read: a list has an object for each pair and each
    text.
    """

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._texts[index].split(" "))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return map(tuple, map(str.split, self._texts, repeat(" ")))


def _preset(metadata: Mapping[str, object], tokens: list[str]) -> Preset:
    """Return the pre-tokenizer that the file names, else the one of its vocabulary, else, with a warning, llama.cpp's
    default. Raise ModelError for a name that is not supported.
    """
    pre = _get(metadata, "pre", str, "") or preset_of_vocabulary(tokens)
    if pre is None:
        reason = "the model's file does not name its pre-tokenizer (tokenizer.ggml.pre), and its vocabulary is unknown"
        effect = "its texts are split by the rule 'default', which is wrong for most models: outputs may be poor"
        fix = "Convert the model again, or add the name with `gguf-new-metadata --pre-tokenizer NAME`"
        warnings.warn(f"{reason}; {effect}. {fix}", stacklevel=2)
        pre = "default"
    if pre not in PRESETS:
        raise ModelError(
            f"metadata tokenizer.ggml.pre is {pre!r}, a pre-tokenizer that is not supported; supported are "
            f"{', '.join(PRESETS)}. Use the model's directory with its tokenizer.json"
        )
    return PRESETS[pre]


def _first_ids(tokens: list[str]) -> dict[str, int]:
    """Return the id of each text: of equal ones the first."""
    last = len(tokens) - 1
    return dict(zip(reversed(tokens), range(last, -1, -1), strict=True))


def _repeated(tokens: list[str]) -> dict[int, str]:
    """Return the text of each id whose text also has an id before it."""
    if len(set(tokens)) == len(tokens):  # as in almost all models; this takes a quarter of the time of the ids
        return {}
    first = _first_ids(tokens)
    return {i: token for i, token in enumerate(tokens) if first[token] != i}


def _with_lines(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Return the vocabulary of Gemma 4: as SentencePiece, with the merges of the file, none of which crosses the end of
    a run of line feeds.
    """
    backend, _ = _sentence_piece(metadata, tokens, types, _Merges(_list(metadata, "merges")), adds_space=False)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    return backend, True


def _sentence_piece(
    metadata: Mapping[str, object],
    tokens: list[str],
    types: Sequence[int],
    merges: Sequence[tuple[str, str]] | None = None,
    *,
    adds_space: bool = True,
) -> tuple[Tokenizer, bool]:
    """Build a tokenizer of SentencePiece's kind. With ``merges`` None, they follow from the scores. ``adds_space`` is
    whether a text begins with a space by default.
    """
    # Some files write user-defined runs of spaces as " ", where the vocabulary uses "▁".
    for i in np.flatnonzero(np.asarray(types) == _Type.USER_DEFINED).tolist():
        tokens[i] = tokens[i].replace(" ", "▁")
    unknown = _token_id(metadata, "unknown", len(tokens))
    vocabulary = _first_ids(tokens)
    if merges is None:
        merges = _merges(vocabulary, tokens, types, _numbers(metadata, "scores", len(tokens)))
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_mark = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _get(metadata, "add_space_prefix", bool, adds_space):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_mark])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = to_mark
    backend.decoder = decoders.Sequence(steps)
    return backend, True


def _merges(
    vocabulary: Mapping[str, int], tokens: list[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return all splits of all tokens in two, best first, because SentencePiece merges the neighbours with the best
    joint score.
    """
    id_of = vocabulary.get
    pairs: list[tuple[int, int]] = []
    for i in np.argsort(-np.asarray(scores), kind="stable").tolist():
        if types[i] != _Type.NORMAL:
            continue
        token, splits = tokens[i], []
        for n in range(1, len(token)):
            left = id_of(token[:n])
            if left is not None and (right := id_of(token[n:])) is not None:
                splits.append((left, right))
        pairs += sorted(splits)
    return [(tokens[left], tokens[right]) for left, right in pairs]


def _word_piece(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Build a tokenizer of BERT's kind. The file has a word's first token as ▁token, and a later one, ##token, as
    token; ▁ alone is ##▁. It does not say whether texts are lower-cased: they are unless a token has an upper-case
    letter.
    """
    normal = []
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        is_first = len(token) > 1 and token[0] == "▁"
        if kind == _Type.USER_DEFINED and is_first:
            tokens[i] = token[1:]
        if kind in (_Type.CONTROL, _Type.UNKNOWN, _Type.USER_DEFINED):
            continue
        if not token:
            raise _wrong(f"tokenizer.ggml.tokens[{i}] is empty")
        normal.append(i)
        if not (len(token) > 1 and token[0] == "[" and token[-1] == "]"):
            tokens[i] = token[1:] if is_first else f"##{token}"
    name = tokens[_unknown(metadata, tokens, "[UNK]")]
    lowers = not any(tokens[i] != tokens[i].lower() for i in normal if tokens[i][0] != "[")
    backend = Tokenizer(models.WordPiece(_first_ids(tokens), unk_token=name))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend, True


def _unigram(metadata: Mapping[str, object], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    """Build a tokenizer of XLM-RoBERTa's kind: words without the white space around them, each the most likely tokens.
    Raise ModelError for one that keeps white space.
    """
    for key in ("add_space_prefix", "remove_extra_whitespaces"):
        if not _get(metadata, key, bool, True):
            fix = "Use the model's directory with its tokenizer.json"
            raise ModelError(f"metadata tokenizer.ggml.{key} = False is not supported. {fix}")
    scores = np.asarray(_numbers(metadata, "scores", len(tokens)), np.float64)
    for i in np.flatnonzero(~np.isfinite(scores))[:1].tolist():
        raise _wrong(f"tokenizer.ggml.scores[{i}] is {scores[i]}, not a finite number")
    scored = list(zip(tokens, scores.tolist(), strict=True))
    backend = Tokenizer(models.Unigram(scored, _unknown(metadata, tokens, "<unk>"), False))
    if characters := _characters(metadata):
        backend.normalizer = normalizers.Precompiled(characters)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    return backend, True


def _characters(metadata: Mapping[str, object]) -> bytes:
    """Return the table of replaced characters: | bytes of the trie u32 | trie | texts |; empty without one. Raise
    ModelError for a trie that is not in it, since tokenizers reserves as much memory as the number says.
    """
    key = "tokenizer.ggml.precompiled_charsmap"
    value = metadata.get(key)
    if value is None:
        return b""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        raise _wrong(f"{key} is {value!r:.80}, not a list of bytes")
    data = value.astype(np.uint8).tobytes()
    size = int.from_bytes(data[:4], "little")
    if not 0 < size <= len(data) - 4:
        raise _wrong(f"{key} has {len(data)} bytes, which hold no trie of {size} bytes")
    return data


def _unknown(metadata: Mapping[str, object], tokens: list[str], usual: str) -> int:
    """Return the token of unknown text: that of the file, else the one with the usual text. Raise ModelError if there
    is none, because requests would fail.
    """
    unknown = _token_id(metadata, "unknown", len(tokens))
    if unknown is None and usual not in tokens:
        raise _wrong(f"tokenizer.ggml.unknown_token_id is missing, and no token is {usual}")
    return tokens.index(usual) if unknown is None else unknown


def _around_texts(metadata: Mapping[str, object], tokens: list[str]) -> processors.TemplateProcessing:
    """Return what surrounds a text of an encoder, and two: with WordPiece [CLS] A [SEP] B [SEP], B of type 1, else
    <s> A </s></s> B </s>. Raise ModelError if the file does not name these tokens.
    """

    def named(*names: str) -> tuple[str, int]:
        found = (_token_id(metadata, name, len(tokens)) for name in names)
        token_id = next((i for i in found if i is not None), None)
        if token_id is None:
            raise _wrong(f"tokenizer.ggml.{names[0]}_token_id is missing")
        return tokens[token_id], token_id

    first, last = named("cls", "bos"), named("separator", "seperator", "eos")
    if _get(metadata, "model", str) == "bert":
        pair = [f"{first[0]}:0", "$A:0", f"{last[0]}:0", "$B:1", f"{last[0]}:1"]
    else:
        pair = [first[0], "$A", last[0], last[0], "$B:0", f"{last[0]}:0"]
    return processors.TemplateProcessing(
        single=[first[0], "$A", last[0]], pair=pair, special_tokens=list(dict.fromkeys([first, last]))
    )


_Build = Callable[[Mapping[str, object], list[str], Sequence[int]], tuple[Tokenizer, bool]]
_BUILDERS: Mapping[str, tuple[str, _Build]] = {
    "gpt2": ("byte-level BPE", _byte_level),
    "llama": ("SentencePiece", _sentence_piece),
    "gemma4": ("Gemma 4", _with_lines),
    "bert": ("WordPiece", _word_piece),
    "t5": ("Unigram", _unigram),
}
"""By ``tokenizer.ggml.model``: its name, and what returns the backend and whether a text begins with bos by default."""


def _add_tokens(backend: Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    """Control and user-defined tokens match before pre-tokenization; those containing "▁" match after normalization."""
    kinds = np.asarray(types)
    special = np.flatnonzero((kinds == _Type.CONTROL) | (kinds == _Type.UNKNOWN)).tolist()
    backend.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in special])
    plain = np.flatnonzero(kinds == _Type.USER_DEFINED).tolist()
    backend.add_tokens([AddedToken(tokens[i], special=False, normalized="▁" in tokens[i]) for i in plain])


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name: tokenizer.chat_template is "default", tokenizer.chat_template.NAME another."""
    templates = {}
    for key, value in metadata.items():
        name = key.removeprefix(_TEMPLATE)
        if name != key and name[:1] in ("", "."):
            if not isinstance(value, str):
                raise _wrong(f"{key} is {value!r:.80}, not a text")
            templates[name[1:] or "default"] = value
    return templates


def _get(metadata: Mapping[str, object], key: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of tokenizer.ggml.KEY."""
    try:
        return typed_value(metadata, f"tokenizer.ggml.{key}", kind, default)
    except TypeError as error:
        raise _wrong(str(error)) from None


def _list(metadata: Mapping[str, object], key: str) -> list[str]:
    """Return a copy of the strings of tokenizer.ggml.KEY."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list | Strings) or not value:
        raise _wrong(f"tokenizer.ggml.{key} is {'missing' if value is None else 'not a list of strings'}")
    return list(value)


def _numbers(metadata: Mapping[str, object], key: str, count: int) -> list[int]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, np.ndarray) or len(value) != count:
        raise _wrong(f"tokenizer.ggml.{key} does not hold a number for each of the {count} tokens")
    return list(value.tolist())


def _token_id(metadata: Mapping[str, object], name: str, count: int) -> int | None:
    key = f"{name}_token_id"
    if f"tokenizer.ggml.{key}" not in metadata:
        return None
    token_id = _get(metadata, key, int)
    if not 0 <= token_id < count:
        raise _wrong(f"tokenizer.ggml.{key} is {token_id}, but there are {count} tokens")
    return token_id


def _wrong(what: str) -> ModelError:
    return ModelError(f"metadata {what}. Convert the model again")
