"""Record the steps of a followed engine as a trace: its decisions, its tensors that differ, and all of its tensors from
time to time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from foreword.batch import InputBatch, RequestStates
from foreword.errors import ConfigError, reason_of
from foreword.shadow import Finding
from foreword.trace.background import BackgroundTrace
from foreword.trace.capture import Capture
from foreword.trace.destination import Destination
from foreword.trace.header import TraceHeader
from foreword.trace.tensors import NAMED

TENSORS_EVERY = 64
"""One of this many steps is recorded with all of its tensors."""


class Recording:
    """Writes a trace in a thread. If the file cannot be written, this is logged once, and the engine continues."""

    def __init__(
        self,
        destination: str,
        states: RequestStates,
        max_num_batched_tokens: int,
        log: Callable[[str], None],
        engine: str,
    ) -> None:
        try:
            to = Destination.of(destination)
            header = TraceHeader.of_states(states, max_num_batched_tokens, engine=engine)
            self._file = BackgroundTrace(to.path, header, log, max_bytes=to.max_bytes)
        except ValueError as error:
            raise ConfigError(f"record:{destination:.200}: {error}") from None
        except OSError as error:
            raise ConfigError(f"record:{destination:.200}: cannot be written ({reason_of(error)})") from None
        self._capture, self._num_steps = Capture(states), 0

    def step(
        self, batch: InputBatch, tensors: Mapping[str, Any], found: Sequence[Finding], preempted: Collection[str]
    ) -> None:
        """Record a step that was just prepared, with the tensors that the engine made."""
        if self._file.wants_snapshot:
            snapshot = self._capture.snapshot()
            self._file.put(self._capture.take())
            self._file.begin(snapshot, self._num_steps + 1)
        names = set(tensors) if self._num_steps % TENSORS_EVERY == 0 else {finding.tensor for finding in found}
        if "cache" in names:
            names |= {"slot_mapping", "block_table"}
        values = {
            name: value
            for name, value in tensors.items()
            if name in names and name in NAMED and not isinstance(value, np.ma.MaskedArray)
        }
        self._capture.step(batch, preempted=preempted, tensors={n: _recorded(batch, n, v) for n, v in values.items()})
        self._num_steps += 1
        self._file.put(self._capture.take())

    def commit(self, sampled: Mapping[str, Sequence[int]]) -> None:
        """Record the samples of the last step."""
        self._capture.commit({req_id: list(ids) for req_id, ids in sampled.items()})

    def close(self) -> None:
        """Write what was recorded so far, and stop."""
        self._capture.close()
        self._file.put(self._capture.take())
        self._file.close()


def _recorded(batch: InputBatch, name: str, value: Any) -> Any:
    """Return a copy of a tensor. Of a block table, only the entries of the requests' blocks are copied."""
    if name != "block_table":
        return [_copied(part) for part in value] if isinstance(value, list) else _copied(value)
    tables = []
    for part, table in zip(value, batch.states.block_tables, strict=True):
        width = min(part.shape[1], table.table.shape[1])
        held = table.num_blocks[batch.idx_mapping]
        cut = np.ma.filled(part[: batch.num_reqs, :width], batch.states.null_block)
        tables.append(np.where(np.arange(width) < held[:, None], cut, batch.states.null_block))
    return tables


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value
