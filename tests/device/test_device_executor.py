"""The executor's calls of a device, counted, and its tokens against the NumPy executor's."""

import sys
from pathlib import Path

import numpy as np
import pytest

from foreword.batch import InputBuffers, KVGroup, NewRequest, PaddingBuckets, RequestStates, prepare_inputs
from foreword.batch import sampling_metadata as metadata_of
from foreword.device.recording import RecordingDevice
from foreword.device.ring import PacketRing
from foreword.errors import ConfigError
from foreword.executors.device import DeviceExecutor
from foreword.sampling import Processors

sys.path.append(str(Path(__file__).parents[1] / "kernels"))  # the small random models

VOCAB = 50
LAUNCHES = [f"launch {name}" for name in ("apply_runs", "prepare_step", "penalize", "draw_tokens", "verify_drafts")]


class NoModel:
    """Launches nothing."""

    hidden_size = mrope_dims = 0
    adapters = None

    def forward(self, rows, num_tokens, num_reqs, num_logits, inputs):
        return np.zeros((num_logits, VOCAB), np.float32)


class Loop:
    """Decode steps of some requests on a device that records."""

    def __init__(self, num_reqs: int = 5, buckets=(8, 16)) -> None:
        self.states = RequestStates(
            max_num_reqs=num_reqs, max_model_len=90, vocab_size=VOCAB, kv_groups=[KVGroup(4)], max_num_draft_tokens=1
        )
        self.device = RecordingDevice()
        self.executor = DeviceExecutor(NoModel(), self.device, buckets=PaddingBuckets(buckets, max_num_reqs=num_reqs))
        self.buffers = [InputBuffers.for_states(self.states, 32) for _ in range(2)]
        self.processors, self.steps = Processors(self.states), 0
        for i in range(num_reqs):
            self.states.add_request(NewRequest(str(i), [1, 2, 3], [[1 + i]]))

    def step(self, tokens: int, num_reqs: int | None = None) -> list[str]:
        """The calls of a step of ``tokens`` tokens each."""
        del self.device.calls[:]
        states, rids = self.states, self.states.req_ids[:num_reqs]
        for rid in rids:
            if states.num_computed_tokens[states.row_of(rid)] % 4 == 3:
                states.append_blocks(rid, [[100 + self.steps]])
        self.steps += 1
        batch = prepare_inputs(
            states, dict.fromkeys(rids, tokens), self.buffers[self.steps % 2], gather_block_tables=False,
            pad_to=self.executor.pad_for(tokens * len(rids), len(rids)),
        )  # fmt: skip
        self.executor.launch(batch, self.processors.step(metadata_of(batch), None)).result()
        states.commit(batch, np.full(batch.num_reqs, 7, np.int32))
        return self.device.calls


def test_a_steady_decode_step_is_one_copy_to_the_device_one_launch_and_one_copy_back():
    """Nothing is allocated, and nothing awaited but the result: also in the steps in which blocks are appended."""
    loop = Loop()
    loop.step(3)
    first = [call for call in loop.step(1) if call != "wait"]  # the prompts took two packets
    assert first == ["to device", *LAUNCHES, "launch commit_samples", "from device", "record"]
    loop.step(1)  # captures
    addresses = {name: id(tensor) for name, tensor in loop.executor._rows.tensors.items()}
    for _ in range(12):
        assert loop.step(1) == ["to device", "replay", "from device", "record", "wait"]
    assert {name: id(tensor) for name, tensor in loop.executor._rows.tensors.items()} == addresses
    assert loop.device.captured == [[*LAUNCHES, "launch commit_samples"]]


def test_a_graph_serves_all_steps_of_its_padded_size():
    loop = Loop()
    for num_reqs in (5, 4, 3, 5, 4):
        loop.step(3 if loop.steps == 0 else 1, num_reqs)
    assert loop.step(1, 3)[1] == "replay"
    assert len(loop.device.captured) == 1  # that of the decode steps; the prompts' size came once


def test_a_step_larger_than_every_graph_runs_without_one():
    loop = Loop(buckets=(4,))
    loop.step(3)
    assert "capture" not in loop.step(1)
    assert "replay" not in loop.step(1)
    assert loop.step(1, 2)[1:2] == LAUNCHES[:1]
    assert "capture" in loop.step(1, 2)


def test_a_packet_is_written_again_only_after_its_event():
    device = RecordingDevice()
    ring = PacketRing(device, depth=2, packet_size=8, sampled_size=4)
    first, second = ring.acquire(), ring.acquire()
    first.launched()
    second.launched()
    del device.calls[:]
    assert ring.acquire() is first
    assert device.calls == ["wait"]
    second.wait()
    assert ring.acquire() is second
    assert device.calls == ["wait", "wait"]
    with pytest.raises(ConfigError, match="depth=0"):
        PacketRing(device, depth=0, packet_size=8, sampled_size=4)


def test_samples_are_read_before_their_slot_is_used_again():
    """More steps in flight than the ring has slots: each result is that of its own step."""
    loop, samples = Loop(), iter(range(1, 6))

    def copy(to, source):
        RecordingDevice.copy(loop.device, to, source)
        if loop.device.calls[-1] == "from device":
            to[:] = next(samples)

    loop.device.copy = copy
    steps = []
    for rid in loop.states.req_ids:
        batch = prepare_inputs(loop.states, {rid: 3}, loop.buffers[0])
        steps.append(loop.executor.launch(batch, loop.processors.step(metadata_of(batch), None)))
    del steps[1]  # no code waits for this step
    assert [step.result().token_ids.tolist() for step in steps] == [[1], [3], [4], [5]]


