"""Read a recording of an engine's steps as a load: arrivals, measured latencies, and the costs of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from foreword.errors import ConfigError, PlanError
from foreword.scheduler import SchedulerConfig
from foreword.scheduler.policies import POLICIES
from foreword.simulation.cost import CostModel
from foreword.simulation.statistics import Durations, LatencyHistogram
from foreword.simulation.trace import Arrival, Trace
from foreword.trace.events import Add, Arrive, Commit, End, Event, Fail, Remove, Restart, Step, Tokens, count_of, ids_of
from foreword.trace.reader import TraceReader

CUT_SHORT = frozenset(("abort", "error"))
"""The finish reasons of requests that ended before their answer was complete."""
CACHE_SETTINGS = {"max_model_len", "num_blocks", "block_size", "prefix_caching"}
"""Settings of a recording that are arguments of `Fleet` itself."""
FAR = 5.0
"""A step that took more than this many times as long as similar steps does not count for the costs."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """Latencies in seconds, as in a `SimulationReport`."""

    time_to_first_token: Durations = field(default_factory=Durations)
    time_per_output_token: Durations = field(default_factory=Durations)
    end_to_end: Durations = field(default_factory=Durations)
    time_between_tokens: LatencyHistogram = field(default_factory=LatencyHistogram)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The data that a simulation reads from a recording.

    trace: its arrivals. A request that was cut short, or that is only partly in the recording, takes part with the
    tokens that it has, but its latencies do not count. measured: the latencies of all other requests.
    cost: the model fitted to the steps; cost_error: the mean relative error of the fit; num_steps: the number of steps
    used.
    settings: the settings of the scheduler and the cache, by name. notes: the differences between simulation and
    engine.
    """

    trace: Trace
    measured: Measured
    cost: CostModel
    cost_error: float
    num_steps: int
    settings: Mapping[str, float | str | bool]
    notes: Sequence[str]


@dataclass(slots=True, eq=False)
class _Request:
    """A request of the recording. arrived: NaN if it began before the recording. num_steps: the steps that gave it
    tokens. computed: the number of computed tokens after its last step.

    is_measured: whether the whole request is in the recording. is_ended: whether its answer was complete.
    origin: an id for everything apart from tokens that must be equal to share a prefix.
    """

    arrived: float
    origin: int
    prompt: Tokens
    tokens: list[int] = field(default_factory=list)
    num_steps: int = 0
    computed: int = 0
    first_token: float = math.nan
    last_token: float = math.nan
    is_measured: bool = False
    is_ended: bool = False

    @property
    def num_prompt(self) -> int:
        return count_of(self.prompt)


@dataclass(slots=True)
class _RanStep:
    """A step of the recording. seconds: the time of the model's run and the rest, if these are known."""

    num_tokens: int
    num_context: int
    time: float | None
    seconds: float | None = None


def read_recording(path: str | Path) -> Recording:
    """Return the load of a trace of steps. Raise ConfigError if the trace has no times or no requests.

    Raise PlanError if its first line cannot be read. The recording ends at a damaged line, and a note says so.
    """
    return _Reading(path).recording()


