"""A step as a serialisable difference: what another process needs to prepare the same step, bit for bit.

    recorder = DifferenceRecorder(states)                   # one process
    batch = prepare_inputs(states, plan, buffers)
    data = recorder.take(batch).to_bytes()

    difference = StepDifference.from_bytes(data)            # another rank, a replay: its own states and buffers
    batch = apply_difference(states, difference, buffers)   # equal tensors, equal columns of the states

A difference holds the net change of the states since the difference before, then the plan. What changed is found by
comparison with an image of the states as the other side has them, so commits, `advance`, appended and replaced blocks,
corrections of computed tokens and moves of rows need no calls of their own. States without a recorder have no cost.
"""

from foreword.batch.difference.apply import apply_difference
from foreword.batch.difference.mirror import states_of
from foreword.batch.difference.recorder import DifferenceRecorder
from foreword.batch.difference.request_json import from_json as extras_from_json
from foreword.batch.difference.request_json import to_json as extras_to_json
from foreword.batch.difference.value import StepDifference

__all__ = [
    "DifferenceRecorder", "StepDifference", "apply_difference", "extras_from_json", "extras_to_json", "states_of",
]  # fmt: skip
