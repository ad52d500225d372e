"""Read what a model's files say about generation: tokens that are never written, and suggested sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foreword.errors import ModelError
from foreword.models.config import Config
from foreword.models.files import FETCH_AGAIN
from foreword.models.keys import WITHOUT_EFFECT, Key, only, table
from foreword.models.text_files import read_object

_PARAMETERS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
    # llama.cpp
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
}
"""Key of a suggestion → the field of `SamplingParams` with this meaning."""
SUGGESTIBLE = frozenset(_PARAMETERS.values())
_SUGGESTED = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("max_length", "max_new_tokens"),
)
"""Keys of a generation_config.json that requests decide."""
_KEYS = table(
    [
        *map(Key, ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", *_SUGGESTED)),
        *(only(name, 1) for name in ("num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty")),
        *(only(name, 0) for name in ("penalty_alpha", "diversity_penalty", "min_length", "min_new_tokens")),
        *(only(name, 0) for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")),
        *(only(name, 0) for name in ("epsilon_cutoff", "eta_cutoff")),
        *(only(name, False) for name in ("remove_invalid_values", "low_memory")),
        *(
            only(name, None, [], {})
            for name in (
                *("force_words_ids", "constraints", "forced_bos_token_id", "forced_eos_token_id"),
                *("forced_decoder_ids", "sequence_bias", "exponential_decay_length_penalty", "stop_strings"),
                *("dola_layers", "watermarking_config", "token_healing", "max_time"),
            )
        ),
    ]
)
_NO_EFFECT = {
    *WITHOUT_EFFECT,
    *("_from_model_config", "cache_config", "compile_config", "disable_compile", "early_stopping", "length_penalty"),
    *("num_return_sequences", "output_logits", "output_scores", "prefill_chunk_size", "renormalize_logits"),
    *("return_dict_in_generate", "return_legacy_cache", "trust_remote_code"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "is_assistant", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "decoder_start_token_id"),
}
"""Keys that change no token of an output, or none of a decoder's without beams."""


@dataclass(frozen=True, slots=True)
class Suggestions:
    """Sampling that a file suggests to requests. source: the file. values: by the keys of the file."""

    source: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def parameters(self) -> dict[str, tuple[str, Any]]:
        """Return field of `SamplingParams` → key and value, of the suggestions that such a field can express.

        ``do_sample`` is temperature 0 if it is false, and 1 if it is true and there is no temperature. llama.cpp's
        penalty is that of a field if it counts all tokens: ``penalty_last_n`` is −1.
        """
        found = {_PARAMETERS[key]: (key, value) for key, value in self.values.items() if key in _PARAMETERS}
        samples = self.values.get("do_sample")
        if samples is False or (samples is True and "temperature" not in found):
            found["temperature"] = "do_sample", float(samples)
        if "penalty_repeat" in self.values and self.values.get("penalty_last_n") != -1:
            del found["repetition_penalty"]
        return found

    def without_parameter(self) -> dict[str, Any]:
        """Return the suggestions that no request follows, by their keys."""
        followed = {key for key, _ in self.parameters().values()} | {"do_sample"}
        if self.values.get("do_sample") is False:
            followed.add("temperature")
        if "penalty_repeat" in followed:
            followed.add("penalty_last_n")
        return {key: value for key, value in self.values.items() if key not in followed}


@dataclass(frozen=True, slots=True)
class GenerationFiles:
    """suppressed: tokens that are never written; suppressed_first: not as the first token. suggested: values for
    requests. unread: keys that have no influence.
    """

    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    suggested: Suggestions = field(default_factory=Suggestions)
    unread: tuple[str, ...] = ()


def read_generation(folder: Path) -> GenerationFiles:
    """Return what generation_config.json says. Raise ModelError for a rule that is not applied."""
    config = _config(folder)
    if config is None:
        return GenerationFiles()
    try:
        config.check()
    except ModelError as error:
        raise ModelError(f"{error}, or remove the key from the file") from None
    words = config.sequence("bad_words_ids")
    if not all(isinstance(word, list) and len(word) == 1 for word in words):
        fix = "Remove it from the file, and give bad_words_token_ids in requests"
        raise config.error("bad_words_ids of several tokens are not applied", fix)
    return GenerationFiles(
        suppressed=_ids(config, "suppress_tokens", [word for (word,) in words]),
        suppressed_first=_ids(config, "begin_suppress_tokens"),
        suggested=_suggestions(config),
        unread=tuple(f"{config.path.name}: {name}" for name in config.unread(_KEYS) if name not in _NO_EFFECT),
    )


def read_suggestions(folder: Path) -> Suggestions:
    """Return the sampling that generation_config.json suggests, whatever else it says."""
    config = _config(folder)
    return Suggestions() if config is None else _suggestions(config)


def _config(folder: Path) -> Config | None:
    path = folder / "generation_config.json"
    return Config(path, read_object(path), keys=_KEYS) if path.exists() else None


def _suggestions(config: Config) -> Suggestions:
    config.optional("do_sample", bool)  # raises for another type
    values = {name: value for name in _SUGGESTED if (value := config.values.get(name)) is not None}
    return Suggestions(str(config.path), values)


def generation_of_gguf(path: Path, metadata: Mapping[str, object]) -> GenerationFiles:
    """Return what the metadata of a GGUF file say."""
    suggestion = "general.sampling."
    found = metadata.get(key := "tokenizer.ggml.suppress_tokens")
    ids = found.tolist() if isinstance(found, np.ndarray) else [] if found is None else found
    return GenerationFiles(
        suppressed=_ids(Config(path, {key: ids}), key),
        suggested=Suggestions(
            str(path), {k.removeprefix(suggestion): v for k, v in metadata.items() if k.startswith(suggestion)}
        ),
    )


def _ids(config: Config, key: str, more: Sequence[object] = ()) -> tuple[int, ...]:
    """Return a list of token ids. Raise ModelError for anything else."""
    ids = [*config.sequence(key), *more]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise config.error(f"{key} is {ids!r:.80}, not token ids", FETCH_AGAIN)
    return tuple(ids)
