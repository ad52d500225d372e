"""Encoder–decoders as transformers loads them, checked against their own forward pass."""

from __future__ import annotations

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
from foreword.batch import InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.errors import ModelError
from foreword.executors.groups import batch_groups
from foreword.executors.transformers.decoder_trace import DecoderTrace, trace_decoder
from foreword.executors.transformers.encoder_decoder import EncoderDecoderExecutor
from foreword.executors.transformers.encoder_prompts import EncoderPromptReader
from foreword.executors.transformers.interface import attention_of
from foreword.executors.transformers.speech import generation_rules, speech_of
from foreword.executors.transformers.verify import BLOCK_SIZE, PROMPTS, STEPS, distance

TYPES = frozenset(
    {"bart", "blenderbot", "blenderbot-small", "marian", "mbart", "mt5", "pegasus", "plbart", "t5", "whisper"}
)
"""Types whose encoder's tokens all see each other, and whose decoder's positions are told or relative."""
DEFAULT_LENGTH = 512  # of models without a longest position, whose positions are relative


def encoder_decoder_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class of encoder–decoders with such a configuration; None if it is not one that runs."""
    if not config.is_encoder_decoder or config.model_type not in TYPES:
        return None
    mappings = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING
    found: Any = next((of[type(config)] for of in mappings if type(config) in of), None)
    kind: type[PreTrainedModel] | None = found[0] if isinstance(found, tuple) else found
    return kind


def decoder_length(config: PreTrainedConfig) -> int:
    """The tokens that the decoder was made for."""
    names = "max_target_positions", "max_position_embeddings", "n_positions"
    return next((int(value) for name in names if (value := getattr(config, name, None))), DEFAULT_LENGTH)


def prompt_reader(folder: Path, model: PreTrainedModel, vocab_size: int) -> EncoderPromptReader:
    """What reads the prompts of a model. The decoder starts with the tokens that its generation config forces."""
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
    """How the decoder attends. ModelError unless chunked steps of two requests give the logits of the model's own
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
    computed = _last_logits(model, found, reader, inputs)
    furthest = max(distance(computed[name], expected[name]) for name in PROMPTS)
    if furthest > (1e-3 if model.dtype == torch.float32 else 0.2):
        raise ModelError(f"its logits differ from those of its own forward pass, by {furthest:.2g} of their norm")
    return found


def own_logits(model: PreTrainedModel, encoder_input: AnyArray, tokens: tuple[int, ...]) -> F32:
    """The logits [T, V] of the model's own forward pass."""
    given = torch.tensor(encoder_input, device=model.device)[None]
    given = given.to(model.dtype) if given.is_floating_point() else given.long()
    name = model.get_encoder().main_input_name
    with torch.inference_mode(), attention_of(model, "eager"):
        ids = torch.tensor([tokens], device=model.device)
        logits: F32 = model(**{name: given}, decoder_input_ids=ids, use_cache=False).logits[0].float().cpu().numpy()
    return logits


def _last_logits(
    model: PreTrainedModel, trace: DecoderTrace, reader: EncoderPromptReader, inputs: dict[str, AnyArray]
) -> dict[str, F32]:
    """The logits at the last token of each prompt, of chunked steps."""
    groups = batch_groups(trace, BLOCK_SIZE)
    states = RequestStates(max_num_reqs=2, max_model_len=12, vocab_size=trace.vocab_size, kv_groups=groups)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=16)
    executor = EncoderDecoderExecutor(
        model, trace, num_blocks=7, block_size=BLOCK_SIZE, max_encoder_len=reader.max_len, max_num_seqs=2
    )
    try:
        for i, (name, prompt) in enumerate(PROMPTS.items()):
            values = inputs[name]
            length = len(values) if reader.speech is None else reader.max_len
            blocks = [range(1 + 3 * i, 4 + 3 * i)]
            states.add_request(NewRequest(name, (*prompt, 1), blocks, encoder_len=length, encoder_input=values))
        logits: dict[str, F32] = {}
        for step in STEPS:
            batch = prepare_inputs(states, step, buffers)
            computed = executor.compute(batch, batch.query_start_loc[1:].astype(np.int64) - 1)
            logits |= {name: row.copy() for name, row in zip(batch.req_ids, computed, strict=True)}
            states.commit(batch, {})
        return logits
    finally:
        executor.close()
