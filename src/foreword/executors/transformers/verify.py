"""Comparisons of paged steps with the model's own forward pass, at load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from foreword.arrays import F32
from foreword.batch import InputBuffers, NewRequest, RequestStates, prepare_inputs
from foreword.errors import ModelError
from foreword.executors.host import HostExecutor
from foreword.executors.pool import batch_groups
from foreword.executors.transformers.executor import TransformersExecutor
from foreword.executors.transformers.interface import attention_of, forward
from foreword.executors.transformers.media import TransformersEncoder, named
from foreword.executors.transformers.trace import Trace
from foreword.media.images import Image
from foreword.media.parts import Medium
from foreword.media.sounds import Sound

BLOCK_SIZE = 4
PROMPTS = {"a": (3, 4, 5, 6, 7, 8, 9, 10, 11), "b": (12, 3, 9, 4, 7, 14)}
STEPS: Sequence[Mapping[str, int]] = ({"a": 4, "b": 1}, {"a": 1}, {"a": 3, "b": 4}, {"a": 1, "b": 1})
"""Chunks of two prompts, mixed with steps of one token. A token follows each prompt, so that nothing is sampled."""
MakeExecutor = Callable[..., HostExecutor]
"""Makes an executor with a number of blocks, ``num_blocks``."""
NO_DISTANCE = 1e-3
"""A `distance` of logits in float32 that counts as none."""
IMAGE_SIZES = (56, 84), (112, 56)


class Inputs(NamedTuple):
    """The inputs of a model besides tokens: see `TransformersExecutor`."""

    first_position: int
    hidden_size: int
    mrope_dims: int
    extra_size: int = 0


def inputs_of(model: PreTrainedModel, trace: Trace, mrope_dims: int = 0) -> Inputs:
    """Return the inputs with which chunked steps give the logits of the model's own forward pass. Raise ModelError
    without any.
    """
    hidden_size = 0
    with torch.inference_mode(), attention_of(model, "eager"):
        ids = {name: torch.tensor([prompt], device=model.device) for name, prompt in PROMPTS.items()}
        expected = {name: _floats(forward(model, input_ids=tokens)[-1]) for name, tokens in ids.items()}
        try:
            vectors = model.get_input_embeddings()(ids["a"])
            if distance(_floats(forward(model, inputs_embeds=vectors)[-1]), expected["a"]) < tolerance(model):
                hidden_size = vectors.shape[-1]
        except Exception:  # a model that needs the tokens themselves raises errors of any kind
            pass
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    least = np.inf
    for first in (0,) if padding is None else (0, padding + 1):
        inputs = Inputs(first, hidden_size, mrope_dims)
        requests = [NewRequest(name, prompt, (), (1,)) for name, prompt in PROMPTS.items()]
        least = min(least, furthest := furthest_last(trace, _maker(model, trace, inputs), requests, expected))
        if furthest < tolerance(model):
            return inputs
    raise ModelError(f"its logits differ from those of its own forward pass, by {least:.2g} of their norm")


def check_media(
    model: PreTrainedModel,
    trace: Trace,
    inputs: Inputs,
    encoder: TransformersEncoder,
    kind: str,
    encode: Callable[[str], list[int]],
) -> None:
    """Raise ModelError unless steps of a prompt with two images, or a sound, give the logits of the model's own forward
    pass, both inside these and after them; in chunks, or with each of them in one step, whose vectors then see each
    other.
    encode: of a text without special tokens of its own.
    """
    if not inputs.hidden_size:
        raise ModelError("it takes no vectors in place of tokens")
    media = _samples(encoder, kind)
    text = ".".join(["", *[encoder.placeholders[kind]] * len(media), ""])
    prompt = encoder.prompt(text, media, encode)
    own = encoder.processed(text, media)
    if own["input_ids"][0].tolist() != prompt.token_ids:
        raise ModelError("its processor makes other tokens of a whole prompt")
    is_vector = ~prompt.is_token
    wanted = [*np.flatnonzero(is_vector & ~np.roll(is_vector, 1)).tolist(), len(prompt.token_ids) - 1]
    with torch.inference_mode(), attention_of(model, "eager"):
        given = {name: value.to(model.device) for name, value in named(model.forward, own).items()}
        kept = torch.tensor(wanted, device=model.device)
        expected = _floats(forward(model, **given, logits_to_keep=kept))
    T = len(prompt.token_ids)
    distances = []
    for sees_all in (False, True):
        encoder.see_all(kind, sees_all)
        prompt = encoder.prompt(text, media, encode)
        request = NewRequest(
            "a",
            prompt.token_ids,
            (),
            (1,),
            prompt_embeds=prompt.embeds,
            prompt_is_token_id=prompt.is_token,
            mrope_positions=prompt.positions,
            mrope_delta=prompt.mrope_delta,
        )
        ends = [*wanted[1:-1], T] if sees_all else [T // 3, 2 * T // 3, T]
        steps = [{"a": n} for n in np.diff(ends, prepend=0).tolist()]
        make = _maker(model, trace, inputs._replace(extra_size=encoder.extra_size))
        computed = _logits(trace, make, [request], {"a": wanted}, steps)
        distances.append(max(distance(one, other) for one, other in zip(computed["a"], expected, strict=True)))
    encoder.see_all(kind, distances[1] < distances[0] / 2)
    if min(distances) > tolerance(model):
        raise ModelError(
            f"with it its logits differ from those of its own forward pass, by {min(distances):.2g} of their norm"
        )


def _samples(encoder: TransformersEncoder, kind: str) -> list[Medium]:
    """Return noise: two images, or a sound of a second and a half."""
    noise = np.random.default_rng(0)
    if kind == "audio":
        rate = encoder.processor.feature_extractor.sampling_rate
        return [Sound("audio", noise.uniform(-1, 1, rate * 3 // 2).astype(np.float32), rate)]
    from PIL import Image as pillow

    pixels = [noise.integers(0, 256, (*size, 3), dtype=np.uint8) for size in IMAGE_SIZES]
    return [Image("image", pillow.fromarray(one)) for one in pixels]


def distance(computed: F32, expected: F32) -> float:
    """Return ‖computed − expected‖ / ‖expected − its mean‖."""
    return float(np.linalg.norm(computed - expected) / np.linalg.norm(expected - expected.mean()))


def _maker(model: PreTrainedModel, trace: Trace, inputs: Inputs) -> MakeExecutor:
    return partial(TransformersExecutor, model, trace, block_size=BLOCK_SIZE, **inputs._asdict())


def tolerance(model: PreTrainedModel) -> float:
    """Return the largest `distance` of logits that counts as none, which depends on the model's numbers."""
    return NO_DISTANCE if model.dtype == torch.float32 else 0.2


