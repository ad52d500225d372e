"""An engine that answers lines of batch files for several threads at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from foreword.engine.llm import LLM
from foreword.engine.options import LLMOptions
from foreword.openai.batch import Batch
from foreword.openai.batch_file import BatchLine, Record


class Answerer:
    """names: of the model, the first one is loaded. options: of `LLM`. max_num_seqs: requests computed at a time."""

    def __init__(self, names: Sequence[str], options: LLMOptions) -> None:
        llm = LLM(names[0], **options)
        self._batch = Batch(llm, list(names))
        self.max_num_seqs = llm.engine.config.scheduler.max_num_seqs
        self._incoming: SimpleQueue[tuple[BatchLine, Future[Record]] | None] = SimpleQueue()
        self._waiting: dict[str, Future[Record]] = {}  # by the id of the record
        self._failure: Exception | None = None
        Thread(target=self._run, name="foreword-answerer", daemon=True).start()

    def close(self) -> None:
        """Stop, with the lines in work, so that the engine's memory is free. No answer may be awaited."""
        self._incoming.put(None)

    def answer(self, lines: Sequence[BatchLine]) -> list[Record]:
        """Return the results of these lines, in their order. Numbers of lines differ from those in other calls that
        run.

        Raises what the engine raises; it answers nothing then.
        """
        futures = [Future[Record]() for _ in lines]
        for line, future in zip(lines, futures, strict=True):
            self._incoming.put((line, future))
        return [future.result() for future in futures]

    def _run(self) -> None:
        while True:
            try:
                while not self._batch.has_work or (not self._incoming.empty() and not self._batch.is_full):
                    given = self._incoming.get()
                    if given is None:
                        return
                    line, future = given
                    if self._failure is not None:
                        future.set_exception(self._failure)
                        continue
                    self._waiting[f"batch_req_{line.number}"] = future
                    self._tell(self._batch.start(line))
                self._tell(self._batch.step())
            except Exception as error:
                self._failure = error
                for future in self._waiting.values():
                    future.set_exception(error)
                self._waiting.clear()
                self._batch.forget()

    def _tell(self, records: list[Record]) -> None:
        for record in records:
            self._waiting.pop(record["id"]).set_result(record)
