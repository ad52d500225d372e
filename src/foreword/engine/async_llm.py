"""The online interface: prompts in at any time, streams of completions out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack

from foreword.arrays import F32
from foreword.batch import PoolingParams, SamplingParams
from foreword.engine.async_engine import AsyncEngine
from foreword.engine.chat import ChatOptions, Conversation, as_messages, chat_options, make_chat
from foreword.engine.llm import LLM
from foreword.engine.options import LLMOptions
from foreword.engine.outputs import RequestOutput
from foreword.engine.pooling import PoolingRequestOutput, plan_scores
from foreword.engine.prompt import Prompt
from foreword.models.loader import LoadedModel
from foreword.models.tokenizer import Tokenizer


class AsyncLLM(AsyncEngine):
    """A model that serves many coroutines at the same time.

        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Options are those of `LLM`. max_num_requests: see `AsyncEngine`.
    """

    def __init__(
        self, model: str | Path | LoadedModel, *, max_num_requests: int = 1024, **options: Unpack[LLMOptions]
    ) -> None:
        self._serve_llm(LLM(model, **options), max_num_requests)

    @classmethod
    def of(cls, llm: LLM, *, max_num_requests: int = 1024, turns: AbstractContextManager[object] | None = None) -> Self:
        """Return an AsyncLLM that uses the engine of an LLM. The LLM must not be used meanwhile.

        max_num_requests, turns: see `AsyncEngine`.
        """
        served = cls.__new__(cls)
        served._serve_llm(llm, max_num_requests, turns)
        return served

    def _serve_llm(self, llm: LLM, max_num_requests: int, turns: AbstractContextManager[object] | None = None) -> None:
        self.model, self.media, self._name = llm.model, llm.media, llm.name
        super().__init__(llm.engine, max_num_requests=max_num_requests, turns=turns)

    def __repr__(self) -> str:
        return f"<AsyncLLM {self._name!r}: {self.num_unfinished} requests>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"an AsyncLLM holds threads of its process. Make one in each: AsyncLLM({self._name!r}, …)")

    def _end(self) -> None:
        super()._end()
        self.engine.executor.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: see `LLM.default_sampling_params`."""
        return self.engine.default_params

    async def embed(self, prompt: Prompt, params: PoolingParams | None = None, **options: Any) -> F32:
        """Return the embedding of one prompt, float32 [dimensions]: see `LLM.embed`."""
        return (await self.encode(prompt, params, **options)).outputs.data

    async def score(
        self, query: str, documents: Sequence[str], params: PoolingParams | None = None
    ) -> list[PoolingRequestOutput]:
        """Return how well each document fits the query, in ``outputs.score``: see `LLM.score`."""
        spec = self.model.pooling
        plan = await asyncio.to_thread(plan_scores, self.tokenizer, spec, query, documents, params)
        requests = zip(plan.prompts, plan.params, strict=True)
        return plan.read(await asyncio.gather(*(self.encode(prompt, own) for prompt, own in requests)))

    async def chat(
        self, messages: Conversation, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation through the chat template. Outputs have ``events``, the final one its ``message``.

        messages: a list of messages, one message, or a text of the user. options: of `ChatOptions` and `generate`.
        """
        chosen = {name: options.pop(name) for name in list(options) if name in ChatOptions.__annotations__}
        limit = self.engine.states.max_model_len
        prompt = as_messages(messages)
        given = chat_options(self.tokenizer, chosen)
        params = params or self.engine.default_params
        chat = await asyncio.to_thread(
            make_chat, self.tokenizer, prompt, params, limit, given, self.media, self.engine.follows_grammars
        )
        reader = chat.reader()
        outputs = self.generate(chat.prompt, chat.params, prompt_text=chat.text, **options)
        async with aclosing(outputs):
            async for output in outputs:
                yield reader.read(output)
