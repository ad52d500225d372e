"""Answer the lines of OpenAI's batch files with one engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from traceback import print_exception
from typing import Any
from uuid import uuid4

from foreword.batch import SamplingParams
from foreword.engine import Engine, RequestOptions, RequestOutput
from foreword.engine.chat import ChatReader, make_chat
from foreword.engine.checked_request import CheckedRequest
from foreword.engine.llm import LLM
from foreword.engine.prompt import Prompt as Given
from foreword.errors import EngineError, ForewordError, RequestError
from foreword.media.encoder import Media
from foreword.models.tokenizer import Tokenizer
from foreword.openai.batch_file import BatchLine, Record
from foreword.openai.errors import error_body, named
from foreword.openai.request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from foreword.openai.response import chat_completion, text_completion


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a line for the engine. at: the field of the body that has it; text: what the chat template wrote, for
    the output; origins: the paths of other fields, for errors.
    """

    name: str
    prompt: Given
    params: SamplingParams
    at: str
    index: int = 0
    text: str | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    reader: ChatReader | None = None


@dataclass(slots=True, eq=False)
class Answer:
    """A line in progress. prompts: the prompts for the engine. options: those of its requests. outputs: those of the
    prompts that have ended, by index.
    """

    line: BatchLine
    request: ChatRequest | CompletionRequest
    model: str
    prompts: list[Prompt]
    options: RequestOptions
    outputs: dict[int, RequestOutput] = field(default_factory=dict)


