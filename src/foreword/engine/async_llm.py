"""The online interface: prompts in at any time, streams of completions out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from foreword.batch import SamplingParams
from foreword.engine.async_engine import AsyncEngine
from foreword.engine.llm import LLM, Message, chat_prompt
from foreword.engine.outputs import RequestOutput
from foreword.models.tokenizer import Tokenizer


class AsyncLLM(AsyncEngine):
    """A model that serves many coroutines at the same time.

        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=8)):
                print(output.outputs[0].text)

    Options are those of `LLM`. max_num_requests: see `AsyncEngine`.
    """

    def __init__(self, model: str, *, max_num_requests: int = 1024, **options: Any) -> None:
        llm = LLM(model, **options)
        self.model = llm.model
        super().__init__(llm.engine, max_num_requests=max_num_requests)
        self._name = model

    def __repr__(self) -> str:
        return f"<AsyncLLM {self._name!r}: {self.num_unfinished} requests>"

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation through the model's chat template.

        template: further variables of the template. options: as `generate`.
        """
        variables = {**(template or {}), "tools": tools, "add_generation_prompt": add_generation_prompt}
        text, prompt = chat_prompt(self.tokenizer, messages, variables)
        return self.generate(prompt, params, prompt_text=text, **options)
