"""Run a recorded trace again on vLLM's own model runner, without its model, to see which findings of the recording
occur again.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import vllm

from foreword.check_options import CheckOptions
from foreword.errors import ConfigError, PlanError
from foreword.names import counted
from foreword.shadow import Finding
from foreword.shadow.comparison import NAMES
from foreword.trace.compare import Difference, first_difference
from foreword.trace.events import Add, Step
from foreword.trace.reader import Trace
from foreword.trace.replay import Replay
from foreword.vllm import bare_runner, step_tensors
from foreword.vllm.decisions import Decision, check_header, decisions, is_of_second
from foreword.vllm.runners import checked_class
from foreword.vllm.window import check_version

MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Rerun:
    """The result of a trace in a runner. title: the title of the runner.

    findings: the findings in the runner, with the step numbers of the trace. order: the requests of the first step with
    a finding, in the runner's order. recorded: the differences in the recorded tensors. reordered: the first step whose
    requests have another order than in the recording.
    """

    title: str
    num_steps: int
    findings: Sequence[Finding]
    order: Sequence[str]
    recorded: Sequence[Difference]
    reordered: int | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        again = {(finding.step, finding.tensor) for finding in self.findings}
        lines = [f"{counted(self.num_steps, 'step')} prepared by {self.title}: {self._verdict(again)}"]
        lines += _first(f"recorded: {one}{'' if self._occurs(one, again) else ' (not here)'}" for one in self.recorded)
        lines += _first(f"here: {finding}" for finding in self.findings)
        if self.reordered is not None:
            lines.append(
                f"from step {self.reordered} on the requests stand in another order than in the recording, which steps "
                "without tokens can cause: they are not in a trace"
            )
        return "\n".join(lines)

    def _verdict(self, again: set[tuple[int, str]]) -> str:
        if not self.recorded:
            return "as defined" if self.ok else counted(len(self.findings), "finding")
        same = sum(self._occurs(one, again) for one in self.recorded)
        if same == len(self.recorded):
            return "what was recorded occurs again"
        return f"of {counted(len(self.recorded), 'recorded difference')} {same or 'none'} occurs again"

    @staticmethod
    def _occurs(one: Difference, again: set[tuple[int, str]]) -> bool:
        return (one.step, one.tensor) in again


def _first(lines: Iterable[str]) -> list[str]:
    shown = list(lines)
    return shown[:MOST_SHOWN] + [f"… {len(shown) - MOST_SHOWN} more"] * (len(shown) > MOST_SHOWN)


def rerun(trace: Trace, *, tensor: str | None = None) -> Rerun:
    """Give the decisions of a trace to vLLM's runner, and compare the tensors that it prepares. tensor: the only tensor
    to compare.

    Raise ConfigError for another version of vLLM, and PlanError for a trace that cannot be replayed, that needs a
    model, or for which the runner itself fails.
    """
    if tensor is not None and tensor not in NAMES:
        raise ConfigError(f"tensor={tensor!r:.80}: is not compared; docs/tensors.md has the names")
    check_version(vllm.__version__)
    check_header(trace.header)
    numbers, recorded = _replayed(trace, tensor)
    runner = _runner_of(trace)
    if runner.follower is None:
        raise ConfigError("this runner cannot be followed; the log says why")
    shadow, order, reordered = runner.follower.shadow, list[str](), None
    try:
        for number, decision in zip(numbers, decisions(trace), strict=True):
            try:
                runner.run(decision)
            except Exception as error:  # any error that vLLM raises
                raise PlanError(
                    f"{type(runner).__name__} cannot prepare the step ({type(error).__name__}: {error})", step=number
                ) from error
            if shadow.findings and not order:
                order = runner.req_ids
            if reordered is None and list(decision["counts"]) != runner.req_ids:
                reordered = number
        if runner.follower.failure:
            raise PlanError(f"the check failed ({runner.follower.failure})", step=numbers[shadow.num_steps - 1])
        found = [replace(one, step=numbers[one.step - 1]) for one in shadow.findings if tensor in (None, one.tensor)]
    finally:
        runner.follower.close()
    title = f"vLLM {vllm.__version__}, {runner.runner_name} without a model"
    return Rerun(title, len(numbers), found, order, recorded, reordered)


def fails(trace: Trace) -> int | None:
    """Return the first step, counted from 0, that vLLM's runner prepares wrongly: for ``foreword shrink --failing
    foreword.vllm.rerun:fails``. None if there is no such step, or if the trace cannot be rerun.
    """
    try:
        found = rerun(trace).findings
    except PlanError:
        return None
    return found[0].step - trace.header.first_step if found else None


def sizes_of(trace: Trace) -> bare_runner.Sizes:
    """Return the sizes of a trace's engine."""
    header = trace.header
    return bare_runner.Sizes(
        max_num_reqs=header.max_num_reqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        max_model_len=header.max_model_len,
        vocab_size=header.vocab_size,
        kv_groups=tuple(
            bare_runner.Group(group.block_size, group.sliding_window, group.recurrent) for group in header.kv_groups
        ),
        max_num_draft_tokens=header.max_num_draft_tokens,
        uses_mrope=any(isinstance(event, Add) and len(event.mrope_positions) for event in trace.events),
    )


