"""Run the outputs of a trace on a model: it takes the same tokens, and their log-probabilities are compared.

    outputs = recorded_outputs(Trace.read("steps.jsonl"))
    report = compare(outputs, recorded(outputs), measure(llm, outputs), tolerance=0.05)

Because every token is given, an early difference does not change the later ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.batch import LoraRequest, SamplingParams
from foreword.batch.values.parameters import CHANGING, Need
from foreword.batch.values.sampling_params import PARAMETERS
from foreword.engine.llm import LLM
from foreword.errors import ConfigError
from foreword.sampling import TokenLogprobs
from foreword.trace.events import Add, Commit, Correct, Tokens, ids_of
from foreword.trace.reader import Trace

Logprobs = tuple[float | None, ...]
Distribution = Mapping[int, float]
"""Token → log-probability, for the token that was taken and some of the most likely tokens."""

_DECIDING = {
    row.name
    for row in PARAMETERS
    if (row.need or (row.column.need if row.column is not None else Need(0))) & (CHANGING | Need.STRUCTURED_OUTPUT)
} | {"forced_tokens"}
"""The parameters with which a greedy request may take another token than the model's most likely one."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedOutput:
    """The data of one request in a trace. logprobs: one per output token, None if the trace has none.

    is_greedy: whether each token was the most likely one of the model. lora_id, lora: its adapter; 0 and None without
    an adapter. lora is also None if the adapter's name is not known. is_text: whether its prompt has no images, sounds
    and bidirectional ranges, unless the range is the whole prompt, which follows from the model.
    """

    req_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    logprobs: Logprobs = ()
    is_greedy: bool = False
    lora_id: int = 0
    lora: LoraRequest | None = None
    is_text: bool = True


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two sides differ. expected, got: their distributions at this position."""

    request: str
    position: int
    token: int
    expected: Distribution
    got: Distribution

    def __str__(self) -> str:
        return (
            f"request {self.request!r}, output position {self.position}, token {self.token}:\n"
            f"  expected {_shown(self.expected)}\n  got      {_shown(self.got)}"
        )


@dataclass(frozen=True, slots=True)
class OutputReport:
    """The comparison of two sides.

    num_compared: number of log-probabilities of taken tokens that both sides have. largest, mean: of their absolute
    differences. num_ranked: number of other positions at which the most likely token of both sides is known.
    first: the first divergence: another most likely token, or a difference above the tolerance.
    """

    num_requests: int
    num_tokens: int
    num_compared: int
    num_ranked: int
    largest: float
    mean: float
    first: Divergence | None

    @property
    def ok(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        head = f"{self.num_requests} requests, {self.num_tokens} tokens, {self.num_compared} log-probabilities compared"
        head += f" and {self.num_ranked} greedy tokens" if self.num_ranked else ""
        rest = f": largest difference {self.largest:.4g}, mean {self.mean:.4g}" if self.num_compared else ""
        return f"{head}{rest}\n" + ("no divergence" if self.first is None else f"first divergence: {self.first}")


def recorded_outputs(trace: Trace) -> list[RecordedOutput]:
    """Return the requests of a trace that have an output. Raise ConfigError if its token ids are not plain."""
    if trace.header.token_ids != "plain":
        raise ConfigError(f"the trace has {trace.header.token_ids} token ids, which a model cannot read")
    found: dict[str, RecordedOutput] = {}
    for event in trace.events:
        match event:
            case Add():
                prompt, output = _ids(event.prompt_token_ids), _ids(event.output_token_ids)
                before = found.get(event.req_id, RecordedOutput(event.req_id, prompt)).logprobs[: len(output)]
                logprobs = (*before, *[None] * (len(output) - len(before)))
                found[event.req_id] = _added(event, prompt, output, logprobs)
            case Correct(num_tokens=int(known)) if event.req_id in found:
                old = found[event.req_id]
                count = max(known - len(old.prompt_token_ids), 0)
                found[event.req_id] = replace(old, token_ids=old.token_ids[:count], logprobs=old.logprobs[:count])
            case Commit():
                for req_id, tokens in event.tokens.items():
                    if req_id in found:
                        old, new = found[req_id], _ids(tokens)
                        given = event.logprobs.get(req_id, ())[: len(new)]
                        values = (*given, *[None] * (len(new) - len(given)))
                        found[req_id] = replace(old, token_ids=old.token_ids + new, logprobs=(*old.logprobs, *values))
    return [output for output in found.values() if output.token_ids]


def measure(llm: LLM, outputs: Sequence[RecordedOutput], top: int = 4) -> dict[str, list[Distribution]]:
    """Return the distribution of a model at each output token, while it takes the tokens of the trace."""
    params = [
        SamplingParams(
            forced_tokens=output.token_ids,
            max_tokens=len(output.token_ids),
            temperature=0.0,
            logprobs=top,
            ignore_eos=True,
            detokenize=False,
        )
        for output in outputs
    ]
    loras = [None if output.lora is None else output.lora.name for output in outputs]
    done = llm.generate([list(output.prompt_token_ids) for output in outputs], params, lora=loras)
    return {
        output.req_id: [_distribution(entry) for entry in answer.outputs[0].logprobs or ()]
        for output, answer in zip(outputs, done, strict=True)
    }


def recorded(outputs: Sequence[RecordedOutput]) -> dict[str, list[Distribution]]:
    """Return the log-probabilities of a trace, as distributions that have only the taken token."""
    return {
        output.req_id: [
            {} if value is None else {token: value}
            for token, value in zip(output.token_ids, output.logprobs, strict=True)
        ]
        for output in outputs
    }


def compare(
    outputs: Sequence[RecordedOutput],
    expected: Mapping[str, Sequence[Distribution]],
    got: Mapping[str, Sequence[Distribution]],
    tolerance: float,
) -> OutputReport:
    """Compare two sides, request by request in the order of the trace.

    If the expected side has no distribution at a position of a greedy request, its token counts as the most likely one.
    Raise ConfigError if there is nothing to compare.
    """
    differences: list[float] = []
    num_ranked = 0
    first: Divergence | None = None
    for output in outputs:
        sides = zip(output.token_ids, expected[output.req_id], got[output.req_id], strict=True)
        for position, (token, one, other) in enumerate(sides):
            difference, other_best = 0.0, False
            if token in one and token in other:
                difference = 0.0 if one[token] == other[token] else abs(one[token] - other[token])  # both may be −∞
                differences.append(difference)
            if len(one) > 1 and len(other) > 1:
                other_best = max(one, key=one.__getitem__) != max(other, key=other.__getitem__)
            elif output.is_greedy and other:
                num_ranked += not one
                other_best = not max(other.values()) - other[token] <= tolerance
            if first is None and (other_best or not difference <= tolerance):
                first = Divergence(output.req_id, position, token, one, other)
    count = len(differences)
    if outputs and not count and not num_ranked:
        raise ConfigError(
            "the trace has no log-probabilities and no greedy request, so there is nothing to compare: record requests "
            "with logprobs or temperature 0, or compare two sides with --against"
        )
    return OutputReport(
        len(outputs),
        sum(len(output.token_ids) for output in outputs),
        count,
        num_ranked,
        max(differences, default=0.0),
        math.fsum(differences) / count if count else 0.0,
        first,
    )


def loras_of(outputs: Sequence[RecordedOutput], given: Mapping[str, str | Path]) -> dict[str, str | Path]:
    """Return name → path of the adapters of these requests. given: the adapters whose path has changed.

    ConfigError, which names the request, for an adapter without a name, and for one that is not where it was.
    """
    paths = dict(given)
    for output in outputs:
        if output.lora_id and output.lora is None:
            raise ConfigError(
                f"request {output.req_id!r} used adapter number {output.lora_id}, whose name is not recorded; leave "
                "the request out, or record it again"
            )
        if output.lora is not None and output.lora.name not in paths:
            name, path = output.lora.name, output.lora.path
            if not path or not Path(path).exists():
                raise ConfigError(
                    f"request {output.req_id!r} used the adapter {name!r}, which is not at its path {path!r}: give "
                    f"--adapter {name}=PATH"
                )
            paths[name] = path
    return paths


def _added(add: Add, prompt: tuple[int, ...], output: tuple[int, ...], logprobs: Logprobs) -> RecordedOutput:
    lora, given = add.extras.get("lora_request"), add.extras.get("sampling_params", {})
    is_greedy = given.get("temperature") == 0 and not given.keys() & _DECIDING
    has_parts = [(a, b) for a, b in add.bidirectional_ranges] not in ([], [(0, len(prompt))])
    return RecordedOutput(
        add.req_id,
        prompt,
        output,
        logprobs,
        is_greedy,
        add.lora_id,
        None if lora is None else LoraRequest(**lora),
        not (add.extras.get("mm_features") or has_parts),
    )


def _ids(tokens: Tokens) -> tuple[int, ...]:
    return tuple(int(token) for token in ids_of(tokens))


def _distribution(entry: TokenLogprobs) -> Distribution:
    return {token: found.logprob for token, found in entry.items()}


def _shown(values: Distribution) -> str:
    some = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{token}: {value:.4f}" for token, value in some) or "not recorded"
