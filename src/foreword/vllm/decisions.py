"""The decisions of a trace in the form of vLLM's scheduler, in plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from foreword.errors import PlanError
from foreword.trace.events import Add, AppendBlocks, Commit, Correct, Event, Fail, Remove, Restart, Step, Tokens, ids_of
from foreword.trace.header import TraceHeader
from foreword.trace.reader import Trace

Blocks = list[list[int]]
PARAMETERS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""The sampling parameters for which a runner has columns."""


class New(TypedDict):
    """A request that is scheduled for the first time. adapter: the name, number and path of its adapter.

    features: the identifier, offset, length and modality of each of its images and sounds. rotary: the rotary positions
    of its prompt in several dimensions, [dims, prompt], and the offset of later tokens; None for a text model.

    output_token_ids: the outputs that it has already. The second model runner gets a resumed request as a new one with
    outputs; for the first one they are the end of the prompt.
    """

    req_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    block_ids: Blocks
    num_computed_tokens: int
    sampling: dict[str, Any]
    adapter: tuple[str, int, str] | None
    features: list[dict[str, Any]]
    rotary: tuple[list[list[int]], int] | None


class Known(TypedDict):
    """A request that was scheduled before. resumed: after a preemption, with other blocks in place of the old ones.

    block_ids: new blocks, None if there are none. all_token_ids: all tokens of a resumed request.
    """

    req_id: str
    resumed: bool
    block_ids: Blocks | None
    num_computed_tokens: int
    num_output_tokens: int
    all_token_ids: list[int]


class Decision(TypedDict):
    """One step of a scheduler: the fields of vLLM's SchedulerOutput, and the samples of the step."""

    new: list[New]
    cached: list[Known]
    counts: dict[str, int]
    drafts: dict[str, list[int]]
    finished: list[str]
    preempted: list[str]
    sampled: dict[str, list[int]]


def is_of_second(header: TraceHeader) -> bool:
    """Return whether a trace is of vLLM's second model runner."""
    return header.engine.startswith("vLLM") and "second" in header.engine


def check_header(header: TraceHeader) -> None:
    """Raise PlanError for an engine whose decisions a runner of vLLM without a model cannot follow."""
    if header.context_parallel is not None:
        raise PlanError("context parallelism: a runner without a model is one rank alone", tensor="context_parallel")
    if header.null_block != 0:
        raise PlanError("vLLM's null block is 0", tensor="null_block", expected=0, got=header.null_block)


def decisions(trace: Trace) -> Iterator[Decision]:
    """Return the decision of each step. Raise PlanError for an event that no decision of vLLM's scheduler expresses.

    The prompt of a request that a trace begins with, or that is admitted with outputs, consists of all of its tokens.
    Blocks are neither zeroed nor copied, because a runner without a model has none. Images are represented by their
    placeholder tokens and their identifiers.
    """
    told = _Told(is_of_second(trace.header))
    for i, event in enumerate(trace.events):
        if isinstance(event, Step):
            yield told.step(event, _commit_of(trace.events, i))
        else:
            told.apply(event)


def _commit_of(events: Sequence[Event], at: int) -> Mapping[str, Tokens]:
    """Return the samples of the step at this index."""
    for event in events[at + 1 :]:
        if isinstance(event, Commit):
            return event.tokens
        if isinstance(event, Step):
            raise PlanError(
                f"line {event.line}: the step before has no commit, and vLLM's runner has one for each step"
            )
    return {}