def test_the_rows_of_another_engine_are_refused():
    loop, other = Loop(), Loop()
    loop.step(3)
    other.executor = loop.executor
    with pytest.raises(ConfigError, match="one per engine"):
        other.step(3)


def test_every_size_is_captured_before_the_first_request():
    """No step is captured while requests are served, whatever its tokens and requests are."""
    loop = Loop(num_reqs=6, buckets=(1, 2, 4, 8))
    loop.executor.start(loop.states, max_num_batched_tokens=32)
    assert len(loop.device.captured) == 4
    assert set(map(tuple, loop.device.captured)) == {(*LAUNCHES, "launch commit_samples")}
    for tokens, num_reqs in ((3, 2), (1, 6), (1, 3), (1, 1), (1, 5)):
        calls = loop.step(tokens, num_reqs)
        assert "replay" in calls
        assert "capture" not in calls
    assert len(loop.device.captured) == 4


def test_a_prompt_alone_shares_the_graph_of_its_bucket():
    """The number of graphs is that of the buckets, not that of the prompts' lengths."""
    buckets = PaddingBuckets.up_to(64, max_num_reqs=64)
    executor = DeviceExecutor(NoModel(), RecordingDevice(), buckets=buckets)
    sizes = {executor.pad_for(tokens, reqs) for tokens in range(1, 65) for reqs in range(1, tokens + 1)}
    assert sizes == set(buckets.graphs())
    assert executor.pad_for(60, 1) == (64, 64)


def test_a_size_that_is_no_bucket_has_no_graph():
    loop = Loop(buckets=(4, 16))
    loop.executor.pad_for = lambda tokens, reqs: None
    for _ in range(3):
        assert not {"capture", "replay"} & set(loop.step(1))


def test_after_a_capture_that_fails_no_other_is_tried():
    loop, tried = Loop(), []

    def capture(work):
        tried.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    loop.device.capture = capture
    with pytest.warns(RuntimeWarning, match="without graphs.*not permitted"):
        notes = loop.executor.start(loop.states, max_num_batched_tokens=32)
    assert "max_graph_tokens=0" in notes[0]
    for n in (3, 1, 1, 1):
        assert "launch commit_samples" in loop.step(n)
    assert len(tried) == 1


def test_a_step_without_a_graph_computes_the_logits_of_its_own_requests():
    loop, found = Loop(buckets=(1,)), []

    class Model(NoModel):
        def forward(self, rows, num_tokens, num_reqs, num_logits, inputs):
            found.append(num_logits)
            return super().forward(rows, num_tokens, num_reqs, num_logits, inputs)

    loop.executor.model = Model()
    loop.step(3, 2)
    loop.step(1, 2)
    assert found == [2, 2]


def test_graphs_of_larger_steps_than_there_are_are_refused():
    loop = Loop(buckets=(8, 64))
    with pytest.raises(ConfigError, match="max_graph_tokens=64: a step has at most max_num_batched_tokens=32"):
        loop.executor.start(loop.states, max_num_batched_tokens=32)


def test_tokens_equal_the_numpy_executors():
    """An engine on the kernels, in the interpreter, every step checked: chunked prompts, prefix hits, graphs, a greedy
    and a sampled request, and one with penalties and log-probabilities, whose steps are sampled on the host.
    """
    torch = pytest.importorskip("torch", reason="the kernels need torch")
    pytest.importorskip("triton", reason="the kernels need Triton")
    from device_model import TorchDecoder
    from device_place import Device
    from kernel_reference import random_weights, rope, tiny_spec

    from foreword.engine import Engine, engine_config
    from foreword.executors.numpy import NumpyExecutor
    from foreword.models.spec import LayerSpec

    torch.set_num_threads(1)
    spec = tiny_spec(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_heads=4, num_kv_heads=2, qk_norm=True,
        layers=(LayerSpec(rope(16)), LayerSpec(rope(16))),
    )  # fmt: skip
    weights = random_weights(spec)
    model = TorchDecoder(spec, weights, num_blocks=40, block_size=4)
    buckets = PaddingBuckets((4, 8), max_num_reqs=4)
    executors = [
        DeviceExecutor(model, Device(), buckets=buckets),
        NumpyExecutor(spec, weights, num_blocks=40, block_size=4),
    ]
    found = [_tokens(Engine, engine_config, executor) for executor in executors]
    assert found[0] == found[1]
    assert all(len(tokens) == 5 for tokens in found[0].values())


def _tokens(engine_type, config, executor) -> dict[str, list[int]]:
    from foreword.batch import SamplingParams

    engine = engine_type(
        executor, vocab_size=VOCAB, max_model_len=60, kv_groups=[KVGroup(4)], num_blocks=40, tokenizer=None,
        config=config({"max_num_seqs": 4, "max_num_batched_tokens": 8, "block_size": 4, "check": "full"}),
    )  # fmt: skip
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, VOCAB, 11).tolist()
    for i, params in enumerate(
        (
            SamplingParams(temperature=0, max_tokens=5),
            SamplingParams(temperature=0.9, seed=4, top_k=9, top_p=0.9, max_tokens=5),
            SamplingParams(temperature=0.7, seed=9, repetition_penalty=1.3, max_tokens=5, logprobs=2),
        )
    ):
        engine.add_request(str(i), [*prompt[: 11 - i], i], params)
    done = {}
    while engine.has_work:
        done |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step() if output.finished}
    return done