class Lines:
    """Read lines for an engine, and write their results.

    names: the names of the model; a request without a model gets the first one. A request may name an adapter instead.
    media: the inputs that the model takes besides text.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, media: Media, names: Sequence[str]) -> None:
        self._engine, self._tokenizer, self._media, self._names = engine, tokenizer, media, names

    def read(self, line: BatchLine, name: str) -> Answer:
        """Return the engine's work for a line that is a request. Raise ForewordError if it cannot be answered. name:
        the prefix of the names of its requests in the engine.
        """
        parse = parse_chat if line.url.endswith("/chat/completions") else parse_completion
        request = parse(line.body, self._engine.suggested)
        known, model = [*self._names, *self._engine.loras.paths], request.model or self._names[0]
        if model not in known:
            model = model.removesuffix(":latest")  # the tag that clients of Ollama add
        if model not in known:
            reason = f"this batch is answered by {' or '.join(map(repr, known))}"
            raise RequestError(None, "model", model, reason, "Use --model, or --served-model-name for another name.")
        if request.stream:
            raise RequestError(None, "stream", True, "a batch has no streams", "Leave it out.")
        options = RequestOptions(**request.options, lora=None if model in self._names else model)
        engine, limit = self._engine, self._engine.states.max_model_len
        if isinstance(request, ChatRequest):
            with named("messages", request.origins):
                chat = make_chat(
                    self._tokenizer,
                    request.messages,
                    request.params,
                    limit,
                    request.chat,
                    self._media,
                    engine.follows_grammars,
                )
            origins, reader = request.origins, chat.reader()
            prompts = [
                Prompt(
                    f"{name}.0", chat.prompt, chat.params, "messages", text=chat.text, origins=origins, reader=reader
                )
            ]
            return Answer(line, request, model, prompts, options)
        request = request.filled(self._tokenizer, limit)
        is_alone = len(request.prompts) == 1
        prompts = [
            Prompt(f"{name}.{i}", prompt, request.params, "prompt" if is_alone else f"prompt[{i}]", i)
            for i, prompt in enumerate(request.prompts)
        ]
        return Answer(line, request, model, prompts, options)

    def result(self, answer: Answer) -> Record:
        """Return the result of a line, all of whose prompts have an output."""
        outputs = [answer.outputs[i] for i in range(len(answer.prompts))]
        for output in outputs:
            if output.error is not None:
                return failure(answer.line, output.error)
        named: dict[str, Any] = {"response_id": uuid4().hex, "created": int(time.time()), "model": answer.model}
        if isinstance(answer.request, ChatRequest):
            body = chat_completion(answer.request, outputs[0], self._tokenizer, **named)
        else:
            body = text_completion(answer.request, outputs, self._tokenizer, **named)
        return answer.line.record(response(200, body), None)


class Batch:
    """Answer lines; the number of lines that are read and not yet answered is bounded.

    names: see `Lines`. ordered: return results in the order of the input.
    """

    def __init__(self, llm: LLM, names: list[str], *, ordered: bool = False) -> None:
        self._llm, self._ordered = llm, ordered
        self._lines = Lines(llm.engine, llm.tokenizer, llm.media.from_others(), names)
        self._limit = 2 * llm.engine.config.scheduler.max_num_seqs
        self._running: dict[str, tuple[Answer, CheckedRequest]] = {}  # by the engine's request id
        self._open: dict[int, Record | None] = {}  # line number → result, for lines that were read and not reported
        self.num_lines = 0

    @property
    def is_full(self) -> bool:
        """Return whether the caller must `step` before it starts more lines."""
        return len(self._open) >= self._limit

    @property
    def has_work(self) -> bool:
        """Return whether lines are in the engine."""
        return bool(self._running)

    def run(self, lines: Iterator[BatchLine]) -> Iterator[Record]:
        """Yield each result as soon as it is known. Raise an error of the engine itself."""
        exhausted = False
        while not exhausted or self._running:
            while not exhausted and not self.is_full:
                line = next(lines, None)
                exhausted = line is None
                if line is not None:
                    yield from self.start(line)
            yield from self.step()

    def start(self, line: BatchLine) -> list[Record]:
        """Start a line whose number differs from those in progress. Return the results that are known now."""
        self.num_lines += 1
        self._open[line.number] = None
        refusal = self._start(line)
        return [] if refusal is None else self._finish(line, refusal)

    def step(self) -> list[Record]:
        """Run one step of the engine, if there is work. Return the results that are known now."""
        found: list[Record] = []
        for output in self._llm.engine.step() if self._running else ():
            if output.request_id not in self._running:  # another prompt of its line has failed in this step
                continue
            answer, part = self._running.pop(output.request_id)
            try:
                answer.outputs[part.index] = part.read(output)
                if len(answer.outputs) < len(answer.prompts):
                    continue
                record = self._lines.result(answer)
            except Exception as error:
                self._drop(prompt.name for prompt in answer.prompts)
                record = failure(answer.line, error)
            found += self._finish(answer.line, record)
        return found

    def forget(self) -> None:
        """Drop the lines in progress, without results."""
        self._drop(list(self._running))
        self._open.clear()

    def _drop(self, names: Iterable[str]) -> None:
        """Abort requests in the engine, without results."""
        for name in names:
            self._llm.engine.abort(name)
            self._running.pop(name, None)

    def _start(self, line: BatchLine) -> Record | None:
        """Add the line to the engine. Return its result if it cannot be answered."""
        if line.error is not None:
            return line.record(None, {"code": line.error.code, "message": str(line.error)})
        engine = self._llm.engine
        parts: list[CheckedRequest] = []
        try:
            answer = self._lines.read(line, str(line.number))
            for one in answer.prompts:
                with named(one.at, one.origins):
                    group = engine.check(one.name, one.prompt, one.params, prompt_text=one.text, **answer.options)
                parts.append(CheckedRequest(group, one.reader, one.index))
            for part in parts:
                engine.add(part.group)
        except Exception as error:  # an error of one line does not end the others
            self._drop(part.group.request_id for part in parts)
            return failure(line, error)
        self._running.update((part.group.request_id, (answer, part)) for part in parts)
        return None

    def _finish(self, line: BatchLine, record: Record) -> list[Record]:
        """Return the results that can be reported now that this one is known."""
        self._open[line.number] = record
        ready = takewhile(lambda n: self._open[n] is not None, list(self._open)) if self._ordered else [line.number]
        return [found for number in ready if (found := self._open.pop(number)) is not None]


def failure(line: BatchLine, error: Exception) -> Record:
    """Return the result of a line that cannot be answered."""
    if not isinstance(error, ForewordError):
        print_exception(error)
        error = EngineError(f"line {line.number}: the program failed: {type(error).__name__}: {error}")
    return line.record(response(*error_body(error)), None)


def response(status: int, body: Record) -> Record:
    """Return the response in the result of a line."""
    return {"status_code": status, "request_id": uuid4().hex, "body": body}
