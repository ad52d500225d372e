"""Write a trace, event by event."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from foreword.arrays import AnyArray, Ints
from foreword.trace.encoding import as_json
from foreword.trace.events import (
    Add,
    AppendBlocks,
    Arrive,
    Commit,
    Correct,
    End,
    Event,
    Fail,
    Ids,
    Remove,
    Restart,
    Step,
    Tensor,
    Wait,
)
from foreword.trace.header import TraceHeader
from foreword.trace.privacy import cover_of
from foreword.trace.reader import opened


def older(path: Path) -> Path:
    """Return the name of the part before the current one: "steps.old.jsonl.gz" for "steps.jsonl.gz"."""
    stem, *suffixes = path.name.split(".")
    return path.with_name(".".join([stem, "old", *suffixes]))


class TraceWriter:
    """Writes the steps of any engine to a file, compressed with gzip if its name ends with ".gz".

        header = TraceHeader.of_states(states, max_num_batched_tokens, engine="vllm 0.33.0")
        with TraceWriter("steps.jsonl", header) as writer:
            writer.add("a", prompt_token_ids, block_ids)
            writer.step(["a"], [5], tensors={"input_ids": …, "slot_mapping": [one per KV group]})
            writer.commit({"a": [token]})

    Arrays and lists are written with the values that they have when the method is called. Tensors have the names of
    docs/conformance.md and may be left out. A method raises OSError if the file cannot be written; the events before
    stay readable.

    max_bytes: the limit of the file together with the part before it. When the file has half of this size, `is_full` is
    true. The caller should then begin a new part with `rotate` and the requests in progress; otherwise the file grows
    further.
    num_bytes: the size of the current part, before compression.
    """

    def __init__(self, path: str | Path, header: TraceHeader, *, max_bytes: int | None = None) -> None:
        self.path, self.header, self.num_bytes = Path(path), header, 0
        self._cover, self._max_bytes = cover_of(header), max_bytes
        self._batch: Sequence[str] = ()
        self._num_steps = header.first_step - 1
        self._file: BinaryIO | None = self._begin(header)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Write buffered events, and close the file. A later event opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def flush(self) -> None:
        """Write buffered events, so that the file is complete now. A compressed file begins another gzip member."""
        if self.path.suffix == ".gz":
            self.close()
        elif self._file is not None:
            self._file.flush()

    def sync(self) -> None:
        """Write buffered events, so that they can be read even if this process is killed. A compressed file stays in
        its gzip member, which `flush` ends.
        """
        if self._file is not None:
            self._file.flush()

    @property
    def is_full(self) -> bool:
        """Return whether the current part has half of max_bytes."""
        return self._max_bytes is not None and self.num_bytes >= self._max_bytes // 2

    def rotate(self, live: Iterable[Add]) -> None:
        """Begin a new part with the requests in progress. The current part gets the name that `older` returns."""
        self.close()
        self.path.replace(older(self.path))
        self._file = self._begin(self.header.beginning_at(self._num_steps + 1))
        for event in live:
            self.write(event)

    def write(self, event: Event) -> None:
        """Write an event. Each method below makes an event and writes it."""
        if isinstance(event, Step):
            self._num_steps += 1
            self._batch = event.req_ids
        elif isinstance(event, Restart):
            self._num_steps = event.first_step - 1
        if self._file is None:
            self._file = opened(self.path, "ab")
        self._write(self._file, as_json(self._cover(event), self._batch))

    def arrive(self, req_id: str, num_prompt_tokens: int, *, time: float | None = None) -> None:
        """See `Arrive`."""
        self.write(Arrive(req_id=req_id, num_prompt_tokens=num_prompt_tokens, time=time))

    def add(
        self,
        req_id: str,
        prompt_token_ids: Ids,
        block_ids: Sequence[Ids],
        output_token_ids: Ids = (),
        num_computed_tokens: int = 0,
        *,
        prefill_len: int | None = None,
        lora_id: int = 0,
        cache_salt: str | None = None,
        cache_miss: str = "",
        bidirectional_ranges: Sequence[Ids] | Ints = (),
        mrope_positions: Sequence[Ids] | Ints = (),
        mrope_delta: int = 0,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        """See `Add`."""
        self.write(
            Add(
                req_id=req_id,
                prompt_token_ids=prompt_token_ids,
                block_ids=block_ids,
                output_token_ids=output_token_ids,
                num_computed_tokens=num_computed_tokens,
                prefill_len=prefill_len,
                lora_id=lora_id,
                cache_salt=cache_salt,
                cache_miss=cache_miss,
                bidirectional_ranges=bidirectional_ranges,
                mrope_positions=mrope_positions,
                mrope_delta=mrope_delta,
                extras=extras or {},
            )
        )

    def append_blocks(self, req_id: str, block_ids: Sequence[Ids]) -> None:
        """See `AppendBlocks`."""
        self.write(AppendBlocks(req_id=req_id, block_ids=block_ids))

    def correct(
        self,
        req_id: str,
        *,
        num_tokens: int | None = None,
        token_ids: tuple[int, Ids] | None = None,
        num_computed_tokens: int | None = None,
        block_ids: Sequence[Ids] | None = None,
    ) -> None:
        """See `Correct`."""
        self.write(
            Correct(
                req_id=req_id,
                num_tokens=num_tokens,
                token_ids=token_ids,
                num_computed_tokens=num_computed_tokens,
                block_ids=block_ids,
            )
        )

    def remove(self, req_id: str, *, preempted: bool = False) -> None:
        """See `Remove`."""
        self.write(Remove(req_id=req_id, preempted=preempted))

    def step(
        self,
        req_ids: Sequence[str],
        counts: Ids,
        *,
        draft_tokens: Mapping[str, Ids] | None = None,
        pad_to: tuple[int | None, int | None] | None = None,
        order: str = "given",
        zero: Ids = (),
        copies: Sequence[Ids] | Ints = (),
        tensors: Mapping[str, Tensor] | None = None,
        time: float | None = None,
    ) -> None:
        """See `Step`."""
        self.write(
            Step(
                req_ids=req_ids,
                counts=counts,
                draft_tokens=draft_tokens or {},
                pad_to=pad_to,
                order=order,
                zero=zero,
                copies=copies,
                tensors=tensors or {},
                time=time,
            )
        )

    def commit(
        self,
        tokens: Mapping[str, Ids] | AnyArray,
        logprobs: Mapping[str, Sequence[float]] | None = None,
        *,
        model_ms: float | None = None,
        host_us: float | None = None,
    ) -> None:
        """See `Commit`. tokens: also as `RequestStates.commit` takes them, [B] or [B, D + 1] padded with −1."""
        if not isinstance(tokens, Mapping):
            tokens = samples_of(self._batch, tokens)
        self.write(Commit(tokens=tokens, logprobs=logprobs or {}, model_ms=model_ms, host_us=host_us))

    def fail(self, error: str, *, time: float | None = None) -> None:
        """See `Fail`."""
        self.write(Fail(error=error, time=time))

    def end(self, req_id: str, reason: str, *, time: float | None = None, arrival: float | None = None) -> None:
        """See `End`."""
        self.write(End(req_id=req_id, reason=reason, time=time, arrival=arrival))

    def restart(self, first_step: int, reason: str = "") -> None:
        """See `Restart`."""
        self.write(Restart(first_step=first_step, reason=reason))

    def wait(self, req_id: str = "", reason: str = "") -> None:
        """See `Wait`."""
        self.write(Wait(req_id=req_id, reason=reason))

    def _begin(self, header: TraceHeader) -> BinaryIO:
        self.num_bytes = 0
        file = opened(self.path, "wb")
        self._write(file, header.as_json())
        return file

    def _write(self, file: BinaryIO, line: Mapping[str, Any]) -> None:
        data = json.dumps(line, separators=(",", ":"), default=_scalar).encode() + b"\n"
        file.write(data)
        self.num_bytes += len(data)


def samples_of(req_ids: Sequence[str], sampled: AnyArray) -> dict[str, list[int]]:
    """Return the tokens of each request from an array [B], or [B, D + 1] padded with −1."""
    table = sampled[:, None] if sampled.ndim == 1 else sampled
    return {r: [t for t in row if t >= 0] for r, row in zip(req_ids, table.tolist(), strict=True)}


def _scalar(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r:.80} of type {type(value).__name__} cannot be part of a trace")