def _runner_of(trace: Trace) -> Any:
    """Return a checked runner, without a model, of the generation that recorded the trace."""
    if not is_of_second(trace.header):
        return bare_runner.bare_runner(sizes_of(trace), _Checked.of)
    from foreword.vllm.bare_second_runner import bare_second_runner  # it imports vLLM's second runner

    return bare_second_runner(sizes_of(trace), _Checked.of)


class _Checked:
    """Hooks of a runner that keep findings and do not log them."""

    check_options = CheckOptions(level="tensors", first=1 << 20)
    runner_name = ""

    @staticmethod
    def report_finding(_: str) -> None:
        pass

    @staticmethod
    def of(runner: type) -> type:
        names = {"runner_name": runner.__bases__[1].__name__}
        return type(f"Checked{runner.__name__}", (_Checked, checked_class(runner)), names)


def _replayed(trace: Trace, only: str | None) -> tuple[list[int], list[Difference]]:
    """Return the number of each step, and the findings in the recorded tensors.

    Raise PlanError for an event that the states do not allow.
    """
    replay, numbers, found = Replay(trace.header, max_num_reqs=len(trace.events)), list[int](), list[Difference]()
    for event in trace.events:
        batch = replay.apply(event)
        if batch is None or not isinstance(event, Step):
            continue
        numbers.append(replay.step)
        for name, value in event.tensors.items():
            if only in (None, name):
                difference = first_difference(batch, name, value, line=event.line, step=replay.step)
                found += [] if difference is None else [difference]
    return numbers, found


# -- a test that needs vLLM alone --------------------------------------------------------------------------------------

_TEST = '''

SIZES = Sizes({sizes})

DECISIONS = r"""
{decisions}"""

EXPECTED = [
{expected}]
"""(tensor, KV group, index, value) of the last step, in the order of the runner's requests: {order}."""


def test_the_last_step_is_prepared_as_the_scheduler_decided():
    runner = bare_runner(SIZES)
    for line in DECISIONS.split():
        runner.run(json.loads(line))
    assert list(runner.input_batch.req_ids) == {order}
    sizes = [group.block_size for group in SIZES.kv_groups]
    logits_indices, drafts = runner.prepared[:2]
    tensors = step_tensors(runner, runner.metadata, runner.input_ids_read, logits_indices, drafts, sizes)
    for name, group, index, value in EXPECTED:
        tensor = np.asarray(tensors[name] if group is None else tensors[name][group])
        assert tensor[index] == value, f"{{name}}{{list(index)}}: {{tensor[index]}} in place of {{value}}"
'''


def as_test(trace: Trace) -> str:
    """Return a file for pytest that needs vLLM alone: the decisions of a trace up to the first step that is prepared
    wrongly, and the values that are wrong there. Raise ConfigError if no step is, and for the second model runner.
    """
    if is_of_second(trace.header):
        raise ConfigError("--as-test: the kernels of vLLM's second model runner need Triton or Foreword; leave it out")
    report = rerun(trace)
    found = report.findings
    if not found:
        raise ConfigError("--as-test: vLLM's runner prepares every step as defined, so there is no fault to test for")
    first = [one for one in found if one.step == found[0].step and one.origin == "runner" and one.tensor != "req_ids"]
    if not first:
        raise ConfigError(f"--as-test: {found[0]}: this is not a value of a tensor")
    number = found[0].step - trace.header.first_step
    told = [decision for k, decision in enumerate(decisions(trace)) if k <= number]
    expected = "".join(f"    {(one.tensor, one.group, one.index, one.expected)!r},\n" for one in first)
    sources = _source(bare_runner), _source(step_tensors)
    test = _TEST.format(
        sizes=", ".join(map(repr, sizes_of(trace))),
        decisions="".join(f"{_line(decision)}\n" for decision in told),
        expected=expected,
        order=json.dumps(report.order),
    )
    return f'"""Decisions of a scheduler that vLLM\'s model runner prepares wrongly: {first[0].tensor}."""\n\n' + (
        f"from __future__ import annotations\n{sources[0]}{sources[1]}{test}"
    )


def _line(decision: Decision) -> str:
    """Return a decision as JSON without blanks and without consecutive quotation marks."""
    return json.dumps(decision, separators=(",", ":")).replace('"""', '""\\u0022').replace(" ", "\\u0020")


def _source(module: ModuleType) -> str:
    """Return the code of a module without its docstring and its first import."""
    _, _, code = inspect.getsource(module).partition("from __future__ import annotations\n")
    return code