@dataclass(slots=True, eq=False)
class _Request:
    """The runner's state of a request. num_prompt_tokens: the given number. blocks: the blocks that it was not given
    yet.

    is_over: whether all of its tokens were computed and no sample was recorded.
    """

    add: Add
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    blocks: Blocks
    is_new: bool = True
    is_resumed: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Told:
    """The decisions since the last step, and the state of each request. is_second: whether they are for the second
    runner.
    """

    is_second: bool
    requests: dict[str, _Request] = field(default_factory=dict)  # in a row
    away: dict[str, _Request] = field(default_factory=dict)  # preempted
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)

    def apply(self, event: Event) -> None:
        match event:
            case Add():
                self._add(event)
            case AppendBlocks():
                blocks = self.requests[event.req_id].blocks
                for held, new in zip(blocks, event.block_ids, strict=True):
                    held += map(int, new)
            case Remove():
                self._remove(event.req_id, event.preempted)
            case Restart():
                for req_id in list(self.requests):
                    self._remove(req_id, False)
            case Correct(num_tokens=int(known), token_ids=None, num_computed_tokens=None, block_ids=None):
                request = self.requests[event.req_id]
                request.num_tokens = min(known, request.num_tokens)
                request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            case Correct():
                text = "tokens, counts and blocks that a scheduler corrects cannot be told to vLLM's runner"
                raise PlanError(f"line {event.line}: {text}", request=event.req_id)
            case Fail():
                raise PlanError(f"line {event.line}: a step failed, which vLLM's runner cannot be told")

    def step(self, event: Step, sampled: Mapping[str, Tokens]) -> Decision:
        counts = {req_id: int(n) for req_id, n in zip(event.req_ids, event.counts, strict=True)}
        drafts = {req_id: list(map(int, ids_of(ids))) for req_id, ids in event.draft_tokens.items()}
        samples = {req_id: list(map(int, ids_of(ids))) for req_id, ids in sampled.items() if req_id in counts}
        scheduled = [request for req_id, request in self.requests.items() if req_id in counts]
        if (over := next((request for request in scheduled if request.is_over), None)) is not None:
            raise PlanError(f"line {event.line}: a sample is missing before this step", request=over.add.req_id)
        decision = Decision(
            new=[_new(request, self.is_second) for request in scheduled if request.is_new],
            cached=[_known(request) for request in scheduled if not request.is_new],
            counts=counts,
            drafts=drafts,
            finished=self.finished,
            preempted=self.preempted,
            sampled=samples,
        )
        self.finished, self.preempted = [], []
        for request in scheduled:
            req_id = request.add.req_id
            num_samples = len(samples.get(req_id, ()))
            request.num_computed_tokens += counts[req_id] - len(drafts.get(req_id, ())) + max(num_samples - 1, 0)
            request.is_over = not num_samples and request.num_computed_tokens >= request.num_tokens
            request.num_tokens += num_samples
            request.blocks = [[] for _ in request.blocks]
            request.is_new = request.is_resumed = False
        return decision

    def _add(self, event: Add) -> None:
        if event.extras.get("pooling_params"):
            raise PlanError(
                f"line {event.line}: a request with pooling_params needs its model to be prepared", request=event.req_id
            )
        given = len(ids_of(event.prompt_token_ids))
        known = given + len(ids_of(event.output_token_ids))
        blocks = [list(map(int, ids)) for ids in event.block_ids]
        before = self.away.pop(event.req_id, None)
        if self.is_second:
            before, prompt = None, given
        else:
            prompt = known if before is None else before.num_prompt_tokens
        self.requests[event.req_id] = _Request(
            event, prompt, known, event.num_computed_tokens, blocks, before is None, before is not None
        )

    def _remove(self, req_id: str, preempted: bool) -> None:
        request = self.requests.pop(req_id)
        if request.is_new:
            return  # the runner does not know it
        if preempted:
            self.away[req_id] = request
            self.preempted.append(req_id)
        else:
            self.finished.append(req_id)


def _new(request: _Request, is_second: bool) -> New:
    add, tokens = request.add, _tokens(request.add)
    num_prompt_tokens = len(ids_of(add.prompt_token_ids)) if is_second else len(tokens)
    parameters, adapter = add.extras.get("sampling_params", {}), add.extras.get("lora_request")
    return New(
        req_id=add.req_id,
        prompt_token_ids=tokens[:num_prompt_tokens],
        output_token_ids=tokens[num_prompt_tokens:],
        block_ids=request.blocks,
        num_computed_tokens=request.num_computed_tokens,
        sampling={name: parameters[name] for name in PARAMETERS if name in parameters},
        adapter=_adapter(add.lora_id, adapter),
        features=[_feature(one) for one in add.extras.get("mm_features", ())],
        rotary=_rotary(add, num_prompt_tokens),
    )


def _known(request: _Request) -> Known:
    is_grown = request.is_resumed or any(request.blocks)
    return Known(
        req_id=request.add.req_id,
        resumed=request.is_resumed,
        block_ids=request.blocks if is_grown else None,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_tokens - request.num_prompt_tokens,
        all_token_ids=_tokens(request.add) if request.is_resumed else [],
    )


def _tokens(add: Add) -> list[int]:
    return [int(token) for ids in (add.prompt_token_ids, add.output_token_ids) for token in ids_of(ids)]


def _adapter(lora_id: int, given: Mapping[str, Any] | None) -> tuple[str, int, str] | None:
    if given is None:
        return (f"adapter-{lora_id}", lora_id, "unknown") if lora_id else None
    return given["name"], given["lora_id"], given.get("path") or "unknown"


def _feature(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "identifier": given["identifier"],
        "offset": int(given["offset"]),
        "length": int(given["length"]),
        "modality": given.get("modality", "image"),
    }


def _rotary(add: Add, num_prompt_tokens: int) -> tuple[list[list[int]], int] | None:
    """Return the rotary positions of the tokens that are given as the prompt: p + delta past the recorded ones."""
    if not len(add.mrope_positions):
        return None
    rows = [[int(position) for position in row] for row in add.mrope_positions]
    known, delta = len(rows[0]), add.mrope_delta
    later = [position + delta for position in range(known, num_prompt_tokens)]
    return [[*row[:num_prompt_tokens], *later] for row in rows], delta
