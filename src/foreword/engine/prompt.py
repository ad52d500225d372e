"""The forms of a prompt, and their checks. A prompt that passes cannot make a step fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypedDict

import numpy as np

from foreword.arrays import F32, I32, AnyArray, Bools, as_array
from foreword.batch import CheckedPrompt, PromptInputs
from foreword.engine.validation import check_capability
from foreword.errors import ContextLengthError, RequestError
from foreword.executors import Capability, Executor
from foreword.fields import entries_of
from foreword.integers import as_int32, flat_int32, is_int32, length_of
from foreword.names import advice
from foreword.scheduler.request import NO_SPANS


class MixedPrompt(TypedDict, total=False):
    """A prompt of T positions with vectors instead of some tokens, or with other rotary positions than text.

    prompt_embeds: floats [T, hidden_size]. A vector is the input of the first layer, as transformers'
    inputs_embeds. Vectors with more values are outputs of the model's own encoders, see `Executor`.
    prompt_token_ids, prompt_is_token_ids: [T], the token ids, and whether a position reads its token id instead of its
    vector. Without these two, every position is a vector.
    mrope_positions: integers [dims, n], the rotary positions of the first n ≤ T positions (M-RoPE). mrope_delta: the
    number that is added to later positions (0).
    """

    prompt_embeds: Any
    prompt_token_ids: Sequence[int] | AnyArray
    prompt_is_token_ids: Sequence[bool] | Bools
    mrope_positions: Any
    mrope_delta: int


class PromptLimit(NamedTuple):
    """The longest request, and whether a token follows its prompt."""

    max_model_len: int
    has_output: bool


class EncoderDecoderPrompt(TypedDict, total=False):
    """A prompt of an encoder–decoder.

    encoder_token_ids: the input of the encoder. For a model of speech it is audio, floats [samples] at its sampling
    rate, at most one window; or input_features, floats [channels, frames], see `Speech.window`.
    prompt_token_ids: the prompt of the decoder, by default the model's first tokens. For a model of speech, these
    follow from the language (a code or a name), the task ("transcribe" or "translate") and timestamps.
    """

    encoder_token_ids: Sequence[int] | AnyArray
    audio: Any
    input_features: Any
    prompt_token_ids: Sequence[int] | AnyArray
    language: str
    task: str
    timestamps: bool


class EncoderPrompts(Protocol):
    """Reads the prompts of an encoder–decoder."""

    def split(
        self, request_id: str, prompt: object, encode: Callable[[str, int | None], list[int]]
    ) -> tuple[Sequence[int], PromptInputs]:
        """Return the decoder's tokens, unchecked, and the input of the encoder. A text or a list of token ids is the
        input of the encoder.

        encode: encodes a text with at most a given number of tokens. Raise RequestError for an input that the encoder
        cannot read.
        """


Prompt = str | Sequence[int] | MixedPrompt | EncoderDecoderPrompt
KEYS = tuple(MixedPrompt.__annotations__)


def checked_prompt(
    request_id: str,
    prompt: object,
    executor: Executor,
    *,
    vocab_size: int,
    max_model_len: int,
    most_new_tokens: int,
    has_output: bool = True,
) -> tuple[CheckedPrompt, PromptInputs]:
    """Return the token ids of a prompt, 0 for embeddings, and its other inputs. Raise RequestError for inputs that do
    not fit.

    most_new_tokens: the largest number of tokens of a step. has_output: whether a token follows the prompt.
    """
    limit = PromptLimit(max_model_len, has_output)
    if not isinstance(prompt, Mapping):
        return checked_tokens(request_id, prompt, vocab_size=vocab_size, limit=limit), {}
    given, inputs = _entries(request_id, prompt), PromptInputs()
    is_token = None
    if given["prompt_embeds"] is not None:
        embeds = _embeds(request_id, given["prompt_embeds"], executor, limit)
        is_token = _is_token(request_id, given, len(embeds))
        embeds[is_token] = 0
        if not (finite := np.isfinite(embeds)).all():
            row, column = np.argwhere(~finite)[0].tolist()
            field, value = f"prompt_embeds[{row}, {column}]", float(embeds[row, column])
            raise RequestError(request_id, field, value, "is not a finite float32", "Give finite numbers.")
        if executor.extra_size:
            _check_spans(request_id, embeds[:, -1], is_token, most_new_tokens)
        if not is_token.all():
            inputs["prompt_embeds"], inputs["prompt_is_token_id"] = embeds, is_token
    elif given["prompt_is_token_ids"] is not None:
        reason = "is given without prompt_embeds"
        raise RequestError(request_id, "prompt_is_token_ids", given["prompt_is_token_ids"], reason, "Give both.")
    if is_token is not None and given["prompt_token_ids"] is None:
        token_ids = CheckedPrompt(np.zeros(len(is_token), np.int32), vocab_size)
    else:
        token_ids = checked_tokens(request_id, given["prompt_token_ids"], is_token, vocab_size=vocab_size, limit=limit)
    if given["mrope_positions"] is not None or given["mrope_delta"] is not None:
        _add_mrope(request_id, inputs, given, executor, len(token_ids))
    return token_ids, inputs


def checked_tokens(
    request_id: str, token_ids: object, is_token: Bools | None = None, *, vocab_size: int, limit: PromptLimit
) -> CheckedPrompt:
    """Return the token ids of a prompt, 0 where ``is_token`` is false. Raise RequestError if there are none, too many
    or not as many as in ``is_token``, or if it is not a list of token ids.
    """
    field, length = "prompt_token_ids", length_of(token_ids)
    if length == 0:
        raise RequestError(request_id, field, [], "is empty", "Give at least one token.")
    _check_length(request_id, field, length, limit)  # checked before an array of this length is made
    ids = flat_int32(token_ids)
    if ids is None:
        reason = "must be a flat list of integers that fit int32"
        raise RequestError(request_id, field, token_ids, reason, "Pass token ids, or a string.")
    if is_token is not None:
        if len(ids) != len(is_token):
            reason = f"prompt_embeds has {len(is_token)} positions"
            raise RequestError(request_id, field, f"{len(ids)} tokens", reason, "Give one id per position.")
        ids = np.where(is_token, ids, np.int32(0))
    return CheckedPrompt(ids, vocab_size, request_id)


def _check_length(request_id: str, field: str, length: int, limit: PromptLimit) -> None:
    max_model_len, has_output = limit
    longest = max_model_len - has_output
    if length > longest:
        reason = "leaves no room for an output" if has_output else "is too long"
        raise ContextLengthError(
            request_id,
            field,
            f"{length} tokens",
            f"{reason}: max_model_len is {max_model_len}",
            f"Shorten the prompt to {longest} tokens, or raise max_model_len if the model allows it.",
            num_tokens=length,
            longest=longest,
            max_model_len=max_model_len,
        )


def _entries(request_id: str, prompt: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the value of every key of `MixedPrompt`, None if it is not given."""
    given = entries_of(request_id, prompt, KEYS)
    for key in list(given)[len(KEYS) :]:
        fix = advice(key if isinstance(key, str) else "", KEYS, f"Use {', '.join(KEYS)}.")
        raise RequestError(request_id, "prompt", key, "is not a key of a prompt", fix)
    return given


