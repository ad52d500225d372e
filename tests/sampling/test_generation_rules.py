"""The rules of a generation config against a loop over the tokens of each row, written from Whisper's paper."""

import numpy as np
import pytest

from foreword.batch import BatchUpdates, KVGroup, NewRequest, RequestStates, SamplingParams
from foreword.sampling import LogitRows
from foreword.sampling.generation_rules import IGNORES_RULES, GenerationProcessor, GenerationRules, TimestampRules

V, END, NO_TIMESTAMPS, FIRST = 40, 20, 24, 25
RULES = GenerationRules((3, 7, 21), (5, END), TimestampRules(FIRST, END, 6))


def expected(logits, prompt, output):
    """The logits [V] after an output."""
    found = logits.astype(np.float64)
    found[list(RULES.suppressed)] = -np.inf
    if not output:
        found[list(RULES.suppressed_first)] = -np.inf
    if NO_TIMESTAMPS in prompt:
        return found
    found[NO_TIMESTAMPS] = -np.inf
    times = [token for token in output if token >= FIRST]
    if output and output[-1] >= FIRST:
        if len(output) < 2 or output[-2] >= FIRST:
            found[FIRST:] = -np.inf  # the pair is complete
        else:
            found[:END] = -np.inf  # the second of the pair, or the end
    for token in range(FIRST, V):
        closes = output[-1:] == [token] and len(output) > 1 and output[-2] < FIRST
        if times and (token < times[-1] or (token == times[-1] and not closes)):
            found[token] = -np.inf
    if not output:
        found[:FIRST] = -np.inf
        found[FIRST + RULES.timestamps.max_initial + 1 :] = -np.inf
    together = np.logaddexp.reduce(found[FIRST:])
    if together > found[:FIRST].max():
        found[:FIRST] = -np.inf
    return found


OUTPUTS = [
    [], [25], [27], [27, 1], [27, 1, 2], [27, 1, 30], [27, 1, 30, 30], [27, 1, 30, 30, 9], [27, 1, 30, 31],
    [27, 1, 39, 39, 4], [27, 1, 30, 30, 9, 39],
]  # fmt: skip


@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_rules_are_those_of_a_loop_over_the_tokens_of_each_row(num_drafts):
    noise, count = np.random.default_rng(num_drafts), 3 * len(OUTPUTS)
    states = RequestStates(max_num_reqs=count, max_model_len=16, vocab_size=V, kv_groups=[KVGroup(16)])
    processor, updates = GenerationProcessor(states, RULES), BatchUpdates(states)
    requests, drafts, rows = [], [], []
    for i in range(count):
        output, prompt = OUTPUTS[i // 3], [[22, 23], [22, 23, NO_TIMESTAMPS, 4], [22]][i % 3]
        known = output[: max(len(output) - num_drafts, 0)]
        params = SamplingParams(extra_args=IGNORES_RULES) if i % 3 == 2 and i % 2 else None
        new = NewRequest(str(i), prompt, [[1 + i]], output_token_ids=known, sampling_params=params)
        rows.append(states.add_request(new))
        drafts.append(output[len(known) :])
        requests.append((prompt, output, params is None))
    processor.update(updates.take())
    applies = np.array([applied for *_, applied in requests])
    np.testing.assert_array_equal(processor.rows.mask[rows], applies)
    at = LogitRows(
        states,
        np.array(rows, np.int32),
        np.array([token for some in drafts for token in some], np.int32),
        np.cumsum([0, *map(len, drafts[:-1])]).astype(np.int32),
        np.array([len(some) for some in drafts], np.int32),
    ).take(np.flatnonzero(applies))
    for scale in (0.1, 1.0, 5.0):
        logits = (scale * noise.standard_normal((len(at), V))).astype(np.float32)
        changed = logits.copy()
        processor.apply(changed, at)
        chosen = [request for request in requests if request[2]]
        for before, after, (prompt, output, _) in zip(logits, changed, chosen, strict=True):
            np.testing.assert_array_equal(after, expected(before, prompt, output), err_msg=str((prompt, output)))


def test_a_model_without_timestamps_has_suppressed_tokens_alone():
    states = RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=V, kv_groups=[KVGroup(8)])
    row = states.add_request(NewRequest("a", [1, 2], [[1]]))
    nothing = np.zeros(1, np.int32)
    logits = np.zeros((1, V), np.float32)
    at = LogitRows(states, np.array([row], np.int32), nothing[:0], nothing, nothing)
    GenerationProcessor(states, GenerationRules((3,), (4,))).apply(logits, at)
    assert np.flatnonzero(np.isinf(logits[0])).tolist() == [3, 4]
    assert not GenerationRules()
