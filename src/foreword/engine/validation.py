"""Checks of a request before it enters the engine. A request that passes cannot make a step fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from foreword.batch import CheckedParams, PoolingParams, PoolingType, SamplingParams
from foreword.engine.request_group import RequestOptions
from foreword.errors import RequestError
from foreword.executors import Capability, Executor
from foreword.integers import is_int32
from foreword.models.pooling import PoolingSpec
from foreword.names import advice
from foreword.sampling import Grammar

MAX_COMPLETIONS = 16384  # per prompt: each is a request of its own, made at once
MAX_TEXTS, MAX_TEXT_CHARS = 1024, 1 << 16  # per parameter: every step looks for them, or they are tokenized
OPTIONS = tuple(RequestOptions.__annotations__)
GRAMMAR = tuple(name for name in vars(Grammar) if not name.startswith("_"))


def checked_params(request_id: str, params: object, *, vocab_size: int, max_logprobs: int) -> CheckedParams:
    """Return the parameters. Raise RequestError for another type, or a value out of range. max_logprobs: −1:
    vocab_size.
    """
    if not isinstance(params, SamplingParams):
        raise RequestError(request_id, "params", params, "must be a SamplingParams", "Pass SamplingParams(...).")
    checked = CheckedParams(params, vocab_size, request_id)
    for field, count in (("n", params.n), ("best_of", params.best_of or 1)):
        if count > MAX_COMPLETIONS:
            raise RequestError(request_id, field, count, f"is above {MAX_COMPLETIONS}", "Add the prompt several times.")
    for field in ("stop", "bad_words", "dry_sequence_breakers"):
        given = getattr(params, field) or ()
        texts = (given,) if isinstance(given, str) else given
        if len(texts) > MAX_TEXTS or sum(map(len, texts)) > MAX_TEXT_CHARS:
            reason = f"has {len(texts)} texts of {sum(map(len, texts))} characters"
            fix = f"Give at most {MAX_TEXTS}, of {MAX_TEXT_CHARS} characters in all."
            raise RequestError(request_id, field, given, reason, fix)
    for field, count in (("logprobs", params.logprobs or 0), ("prompt_logprobs", params.prompt_logprobs or 0)):
        if count > vocab_size:
            raise RequestError(request_id, field, count, f"the vocabulary has {vocab_size} tokens", "Use −1 for all.")
        if max_logprobs >= 0 and (count > max_logprobs or count < 0):
            fix = "Ask for fewer, or start the engine with a larger max_logprobs."
            raise RequestError(request_id, field, count, f"is more than max_logprobs = {max_logprobs}", fix)
    return checked


def check_id(request_id: object) -> None:
    """Raise RequestError unless it is a string without a null character."""
    if type(request_id) is not str:  # see foreword.batch: a subclass of str is refused
        raise RequestError(None, "request_id", request_id, "must be a string", "Name requests by strings, as str(id).")
    if "\0" in request_id:
        raise RequestError(request_id, "request_id", request_id, "contains a null character", "Use another id.")


def check_options(request_id: str, options: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown option; RequestError for a value of another type, which would fail a step."""
    for name in options.keys() - OPTIONS:
        fix = advice(name, OPTIONS, f"The options are {', '.join(OPTIONS)}.")
        raise TypeError(f"a request has no option {name!r}. {fix}")
    priority, cache_salt = options.get("priority", 0), options.get("cache_salt")
    stream, grammar = options.get("stream", False), options.get("grammar")
    if type(stream) is not bool:
        raise RequestError(request_id, "stream", stream, "must be a bool", "Pass True or False.")
    if grammar is not None and not all(hasattr(type(grammar), name) for name in GRAMMAR):
        raise RequestError(request_id, "grammar", grammar, "must be a Grammar", "See foreword.sampling.Grammar.")
    if not is_int32(priority):
        raise RequestError(request_id, "priority", priority, "must be an int32", "Smaller is first; 0 is usual.")
    owner, share = options.get("owner", ""), options.get("share", 1.0)
    if not isinstance(owner, str):
        raise RequestError(request_id, "owner", owner, "must be a string", "Name whose request it is.")
    if not isinstance(share, int | float) or not 2**-10 <= share <= 2**10:
        raise RequestError(request_id, "share", share, "must be a number from 1/1024 to 1024", "1 is usual.")
    max_len = options.get("max_len")
    if max_len is not None and not is_int32(max_len, 1):
        raise RequestError(request_id, "max_len", max_len, "must be a number of tokens above 0, or None", "Correct it.")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise RequestError(request_id, "cache_salt", cache_salt, "must be a string or None", "Pass a string, or None.")


