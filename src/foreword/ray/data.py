"""A stage of Ray Data: a column of requests in, a column of results out.

ds = ray.data.read_text("requests.jsonl")
ds = ds.map_batches(ForewordStage, fn_constructor_args=("smollm2",), batch_size=512, concurrency=2, num_cpus=4)
ds.write_json("results")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Unpack

import numpy as np

from foreword.engine.options import LLMOptions
from foreword.openai.batch_file import BatchLine, LineError, Record, batch_lines
from foreword.ray.answerer import Answerer


class ForewordStage:
    """An actor's engine. names: further names of the model in requests. options: of `LLM`; num_threads should be the
    stage's num_cpus.

    column: requests, each a line of OpenAI's batch format; result: the column of their results, JSON like the lines of
    `foreword batch`. A row that cannot be answered has an error there. A batch is answered as a whole: use batches of
    several times max_num_seqs. Rows keep their order in a batch; Ray keeps that of batches with
    ``DataContext.execution_options.preserve_order``.
    """

    def __init__(
        self,
        model: str,
        *,
        names: Sequence[str] = (),
        column: str = "text",
        result: str = "result",
        **options: Unpack[LLMOptions],
    ) -> None:
        self._arguments = (model, *names), options
        self._column, self._result, self._numbers = column, result, count(1)
        self._answerer = Answerer(*self._arguments)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        lines = [self._line(text) for text in batch[self._column]]
        try:
            records = self._answerer.answer(lines)
        except Exception:
            records = [self._alone(line) for line in lines]
        return {**batch, self._result: np.array([json.dumps(record) for record in records], object)}

    def _line(self, text: Any) -> BatchLine:
        number = next(self._numbers)
        given = text.encode() if isinstance(text, str) else text
        found = list(batch_lines([given])) if isinstance(given, bytes) else []
        if not found:
            return BatchLine(number, None, error=LineError("invalid_json", f"row {number}: is not a line of a batch"))
        return replace(found[0], number=number)

    def _alone(self, line: BatchLine) -> Record:
        """Answer one line after a failure of the engine, with a new one, so that one row does not fail the others."""
        for _ in range(2):  # the engine may have failed before this row
            try:
                return self._answerer.answer([line])[0]
            except Exception as error:
                failure = error
                self._answerer.close()
                self._answerer = Answerer(*self._arguments)
        return line.record(None, {"code": "engine_failed", "message": f"{failure!r:.500}"})

    def close(self) -> None:
        """Free the engine's memory."""
        self._answerer.close()