def _embeds(request_id: str, values: object, executor: Executor, limit: PromptLimit) -> F32:
    """Return prompt embeddings as a new float32 array."""
    field, width, extra = "prompt_embeds", executor.hidden_size, executor.extra_size
    check_capability(request_id, executor, Capability.PROMPT_EMBEDS, field, values)
    array = as_array(values)
    if (
        array is None
        or array.dtype.kind != "f"
        or array.ndim != 2
        or not len(array)
        or array.shape[1] not in (width, width + extra)
    ):
        got = values if array is None else f"{array.dtype} {list(array.shape)}"
        fix = "Give one vector per position, as float32."
        raise RequestError(request_id, field, got, f"must be floats [tokens, {width}], tokens ≥ 1", fix)
    _check_length(request_id, field, len(array), limit)
    embeds = np.zeros((len(array), width + extra), np.float32)
    with np.errstate(over="ignore"):  # infinities are refused by the code that reads them
        embeds[:, : array.shape[1]] = array
    return embeds


def _is_token(request_id: str, given: Mapping[str, Any], length: int) -> Bools:
    """Return whether each position is a token, bool [length]."""
    field, values = "prompt_is_token_ids", given["prompt_is_token_ids"]
    if (values is None) != (given["prompt_token_ids"] is None):
        reason, fix = "prompt_token_ids and prompt_is_token_ids belong together", "Give both, or none of them."
        raise RequestError(request_id, field, values, reason, fix)
    if values is None:
        return np.zeros(length, np.bool_)
    mask = as_array(values)
    if mask is None or mask.dtype.kind != "b" or mask.shape != (length,):
        got = values if mask is None else f"{mask.dtype} {list(mask.shape)}"
        fix = "Give one truth value per position."
        raise RequestError(request_id, field, got, f"must be bool [{length}], as prompt_embeds", fix)
    return mask.copy()