def _floats(tensor: torch.Tensor) -> F32:
    floats: F32 = tensor.float().cpu().numpy()
    return floats


def furthest_last(
    trace: Trace, make: MakeExecutor, requests: Sequence[NewRequest], expected: Mapping[str, F32]
) -> float:
    """Return the largest distance of the logits at the last tokens of the requests of `PROMPTS`, after `STEPS`."""
    wanted = {name: [len(prompt) - 1] for name, prompt in PROMPTS.items()}
    computed = _logits(trace, make, requests, wanted, STEPS)
    return max(distance(computed[name][0], expected[name]) for name in PROMPTS)


def _logits(
    trace: Trace,
    make: MakeExecutor,
    requests: Sequence[NewRequest],
    wanted: Mapping[str, Sequence[int]],
    steps: Sequence[Mapping[str, int]],
) -> dict[str, list[F32]]:
    """Return the logits at wanted positions of each request, which are ascending, as an executor computes them in
    steps.
    """
    groups = batch_groups(trace, BLOCK_SIZE)
    lengths = {request.req_id: len(request.prompt_token_ids or ()) + 1 for request in requests}
    blocks_of = {
        name: [1 if group.recurrent else -(-length // BLOCK_SIZE) for group in groups]
        for name, length in lengths.items()
    }
    num_blocks, longest = 1 + sum(map(sum, blocks_of.values())), max(lengths.values()) + 1
    states = RequestStates(
        max_num_reqs=len(requests), max_model_len=longest, vocab_size=trace.vocab_size, kv_groups=groups
    )
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=max(sum(step.values()) for step in steps))
    executor = make(num_blocks=num_blocks)
    try:
        free = list(range(1, num_blocks))
        for request in requests:
            blocks = [[free.pop() for _ in range(count)] for count in blocks_of[request.req_id]]
            states.add_request(replace(request, block_ids=blocks))
        logits: dict[str, list[F32]] = {name: [] for name in lengths}
        for step in steps:
            batch = prepare_inputs(states, step, buffers)
            at = [
                (name, int(first) + position - int(computed))
                for name, first, computed in zip(
                    batch.req_ids, batch.query_start_loc, batch.num_computed_tokens, strict=False
                )
                for position in wanted[name]
                if 0 <= position - computed < step[name]
            ]
            found = executor.compute(batch, np.array([token for _, token in at], np.int64))
            for (name, _), row in zip(at, found, strict=True):
                logits[name].append(row.copy())
            states.commit(batch, {})
        return logits
    finally:
        executor.close()
