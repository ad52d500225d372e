"""From a user's request to the scheduler's requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, Unpack, cast

import numpy as np

from foreword.batch import PoolingParams, PromptInputs, RequestStates, SamplingParams
from foreword.batch.values.integers import length_of
from foreword.cache import prefix_keys, with_adapter
from foreword.engine.loras import Loras
from foreword.engine.prompt import EncoderPrompts, Prompt, checked_prompt, spans_of
from foreword.engine.request_group import Completion, RequestGroup, RequestOptions
from foreword.engine.text import Detokenizer, TextStream
from foreword.engine.validation import (
    check_capabilities,
    check_id,
    check_options,
    check_pooling,
    checked_params,
)
from foreword.errors import RequestError
from foreword.executors import Executor
from foreword.models.pooling import PoolingSpec
from foreword.sampling import Grammar, Processors, derived_seed
from foreword.scheduler import Request
from foreword.structured import GrammarCompiler

DRY_BREAKERS = ("\n", ":", '"', "*")


class Tokenizer(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def special_token_ids(self) -> Mapping[str, int]: ...

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]: ...

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        *,
        continues: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer: ...


DEFAULT_PARAMS = SamplingParams(temperature=0.0, max_tokens=1024)
"""Of requests and commands without parameters."""
POOLING = SamplingParams(max_tokens=1, detokenize=False)
"""Of pooling requests, which sample nothing."""


class Intake:
    """Checks requests, and expands each into one scheduler request per completion.

    seed: the seeds of requests without one are derived from it and their arrival number; None: a random one.
    """

    def __init__(
        self,
        states: RequestStates,
        executor: Executor,
        processors: Processors,
        *,
        loras: Loras,
        node_size: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        grammars: GrammarCompiler | None,
        seed: int | None,
        clock: Callable[[], float],
        pooling: PoolingSpec,
        generates: bool,
        encoder: EncoderPrompts | None,
        most_new_tokens: int,
    ) -> None:
        """node_size: tokens of a block of the prefix tree. encoder: of an encoder–decoder. most_new_tokens: of a
        step.
        """
        self._encoder, self._most_new_tokens = encoder, most_new_tokens
        self._pooling, self._generates = pooling, generates
        self._states, self._executor, self._processors = states, executor, processors
        self._node_size, self._tokenizer, self._eos_token_ids = node_size, tokenizer, eos_token_ids
        self._seed = seed if seed is not None else int.from_bytes(os.urandom(7), "little")
        self._clock, self._grammars, self._loras = clock, grammars, loras
        self._num_arrivals = 0
        self._last_params: SamplingParams | None = None  # checked before, and of values that cannot change

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        prompt_text: str | None,
        **options: Unpack[RequestOptions],
    ) -> RequestGroup:
        """See `Engine.check`."""
        check_id(request_id)
        check_options(request_id, options)
        if isinstance(params, PoolingParams):
            return self._check_pooling(request_id, prompt, params, prompt_text, **options)
        if not self._generates:
            raise RequestError(
                request_id,
                "params",
                params,
                "the model computes no logits, so it generates no text",
                "Pass PoolingParams, or use LLM.embed, LLM.classify or LLM.score.",
            )
        vocab_size, max_model_len = self._states.vocab_size, self._states.max_model_len
        if params is None:
            params = DEFAULT_PARAMS
        if params is not self._last_params:
            params = checked_params(request_id, params, vocab_size=vocab_size)
            self._last_params = None if params.has_mappings else params
        num_kept = self._num_kept(request_id, params)
        of_encoder = PromptInputs()
        if self._encoder is not None:
            if num_kept:
                reason = "the prompt of an encoder–decoder cannot be cut"
                raise RequestError(request_id, "truncate_prompt_tokens", num_kept, reason, "Cut it before it is given.")
            prompt_text = prompt if isinstance(prompt, str) else prompt_text
            prompt, of_encoder = self._encoder.split(request_id, prompt, partial(self._encode, request_id))
        if isinstance(prompt, str):
            prompt_text, prompt = prompt, self._encode(request_id, prompt, None if num_kept else max_model_len)
        if num_kept:
            _check_cut(request_id, prompt, params.truncate_prompt_tokens)
        if num_kept and isinstance(prompt, Sequence | np.ndarray):
            prompt = prompt[-num_kept:]
        tokens, inputs = checked_prompt(
            request_id,
            prompt,
            self._executor,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            most_new_tokens=self._most_new_tokens,
        )
        inputs |= of_encoder
        if params.prompt_logprobs is not None and "prompt_embeds" in inputs:
            reason = "embeddings have no token ids, and so no log-probabilities"
            raise RequestError(request_id, "prompt_logprobs", params.prompt_logprobs, reason, "Leave it out.")
        lora, grammar = options.get("lora"), options.get("grammar")
        self._check_support(request_id, params, lora, grammar)
        if grammar is None and params.needs_grammar:
            grammar = self._grammar(request_id, params)
        self._processors.check(request_id, params)
        if self._tokenizer is None:
            for field in ("stop", "bad_words", "dry_sequence_breakers"):
                if value := getattr(params, field):
                    raise RequestError(request_id, field, value, "needs a tokenizer", "Use token ids.")
        if words := self._bad_words(params):
            params = replace(params, bad_words_token_ids=(*params.bad_words_token_ids, *words))
        if breakers := self._dry_breakers(params):
            params = replace(params, dry_breaker_token_ids=(*params.dry_breaker_token_ids, *breakers))
        spans = spans_of(inputs, self._executor)
        return RequestGroup(
            request_id,
            prompt_text,
            tokens.tolist(),
            params,
            options.get("stream", False) and (params.best_of or params.n) == params.n,
            self._clock(),
            priority=options.get("priority", 0),
            lora=lora,
            keys=prefix_keys(
                self._node_size,
                salt=options.get("cache_salt"),
                inputs=inputs,
                spans=spans,
                max_len=self._max_len(len(tokens), params),
            ),
            inputs=inputs,
            spans=spans,
            grammar=grammar,
        )

    def _check_pooling(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        prompt_text: str | None,
        **options: Unpack[RequestOptions],
    ) -> RequestGroup:
        check_pooling(request_id, self._executor, params, self._pooling)
        limit = self._states.max_model_len
        if params.truncate_prompt_tokens is not None:
            num_kept = limit if params.truncate_prompt_tokens == -1 else min(limit, params.truncate_prompt_tokens)
        if isinstance(prompt, str):
            max_tokens = limit if params.truncate_prompt_tokens is None else None
            prompt_text, prompt = prompt, self._encode(request_id, prompt, max_tokens)
        if params.truncate_prompt_tokens is not None:
            _check_cut(request_id, prompt, num_kept)
            if length_of(prompt) > num_kept:
                prompt = self._truncated(cast(Sequence[int], prompt), num_kept)
        vocab_size = self._states.vocab_size
        tokens, inputs = checked_prompt(
            request_id,
            prompt,
            self._executor,
            vocab_size=vocab_size,
            max_model_len=limit,
            most_new_tokens=self._most_new_tokens,
            has_output=False,
        )
        if params.step_tag_id is not None and params.step_tag_id not in tokens:
            reason = "is not in the prompt, so there is no step to pool"
            fix = "Mark the end of each step with it."
            raise RequestError(request_id, "step_tag_id", params.step_tag_id, reason, fix)
        if (grammar := options.get("grammar")) is not None:
            raise RequestError(request_id, "grammar", grammar, "a pooling request has no tokens", "Leave it out.")
        lora = options.get("lora")
        self._check_support(request_id, POOLING, lora, None)
        spans = spans_of(inputs, self._executor)
        return RequestGroup(
            request_id,
            prompt_text,
            tokens.tolist(),
            POOLING,
            False,
            self._clock(),
            priority=options.get("priority", 0),
            lora=lora,
            keys=prefix_keys(
                self._node_size,
                salt=options.get("cache_salt"),
                inputs=inputs,
                spans=spans,
                max_len=len(tokens) + 1,
            ),
            inputs=inputs,
            spans=spans,
            pooling_params=params,
        )

    def _check_support(
        self, request_id: str, params: SamplingParams, lora: str | None, grammar: Grammar | None
    ) -> None:
        """RequestError for what the executor lacks, and an adapter that is not there."""
        check_capabilities(request_id, self._executor, params, lora=lora, grammar=grammar)
        if lora is not None:
            self._loras.check(request_id, lora)

    def _truncated(self, token_ids: Sequence[int], num_kept: int) -> Sequence[int]:
        """The first tokens, and the special tokens at the end."""
        special = set() if self._tokenizer is None else set(self._tokenizer.special_token_ids.values())
        num_last = next((i for i, token in enumerate(reversed(token_ids)) if token not in special), len(token_ids))
        num_last = min(num_last, num_kept)
        return [*token_ids[: num_kept - num_last], *token_ids[len(token_ids) - num_last :]]

    def expand(self, group: RequestGroup) -> None:
        """Make the group's completions, each with a request of its own. Its adapter has entered."""
        if group.pooling_params is not None:
            self._expand_pooling(group, group.pooling_params)
            return
        params, prompt = group.params, np.array(group.prompt_token_ids, np.int32)
        limit = self._max_len(len(prompt), params)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        count = params.best_of or params.n
        seed = params.seed if params.seed is not None else derived_seed(self._seed, self._num_arrivals + 1)
        logprobs = 0 if params.logprobs is None and count > params.n else params.logprobs
        make_text = None
        if self._tokenizer is not None and params.detokenize:
            make_text = partial(_text_stream, self._tokenizer, params)
        group.completions = []
        for index in range(count):
            request = Request(
                request_id=group.request_id if count == 1 else f"{group.request_id}\0{index}",
                prompt=prompt,
                arrival=self._num_arrivals,
                max_len=limit,
                params=params.with_values(
                    seed=derived_seed(seed, index),
                    logprobs=logprobs,
                    prompt_logprobs=params.prompt_logprobs if index == 0 else None,
                    n=1,
                    best_of=None,
                ),
                reuse_prefix=params.prompt_logprobs is None or index > 0,
                priority=group.priority,
                lora_id=group.lora_id,
                keys=with_adapter(group.keys, group.lora_id, group.lora),
                inputs=group.inputs,
                spans=group.spans,
            )
            self._num_arrivals += 1
            grammar = group.grammar if index == 0 or group.grammar is None else group.grammar.copy()
            group.completions.append(Completion(group, index, request, end_ids, make_text, grammar))
        group.num_unfinished = count

    def _expand_pooling(self, group: RequestGroup, params: PoolingParams) -> None:
        """One completion without tokens. Only the last token's states are there after a hit in the prefix cache."""
        request = Request(
            request_id=group.request_id,
            prompt=np.array(group.prompt_token_ids, np.int32),
            arrival=self._num_arrivals,
            max_len=len(group.prompt_token_ids) + 1,
            params=group.params,
            pooling_params=params,
            reuse_prefix=params.pooling_or(self._pooling.pooling) == "last",
            priority=group.priority,
            lora_id=group.lora_id,
            keys=with_adapter(group.keys, group.lora_id, group.lora),
            inputs=group.inputs,
            spans=group.spans,
        )
        self._num_arrivals += 1
        group.completions = [Completion(group, 0, request, frozenset(), None, None)]
        group.num_unfinished = 1

    def _max_len(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Number of known tokens at which a request ends."""
        limit = self._states.max_model_len
        return limit if params.max_tokens is None else min(limit, num_prompt_tokens + params.max_tokens)

    def _grammar(self, request_id: str, params: SamplingParams) -> Grammar | None:
        if self._grammars is None:
            asks = "thinking_end" if params.structured_outputs is None else "structured_outputs"
            reason, fix = "the engine does not compile grammars", "Compile it, and pass the result as grammar=."
            raise RequestError(request_id, asks, getattr(params, asks), reason, fix)
        return self._grammars.grammar(request_id, params)

    def _num_kept(self, request_id: str, params: SamplingParams) -> int | None:
        """How many of the last prompt tokens are kept; None: all."""
        if params.truncate_prompt_tokens != -1:
            return params.truncate_prompt_tokens
        num_kept = self._states.max_model_len - (params.max_tokens or 1)
        if num_kept < 1:
            reason = f"max_tokens = {params.max_tokens} leaves no room: max_model_len is {self._states.max_model_len}"
            raise RequestError(request_id, "truncate_prompt_tokens", -1, reason, "Lower max_tokens.")
        return num_kept

    def _encode(self, request_id: str, text: str, max_tokens: int | None) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(request_id, "prompt", text, "needs a tokenizer", "Pass token ids.")
        try:
            return self._tokenizer.encode(text, max_tokens=max_tokens)
        except RequestError as error:
            raise RequestError(request_id, "prompt", error.value, error.reason, error.fix) from None

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """The tokens of each bad word, at the beginning of a text and inside it."""
        if self._tokenizer is None:
            return []
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        ids = (self._tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings)
        return [word for word in ids if word]

    def _dry_breakers(self, params: SamplingParams) -> list[int]:
        """The last token of each sequence breaker inside a text."""
        if self._tokenizer is None or not params.dry_multiplier:
            return []
        breakers = DRY_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
        before, *ids = (self._tokenizer.encode("a" + breaker, add_special_tokens=False) for breaker in ("", *breakers))
        return [token_ids[-1] for token_ids in ids if token_ids != before]


def _check_cut(request_id: str, prompt: Prompt, num_kept: int | None) -> None:
    """RequestError for a prompt of which `truncate_prompt_tokens` cannot keep a part."""
    if isinstance(prompt, Mapping):
        reason, fix = "a prompt with embeddings or positions cannot be cut", "Cut it before it is given."
        raise RequestError(request_id, "truncate_prompt_tokens", num_kept, reason, fix)


def _text_stream(tokenizer: Tokenizer, params: SamplingParams) -> TextStream:
    detokenizer = tokenizer.detokenizer(
        params.skip_special_tokens,
        continues=True,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    return TextStream(detokenizer, params.stop_strings, include_stop=params.include_stop_str_in_output)