class _Reading:
    """Goes through the events once."""

    def __init__(self, path: str | Path) -> None:
        self._path, self._reader = path, TraceReader(path)
        self._requests: dict[str, _Request] = {}
        self._arrived: dict[str, float] = {}
        self._open: set[str] = set()  # requests in progress
        self._steps: list[tuple[int, int, float]] = []  # tokens, tokens of context, seconds
        self._ids: dict[tuple[object, ...], int] = {}
        self._last: _RanStep | None = None
        self._groups: dict[str, list[_Request]] = {}  # the completions of each request
        self._measured = Measured()
        self._num_drafts = 0
        self._notes: list[str] = []

    def recording(self) -> Recording:
        try:
            for event in self._reader:
                self._read(event)
        except PlanError as damage:
            self._notes.append(f"{damage}; what comes before it is used")
        self._finish_step(None)
        if not self._requests:
            raise ConfigError(f"{self._path}: the recording has no requests")
        if not self._steps:
            raise ConfigError(f"{self._path}: the recording has no times of steps; record with --record")
        cost, error = self._cost()
        header = self._reader.header
        settings: dict[str, float | str | bool] = {
            "max_num_batched_tokens": header.max_num_batched_tokens,
            "max_num_seqs": header.max_num_reqs,
            "max_model_len": header.max_model_len,
            "block_size": header.kv_groups[0].block_size,
            **header.settings,
        }
        self._check(settings)
        self._note(settings)
        return Recording(
            trace=self._trace(),
            measured=self._latencies(),
            cost=cost,
            cost_error=error,
            num_steps=len(self._steps),
            settings=settings,
            notes=self._notes,
        )

    # -- events --------------------------------------------------------------------------------------------------------

    def _read(self, event: Event) -> None:
        match event:
            case Arrive():
                self._arrived[event.req_id] = math.nan if event.time is None else event.time
                self._open.add(event.req_id)
            case Add():
                self._add(event)
            case Step():
                self._finish_step(event.time)
                self._begin_step(event)
            case Commit():
                self._commit(event)
            case Remove():
                if not event.preempted:
                    self._close(event.req_id)
            case End():
                self._end(event)
            case Fail():
                self._last = None
            case Restart():
                self._last = None
                for request in self._requests.values():
                    request.is_measured = False

    def _add(self, event: Add) -> None:
        self._open.add(event.req_id)
        request = self._requests.get(event.req_id)
        if request is None:
            arrived = self._arrived.get(_group(event.req_id), math.nan)
            origin = self._id("origin", event.cache_salt, event.lora_id)
            request = _Request(arrived, origin, event.prompt_token_ids, is_measured=not math.isnan(arrived))
            if count_of(
                event.output_token_ids
            ):  # it began before the recording: all tokens that it has by now count as its prompt
                tokens = [ids_of(event.prompt_token_ids), ids_of(event.output_token_ids)]
                request.prompt = np.concatenate(tokens)
            self._requests[event.req_id] = request
            self._groups.setdefault(_group(event.req_id), []).append(request)
        request.computed = event.num_computed_tokens

    def _begin_step(self, event: Step) -> None:
        self._num_drafts += bool(event.draft_tokens)
        counts = np.asarray(event.counts).tolist()
        for req_id, count in zip(event.req_ids, counts, strict=True):
            self._request(req_id).computed += count
        context = sum(self._requests[req_id].computed for req_id in event.req_ids)
        self._last = _RanStep(sum(counts), context, event.time)

    def _finish_step(self, next_time: float | None) -> None:
        """Count the last step. If requests are in progress, it lasts until the next step begins."""
        last, self._last = self._last, None
        if last is None:
            return
        seconds = last.seconds
        if self._open and last.time is not None and next_time is not None:
            seconds = next_time - last.time
        if seconds is not None and seconds > 0:
            self._steps.append((last.num_tokens, last.num_context, seconds))

    def _commit(self, event: Commit) -> None:
        last, now = self._last, math.nan
        if last is not None and event.model_ms is not None:
            last.seconds = event.model_ms / 1e3 + (event.host_us or 0.0) / 1e6
            now = math.nan if last.time is None else last.time + event.model_ms / 1e3
        waited: list[float] = []
        for req_id, tokens in event.tokens.items():
            if not count_of(tokens):
                continue
            request = self._request(req_id)
            request.tokens += np.asarray(ids_of(tokens)).tolist()
            request.computed = request.num_prompt + len(request.tokens) - 1
            request.num_steps += 1
            if request.num_steps == 1:
                request.first_token = now
            elif not math.isnan(now - request.last_token):
                waited.append(now - request.last_token)
            request.last_token = now
        self._measured.time_between_tokens.add(waited)

    def _end(self, event: End) -> None:
        for request in self._groups.get(event.req_id, ()):
            if event.arrival is not None:
                request.arrived = event.arrival
            request.is_ended = not set(event.reason.split(", ")) & CUT_SHORT
        self._close(event.req_id)

    def _close(self, req_id: str) -> None:
        self._open.discard(req_id)
        if not self._open:  # the time until the next step begins is not the duration of this step
            self._finish_step(None)

    def _request(self, req_id: str) -> _Request:
        if req_id not in self._requests:
            raise PlanError(f"request {req_id!r:.80} has tokens, and was not added")
        return self._requests[req_id]

    def _id(self, *what: object) -> int:
        """Return the hash id of some content, a new id for new content."""
        return self._ids.setdefault(what, len(self._ids))

    # -- results -------------------------------------------------------------------------------------------------------

    def _cost(self) -> tuple[CostModel, float]:
        """Return the costs of a step and their mean error. Steps that took far longer than similar steps are left out,
        because other programs ran. The costs are scaled so that all steps together take as long as measured.
        """
        tokens, context, seconds = (np.array(column) for column in zip(*self._steps, strict=True))
        cost = CostModel.fitted(tokens, context, seconds)
        usual = seconds < FAR * (cost.step + cost.token * tokens + cost.context * context)
        if usual.any():
            tokens, context, seconds = tokens[usual], context[usual], seconds[usual]
            cost = CostModel.fitted(tokens, context, seconds)
        factor = seconds.sum() / (cost.step + cost.token * tokens + cost.context * context).sum()
        cost = CostModel(*(float(factor * value) for value in (cost.step, cost.token, cost.context)))
        return cost, cost.error(tokens, context, seconds)

    def _trace(self) -> Trace:
        size = self._reader.header.kv_groups[0].block_size
        known = [request.arrived for request in self._requests.values() if not math.isnan(request.arrived)]
        begin = min(known, default=0.0)
        arrivals = []
        for request in self._requests.values():
            length, time = request.num_prompt, 0.0 if math.isnan(request.arrived) else request.arrived - begin
            ids: tuple[int, ...] = ()
            num_hashed = length
            if not isinstance(request.prompt, int):
                ids = self._hash_ids(request, size)
                num_hashed = size * len(ids)
            steps = max(request.num_steps, 1)
            arrivals.append(Arrival(time, length, steps, ids, num_hashed, request.is_measured and request.is_ended))
        arrivals.sort(key=lambda arrival: arrival.time)
        return Trace(tuple(arrivals), size)

    def _hash_ids(self, request: _Request, size: int) -> tuple[int, ...]:
        """Return one id per whole piece of prompt and answer. An id represents the tokens of the piece and all tokens
        before them.
        """
        tokens = np.concatenate((np.asarray(request.prompt), np.array(request.tokens, np.int64))).astype(np.int32)
        ids, before = [], request.origin
        for end in range(size, len(tokens) + 1, size):
            before = self._id(before, tokens[end - size : end].tobytes())
            ids.append(before)
        return tuple(ids)

    def _latencies(self) -> Measured:
        measured = self._measured
        for request in self._requests.values():
            if not (request.is_measured and request.is_ended) or math.isnan(request.last_token - request.arrived):
                continue
            measured.time_to_first_token.add(request.first_token - request.arrived)
            measured.end_to_end.add(request.last_token - request.arrived)
            if request.num_steps > 1:
                lasted = request.last_token - request.first_token
                measured.time_per_output_token.add(lasted / (request.num_steps - 1))
        return measured

    def _check(self, settings: dict[str, float | str | bool]) -> None:
        """Raise ConfigError for a setting that a simulation does not support. A policy that is not built in becomes
        fcfs.
        """
        known = {f.name for f in fields(SchedulerConfig)} | CACHE_SETTINGS
        if unknown := settings.keys() - known:
            raise ConfigError(
                f"{self._path}, line 1: settings: unknown name {min(unknown)!r:.80}; the names are "
                f"{', '.join(sorted(known))}"
            )
        settings.setdefault("prompt_time_share", 1.0)  # older recordings are of engines without this limit
        policy = settings.setdefault("policy", "fcfs")
        if policy not in POLICIES:  # no code is loaded because a file names it
            self._notes.append(
                f"policy {policy!r:.80} is not one of Foreword's: simulated as fcfs; --policy names another"
            )
            settings["policy"] = "fcfs"

    def _note(self, settings: Mapping[str, float | str | bool]) -> None:
        """Add the notes about differences between simulation and engine."""
        if settings.get("prompt_time_share", 1.0) != 1.0:
            self._notes.append(
                "the recording does not say which requests stream: all do in the simulation, so prompts beside them "
                "take their share of the time; --prompt-time-share 1 does not limit them"
            )
        header, requests = self._reader.header, self._requests.values()
        if left_out := sum(not (r.is_measured and r.is_ended) for r in requests):
            self._notes.append(
                f"{left_out} requests were cut short, or are not in the recording as a whole: they take part, and "
                "their latencies do not count"
            )
        if never := len(self._arrived.keys() - self._groups.keys()):
            self._notes.append(f"{never} requests never began, and are left out")
        if self._num_drafts:
            self._notes.append(
                f"{self._num_drafts} steps verified drafts: the tokens that one step brings count as one"
            )
        if header.token_ids == "omitted":
            self._notes.append("the recording has no token ids, so no prompt has the beginning of another one")
        if len(header.kv_groups) > 1 or header.kv_groups[0].sliding_window or header.kv_groups[0].recurrent:
            self._notes.append("the model's KV groups are simulated as one of full attention")


def _group(req_id: str) -> str:
    """Return the request that a completion belongs to."""
    return req_id.partition("\0")[0]
