"""Answers to the lines of OpenAI's batch files, by one engine."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any
from uuid import uuid4

from foreword.batch import SamplingParams
from foreword.engine import RequestOptions, RequestOutput
from foreword.engine.chat import ChatReader, make_chat
from foreword.engine.llm import LLM
from foreword.engine.prompt import Prompt
from foreword.errors import ForewordError, RequestError
from foreword.openai.batch_file import BatchLine, Record
from foreword.openai.request import ChatRequest, CompletionRequest, parse_chat, parse_completion
from foreword.openai.response import chat_completion, error_body, text_completion


@dataclass(slots=True, eq=False)
class _Job:
    """A line in the engine, and its outputs, one per prompt. reader: of a conversation's output."""

    line: BatchLine
    request: ChatRequest | CompletionRequest
    model: str
    reader: ChatReader | None = None
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)


class Batch:
    """Answers lines, with a bounded number of them read and not yet answered.

    names: of models that are this one; the first stands for a request without. A request may name an adapter instead.
    ordered: results in the input's order.
    """

    def __init__(self, llm: LLM, names: list[str], *, ordered: bool = False) -> None:
        self._llm, self._names, self._ordered = llm, names, ordered
        self._media = llm.media.from_others()
        self._limit = 2 * llm.engine.config.scheduler.max_num_seqs
        self._jobs: dict[str, _Job] = {}  # by the engine's request id
        self._open: dict[int, Record | None] = {}  # line number → its result, of lines that were read and not reported
        self.num_lines = 0

    @property
    def is_full(self) -> bool:
        """Whether it should `step` before it gets more lines."""
        return len(self._open) >= self._limit

    @property
    def has_work(self) -> bool:
        """Whether lines are in the engine."""
        return bool(self._jobs)

    def run(self, lines: Iterator[BatchLine]) -> Iterator[Record]:
        """The results, each as soon as it is known. An error of the engine itself is raised."""
        exhausted = False
        while not exhausted or self._jobs:
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
        for output in self._llm.engine.step() if self._jobs else ():
            job = self._jobs.pop(output.request_id)
            job.outputs[output.request_id] = output
            if None not in job.outputs.values():
                found += self._finish(job.line, self._result(job))
        return found

    def forget(self) -> None:
        """Drop the lines in work, without results."""
        for request_id in self._jobs:
            self._llm.engine.abort(request_id)
        self._jobs.clear()
        self._open.clear()

    def _start(self, line: BatchLine) -> Record | None:
        """Add the line to the engine; the result if it cannot be answered."""
        if line.error is not None:
            return line.record(None, {"code": line.error.code, "message": str(line.error)})
        engine = self._llm.engine
        try:
            job, prompts, params = self._parse(line)
            options = RequestOptions(**job.request.options, lora=None if job.model in self._names else job.model)
            groups = [engine.check(f"{line.number}.{i}", prompt, params, **options) for i, prompt in enumerate(prompts)]
        except ForewordError as error:
            return line.record(_response(*error_body(error)), None)
        try:
            for group in groups:
                engine.add(group)
        except RequestError as error:  # its adapter cannot be read again
            for group in groups:
                engine.abort(group.request_id)
            return line.record(_response(*error_body(error)), None)
        for group in groups:
            job.outputs[group.request_id] = None
            self._jobs[group.request_id] = job
        return None

    def _parse(self, line: BatchLine) -> tuple[_Job, Sequence[Prompt], SamplingParams]:
        """The line's request, and the prompts and parameters for the engine."""
        request = parse_chat(line.body) if line.url.endswith("/chat/completions") else parse_completion(line.body)
        model = request.model or self._names[0]
        if model not in (known := [*self._names, *self._llm.loras]):
            reason = f"this batch is answered by {' or '.join(map(repr, known))}"
            raise RequestError(None, "model", model, reason, "Use --model, or --served-model-name for another name.")
        if request.stream:
            raise RequestError(None, "stream", True, "a batch has no streams", "Leave it out.")
        if isinstance(request, CompletionRequest):
            return _Job(line, request, model), request.prompts, request.params
        limit = self._llm.engine.states.max_model_len
        chat = make_chat(self._llm.tokenizer, request.messages, request.params, limit, request.chat, self._media)
        return _Job(line, request, model, chat.reader()), [chat.prompt], chat.params

    def _result(self, job: _Job) -> Record:
        outputs = [output for output in job.outputs.values() if output is not None]
        for output in outputs:
            if output.error is not None:
                return job.line.record(_response(*error_body(output.error)), None)
        tokens = self._llm.tokenizer
        named: dict[str, Any] = {"response_id": uuid4().hex, "created": int(time.time()), "model": job.model}
        if isinstance(job.request, ChatRequest):
            output = outputs[0] if job.reader is None else job.reader.read(outputs[0])
            body = chat_completion(job.request, output, tokens, **named)
        else:
            body = text_completion(job.request, outputs, tokens, **named)
        return job.line.record(_response(200, body), None)

    def _finish(self, line: BatchLine, record: Record) -> list[Record]:
        """The results that can be reported, now that this one is known."""
        self._open[line.number] = record
        ready = takewhile(lambda n: self._open[n] is not None, list(self._open)) if self._ordered else [line.number]
        return [found for number in ready if (found := self._open.pop(number)) is not None]


def _response(status: int, body: Record) -> Record:
    return {"status_code": status, "request_id": uuid4().hex, "body": body}
