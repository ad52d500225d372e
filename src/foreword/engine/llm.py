"""The offline interface: prompts in, completions out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Self

import numpy as np

from foreword.batch import SamplingParams
from foreword.engine.build import ExecutorKind, build_engine
from foreword.engine.config import engine_config
from foreword.engine.engine import Engine
from foreword.engine.intake import Prompt
from foreword.engine.outputs import RequestOutput
from foreword.engine.progress import progress_bar
from foreword.engine.request_group import RequestGroup
from foreword.engine.transaction import Transaction
from foreword.errors import EngineError, RequestError
from foreword.models.loader import load_model
from foreword.models.tokenizer import Tokenizer

Message = Mapping[str, Any]

EXECUTOR_OPTIONS = ("num_threads", "weight_format", "kv_format")  # of the native executor


class LLM:
    """A model that completes prompts in batches.

        llm = LLM("smollm2")
        llm.generate("The capital of France is", SamplingParams(temperature=0.0, max_tokens=8))
        llm.chat([{"role": "user", "content": "What is the capital of France?"}])

    model: a name the project knows, a .gguf file, a directory of safetensors, or a hub id.
    executor: "auto" is the native one if it is built, else "numpy".
    options: num_threads, weight_format and kv_format of the native executor; the fields of `EngineConfig` and of its
        `SchedulerConfig`. ConfigError for any other name.
    """

    def __init__(self, model: str, *, executor: ExecutorKind = "auto", **options: Any) -> None:
        native = {name: options.pop(name) for name in EXECUTOR_OPTIONS if name in options}
        native = {name: value for name, value in native.items() if value is not None}
        config = engine_config(options, other_names=("executor", *EXECUTOR_OPTIONS))
        self.model = load_model(model)
        self.engine: Engine = build_engine(self.model, config, executor=executor, **native)
        self._name, self._is_closed = model, False
        self._ids = count()
        self._running: list[RequestGroup] = []
        self._transaction = Transaction(self, ("_run", "close"), self._abort_running)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"<LLM {self._name!r} on {type(self.engine.executor).__name__}{state}>"

    def close(self) -> None:
        """End its thread; the model can no longer be used, and its memory is freed with the object. Closing twice is
        harmless.
        """
        with self._transaction:
            self._is_closed = True
            self.engine.close()

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

        prompts: a text, token ids, or a list of either. sampling_params: one for all, or one per prompt; None:
        the defaults, temperature 1 and 16 tokens (those of `foreword run` are 0 and 1024). progress: a bar on standard
        error; None: if that is a terminal.

        RequestError for a prompt or parameter that cannot be served, with its index in the list, before any request
        has started. A request that fails later, such as for logits that are not numbers, has its error in
        ``RequestOutput.error``; if all requests failed, the first error is raised.
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
        """Answer one conversation or many through the model's chat template. template: further variables of it."""
        template |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        limit = self.engine.states.max_model_len
        prompts = [chat_prompt(self.tokenizer, c, template, limit) for c in as_conversations(messages)]
        return self._run(prompts, sampling_params, progress)

    def _run(
        self,
        prompts: Sequence[tuple[str | None, Prompt]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        params = one_each(sampling_params, len(prompts))
        engine = self.engine
        with self._transaction:
            if self._is_closed:
                raise EngineError("this LLM is closed: make a new one")
            groups = [
                engine.check(f"prompts[{i}]", prompt, p, prompt_text=text)
                for i, ((text, prompt), p) in enumerate(zip(prompts, params, strict=True))
            ]
            results: dict[str, RequestOutput] = {}
            others: dict[str, RequestOutput] = {}  # the latest of requests that were added to the engine directly
            self._running = groups
            try:
                for group in groups:
                    group.request_id = next(name for name in map(str, self._ids) if name not in engine)
                    engine.add(group)
                own = {group.request_id for group in groups}
                with progress_bar(len(groups), show=progress) as advance:
                    while len(results) < len(groups):
                        for output in engine.step():
                            if output.request_id in own:
                                results[output.request_id] = output
                                advance(1, sum(len(c.token_ids) for c in output.outputs))
                            else:
                                others[output.request_id] = output
            finally:
                engine.give_back(others.values())
            self._running = []
        failures = [output.failure for output in results.values() if output.failure is not None]
        if failures and len(failures) == len(results):
            raise failures[0]
        return [results[group.request_id] for group in groups]

    def _abort_running(self) -> None:
        """Also after an interrupt, no request of a batch stays in the engine."""
        while self._running:
            with suppress(Exception):  # an observer's
                self.engine.abort(self._running[-1].request_id)
            self._running.pop()


def chat_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], template: Mapping[str, Any], max_tokens: int
) -> tuple[str, list[int]]:
    """A conversation as text and token ids, through the chat template with these variables."""
    text = tokenizer.apply_chat_template(messages, **template)
    # The template writes the special tokens.
    return text, tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one; a list of token ids is one prompt, a list of lists or texts many."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise RequestError(
            None, "prompts", prompts, "must be a text, token ids, or a list of these", "Pass one of them."
        )
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
    """One set of parameters per prompt. RequestError if a list has another length than the prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise RequestError(
            None,
            "sampling_params",
            f"{len(params)} values",
            f"there are {num_prompts} prompts",
            "Give one, or one per prompt.",
        )
    return params
