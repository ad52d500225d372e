"""Step differences: the bytes from another process, decoded and applied in order.

An input is a few differences, each after its length as four bytes.
"""

import json
import struct
import zlib

import numpy as np

from foreword.batch import (
    ContextParallel,
    DifferenceRecorder,
    InputBuffers,
    KVGroup,
    LoraRequest,
    MultiModalFeature,
    NewRequest,
    RequestStates,
    SamplingParams,
    StepDifference,
    apply_difference,
    prepare_inputs,
    sampling_metadata,
)
from fuzz.mutations import DEEP, mutate_bytes, mutate_json
from fuzz.target import Target

PREFIX = struct.Struct("<4sIII")  # magic, version, bytes of the header, CRC-32 of header and arrays


def states_and_buffers():
    states = RequestStates(
        max_num_reqs=4,
        max_model_len=24,
        vocab_size=50,
        kv_groups=[KVGroup(4, context_parallel=True), KVGroup(2, sliding_window=3), KVGroup(1, recurrent=True)],
        max_num_draft_tokens=2,
        context_parallel=ContextParallel(size=2, rank=1, interleave=2),
    )
    return states, InputBuffers.for_states(states, 32)


def blocks(first):
    return [range(first, first + 3), range(first + 3, first + 15), [first + 15]]


def valid():
    """A run with arrivals, drafts, a departure, and requests with everything that few have."""
    states, buffers = states_and_buffers()
    recorder = DifferenceRecorder(states)
    out = []

    def step(plan, sampled, drafts=None):
        batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts)
        data = recorder.take(batch).to_bytes()
        out.append(struct.pack("<I", len(data)) + data)
        states.commit(batch, sampled)

    params = SamplingParams(temperature=0.5, seed=3, logit_bias={4: 1.5}, bad_words_token_ids=[[1, 2]], stop=["x"])
    states.add_request(NewRequest("a", [1, 2, 3], blocks(1), sampling_params=params))
    states.add_request(NewRequest("b", [4] * 7, blocks(20), num_computed_tokens=2, lora_id=1,
                                  lora_request=LoraRequest(1, "name", "path")))  # fmt: skip
    step({"a": 3, "b": 4}, {"a": [5]})
    rare = {
        "prompt_embeds": np.ones((4, 2), np.float32),
        "mm_features": [MultiModalFeature("image", 1, 2, np.array([True, False]), "image")],
        "mrope_positions": np.ones((3, 4), np.int32),
        "mrope_delta": 2,
        "encoder_len": 3,
    }
    states.add_request(NewRequest("c", None, blocks(40), **rare))
    step({"a": 3, "c": 4, "b": 1}, {"a": [6, 7], "c": [8], "b": [9]}, {"a": [6, 6]})
    states.remove_request("b")
    states.swap_rows(states.row_of("a"), states.row_of("c"))
    step({"c": 1, "a": 1}, {"a": [1], "c": [2]})
    return [b"".join(out[:count]) for count in (1, 2, 3)]


def hostile():
    def packed(header):
        return frame(sealed(header, b""))

    huge = (
        [["admitted.token_ids", "i4", 2**40 - 1]],
        [["a", "b1", *[2**39] * 3]],
        [["a", "i4", 0, 2**40 - 1]],
        [["tokens", "=u1", 2**40 - 1]],
    )
    return [
        *(packed(json.dumps({"step": 1, "arrays": table}).encode()) for table in huge),
        packed(b"[" * DEEP),
        packed(b'{"arrays": [' + b"[" * DEEP),
        frame(b""),
    ]


def frame(data):
    return struct.pack("<I", len(data)) + data


def sealed(header, arrays):
    """Header and arrays behind a prefix that belongs to them."""
    return PREFIX.pack(b"FWSD", 2, len(header), zlib.crc32(header + arrays)) + header + arrays


def frames(data):
    """The differences of an input; the last one may be cut."""
    while len(data) >= 4:
        size = int.from_bytes(data[:4], "little")
        yield data[4 : 4 + size]
        data = data[4 + size :]


def mutate(rng, data):
    """The header or the arrays of one difference, as a rule with the right checksum; or one repeated."""
    parts = list(frames(data))
    at = rng.randrange(len(parts))
    size = PREFIX.unpack_from(parts[at])[2]
    header, arrays = parts[at][PREFIX.size :][:size], parts[at][PREFIX.size + size :]
    match rng.randrange(10):
        case 0:
            parts[at] = mutate_bytes(rng, parts[at])
        case 1:
            parts.insert(rng.randrange(len(parts) + 1), parts[at])
        case 2 | 3 | 4 | 5:
            parts[at] = sealed(mutate_json(rng, header), arrays)
        case _:
            changed = bytearray(arrays)
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.choice((0, 1, 2, 3, 127, 128, 255, rng.randrange(256)))
            parts[at] = sealed(header, bytes(changed))
    return b"".join(map(frame, parts))


def read(data, folder):
    states, buffers = states_and_buffers()
    for part in frames(data):
        batch = apply_difference(states, StepDifference.from_bytes(part), buffers)
        str(batch.explain(0))
        sampling_metadata(batch)


TARGET = Target(valid, read, mutate, hostile)
