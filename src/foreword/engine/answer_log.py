"""A log of prompts and answers, as JSON lines in a file that only its owner reads."""

from __future__ import annotations

import json
import os
import stat
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from foreword.engine.observer import EngineObserver
from foreword.engine.outputs import RequestOutput
from foreword.errors import ConfigError, reason_of

MODE = 0o600  # its owner reads and writes it


class AnswerLog(EngineObserver):
    """Appends a line for each request that ends: prompt, answers, times. Embeddings and scores have no line.

    If a file that has a line would grow beyond ``most_bytes``, it is first renamed to FILE.1, which replaces an earlier
    one. Several processes may write to one log. A line that cannot be written is lost; one warning says so until a line
    is written again, and requests are not affected.
    """

    def __init__(self, path: Path, most_bytes: int, model: str) -> None:
        """Open the file for lines with the name of the ``model``. Raise ConfigError if the file cannot be written."""
        self.path, self.most_bytes, self.model = path, most_bytes, model
        self._has_failed = False
        try:
            self._write(b"")
        except OSError as error:
            raise ConfigError(f"answer_log={str(path)!r}: cannot be written ({reason_of(error)})") from None

    def request_ended(self, output: RequestOutput) -> None:
        if output.pooled is not None:
            return
        try:
            self._write(json.dumps(self._line(output)).encode() + b"\n")
        except OSError as error:
            if not self._has_failed:
                with suppress(Warning):  # a warning that a filter turns into an error would end the caller's step
                    warnings.warn(f"answer_log: {self.path}: answers are not kept: {reason_of(error)}", stacklevel=2)
            self._has_failed = True
        else:
            self._has_failed = False

    def _line(self, output: RequestOutput) -> dict[str, object]:
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": output.request_id,
            "model": self.model,
            "prompt": output.prompt,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "answers": [
                {"text": one.text, "num_tokens": one.num_tokens, "finish_reason": one.finish_reason or "abort"}
                for one in output.outputs
            ],
            "error": None if output.error is None else str(output.error),
            "seconds": output.metrics.e2e_latency,
        }

    def _write(self, line: bytes) -> None:
        """Append a line, whole or not at all. The file is opened each time, because another process may have renamed
        it.
        """
        with suppress(FileNotFoundError):
            size = self.path.stat().st_size
            if size and size + len(line) > self.most_bytes and self.path.is_file():
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, MODE)
        try:
            found = os.fstat(handle)
            if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) != MODE:
                self.path.chmod(MODE)
            if (written := os.write(handle, line)) != len(line):  # for example on a full disk
                os.ftruncate(handle, os.fstat(handle).st_size - written)
                raise OSError("only a part of a line was written")
        finally:
            os.close(handle)
