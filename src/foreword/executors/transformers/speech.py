"""Read the rules for outputs from the configurations of an encoder–decoder: tokens that are suppressed, and
Whisper's rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoFeatureExtractor, GenerationConfig, PreTrainedModel
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from foreword.arrays import F32
from foreword.errors import ModelError
from foreword.media.speech import TRANSCRIBE, Speech
from foreword.sampling.generation_rules import GenerationRules, TimestampRules

NOT_APPLIED = "compression_ratio_threshold", "logprob_threshold", "no_speech_threshold", "condition_on_prev_tokens"
"""Fields of Whisper's generation config that ask for several attempts at a window, or for text of the one before."""


def generation_rules(model: PreTrainedModel, vocab_size: int) -> GenerationRules:
    """Return the tokens that the generation config suppresses. Raise ModelError for rules that are not applied."""
    config = model.generation_config
    words = getattr(config, "bad_words_ids", None) or ()
    if any(len(word) != 1 for word in words):
        raise ModelError("its generation config has bad_words_ids of several tokens, which are not applied: remove it")
    suppressed = {*(config.suppress_tokens or ()), *(token for (token,) in words)}
    timestamps, end = None, config.eos_token_id
    if (no_timestamps := getattr(config, "no_timestamps_token_id", None)) is not None:
        end = end[0] if isinstance(end, list) else end
        if end is None:
            raise ModelError("its generation config has timestamps and no eos_token_id")
        most = getattr(config, "max_initial_timestamp_index", None)
        timestamps = TimestampRules(no_timestamps + 1, end, most)
    return GenerationRules(
        _known(suppressed, vocab_size), _known(config.begin_suppress_tokens or (), vocab_size), timestamps
    )


def speech_of(folder: Path, model: PreTrainedModel) -> Speech:
    """Return what Whisper reads and writes. Raise ModelError for a generation config whose rules are not applied."""
    config, generation = model.config, model.generation_config
    for name in NOT_APPLIED:
        if getattr(generation, name, None) not in (None, False):
            raise ModelError(f"its generation config has {name}, which is not applied: remove it")
    extractor: Any = AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    num_frames = 2 * int(config.max_source_positions)

    def log_mel(samples: F32, is_short: bool) -> F32:
        whole = {} if is_short else {"truncation": False, "padding": "longest"}
        given = extractor(samples, sampling_rate=extractor.sampling_rate, return_tensors="np", **whole)
        return np.ascontiguousarray(given["input_features"][0], np.float32)

    if (shape := log_mel(np.zeros(1, np.float32), True).shape) != (config.num_mel_bins, num_frames):
        raise ModelError(f"its feature extractor gives {list(shape)}, its encoder reads {num_frames} frames")
    no_timestamps = getattr(generation, "no_timestamps_token_id", None)
    languages = _languages(generation)
    forced = _forced(generation, config)
    language = getattr(generation, "language", None)
    task = getattr(generation, "task", None)
    return Speech(
        log_mel=log_mel,
        sampling_rate=extractor.sampling_rate,
        num_frames=num_frames,
        max_previous=config.max_target_positions // 2 - 1,
        start=int(generation.decoder_start_token_id),
        forced=[] if language or task else [token for token in forced if token is not None],
        languages=languages,
        language=languages.get(language.lower()) if language else _first_of(forced, languages.values()),
        tasks=getattr(generation, "task_to_id", None) or {},
        task=task or TRANSCRIBE,
        no_timestamps=no_timestamps,
        no_speech=None if no_timestamps is None else no_timestamps - 1,
        timestamps=no_timestamps is not None and getattr(generation, "return_timestamps", None) is True,
    )


def _known(tokens: Iterable[int], vocab_size: int) -> list[int]:
    return sorted(token for token in tokens if 0 <= token < vocab_size)


def _languages(generation: GenerationConfig) -> dict[str, int]:
    """Return the tokens of languages by their codes and names; none of a model of one language."""
    if getattr(generation, "is_multilingual", True) is False:
        return {}
    found = {text.strip("<|>"): token for text, token in (getattr(generation, "lang_to_id", None) or {}).items()}
    return found | {name: found[code] for name, code in TO_LANGUAGE_CODE.items() if code in found}


def _forced(generation: GenerationConfig, config: Any) -> list[int | None]:
    """Return the tokens after the first one that old configurations force."""
    pairs = getattr(generation, "forced_decoder_ids", None) or getattr(config, "forced_decoder_ids", None) or ()
    if [place for place, _ in pairs] != list(range(1, 1 + len(pairs))):
        raise ModelError(f"its forced_decoder_ids {pairs!r:.100} are not those of the first places")
    return [token for _, token in pairs]


def _first_of(forced: list[int | None], languages: Collection[int]) -> int | None:
    return forced[0] if forced and forced[0] in languages else None