def check_pooling(request_id: str, executor: Executor, params: PoolingParams, spec: PoolingSpec) -> None:
    """Raise RequestError for parameters out of range, and for a task or pooling that the model does not do."""

    def require(ok: bool, field: str, reason: str, fix: str) -> None:
        if not ok:
            raise RequestError(request_id, field, getattr(params, field), reason, fix)

    if Capability.POOLING not in executor.capabilities:
        reason = f"{type(executor).__name__} does not support pooling (Capability.POOLING)"
        raise RequestError(request_id, "pooling_params", params, reason, "Use an executor that does.")
    require(
        isinstance(params.task, str) and params.task in spec.tasks,
        "task",
        f"the model does {', '.join(spec.tasks)}",
        "Use one of these.",
    )
    known = (None, *get_args(PoolingType))
    named = params.pooling is None or isinstance(params.pooling, str)
    require(
        named and params.pooling in known,
        "pooling",
        f"must be one of {', '.join(map(repr, known))}",
        "Use one of these.",
    )
    if params.task == "token_embed":
        require(params.pooling in (None, "all", "step"), "pooling", "gives no state of each token", "Use 'all'.")
    if params.task in ("embed", "classify", "score"):
        require(params.pooling not in ("all", "step"), "pooling", f"{params.task} has one result", "Leave it out.")
    require(type(params.normalize) is bool, "normalize", "must be a bool", "Pass True or False.")
    optional_int32 = "must be an int32 of at least {}, or None"
    for field, least in (("dimensions", 1), ("step_tag_id", 0), ("first_text_len", 0), ("truncate_prompt_tokens", -1)):
        value = getattr(params, field)
        require(value is None or is_int32(value, least), field, optional_int32.format(least), "Give a whole number.")
    known_prompts = ", ".join(map(repr, spec.prompts)) or "no prompts"
    name: object = params.prompt_name
    is_known = name is None or (isinstance(name, str) and name in ("", *spec.prompts))
    require(is_known, "prompt_name", f"the model has {known_prompts}", "Use one of these, or leave it out.")
    embeds = params.task in ("embed", "token_embed")
    require(embeds or not params.prompt_name, "prompt_name", f"{params.task} takes no prompt", "Leave it out.")
    has_types = params.first_text_len is None or spec.num_token_types > 1
    require(has_types, "first_text_len", "the model does not distinguish texts of a pair", "Leave it out.")
    require(params.truncate_prompt_tokens != 0, "truncate_prompt_tokens", "keeps no token", "Keep at least 1.")
    has_tag = params.step_tag_id is not None
    require(has_tag == (params.pooling == "step"), "step_tag_id", "belongs to pooling='step'", "Give both, or none.")
    if params.dimensions is not None:
        most = spec.hidden_size
        require(embeds, "dimensions", f"{params.task} gives no embedding", "Leave it out.")
        require(params.dimensions <= most, "dimensions", f"the model has {most}", f"Use at most {most}.")


def check_capabilities(
    request_id: str, executor: Executor, params: SamplingParams, *, lora: str | None, grammar: Grammar | None
) -> None:
    """Raise RequestError for the first field that needs a capability which the executor lacks."""
    for capability, field, value, is_given in (
        (Capability.LORA, "lora", lora, lora is not None),
        (Capability.GRAMMAR, "structured_outputs", params.structured_outputs, params.structured_outputs is not None),
        (Capability.GRAMMAR, "thinking_end", params.thinking_end, params.thinking_end is not None),
        (Capability.GRAMMAR, "forced_tokens", params.forced_tokens, bool(params.forced_tokens)),
        (Capability.GRAMMAR, "grammar", grammar, grammar is not None),
    ):
        if is_given:
            check_capability(request_id, executor, capability, field, value)


def check_capability(request_id: str, executor: Executor, capability: Capability, field: str, value: object) -> None:
    """Raise RequestError for a field that needs a capability which the executor, with its model, lacks."""
    if capability not in executor.capabilities:
        raise RequestError(
            request_id,
            field,
            value,
            f"{type(executor).__name__} does not support {capability.value} (Capability.{capability.name})",
            "Leave it out, or use an executor that does.",
        )
