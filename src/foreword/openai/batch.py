"""Answers to the lines of OpenAI's batch files, by one engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from traceback import print_exception
from typing import Any
from uuid import uuid4

from foreword.engine import RequestOptions, RequestOutput
from foreword.engine.chat import make_chat
from foreword.engine.checked_request import CheckedRequest
from foreword.engine.llm import LLM
from foreword.errors import EngineError, ForewordError, RequestError
from foreword.openai.batch_file import BatchLine, Record
from foreword.openai.errors import error_body, named
from foreword.openai.request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from foreword.openai.response import chat_completion, text_completion


@dataclass(slots=True, eq=False)
class _Answer:
    """A line in the engine. parts: its prompts as requests; outputs: those that have ended, by their index."""

    line: BatchLine
    request: ChatRequest | CompletionRequest
    model: str
    parts: list[CheckedRequest]
    outputs: dict[int, RequestOutput] = field(default_factory=dict)


class Batch:
    """Answers lines, with a bounded number of them read and not yet answered.

    names: of models that are this one; the first stands for a request without. A request may name an adapter instead.
    ordered: results in the input's order.
    """

    def __init__(self, llm: LLM, names: list[str], *, ordered: bool = False) -> None:
        self._llm, self._names, self._ordered = llm, names, ordered
        self._media = llm.media.from_others()
        self._limit = 2 * llm.engine.config.scheduler.max_num_seqs
        self._running: dict[str, tuple[_Answer, CheckedRequest]] = {}  # by the engine's request id
        self._open: dict[int, Record | None] = {}  # line number → its result, of lines that were read and not reported
        self.num_lines = 0

    @property
    def is_full(self) -> bool:
        """Return whether it should `step` before it gets more lines."""
        return len(self._open) >= self._limit

    @property
    def has_work(self) -> bool:
        """Return whether lines are in the engine."""
        return bool(self._running)

    def run(self, lines: Iterator[BatchLine]) -> Iterator[Record]:
        """The results, each as soon as it is known. An error of the engine itself is raised."""
        exhausted = False
        while not exhausted or self._running:
            while not exhausted and not self.is_full:
                line = next(lines, None)
                exhausted = line is None
                if line is not None:
                    yield from self.start(line)
            yield from self.step()

    def start(self, line: BatchLine) -> list[Record]:
        """Take a line, whose number is not that of another one in work. The results that are known by that."""
        self.num_lines += 1
        self._open[line.number] = None
        refusal = self._start(line)
        return [] if refusal is None else self._finish(line, refusal)

    def step(self) -> list[Record]:
        """One step of the engine, if there is work. The results that are known by that."""
        found: list[Record] = []
        for output in self._llm.engine.step() if self._running else ():
            if output.request_id not in self._running:  # another part of its line has failed in this step
                continue
            answer, part = self._running.pop(output.request_id)
            try:
                answer.outputs[part.index] = part.read(output)
                if len(answer.outputs) < len(answer.parts):
                    continue
                record = self._result(answer)
            except Exception as error:
                self._drop(answer.parts)
                record = _failure(answer.line, error)
            found += self._finish(answer.line, record)
        return found

    def forget(self) -> None:
        """Drop the lines in work, without results."""
        self._drop([part for _, part in self._running.values()])
        self._open.clear()

    def _drop(self, parts: Iterable[CheckedRequest]) -> None:
        """Take requests out of the engine, without results."""
        for part in parts:
            self._llm.engine.abort(part.group.request_id)
            self._running.pop(part.group.request_id, None)

    def _start(self, line: BatchLine) -> Record | None:
        """Add the line to the engine; the result if it cannot be answered."""
        if line.error is not None:
            return line.record(None, {"code": line.error.code, "message": str(line.error)})
        engine = self._llm.engine
        parts: list[CheckedRequest] = []
        try:
            answer = self._checked(line)
            parts = answer.parts
            for part in parts:
                engine.add(part.group)
        except Exception as error:  # whatever a line causes, the others are answered
            self._drop(parts)
            return _failure(line, error)
        self._running.update((part.group.request_id, (answer, part)) for part in answer.parts)
        return None

    def _checked(self, line: BatchLine) -> _Answer:
        """Check the line's request, and each of its prompts as one of the engine."""
        parse = parse_chat if line.url.endswith("/chat/completions") else parse_completion
        request = parse(line.body, self._llm.engine.suggested)
        model = request.model or self._names[0]
        if model not in (known := [*self._names, *self._llm.loras]):
            reason = f"this batch is answered by {' or '.join(map(repr, known))}"
            raise RequestError(None, "model", model, reason, "Use --model, or --served-model-name for another name.")
        if request.stream:
            raise RequestError(None, "stream", True, "a batch has no streams", "Leave it out.")
        options = RequestOptions(**request.options, lora=None if model in self._names else model)
        engine = self._llm.engine
        if isinstance(request, ChatRequest):
            limit = engine.states.max_model_len
            with named("messages", request.origins):
                arguments = self._llm.tokenizer, request.messages, request.params, limit, request.chat, self._media
                chat = make_chat(*arguments)
                group = engine.check(f"{line.number}.0", chat.prompt, chat.params, **options)
            return _Answer(line, request, model, [CheckedRequest(group, chat.reader())])
        request = request.filled(self._llm.tokenizer, engine.states.max_model_len)
        parts = []
        for i, prompt in enumerate(request.prompts):
            with named("prompt" if len(request.prompts) == 1 else f"prompt[{i}]"):
                group = engine.check(f"{line.number}.{i}", prompt, request.params, **options)
            parts.append(CheckedRequest(group, index=i))
        return _Answer(line, request, model, parts)

    def _result(self, answer: _Answer) -> Record:
        outputs = [answer.outputs[i] for i in range(len(answer.parts))]
        for output in outputs:
            if output.error is not None:
                return _failure(answer.line, output.error)
        named: dict[str, Any] = {"response_id": uuid4().hex, "created": int(time.time()), "model": answer.model}
        tokens = self._llm.tokenizer
        if isinstance(answer.request, ChatRequest):
            body = chat_completion(answer.request, outputs[0], tokens, **named)
        else:
            body = text_completion(answer.request, outputs, tokens, **named)
        return answer.line.record(_response(200, body), None)

    def _finish(self, line: BatchLine, record: Record) -> list[Record]:
        """The results that can be reported, now that this one is known."""
        self._open[line.number] = record
        ready = takewhile(lambda n: self._open[n] is not None, list(self._open)) if self._ordered else [line.number]
        return [found for number in ready if (found := self._open.pop(number)) is not None]


def _failure(line: BatchLine, error: Exception) -> Record:
    """Return the result of a line that cannot be answered."""
    if not isinstance(error, ForewordError):
        print_exception(error)
        error = EngineError(f"line {line.number}: the program failed: {type(error).__name__}: {error}")
    return line.record(_response(*error_body(error)), None)


def _response(status: int, body: Record) -> Record:
    return {"status_code": status, "request_id": uuid4().hex, "body": body}
