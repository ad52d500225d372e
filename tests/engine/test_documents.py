"""The worked examples of the reference documents, through the whole engine: every step's tensors as the documents
print them.

Errata: 002 prints query_start_loc as [0, 1, 1, 2, 95, 170, 200]; 000 names request 2's tokens T_3_x; 003 puts T_0_2 in
block 2 in step 2, where it is T_0_3.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from engine_rig import OnStep, V, make_engine, run
from oracle_model import plain_output

from foreword.batch import SamplingParams
from foreword.batch.adapters.nano_vllm import nano_vllm_context
from foreword.batch.adapters.vllm_ascend import ascend_metadata

DATA = Path(__file__).parents[1] / "data"

CASES = {case["name"]: case for case in json.loads((DATA / "worked_examples.json").read_text())["cases"]}
PLANNING = pytest.mark.parametrize("async_scheduling", [False, True], ids=["in turn", "ahead"])


def figures(name: str, **own) -> dict:
    """The figures of a worked example, which has ids and blocks of its own, with those of the engine."""
    return CASES[name]["expected"] | {"attention_state": CASES[name]["attention_state"]} | own


def causal(positions: list[int], num_keys: int) -> np.ndarray:
    return np.arange(num_keys) <= np.array(positions)[:, None]


class Steps(list):
    """The steps that an engine runs, each as the arrays that the documents name. Filled while the engine runs."""

    def __init__(self, engine) -> None:
        super().__init__()
        engine.observers.add(OnStep(lambda _plan, batch: self.append(arrays_of(batch))))


def arrays_of(batch) -> dict:
    """Copies of the step's tensors, its derived ones, and what adapters make of them."""
    names = (
        "req_ids", "req_indices", "positions", "input_ids", "query_start_loc", "seq_lens", "num_computed_tokens",
        "num_scheduled_tokens", "num_reqs", "num_tokens", "max_query_len", "max_seq_len", "logits_indices",
    )  # fmt: skip
    arrays = {name: np.array(getattr(batch, name)) for name in names}
    explained = batch.explain()
    for name in ("token_indices", "block_table_indices", "block_numbers", "block_offsets"):
        arrays[name] = getattr(explained, name)
    ascend, nano = ascend_metadata(batch), nano_vllm_context(batch)
    arrays |= {
        "slot_mapping": batch.slot_mapping[0].copy(),
        "block_table": batch.block_table[0].copy(),
        "attention_state": batch.attention_state.name,
        "attn_state": ascend.attn_state.name,
        "attn_mask": None if ascend.attn_mask is None else ascend.attn_mask.copy(),
        "attention_mask": batch.attention_mask(),
    }
    for name in ("cu_seqlens_q", "cu_seqlens_k", "context_lens", "block_tables"):
        value = getattr(nano, name)
        arrays[name] = None if value is None else value.copy()
    return arrays


def assert_step(arrays: dict, expected: dict) -> None:
    for name, value in expected.items():
        if value is None or isinstance(value, str):
            assert arrays[name] == value, name
        else:
            assert np.array_equal(arrays[name], value), f"{name}: {arrays[name]}"


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def greedy_output(prompt: list[int], length: int) -> list[int]:
    return plain_output(prompt, lambda logits, _position: logits.argmax(), length, V)


# -- 000 and 003: prompts of 3, 2 and 8 tokens, a budget of 10, S = 2, M = 12, K = 6 --------------------------------


