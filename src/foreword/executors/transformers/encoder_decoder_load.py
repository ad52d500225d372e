"""Encoder–decoders as transformers loads them, checked against their own forward pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from foreword.arrays import F32, AnyArray
from foreword.batch import NewRequest
from foreword.errors import ModelError
from foreword.executors.transformers.decoder_trace import DecoderTrace, trace_decoder
from foreword.executors.transformers.encoder_decoder import EncoderDecoderExecutor
from foreword.executors.transformers.encoder_prompts import EncoderPromptReader
from foreword.executors.transformers.interface import attention_of
from foreword.executors.transformers.speech import generation_rules, speech_of
from foreword.executors.transformers.verify import BLOCK_SIZE, PROMPTS, furthest_last, tolerance

TYPES = frozenset(
    {"bart", "blenderbot", "blenderbot-small", "marian", "mbart", "mt5", "pegasus", "plbart", "t5", "whisper"}
)
"""Types whose encoder's tokens all see each other, and whose decoder takes explicit or relative positions."""
DEFAULT_LENGTH = 512  # for models without a longest position, whose positions are relative


def encoder_decoder_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of encoder–decoders with such a configuration; None if it is not one that runs."""
    if not config.is_encoder_decoder or config.model_type not in TYPES:
        return None
    mappings = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    found: Any = next((of[type(config)] for of in mappings if type(config) in of), None)
    kind: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    return kind


def decoder_length(config: PreTrainedConfig) -> int:
    """Return the tokens that the decoder was made for."""
    names = "max_target_positions", "max_position_embeddings", "n_positions"
    return next((int(value) for name in names if (value := getattr(config, name, None))), DEFAULT_LENGTH)


def prompt_reader(folder: Path, model: PreTrainedModel, vocab_size: int) -> EncoderPromptReader:
    """Return what reads the prompts of a model. The decoder starts with the tokens that its generation config
    forces.
    """
    generation, config = model.generation_config, model.config
    start = generation.decoder_start_token_id
    start = getattr(config, "decoder_start_token_id", None) if start is None else start
    if start is None:
        raise ModelError("its configuration has no decoder_start_token_id")
    forced = [generation.forced_bos_token_id] if generation.forced_bos_token_id is not None else []
    speech = speech_of(folder, model) if config.model_type == "whisper" else None
    return EncoderPromptReader(
        (int(start), *map(int, forced)),
        vocab_size,
        decoder_length(config) if speech is None else int(config.max_source_positions),
        speech,
        generation_rules(model, vocab_size),
    )


def traced(model: PreTrainedModel, reader: EncoderPromptReader) -> DecoderTrace:
    """Return how the decoder attends. Raise ModelError unless chunked steps give the logits of the model's own
    forward pass.
    """
    found = trace_decoder(model, decoder_length(model.config))
    noise = np.random.default_rng(0)
    inputs: dict[str, AnyArray] = {}
    for i, name in enumerate(PROMPTS):
        if reader.speech is None:
            inputs[name] = noise.integers(3, 16, 7 + 4 * i, np.int32)
        else:
            inputs[name] = noise.standard_normal((model.config.num_mel_bins, 2 * reader.max_len), np.float32)
    expected = {name: own_logits(model, inputs[name], PROMPTS[name])[-1] for name in PROMPTS}
    lengths = {name: len(inputs[name]) if reader.speech is None else reader.max_len for name in PROMPTS}
    requests = [
        NewRequest(name, prompt, (), (1,), encoder_len=lengths[name], encoder_input=inputs[name])
        for name, prompt in PROMPTS.items()
    ]
    sizes = {"block_size": BLOCK_SIZE, "max_encoder_len": reader.max_len, "max_num_seqs": 2}
    furthest = furthest_last(found, partial(EncoderDecoderExecutor, model, found, **sizes), requests, expected)
    if furthest > tolerance(model):
        raise ModelError(f"its logits differ from those of its own forward pass, by {furthest:.2g} of their norm")
    return found


def own_logits(model: PreTrainedModel, encoder_input: AnyArray, tokens: tuple[int, ...]) -> F32:
    """Return the logits [T, V] of the model's own forward pass."""
    given = torch.tensor(encoder_input, device=model.device)[None]
    given = given.to(model.dtype) if given.is_floating_point() else given.long()
    name = model.get_encoder().main_input_name
    with torch.inference_mode(), attention_of(model, "eager"):
        ids = torch.tensor([tokens], device=model.device)
        logits: F32 = model(**{name: given}, decoder_input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
    return logits
