"""The inputs that few steps have beside tokens, against the definition of each token's own."""

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.errors import RequestError
from foreword.executors.inputs import TEXT, StepInputs
from foreword.executors.numpy import NumpyExecutor
from kernels.kernel_reference import SPECS, random_weights

H, BLOCK, LENGTH = 6, 4, 9
RNG = np.random.default_rng(3)
VECTORS = {name: RNG.normal(size=(LENGTH, H)).astype(np.float32) for name in ("vectors", "both")}
POSITIONS = {name: RNG.integers(0, 30, (3, LENGTH)) for name in ("positions", "both")}
DELTAS = {"positions": -2, "both": 3}
IS_TOKEN = np.arange(LENGTH) % 3 != 1


class Model:
    """An executor with what `StepInputs` asks of it."""

    def __init__(self, hidden_size=H, extra_size=0, mrope_dims=3):
        self.hidden_size, self.extra_size, self.mrope_dims = hidden_size, extra_size, mrope_dims


def request(name, row):
    more = {}
    if name in VECTORS:
        more |= {"prompt_embeds": VECTORS[name], "prompt_is_token_id": IS_TOKEN}
    if name in POSITIONS:
        more |= {"mrope_positions": POSITIONS[name], "mrope_delta": DELTAS[name]}
    return NewRequest(name, list(range(1, LENGTH + 1)), [list(range(1 + 4 * row, 5 + 4 * row))], **more)


def steps(*names):
    """Each step's batch: prompts in chunks of other sizes, then tokens that are decoded."""
    states = RequestStates(max_num_reqs=4, max_model_len=16, vocab_size=50, kv_groups=[KVGroup(BLOCK)])
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=32)
    for row, name in enumerate(names):
        states.add_request(request(name, row))
    for sizes in ((4, 3, 5, 2), (5, 6, 4, 7), (1, 1, 1, 1), (1, 1, 1, 1)):
        batch = prepare_inputs(states, dict(zip(names, sizes, strict=False)), buffers, check="full")
        yield batch
        states.commit(batch, {name: [7] for name in batch.req_ids})


def definition(batch):
    """The rotary positions [3, T] of a step, and the vectors of its tokens that have one."""
    rotary, vectors = np.zeros((3, batch.num_tokens), np.int64), {}
    for t in range(batch.num_tokens):
        name, p = batch.req_ids[batch.req_indices[t]], int(batch.positions[t])
        known = name in POSITIONS and p < LENGTH
        rotary[:, t] = POSITIONS[name][:, p] if known else p + DELTAS.get(name, 0)
        if name in VECTORS and p < LENGTH and not IS_TOKEN[p]:
            vectors[t] = VECTORS[name][p]
    return rotary, vectors


@pytest.mark.parametrize("names", [("plain", "vectors", "positions", "both"), ("positions", "plain"), ("vectors",)])
def test_every_token_has_its_own_vector_and_rotary_positions(names):
    for batch in steps(*names):
        inputs, (rotary, vectors) = StepInputs.of(batch, Model()), definition(batch)
        own = np.tile(batch.positions[: batch.num_tokens], (3, 1)) if inputs.mrope is None else inputs.mrope
        np.testing.assert_array_equal(own, rotary)
        assert own.flags.c_contiguous
        assert (inputs.embeds is None) == (not vectors)
        if inputs.embeds is not None:
            assert inputs.embeds[0].tolist() == list(vectors)
            np.testing.assert_array_equal(inputs.embeds[1], np.stack(list(vectors.values())))


def test_an_executor_that_adds_offsets_itself_gets_positions_of_prompts_alone():
    found = []
    for batch in steps("plain", "positions"):
        inputs, (rotary, _) = StepInputs.of(batch, Model(), adds_rope_delta=True), definition(batch)
        found.append(inputs.mrope is not None)
        delta = batch.states.rope_delta[batch.idx_mapping][batch.req_indices]
        own = np.tile(batch.positions[: batch.num_tokens] + delta, (3, 1)) if inputs.mrope is None else inputs.mrope
        np.testing.assert_array_equal(own, rotary)
    assert found == [True, True, False, False]


def test_a_step_of_text_and_a_model_that_reads_tokens_alone_have_no_inputs():
    assert all(StepInputs.of(batch, Model()) is TEXT for batch in steps("plain"))
    assert all(StepInputs.of(batch, Model(mrope_dims=0)) is TEXT for batch in steps("positions"))


def test_vectors_of_another_width_are_refused_and_those_of_several_layers_are_read():
    batch = next(steps("vectors"))
    with pytest.raises(RequestError, match=r"'vectors'.*prompt_embeds.*have 5 values"):
        StepInputs.of(batch, Model(hidden_size=5))
    assert StepInputs.of(batch, Model(hidden_size=2, extra_size=4)).embeds is not None


def test_an_executor_reads_what_its_sizes_say():
    spec = SPECS["llama"]
    executor = NumpyExecutor(spec, random_weights(spec), num_blocks=2, block_size=BLOCK)
    names = {capability.name for capability in executor.capabilities}
    assert "PROMPT_EMBEDS" in names
    assert "MROPE" not in names
