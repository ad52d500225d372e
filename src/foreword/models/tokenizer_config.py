"""The keys of tokenizer_config.json beside tokenizer.json: followed, refused by name, or told to have no influence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, normalizers, processors

from foreword.models.config import USE_ITS_CONFIG, Config
from foreword.models.text_bounds import state_of, steps_of
from foreword.models.tokenizer_parts import panics_caught, surrounding

SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
_READ = {
    *SPECIAL,
    *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "split_special_tokens"),
    *("add_prefix_space", "add_bos_token", "add_eos_token", "do_lower_case", "strip_accents", "tokenize_chinese_chars"),
    *("chat_template", "response_template", "model_max_length"),
}
_WITHOUT_EFFECT = {
    *("tokenizer_class", "processor_class", "auto_map", "name_or_path", "special_tokens_map_file", "tokenizer_file"),
    *("backend", "is_local", "local_files_only", "model_type", "from_slow", "use_fast", "init_inputs", "added_tokens"),
    *("model_input_names", "max_length", "max_len", "stride", "errors", "trim_offsets", "do_basic_tokenize"),
    *("padding", "padding_side", "padding_strategy", "pad_to_multiple_of", "pad_token_type_id", "pad_token_id"),
    *("truncation", "truncation_side", "truncation_strategy", "never_split", "use_default_system_prompt"),
    *("legacy", "sp_model_kwargs", "vocab_file", "merges_file", "do_split", "unk_id", "bos_id", "eos_id"),
}
"""Keys of files, of batches and of slow tokenizers. What ``legacy`` chooses is in tokenizer.json."""
_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_SWITCHES = ("add_bos_token", "add_eos_token", *_BERT)
_ENDS = ("bos", "eos")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def configure(backend: tokenizers.Tokenizer, config: Config) -> tuple[str, ...]:
    """Apply the configuration to a backend, and return the keys without influence. Raise ModelError for what
    contradicts tokenizer.json, and for what is not supported.
    """
    for name in _SWITCHES:
        config.optional(name, bool)  # raises for another type, also where nothing reads it
    if config.value("model_max_length") is not None and type(config.value("model_max_length")) is not int:
        config.get("model_max_length", float)
    if config.get("split_special_tokens", bool, False):
        raise config.error("split_special_tokens = True is not supported", "Encode texts with parse_special=False")
    for token_id, token in added_tokens(config):
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(token.content) != token_id:
            reason = f"added_tokens_decoder gives {token.content!r:.80} the id {token_id}"
            raise config.error(f"{reason}, tokenizer.json {backend.token_to_id(token.content)}", USE_ITS_CONFIG)
    for text in _more_tokens(config):
        if backend.token_to_id(text) is None:
            raise config.error(f"the special token {text!r:.80} is not in tokenizer.json", USE_ITS_CONFIG)
    _configure_bert(backend, config)
    _add_around(backend, config)
    given = config.optional("add_prefix_space", bool)
    if given is not None and given != (found := _has_prefix_space(backend)):
        raise config.error(f"add_prefix_space = {given}, in tokenizer.json it is {found}", USE_ITS_CONFIG)
    unread = [
        name for name, value in config.values.items() if value is not None and name not in _READ | _WITHOUT_EFFECT
    ]
    neutral = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
    unread = [name for name in unread if config.values[name] != neutral.get(name)]
    return tuple(f"{config.path.name}: {name}" for name in sorted({*unread, *_contradicted(backend, config)}))


def added_tokens(config: Config) -> Iterator[tuple[int, AddedToken]]:
    """Yield the tokens of added_tokens_decoder with their ids, in order."""
    given: Any = {} if config.value("added_tokens_decoder") is None else config.value("added_tokens_decoder")
    try:
        found = sorted((int(token_id), token["content"], token) for token_id, token in given.items())
        for token_id, content, token in found:
            yield token_id, AddedToken(content, **{flag: bool(token[flag]) for flag in _FLAGS if flag in token})
    except (AttributeError, TypeError, ValueError, KeyError):
        raise config.error(f"added_tokens_decoder is {given!r:.80}, not tokens by id", USE_ITS_CONFIG) from None


def _more_tokens(config: Config) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        given: Any = () if config.value(key) is None else config.value(key)
        if not isinstance(given, Mapping | list | tuple):
            raise config.error(f"{key} is {given!r:.80}, not tokens", USE_ITS_CONFIG)
        for token in given.values() if isinstance(given, Mapping) else given:
            text = token.get("content") if isinstance(token, Mapping) else token
            if not isinstance(text, str):
                raise config.error(f"{key} is {given!r:.80}, not tokens", USE_ITS_CONFIG)
            yield text


def _configure_bert(backend: tokenizers.Tokenizer, config: Config) -> None:
    """Set what the normalizer of BERT does, where the configuration says so."""
    if not isinstance(backend.normalizer, normalizers.BertNormalizer):
        return
    state = {name: value for name, value in state_of(backend.normalizer).items() if name != "type"}
    given = {own: config.optional(key, bool) for key, own in _BERT.items()}
    backend.normalizer = normalizers.BertNormalizer(
        **{**state, **{own: value for own, value in given.items() if value is not None}}
    )


def _add_around(backend: tokenizers.Tokenizer, config: Config) -> None:
    """Add the tokens around a text that the configuration asks for, where the model has a tokenizer of its own code:
    such code adds them after it has read a tokenizer.json without any.
    """
    classes: Any = config.value("auto_map")
    if not (isinstance(classes, Mapping) and "AutoTokenizer" in classes) or _around(backend) != set():
        return
    tokens: dict[str, list[tuple[str, int]]] = {}
    for name in _ENDS:
        text, token_id = _named(backend, config, name)
        is_added = config.value(f"add_{name}_token") is True
        tokens[name] = [(text, token_id)] if is_added and token_id is not None else []
    if any(tokens.values()):
        added, own = surrounding(tokens["bos"], tokens["eos"]), backend.post_processor
        backend.post_processor = added if own is None else processors.Sequence([own, added])


def _named(backend: tokenizers.Tokenizer, config: Config, name: str) -> tuple[str, int | None]:
    """Return the text and the id of the token of this name, "" and None if there is none."""
    token: Any = config.value(f"{name}_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    return (text, backend.token_to_id(text)) if isinstance(text, str) else ("", None)


def _around(backend: tokenizers.Tokenizer) -> set[str] | None:
    """Return the tokens around an empty text; None if the tokenizer fails on it."""
    try:
        with panics_caught():
            return set(backend.encode("").tokens)
    except Exception:  # tokenizers fail on the text
        return None


def _has_prefix_space(backend: tokenizers.Tokenizer) -> bool:
    """Return whether a text gets a space before it."""
    steps = [*steps_of(state_of(backend.pre_tokenizer)), *steps_of(state_of(backend.normalizer))]
    return any(
        step.get("add_prefix_space", False) or step.get("prepend_scheme", "never") != "never" or "prepend" in step
        for step in steps
    )


def _contradicted(backend: tokenizers.Tokenizer, config: Config) -> Iterator[str]:
    """Yield the keys that tokenizer.json contradicts: it decides which tokens are around a text, as in transformers."""
    if (around := _around(backend)) is None:
        return
    for name in _ENDS:
        given, (text, _) = config.value(f"add_{name}_token"), _named(backend, config, name)
        if given is not None and text and given != (text in around):
            yield f"add_{name}_token"
