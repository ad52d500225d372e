"""Make steps visible: traces, their replay and comparison, explanations, and reports about a machine.

The format of traces is docs/conformance.md. `foreword.insight.conform` compares a trace with the definition.
"""

from foreword.trace.compare import Difference, first_difference
from foreword.trace.events import (
    Add,
    AppendBlocks,
    Arrive,
    Commit,
    Correct,
    End,
    Event,
    Fail,
    Remove,
    Restart,
    Step,
    Wait,
)
from foreword.trace.header import TraceHeader
from foreword.trace.reader import Trace, TraceReader
from foreword.trace.recorder import TraceRecorder
from foreword.trace.replay import Replay
from foreword.trace.shrink import Shrinker, evidence
from foreword.trace.writer import TraceWriter

__all__ = [
    "Add", "AppendBlocks", "Arrive", "Commit", "Correct", "Difference", "End", "Event", "Fail", "Remove", "Replay",
    "Restart", "Shrinker", "Step", "Trace", "TraceHeader", "TraceReader", "TraceRecorder", "TraceWriter", "Wait",
    "evidence", "first_difference",
]  # fmt: skip
