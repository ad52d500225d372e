"""The kernels' draws against `foreword.sampling.reference`, token for token."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from device_place import WHERE, Device, host, to_device

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, SamplingParams, prepare_inputs
from foreword.batch.state.sampling_columns import COLUMNS
from foreword.device import sampling
from foreword.device.layout import NO_TOKEN
from foreword.device.rows import DeviceRows
from foreword.device.sampling import DeviceSampler
from foreword.sampling.reference import ReferenceRows, StepArrays
from foreword.sampling.rules import RequestRules

VOCAB = 300
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=-5),
    SamplingParams(temperature=1.3, seed=1 << 50, top_k=7),
    SamplingParams(temperature=0.7, seed=3, top_p=0.6),
    SamplingParams(temperature=1.1, seed=4, min_p=0.2),
    SamplingParams(temperature=2.0, seed=5, top_k=20, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=0, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(temperature=0.9, seed=6, frequency_penalty=-0.6, top_k=3),
    SamplingParams(temperature=1.0, seed=7, top_k=1),
    SamplingParams(temperature=1.0, seed=8, top_p=1e-9),
)
DRAFTS = {"1": [7, 9], "6": [3], "9": [5, 5]}


def sampled(logits_of, drafts) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that the device commits, and those of the reference, for a step of one request per PARAMS."""
    rng, R = np.random.default_rng(3), len(PARAMS)
    states = RequestStates(
        max_num_reqs=R, max_model_len=40, vocab_size=VOCAB, kv_groups=[KVGroup(8)], max_num_draft_tokens=2
    )
    for i, params in enumerate(PARAMS):
        prompt, outputs = rng.integers(0, 20, 6), rng.integers(0, 20, 9)
        blocks = [list(range(1 + 5 * i, 6 + 5 * i))]
        states.add_request(NewRequest(str(i), prompt, blocks, outputs, 14, params))
    rows, buffers = (
        DeviceRows(states, Device(), max_num_batched_tokens=40),
        InputBuffers(states, max_num_batched_tokens=40),
    )
    plan = {str(i): 1 + len(drafts.get(str(i), ())) for i in range(R)}
    batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts, pad_to=(24, R))
    logits = logits_of(rng, len(batch.logits_indices))
    rows.send(buffers)
    rows.prepare(24, R)
    padded = torch.zeros(24, VOCAB, device=WHERE)
    padded[: len(logits)] = to_device(logits)
    DeviceSampler(rows).sample(padded, num_logits=24, num_reqs=R)
    got = host(rows.tensors["sampled"]).reshape(R, 3)

    columns = {name: getattr(states.sampling, name) for name in COLUMNS}
    reference = ReferenceRows(columns, states.token_ids, states.prompt_len, states.num_tokens, VOCAB)
    for row, params in states.sampling.params.items():
        reference.set(row, *RequestRules.of(params, frozenset()))
    step = StepArrays(
        logits, batch.idx_mapping, batch.num_computed_tokens, batch.cu_num_logits,
        batch.positions[batch.logits_indices] + 1, batch.draft_token_ids, None, None, None,
    )  # fmt: skip
    expected = np.empty((R, 3), np.int32)
    reference.sample(*step, None, None, expected, None, None, None, None, None)
    return got, expected


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_draws_equal_the_reference(drafts, monkeypatch):
    monkeypatch.setattr(sampling, "_BLOCK", 128 if drafts else 512)  # several blocks of the vocabulary, or one
    got, expected = sampled(lambda rng, n: rng.standard_normal((n, VOCAB), np.float32) * 3, drafts or {})
    assert got.tolist() == expected.tolist()
    assert (expected[:, 0] >= 0).all()


def test_ties_and_impossible_tokens_are_drawn_as_by_the_reference(monkeypatch):
    """Few different logits, so that filters cut between equal ones; a third of the tokens is impossible."""
    monkeypatch.setattr(sampling, "_BLOCK", 128)

    def logits(rng, n):
        x = rng.integers(-2, 3, (n, VOCAB)).astype(np.float32)
        x[x == 0] *= rng.choice([-1.0, 1.0], (x == 0).sum()).astype(np.float32)
        x[rng.random(x.shape) < 0.3] = -np.inf
        return x

    got, expected = sampled(logits, DRAFTS)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_without_a_choice_draws_nothing(bad):
    def logits(rng, n):
        x = rng.standard_normal((n, VOCAB), np.float32)
        x[1, 200] = bad
        x[2] = -np.inf
        return x

    got, expected = sampled(logits, {})
    assert got[1].tolist() == got[2].tolist() == [NO_TOKEN, -1, -1]
    assert expected[1].tolist() == expected[2].tolist() == [-1, -1, -1]
    assert np.where(got == NO_TOKEN, -1, got).tolist() == expected.tolist()


def test_penalties_leave_out_positions_that_are_embeddings():
    """They have no token id; a mixed prompt has one, which is not read. The host's counts are the definition."""
    states = RequestStates(max_num_reqs=2, max_model_len=32, vocab_size=VOCAB, kv_groups=[KVGroup(8)])
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    embeds, is_token = np.ones((5, 8), np.float32), np.array([True, False, True, False, True])
    for rid, ids, mask in (("alone", None, None), ("mixed", [4, 7, 5, 7, 6], is_token)):
        states.add_request(
            NewRequest(rid, ids, [[1]], sampling_params=params, prompt_embeds=embeds, prompt_is_token_id=mask)
        )
    rows, buffers = (
        DeviceRows(states, Device(), max_num_batched_tokens=16),
        InputBuffers(states, max_num_batched_tokens=16),
    )
    batch = prepare_inputs(states, {"alone": 5, "mixed": 5}, buffers)
    rows.send(buffers)
    rows.prepare(10, 2)
    rows.check(batch)
    logits = torch.zeros(2, VOCAB, device=WHERE)
    logits[:, 0], logits[:, 7], logits[:, 9] = 2.9, 3.0, 1.0
    logits[1, 4] = 4.0  # a token of the mixed prompt
    DeviceSampler(rows).sample(logits, num_logits=2, num_reqs=2)
    assert rows.tensors["sampled"].tolist() == [7, 7]


def test_any_number_of_programs_counts_the_tokens_of_all_rows(monkeypatch):
    monkeypatch.setattr(sampling, "_PENALTY_PROGRAMS", 2)
    got, expected = sampled(lambda rng, n: rng.standard_normal((n, VOCAB), np.float32) * 3, DRAFTS)
    assert got.tolist() == expected.tolist()


def test_an_accepted_draft_brings_the_next_token():
    drawn, _ = sampled(lambda rng, n: np.tile(np.eye(1, VOCAB, 7, dtype=np.float32) * 50, (n, 1)), {"0": [7, 9]})
    assert drawn[0].tolist() == [7, 7, -1]
