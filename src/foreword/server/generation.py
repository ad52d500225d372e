"""Turn a parsed request into outputs of the engine: the part that all interfaces that generate share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from heapq import nlargest
from itertools import islice

from starlette.requests import Request

from foreword.batch import PoolingParams, SamplingParams
from foreword.engine import RequestOptions, RequestOutput
from foreword.engine.async_engine import Stream
from foreword.engine.chat import make_chat
from foreword.engine.checked_request import CheckedRequest
from foreword.engine.prompt import Prompt
from foreword.engine.request_group import RequestGroup
from foreword.errors import RequestError
from foreword.openai import ChatRequest
from foreword.openai.errors import named
from foreword.server.admission import Place
from foreword.server.client import Client
from foreword.server.context import Context, Progress
from foreword.server.errors import HttpError
from foreword.server.failures import INVALID
from foreword.server.reply import apart, is_small

TOKEN_BYTES, LOGPROB_BYTES = 64, 400
"""Memory of an answer, at most: of a token with its text, of a log-probability with its token's text."""


class Generation:
    """The prompts of one HTTP request on their way through the engine. Everything ends with that request."""

    def __init__(self, context: Context, request: Request) -> None:
        self.context = context
        self.id: str = request.scope["request_id"]
        self._stack: AsyncExitStack = request.scope["stack"]
        self._headers, self.is_small = request.headers, is_small(request)
        self._client: Client = request.scope["requester"]
        self._share = max(context.engine.engine.states.max_num_reqs // 2, 1)
        self._place: Place | None = None
        self._progress = Progress(self._client)
        self._params: SamplingParams | None = None
        self._untraced: set[str] = {self.id}  # requests whose end is not in the trace yet
        self._begin = time.perf_counter()
        self._stack.push(self._trace_failure)
        self._lora: str | None = None

    def choose_model(self, name: str | None) -> str:
        """Choose the model or adapter of its requests, and return its name. Raise HttpError if it is not served."""
        model = self.context.check_model(name)
        self._lora = None if model in self.context.names else model
        return model

    async def limit_time(self, when: float | None) -> None:
        """Let the handler fail with TimeoutError from ``when`` on, a time of the event loop's clock; never for None."""
        if when is not None:
            await self._stack.enter_async_context(asyncio.timeout_at(when))

    def enter(self, params: SamplingParams, num_prompts: int = 1) -> None:
        """Take a place, before any work is done. Raise HttpError 429 if the server is full, 400 for a large answer."""
        self._params = params
        check_completions(self.context, params)
        self.enter_many(num_prompts, params.num_completions)
        self.count_bytes(answer_bytes(self.context, params, num_prompts))

    def check_count(self, field: str, num_prompts: int) -> None:
        """Raise HttpError 400 if the field has more prompts than a body may have."""
        check_prompts(self.context, field, num_prompts)

    def _count_prompts(self, groups: Sequence[RequestGroup]) -> None:
        """Count the tokens of prompts that are in the engine at the same time, and the log-probabilities of all."""
        self.add_tokens(sum(nlargest(self._share, (len(group.prompt) for group in groups))))
        self.count_bytes(prompt_bytes(self.context, groups))

    def count_bytes(self, num_bytes: int) -> None:
        """Count memory that the answer may take. Raise HttpError if it is more than allowed."""
        if self._place is not None:
            self._place.add_bytes(num_bytes)

    def enter_many(self, num_prompts: int, num_completions: int = 1) -> None:
        """Take a place for each completion that will be in the engine at the same time. Raise HttpError 429 if the
        server is full, RequestError if the id is in use.
        """
        progress = self.context.progress
        if self.id in progress:
            raise RequestError(self.id, "X-Request-Id", self.id, "is in use", "Use another id.")
        count = min(num_prompts * num_completions, max(self._share, num_completions))
        self._place = self.context.admission.enter(count)
        self._stack.callback(self._place.end)
        self._stack.callback(self.context.admission.keys.enter(self._client.key, count))
        progress[self.id] = self._progress
        self._stack.callback(progress.pop, self.id)

    async def chat(self, wanted: ChatRequest) -> AsyncGenerator[RequestOutput, None]:
        """Check a conversation, and return the outputs of its answer."""
        self.enter(wanted.params)
        context = self.context
        limit, media = context.engine.engine.states.max_model_len, context.media
        with named("messages", wanted.origins):
            takes_time = not self.is_small or media.encoder is not None
            arguments = context.tokenizer, wanted.messages, wanted.params, limit, wanted.chat, media
            made = await apart(takes_time, make_chat, *arguments, context.engine.engine.follows_grammars)
            group = await self._checked(self.id, made.prompt, made.params, made.text, wanted.options, wanted.stream)
        self._count_prompts([group])
        return self.outputs([CheckedRequest(group, made.reader())])

    async def check(
        self,
        field: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        options: RequestOptions,
        *,
        stream: bool = False,
    ) -> list[CheckedRequest]:
        """Check each prompt with its parameters. field: of the body, which has the prompts."""
        checked = []
        for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            is_alone = len(prompts) == 1
            with named(field if is_alone else f"{field}[{i}]"):
                name = self.id if is_alone else f"{self.id}-{i}"
                group = await self._checked(name, prompt, own, None, options, stream)
            checked.append(CheckedRequest(group, index=i))
        self._count_prompts([one.group for one in checked])
        return checked

    async def outputs(self, requests: Sequence[CheckedRequest]) -> AsyncGenerator[RequestOutput, None]:
        """Run requests, and yield their outputs as they come. At most `_share` completions are in the engine at the
        same time, so that a body of many prompts leaves rows to the requests of others.
        """
        engine = self.context.engine
        self._progress.names = tuple(one.group.request_id for one in requests)
        self._untraced = set(self._progress.names)
        with ExitStack() as stack:
            running: dict[asyncio.Future[RequestOutput], tuple[CheckedRequest, Stream]] = {}
            waiting = iter(requests)

            def start(count: int) -> None:
                for one in islice(waiting, count):
                    stream = stack.enter_context(engine.run(one.group))
                    if self._progress.is_aborted:
                        engine.abort(one.group.request_id)
                    running[asyncio.ensure_future(anext(stream))] = one, stream

            stack.callback(lambda: [task.cancel() for task in running])
            if requests:  # there are none for an empty list of inputs, which Ollama has
                start(max(self._share // requests[0].group.params.num_completions, 1))
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    (one, stream), output = running.pop(task), task.result()
                    if stream.is_finished:
                        start(1)
                    else:
                        running[asyncio.ensure_future(anext(stream))] = one, stream
                    yield self._read(one, output)

    def _read(self, request: CheckedRequest, output: RequestOutput) -> RequestOutput:
        self._add_key_tokens(sum(len(completion.new_token_ids) for completion in output.outputs))
        if output.finished and self.context.trace is not None:
            self.context.trace.ended(output, request.group.params, self._headers)
            self._untraced.discard(output.request_id)
        return request.read(output)

    def _trace_failure(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Trace, at the end of the HTTP request, the requests that ended without a final output."""
        trace = self.context.trace
        if trace is None or error is None:
            return
        for name in sorted(self._untraced):
            trace.failed(name, error, time.perf_counter() - self._begin, self._params, self._headers)

    def add_tokens(self, count: int) -> None:
        """Count tokens of a prompt. Raise HttpError 429 if the prompts in progress have too many."""
        if self._place is not None:
            self._place.add_tokens(count)
        self._add_key_tokens(count)

    def _add_key_tokens(self, count: int) -> None:
        self.context.admission.keys.add_tokens(self._client.key, count)

    def leave(self) -> None:
        """Give the place back, as soon as the engine has done its part: a slow reader holds the memory alone."""
        if self._place is not None:
            self._place.leave()

    async def _checked(
        self,
        name: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        text: str | None,
        options: RequestOptions,
        stream: bool,
    ) -> RequestGroup:
        client = self._client
        chosen: RequestOptions = {**options, "stream": stream, "lora": self._lora, "owner": client.owner}
        chosen["share"] = self.context.admission.keys.share(client.key)
        if self.context.config.cache_by_key:
            chosen["cache_salt"] = f"{self._client.key} {options.get('cache_salt') or ''}"
        is_small = self.is_small and not isinstance(prompt, Mapping)  # a small body may name large images
        return await self.context.engine.check(
            name, prompt, params, prompt_text=text, is_small=is_small, client=str(self._client), **chosen
        )


def check_completions(context: Context, params: SamplingParams) -> None:
    """Raise HttpError 400 for more completions of a prompt than the server allows."""
    if params.num_completions > (most := context.config.max_completions):
        name = "n" if params.best_of is None else "best_of"
        reason = f"{name} = {params.num_completions}: is more than max_completions = {most}. Ask for fewer"
        raise HttpError(INVALID, reason, param=name)


def check_prompts(context: Context, field: str, num_prompts: int) -> None:
    """Raise HttpError 400 if the field has more prompts than a body may have."""
    if num_prompts > (most := context.config.max_prompts):
        reason = f"{field}: has {num_prompts} entries, more than max_prompts = {most}. Send several requests"
        raise HttpError(INVALID, reason, param=field)


def answer_bytes(context: Context, params: SamplingParams, num_prompts: int) -> int:
    """Return the memory that the completions of an answer may take."""
    states = context.engine.engine.states
    longest = states.max_model_len
    num_tokens = longest if params.max_tokens is None else min(params.max_tokens, longest)
    size = TOKEN_BYTES + LOGPROB_BYTES * _entries(params.logprobs, states.vocab_size)
    return num_prompts * params.num_completions * num_tokens * size


def prompt_bytes(context: Context, groups: Sequence[RequestGroup]) -> int:
    """Return the memory that the log-probabilities of prompts take in an answer."""
    vocab_size = context.engine.engine.states.vocab_size
    return LOGPROB_BYTES * sum(len(one.prompt) * _entries(one.params.prompt_logprobs, vocab_size) for one in groups)


def _entries(asked: int | None, vocab_size: int) -> int:
    """Return the number of log-probabilities per token, that of the token itself included."""
    return 0 if asked is None else 1 + (asked if asked >= 0 else vocab_size)


def in_order(outputs: Iterable[RequestOutput]) -> list[RequestOutput]:
    """Return the final outputs of several prompts in the order of the prompts."""
    return sorted(outputs, key=lambda output: output.prompt_index)
