"""Convert a user's request to the scheduler's requests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, Unpack, cast

import numpy as np

from foreword.arrays import I32
from foreword.batch import CheckedParams, CheckedPrompt, PoolingParams, PromptInputs, RequestStates, SamplingParams
from foreword.cache import prefix_keys, with_adapter
from foreword.engine.loras import Loras
from foreword.engine.prompt import EncoderPrompts, Prompt, checked_prompt, range_of_prompt, spans_of
from foreword.engine.request_group import Completion, RequestGroup, RequestOptions
from foreword.engine.text import Detokenizer, TextStream
from foreword.engine.validation import check_capabilities, check_id, check_options, check_pooling, checked_params
from foreword.errors import ContextLengthError, RequestError
from foreword.executors import Executor
from foreword.integers import length_of
from foreword.models.pooling import PoolingSpec
from foreword.sampling import GivenTokens, Grammar, Processors, derived_seed
from foreword.scheduler import Request
from foreword.structured import GrammarCompiler
from foreword.versions import Memo

MOST_CUT = 64
"""A text of more than this many times max_model_len tokens is refused, even if it would be cut, because the whole text
is tokenized."""
DRY_BREAKERS = ("\n", ":", '"', "*")


class Tokenizer(Protocol):
    """The part of a tokenizer that the engine uses."""

    @property
    def special_token_ids(self) -> Mapping[str, int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]: ...

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        *,
        continues: bool = False,
        prompt: Sequence[int] | I32 = (),
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer: ...


POOLING = SamplingParams(max_tokens=1, detokenize=False, ignore_eos=True)
"""The sampling parameters of pooling requests, which do not sample."""


class Cut(NamedTuple):
    """The truncation of a prompt to ``num_kept`` tokens. given: the value of `truncate_prompt_tokens` for messages."""

    num_kept: int
    given: int
    keep: Callable[[Prompt, int], Prompt]


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
        prefix_lm: bool,
        encoder: EncoderPrompts | None,
        most_new_tokens: int,
        max_logprobs: int,
        default_params: SamplingParams,
    ) -> None:
        """Take the parts of an engine that requests are checked with.

        node_size: the number of tokens in a block of the prefix tree. prefix_lm: whether the tokens of a prompt see
        each other. encoder: reads the prompts of an encoder–decoder.
        most_new_tokens: the most tokens that a step computes. default_params: the parameters of requests that have
        none.
        """
        self._encoder, self._most_new_tokens, self._max_logprobs = encoder, most_new_tokens, max_logprobs
        self._pooling, self._generates, self._prefix_lm = pooling, generates, prefix_lm
        self._states, self._executor, self._processors = states, executor, processors
        self._node_size, self._tokenizer, self._eos_token_ids = node_size, tokenizer, eos_token_ids
        self._seed = seed if seed is not None else int.from_bytes(os.urandom(7), "little")
        self._clock, self._grammars, self._loras = clock, grammars, loras
        self._num_arrivals, self._default_params = 0, default_params
        self._checked = Memo[SamplingParams, CheckedParams]()  # by the given parameters
        self._sampling_of_pooling = CheckedParams(POOLING, states.vocab_size)

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None,
        prompt_text: str | None,
        **options: Unpack[RequestOptions],
    ) -> RequestGroup:
        check_id(request_id)
        check_options(request_id, options)
        lora, grammar = options.get("lora"), options.get("grammar")
        pooling, cut = None, None
        limit = min(options.get("max_len") or self._states.max_model_len, self._states.max_model_len)
        if isinstance(params, PoolingParams):
            pooling, sampling = params, self._sampling_of_pooling
            check_pooling(request_id, self._executor, params, self._pooling)
            prompt = self._with_prompt(request_id, prompt, params)
            if params.truncate_prompt_tokens is not None:
                cut = self._cut_for_pooling(params.truncate_prompt_tokens, limit)
        else:
            sampling = self._checked_params(request_id, params)
            cut = self._cut_for_output(request_id, sampling.params, limit)
        text, tokens, inputs = self._checked_prompt(
            request_id, prompt, prompt_text, cut, limit, has_output=pooling is None
        )
        if pooling is not None:
            _check_pooled(request_id, pooling, tokens, grammar)
        elif sampling.params.prompt_logprobs is not None and "prompt_embeds" in inputs:
            value, reason = sampling.params.prompt_logprobs, "embeddings have no token ids, and so no log-probabilities"
            raise RequestError(request_id, "prompt_logprobs", value, reason, "Leave it out.")
        elif sampling.params.prompt_logprobs is not None and self._prefix_lm:
            value, reason = sampling.params.prompt_logprobs, "the tokens of a prompt see those that they would predict"
            fix = "Give the tokens to score as forced_tokens, with logprobs."
            raise RequestError(request_id, "prompt_logprobs", value, reason, fix)
        check_capabilities(request_id, self._executor, sampling.params, lora=lora, grammar=grammar)
        if lora is not None:
            self._loras.check(request_id, lora)
        grammar = self._grammar_of(request_id, sampling.params, grammar)
        max_len = _max_len(len(tokens), sampling.params, limit) if pooling is None else len(tokens) + 1
        spans = spans_of(inputs, self._executor)
        if self._prefix_lm:
            spans = inputs["bidirectional_ranges"] = range_of_prompt(request_id, len(tokens), self._most_new_tokens)
        salt, num_outputs = options.get("cache_salt"), sampling.params.num_completions
        return RequestGroup(
            request_id,
            text,
            tokens,
            sampling,
            max_len,
            options.get("stream", False) and pooling is None and num_outputs == sampling.params.n,
            self._clock(),
            priority=options.get("priority", 0),
            owner=options.get("owner", ""),
            share=options.get("share", 1.0),
            lora=lora,
            keys=prefix_keys(
                self._node_size, salt=salt, inputs=inputs, spans=spans, prompt=tokens.token_ids, max_len=max_len
            ),
            inputs=inputs,
            spans=spans,
            grammar=grammar,
            pooling_params=pooling,
        )

    def _with_prompt(self, request_id: str, prompt: Prompt, params: PoolingParams) -> Prompt:
        """Return a text to embed with the model's prompt before it. Token ids are not changed."""
        if params.task not in ("embed", "token_embed"):
            return prompt
        name = self._pooling.default_prompt if params.prompt_name is None else params.prompt_name
        if isinstance(prompt, str):
            return self._pooling.prompts.get(name, "") + prompt
        if params.prompt_name:
            reason = "comes before a text, and the prompt is token ids"
            raise RequestError(request_id, "prompt_name", name, reason, "Give a text, or leave it out.")
        return prompt

    def _checked_params(self, request_id: str, params: SamplingParams | None) -> CheckedParams:
        """Return checked parameters, with the token ids of their words; for None, the default ones."""
        if not self._generates:
            raise RequestError(
                request_id,
                "params",
                params,
                "the model computes no logits, so it generates no text",
                "Pass PoolingParams, or use LLM.embed, LLM.classify or LLM.score.",
            )
        given = self._default_params if params is None else params
        if (known := self._checked.find(given)) is not None:
            return known
        vocab_size = self._states.vocab_size
        checked = checked_params(request_id, given, vocab_size=vocab_size, max_logprobs=self._max_logprobs)
        self._processors.check(request_id, given)
        if self._tokenizer is None:
            for field in ("stop", "bad_words", "dry_sequence_breakers"):
                if value := getattr(given, field):
                    raise RequestError(request_id, field, value, "needs a tokenizer", "Use token ids.")
        words, breakers = self._bad_words(given), self._dry_breakers(given)
        if words or breakers:
            complete = replace(
                given,
                bad_words_token_ids=(*given.bad_words_token_ids, *words),
                dry_breaker_token_ids=(*given.dry_breaker_token_ids, *breakers),
            )
            checked = CheckedParams(complete, vocab_size, request_id)
        # not stored, because mappings may change
        return checked if given.has_mappings else self._checked.keep(given, checked)

    def _checked_prompt(
        self, request_id: str, prompt: Prompt, text: str | None, cut: Cut | None, limit: int, *, has_output: bool
    ) -> tuple[str | None, CheckedPrompt, PromptInputs]:
        """Return the prompt's text if it is known, its checked tokens after a cut, and its other inputs. limit: of the
        tokens with those of the output.
        """
        of_encoder = PromptInputs()
        if self._encoder is not None:
            if cut is not None:
                value, reason = cut.num_kept, "the prompt of an encoder–decoder cannot be cut"
                raise RequestError(request_id, "truncate_prompt_tokens", value, reason, "Cut it before it is given.")
            text = prompt if isinstance(prompt, str) else text
            prompt, of_encoder = self._encoder.split(request_id, prompt, partial(self._encode, request_id))
        if isinstance(prompt, str):
            text, prompt = prompt, self._encode(request_id, prompt, limit if cut is None else MOST_CUT * limit)
        if cut is not None:
            if isinstance(prompt, Mapping):
                reason, fix = "a prompt with embeddings or positions cannot be cut", "Cut it before it is given."
                raise RequestError(request_id, "truncate_prompt_tokens", cut.given, reason, fix)
            prompt = cut.keep(prompt, cut.num_kept)
        tokens, inputs = checked_prompt(
            request_id,
            prompt,
            self._executor,
            vocab_size=self._states.vocab_size,
            max_model_len=limit,
            most_new_tokens=self._most_new_tokens,
            has_output=has_output,
        )
        return text, tokens, inputs | of_encoder

    def _cut_for_output(self, request_id: str, params: SamplingParams, limit: int) -> Cut | None:
        """Return the cut that keeps the last tokens of a prompt; None for all of it."""
        given = params.truncate_prompt_tokens
        if given is None or given != -1:
            return None if given is None else Cut(given, given, _last)
        num_kept = limit - (params.max_tokens or 1)
        if num_kept < 1:
            reason = f"leaves no room for truncate_prompt_tokens = -1: max_model_len is {limit}"
            raise ContextLengthError(
                request_id, "max_tokens", params.max_tokens, reason, "Lower it.",
                num_tokens=1 + (params.max_tokens or 1), longest=limit, max_model_len=limit,
            )  # fmt: skip
        return Cut(num_kept, given, _last)

    def _cut_for_pooling(self, given: int, limit: int) -> Cut:
        """Return the cut that keeps the first tokens of a prompt, and the special tokens at its end."""
        num_kept = limit if given == -1 else min(limit, given)
        return Cut(num_kept, num_kept, self._first_and_special)

    def _first_and_special(self, prompt: Prompt, num_kept: int) -> Prompt:
        if length_of(prompt) <= num_kept:
            return prompt
        token_ids = cast(Sequence[int], prompt)
        special = set() if self._tokenizer is None else set(self._tokenizer.special_token_ids.values())
        num_last = next((i for i, token in enumerate(reversed(token_ids)) if token not in special), len(token_ids))
        num_last = min(num_last, num_kept)
        return [*token_ids[: num_kept - num_last], *token_ids[len(token_ids) - num_last :]]

    def expand(self, group: RequestGroup) -> None:
        """Make the group's completions, each with its own request. Its adapter must be loaded."""
        params, pooling = group.params, group.pooling_params
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        count = params.num_completions
        seed = params.seed if params.seed is not None else derived_seed(self._seed, self._num_arrivals + 1)
        logprobs = 0 if params.logprobs is None and count > params.n else params.logprobs
        make_text = None
        if self._tokenizer is not None and params.detokenize:
            group.token_bytes = self._tokenizer.token_bytes
            make_text = partial(_text_stream, self._tokenizer, params, group.prompt.token_ids)
        group.completions = []
        for index in range(count):
            prompt_logprobs = params.prompt_logprobs if index == 0 else None
            sampling = group.sampling.of_completion(
                seed=derived_seed(seed, index), logprobs=logprobs, prompt_logprobs=prompt_logprobs
            )
            reuse_prefix = prompt_logprobs is None
            if pooling is not None:  # after a hit, only the states of the last token are computed
                reuse_prefix = pooling.pooling_or(self._pooling.pooling) == "last"
            request = Request(
                request_id=group.request_id if count == 1 else f"{group.request_id}\0{index}",
                prompt=group.prompt,
                arrival=self._num_arrivals,
                max_len=group.max_len,
                params=sampling,
                pooling_params=pooling,
                reuse_prefix=reuse_prefix,
                priority=group.priority,
                owner=group.owner,
                share=group.share,
                streams=group.stream,
                lora_id=group.lora_id,
                keys=with_adapter(group.keys, group.lora_id, group.lora),
                inputs=group.inputs,
                spans=group.spans,
            )
            self._num_arrivals += 1
            grammar = group.grammar if index == 0 or group.grammar is None else group.grammar.copy()
            group.completions.append(Completion(group, index, request, sampling.params, end_ids, make_text, grammar))
        group.num_unfinished = count

    def settle_grammar(self, params: SamplingParams, seconds: float) -> bool:
        """Wait for the compilation of a grammar: see `Engine.settle_grammar`."""
        return self._grammars is None or self._grammars.settle(params, seconds)

    def _grammar_of(self, request_id: str, params: SamplingParams, given: Grammar | None) -> Grammar | None:
        """Return the grammar of the output: a given one, or that of the parameters."""
        if params.forced_tokens:
            if given is not None or params.needs_grammar:
                reason = "a grammar or a thinking part decides which tokens may follow"
                raise RequestError(request_id, "forced_tokens", params.forced_tokens, reason, "Leave out one of them.")
            return GivenTokens(params.forced_tokens)
        return self._grammar(request_id, params) if given is None and params.needs_grammar else given

    def _grammar(self, request_id: str, params: SamplingParams) -> Grammar | None:
        if self._grammars is None:
            asks = "thinking_end" if params.structured_outputs is None else "structured_outputs"
            reason, fix = "the engine does not compile grammars", "Compile it, and pass the result as grammar=."
            raise RequestError(request_id, asks, getattr(params, asks), reason, fix)
        return self._grammars.grammar(request_id, params)

    def _encode(self, request_id: str, text: str, max_tokens: int | None) -> list[int]:
        if self._tokenizer is None:
            raise RequestError(request_id, "prompt", text, "needs a tokenizer", "Pass token ids.")
        try:
            return self._tokenizer.encode(text, max_tokens=max_tokens)
        except RequestError as error:
            raise error.of_request(request_id) from None

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Return the tokens of each bad word, at the beginning of a text and inside it."""
        if self._tokenizer is None:
            return []
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        ids = (self._tokenizer.encode(spelling, add_special_tokens=False) for spelling in spellings)
        return [word for word in ids if word]

    def _dry_breakers(self, params: SamplingParams) -> list[int]:
        """Return the last token of each sequence breaker inside a text."""
        if self._tokenizer is None or not params.dry_multiplier:
            return []
        breakers = DRY_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
        before, *ids = (self._tokenizer.encode("a" + breaker, add_special_tokens=False) for breaker in ("", *breakers))
        return [token_ids[-1] for token_ids in ids if token_ids != before]


def _last(prompt: Prompt, num_kept: int) -> Prompt:
    return prompt[-num_kept:] if isinstance(prompt, Sequence | np.ndarray) else prompt


def _check_pooled(request_id: str, params: PoolingParams, prompt: CheckedPrompt, grammar: Grammar | None) -> None:
    """Raise RequestError for a prompt without a step to pool, and for a grammar."""
    if params.step_tag_id is not None and params.step_tag_id not in prompt.token_ids:
        reason = "is not in the prompt, so there is no step to pool"
        fix = "Mark the end of each step with it."
        raise RequestError(request_id, "step_tag_id", params.step_tag_id, reason, fix)
    if grammar is not None:
        raise RequestError(request_id, "grammar", grammar, "a pooling request has no tokens", "Leave it out.")


def _text_stream(tokenizer: Tokenizer, params: SamplingParams, prompt: I32) -> TextStream:
    """Return the text stream of an output. prompt: its last tokens may begin a character, which the text then contains
    completely.
    """
    skips = params.skip_special_tokens
    special = tokenizer.special_token_ids if skips and params.stop_strings else {}
    if left_out := any(text in stop for stop in params.stop_strings for text in special):
        skips = False
    detokenizer = tokenizer.detokenizer(
        skips, continues=True, spaces_between_special_tokens=params.spaces_between_special_tokens, prompt=prompt
    )
    return TextStream(
        detokenizer,
        params.stop_strings,
        include_stop=params.include_stop_str_in_output,
        left_out={token_id: text for text, token_id in special.items()} if left_out else None,
    )


def _max_len(num_prompt_tokens: int, params: SamplingParams, limit: int) -> int:
    """Return the number of known tokens at which a request ends."""
    return limit if params.max_tokens is None else min(limit, num_prompt_tokens + params.max_tokens)