@pytest.mark.smoke
@PLANNING
def test_three_requests_with_a_budget_of_ten(async_scheduling):
    engine = make_engine(
        blocks=20, M=12, block_size=2, max_num_batched_tokens=10, max_num_seqs=4, async_scheduling=async_scheduling
    )
    steps = Steps(engine)
    prompts = [[1, 2, 3], [11, 12], [21, 22, 23, 24, 25, 26, 27, 28]]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(3))
    outputs = run(engine)
    (t_0_3, t_0_4, _), (t_1_2, t_1_3, _), (t_2_8, t_2_9, _) = tokens = [greedy_output(p, 3) for p in prompts]
    assert [outputs[str(i)].outputs[0].token_ids for i in range(3)] == tokens
    assert len(steps) == 4

    first, second = "three-requests/step-1-prefill", "three-requests/step-2-decode-and-chunk"
    assert_step(
        steps[0],
        figures(
            first,
            req_ids=["0", "1", "2"],
            num_scheduled_tokens=[3, 2, 5],
            input_ids=[1, 2, 3, 11, 12, 21, 22, 23, 24, 25],
            block_table=[[1, 2, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0], [4, 5, 6, 0, 0, 0]],
            num_computed_tokens=[0, 0, 0],
            attn_state="PrefillNoCache",
            attention_mask=causal([0, 1, 2, 3, 4], 5),
            attn_mask=causal([0, 1, 2, 3, 4], 5),
        ),
    )
    assert_step(
        steps[1],
        figures(
            second,
            req_ids=["0", "1", "2"],
            num_scheduled_tokens=[1, 1, 3],
            input_ids=[t_0_3, t_1_2, 26, 27, 28],
            block_table=[[1, 2, 0, 0, 0, 0], [3, 7, 0, 0, 0, 0], [4, 5, 6, 8, 0, 0]],
            num_computed_tokens=[3, 2, 5],
            attn_state="ChunkedPrefill",
            attention_mask=causal([3, 2, 5, 6, 7], 8),
            attn_mask=causal([3, 2, 5, 6, 7], 8),
        ),
    )
    # "If you understand the step_1 and step_2, you will know the all following steps."
    assert_step(
        steps[2],
        {
            "positions": [4, 3, 8],
            "token_indices": [4, 15, 32],
            "input_ids": [t_0_4, t_1_3, t_2_8],
            "block_table": [[1, 2, 9, 0, 0, 0], [3, 7, 0, 0, 0, 0], [4, 5, 6, 8, 10, 0]],
            "block_table_indices": [2, 7, 16],
            "slot_mapping": [18, 15, 20],
            "query_start_loc": [0, 1, 2, 3],
            "seq_lens": [5, 4, 9],
            "attn_state": "DecodeOnly",
            "attention_mask": None,
            "attn_mask": None,
        },
    )
    assert_step(steps[3], {"req_ids": ["2"], "positions": [9], "input_ids": [t_2_9], "slot_mapping": [21]})


# -- 002: five requests, 200 tokens, S = 16, M = 240, K = 15 -------------------------------------------------------


def test_five_requests_of_two_hundred_tokens():
    engine = make_engine(blocks=40, M=240, block_size=16, max_num_batched_tokens=200, max_num_seqs=8)
    steps = Steps(engine)
    prompts = [[1 + (7 * i + j) % 29 for j in range(n)] for i, n in enumerate([54, 145, 93, 75, 60])]
    for i in (0, 1):
        engine.add_request(str(i), prompts[i], greedy(2))
    engine.step()
    for i in (2, 3, 4):
        engine.add_request(str(i), prompts[i], greedy(2))
    outputs = run(engine)
    tokens = [greedy_output(p, 2) for p in prompts]
    assert {i: outputs[str(i)].outputs[0].token_ids for i in (2, 3, 4)} == dict(enumerate(tokens[2:], 2))
    row = lambda first, last: [*range(first, last + 1), *[0] * (15 - (last - first + 1))]  # noqa: E731
    assert_step(
        steps[1],
        figures(
            "five-requests/200-tokens",
            req_ids=["0", "1", "2", "3", "4"],
            num_scheduled_tokens=[1, 1, 93, 75, 30],
            num_computed_tokens=[54, 145, 0, 0, 0],
            input_ids=[tokens[0][0], tokens[1][0], *prompts[2], *prompts[3], *prompts[4][:30]],
            block_table=[row(1, 4), row(5, 14), row(15, 20), row(21, 25), row(26, 27)],
            attn_state="ChunkedPrefill",
        ),
    )
    mask = steps[1]["attn_mask"]
    assert mask.shape == (200, 146)
    assert np.array_equal(mask.sum(1), steps[1]["positions"] + 1)
    assert np.array_equal(mask, steps[1]["attention_mask"])


# -- 004: prompts of 11 and 17 tokens, S = 256; tables padded with −1 ----------------------------------------------


def test_a_decodes_tables_are_as_wide_as_the_longest_and_padded_with_minus_one():
    engine = make_engine(blocks=20, M=24, block_size=4, max_num_batched_tokens=64)
    steps = Steps(engine)
    for i, length in enumerate([11, 17]):
        engine.add_request(str(i), [*range(1 + i, length + 1 + i)], greedy(2))
    run(engine)
    assert_step(steps[1], {"block_tables": [[1, 2, 3, -1, -1], [4, 5, 6, 7, 8]], "context_lens": [12, 18]})
