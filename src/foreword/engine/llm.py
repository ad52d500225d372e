"""The offline interface: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from foreword.batch.values.sampling_params import SamplingParams
from foreword.engine.build import ExecutorKind, build_engine
from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine, Prompt
from foreword.engine.outputs import RequestOutput
from foreword.engine.progress import progress_bar
from foreword.errors import RequestError
from foreword.models.loader import load_model
from foreword.models.tokenizer import Tokenizer

Message = Mapping[str, Any]


class LLM:
    """A model, ready to answer.

        llm = LLM("smollm2")
        llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
        llm.chat([{"role": "user", "content": "What is the capital of France?"}])

    model: a name the project knows, a .gguf file, a directory of safetensors, or a hub id.
    executor: "auto" is the native one where it is built, else "numpy". num_threads, weight_format, kv_format: for the
    native one. All other options are those of `EngineConfig`.
    """

    def __init__(
        self,
        model: str,
        *,
        executor: ExecutorKind = "auto",
        num_threads: int | None = None,
        weight_format: str | None = None,
        kv_format: str | None = None,
        **config: Any,
    ) -> None:
        chosen = {"num_threads": num_threads, "weight_format": weight_format, "kv_format": kv_format}
        options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        self.model = load_model(model)
        self.engine: Engine = build_engine(self.model, EngineConfig(**config), executor=executor, **options)
        self._ids = count()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many, in one list in the order given.

        prompts: a text, token ids, or a list of either. sampling_params: one for all, or one a prompt; None: the
        defaults. progress: a bar on standard error; None: where that is a terminal.

        RequestError for a prompt or parameter that cannot be served, naming its place in the list, before anything
        has started.
        """
        return self._run([(None, prompt) for prompt in as_list(prompts)], sampling_params, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        progress: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template. template: more for the template."""
        texts = [
            self.tokenizer.apply_chat_template(c, tools=tools, add_generation_prompt=add_generation_prompt, **template)
            for c in as_conversations(messages)
        ]
        # The template writes the special tokens itself.
        prompts = [(text, self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return self._run(prompts, sampling_params, progress)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, Prompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        params = one_each(sampling_params, len(prompts))
        engine = self.engine
        jobs = [
            engine.check(f"prompts[{i}]", prompt, p, prompt_text=text)
            for i, ((text, prompt), p) in enumerate(zip(prompts, params, strict=True))
        ]
        for job in jobs:
            job.request_id = str(next(self._ids))
            engine.add(job)
        results: dict[str, RequestOutput] = {}
        try:
            with progress_bar(len(jobs), show=progress) as advance:
                while len(results) < len(jobs):
                    for output in engine.step():
                        results[output.request_id] = output
                        advance(1, sum(len(c.token_ids) for c in output.outputs))
        except BaseException:
            for job in jobs:  # an interrupt must not leave half a batch in the engine
                engine.abort(job.request_id)
            raise
        return [results[job.request_id] for job in jobs]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a list of token ids is one prompt, a list of lists or texts many."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(None, "prompts", prompts, "is no prompt", "Give a text, token ids, or a list of either.")
    items = list(prompts)
    if not items or isinstance(items[0], str) or np.ndim(items[0]) > 0:
        return items  # type: ignore[return-value]
    return [items]  # type: ignore[list-item]


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation as a list of one. RequestError without any message."""
    if not len(messages):
        raise RequestError(None, "messages", messages, "is empty", "Give at least one message.")
    if isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams | None]:
    """One set of parameters a prompt. RequestError if a list is not as long as the prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            None,
            "sampling_params",
            f"{len(params)} of them",
            f"there are {num_prompts} prompts",
            "Give one, or one each.",
        )
    return params