def spans_of(inputs: PromptInputs, executor: Executor) -> I32:
    """Return the spans [n, 2] (first, end) of vectors that attend to each other and must be computed in one step."""
    if not executor.extra_size or "prompt_embeds" not in inputs:
        return NO_SPANS
    reach = inputs["prompt_embeds"][:, -1] > 0
    firsts = np.flatnonzero(reach & ~np.concatenate(([False], reach[:-1])))
    ends = firsts + 1 + inputs["prompt_embeds"][firsts, -1].astype(np.int64)
    return np.stack([firsts, ends], 1).astype(np.int32)


def range_of_prompt(request_id: str, length: int, most_new_tokens: int) -> I32:
    """Return the range [1, 2] of all tokens of a prompt. Raise RequestError if no step can have as many."""
    if length > most_new_tokens:
        reason = f"the tokens of a prompt see each other, so it is one step, which has at most {most_new_tokens} tokens"
        fix = "Shorten it, or raise max_num_batched_tokens."
        raise RequestError(request_id, "prompt_token_ids", f"{length} tokens", reason, fix)
    return np.array([[0, length]], np.int32)


def _check_spans(request_id: str, reach: F32, is_token: Bools, most_new_tokens: int) -> None:
    """Raise RequestError unless the vectors of each span attend to all positions up to its end, and a step can have
    that many tokens.
    """
    following = np.append(np.where(is_token, -1, reach)[1:], -1)
    bad = (reach < 0) | ((reach > 0) & (following != reach - 1))
    if bad.any():
        at = int(bad.argmax())
        reason, fix = "is not a valid count of following vectors", "Give 0, or one less at each vector up to the last."
        raise RequestError(request_id, f"prompt_embeds[{at}, -1]", float(reach[at]), reason, fix)
    if len(reach) and reach.max() >= most_new_tokens:
        reason = f"an image has more positions than the {most_new_tokens} of a step"
        fix = "Raise max_num_batched_tokens."
        raise RequestError(request_id, "prompt_embeds", f"{int(reach.max()) + 1} positions", reason, fix)


def _add_mrope(
    request_id: str, inputs: PromptInputs, given: Mapping[str, Any], executor: Executor, length: int
) -> None:
    """Add the rotary positions of a prompt of ``length`` tokens."""
    values, delta, dims = given["mrope_positions"], given["mrope_delta"], executor.mrope_dims
    field = "mrope_delta" if values is None else "mrope_positions"
    check_capability(request_id, executor, Capability.MROPE, field, given[field])
    array = np.zeros((dims, 0), np.int32) if values is None else as_array(values)
    positions = None if array is None or array.dtype.kind not in "iu" else as_int32(array)
    fits = positions is not None and positions.ndim == 2 and len(positions) == dims and positions.shape[1] <= length
    if positions is None or not fits or (positions.size and positions.min() < 0):
        limit = f"must be integers ≥ 0 that fit int32, [{dims}, n] with n ≤ {length}"
        fix = f"Give {dims} numbers for each of the first n positions."
        raise RequestError(request_id, "mrope_positions", values if array is None else array, limit, fix)
    delta = 0 if delta is None else delta
    if not is_int32(delta, -positions.shape[1]):
        limit = f"must be an int32 of at least −{positions.shape[1]}, the number of given positions"
        raise RequestError(request_id, "mrope_delta", delta, limit, "Later positions must not be negative.")
    inputs["mrope_positions"], inputs["mrope_delta"] = np.array(positions, np.int32, order="C"), int(delta)
