"""Checks of a request before it enters the engine. A request that passes cannot make a step fail."""

from __future__ import annotations

from collections.abc import Mapping

from foreword.batch import SamplingParams
from foreword.batch.values.integers import is_int32
from foreword.batch.values.structured_outputs import StructuredOutputs
from foreword.engine.request_group import RequestOptions
from foreword.errors import RequestError, nearest
from foreword.executors import Capability, Executor
from foreword.sampling import Grammar

MAX_COMPLETIONS = 16384  # of one prompt: each is a request of its own, made at once
OPTIONS = tuple(RequestOptions.__annotations__)
GRAMMAR = tuple(name for name in vars(Grammar) if not name.startswith("_"))


def checked_params(request_id: str, params: object, *, vocab_size: int) -> SamplingParams:
    """The parameters; RequestError for another type, or a value out of range."""
    if not isinstance(params, SamplingParams):
        raise RequestError(request_id, "params", params, "must be a SamplingParams", "Pass SamplingParams(...).")
    params.check(request_id, vocab_size)
    if params.structured_outputs is not None:
        StructuredOutputs.of(params.structured_outputs, request_id)
    for field, count in (("n", params.n), ("best_of", params.best_of or 1)):
        if count > MAX_COMPLETIONS:
            raise RequestError(request_id, field, count, f"is above {MAX_COMPLETIONS}", "Add the prompt several times.")
    for field, count in (("logprobs", params.logprobs or 0), ("prompt_logprobs", params.prompt_logprobs or 0)):
        if count > vocab_size:
            raise RequestError(request_id, field, count, f"the vocabulary has {vocab_size} tokens", "Use −1 for all.")
    return params


def check_id(request_id: object) -> None:
    """RequestError unless it is a string without a null character."""
    if not isinstance(request_id, str):
        raise RequestError(None, "request_id", request_id, "must be a string", "Name requests by strings.")
    if "\0" in request_id:
        raise RequestError(request_id, "request_id", request_id, "contains a null character", "Use another id.")


def check_options(request_id: str, options: Mapping[str, object]) -> None:
    """TypeError for an unknown option; RequestError for a value of another type, which would fail a step."""
    for name in options.keys() - OPTIONS:
        raise TypeError(f"a request has no option {name!r}; did you mean {nearest(name, OPTIONS)!r}?")
    priority, cache_salt = options.get("priority", 0), options.get("cache_salt")
    stream, grammar = options.get("stream", False), options.get("grammar")
    if type(stream) is not bool:
        raise RequestError(request_id, "stream", stream, "must be a bool", "Pass True or False.")
    if grammar is not None and not all(hasattr(type(grammar), name) for name in GRAMMAR):
        raise RequestError(request_id, "grammar", grammar, "must be a Grammar", "See foreword.sampling.Grammar.")
    if not is_int32(priority):
        raise RequestError(request_id, "priority", priority, "must be an int32", "Smaller is first; 0 is usual.")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(request_id, "cache_salt", cache_salt, "must be a string or None", "Pass a string, or None.")


def check_capabilities(
    request_id: str, executor: Executor, params: SamplingParams, *, lora: str | None, grammar: Grammar | None
) -> None:
    """RequestError for the first field that needs a capability which the executor lacks."""
    for capability, field, value, is_given in (
        (Capability.LORA, "lora", lora, lora is not None),
        (Capability.GRAMMAR, "structured_outputs", params.structured_outputs, params.structured_outputs is not None),
        (Capability.GRAMMAR, "thinking_end", params.thinking_end, params.thinking_end is not None),
        (Capability.GRAMMAR, "grammar", grammar, grammar is not None),
    ):
        if is_given:
            check_capability(request_id, executor, capability, field, value)


def check_capability(request_id: str, executor: Executor, capability: Capability, field: str, value: object) -> None:
    """RequestError for a field that needs a capability which the executor, with its model, lacks."""
    if capability not in executor.capabilities:
        raise RequestError(
            request_id,
            field,
            value,
            f"{type(executor).__name__} does not support {capability.value} (Capability.{capability.name})",
            "Leave it out, or use an executor that does.",
        )
