"""The fields that an admission, a move, a removal and a step in flight write to a row, each compared with the request
itself.
"""

from functools import partial

import numpy as np
import pytest
from batch_rig import states_and_buffers, states_of

from foreword.batch import (
    BatchUpdates,
    InputBuffers,
    KVGroup,
    MultiModalFeature,
    NewRequest,
    NewRequests,
    PoolingParams,
    RequestStates,
    SamplingParams,
    advance,
    prepare_inputs,
    resolve,
)
from foreword.batch.adapters.vllm_preempted import preempt, resume
from foreword.batch.state.changes import make as make_changes

GROUPS = [KVGroup(block_size=4), KVGroup(block_size=2)]
ROWS = 4
FEATURES = [MultiModalFeature(f"image {i}", 1, 2) for i in range(ROWS)]
make = partial(states_of, *GROUPS, rows=ROWS, length=16)


def values(serial: int = 0, **changes) -> dict[str, object]:
    """Every field of a request; no two requests of different ``serial`` share a value or a length."""
    prompt = [5 + serial, *range(6, 8 + serial)]
    return {
        "prompt_token_ids": prompt,
        "block_ids": [[11 + serial, *range(12, 13 + serial // 2)], [21 + serial, 22, 23, *range(24, 24 + serial)]],
        "output_token_ids": [8, 9 + serial],
        "num_computed_tokens": 1 + serial,
        "sampling_params": SamplingParams(
            temperature=0.5 + serial, top_k=3 + serial, seed=70 + serial, presence_penalty=0.25 * (serial > 1)
        ),
        "lora_id": 4 + serial,
        "prompt_embeds": np.full((len(prompt), 2), serial, np.float32),
        "prompt_is_token_id": np.arange(len(prompt)) % 2 == 0,
        "mm_features": (FEATURES[serial],),
        "mrope_positions": np.arange(9).reshape(3, 3) + serial,
        "mrope_delta": -2 - serial,
        "encoder_len": 17 + serial,
    } | changes


def fields(states: RequestStates, rid: str) -> dict[str, object]:
    """Everything the states hold about a request."""
    row = states.row_of(rid)
    known, extras = int(states.num_tokens[row]), states.extras
    columns = ("num_computed_tokens", "num_placeholders", "num_accepted_tokens", "prompt_len", "prefill_len",
               "last_sampled_token", "lora_id", "rope_delta", "encoder_len", "live")  # fmt: skip
    mask = states.extras.is_embedding
    return {
        "req_id": states.req_id_of(row),
        "tokens": states.token_ids[row, :known].tolist(),
        **{name: getattr(states, name)[row].item() for name in columns},
        **{name: getattr(states.sampling, name)[row].item() for name in ("temperature", "top_k", "seed", "needs")},
        "presence_penalty": states.sampling.presence_penalty[row].item(),
        "params": states.sampling.params.get(row),
        "blocks": [t.table[row].tolist() for t in states.block_tables],
        "num_blocks": [int(t.num_blocks[row]) for t in states.block_tables],
        "embeds": np.asarray(extras.prompt_embeds.get(row, ())).tolist(),
        "is_embedding": None if mask is None else mask[row].tolist(),
        "features": extras.mm_features.get(row),
        "mrope": np.asarray(extras.mrope_positions.get(row, ())).tolist(),
        "pooling": extras.pooling_params.get(row),
    }


def expected(rid: str, v: dict, num_placeholders: int = 0, num_accepted: int = 1) -> dict[str, object]:
    """Return the fields that the states must hold for a request made from these values."""
    tokens, params = [*v["prompt_token_ids"], *v["output_token_ids"]], v["sampling_params"]
    return {
        "req_id": rid,
        "tokens": tokens,
        "num_computed_tokens": v["num_computed_tokens"],
        "num_placeholders": num_placeholders,
        "num_accepted_tokens": num_accepted,
        "prompt_len": len(v["prompt_token_ids"]),
        "prefill_len": len(tokens),
        "last_sampled_token": tokens[-1],
        "lora_id": v["lora_id"],
        "rope_delta": v["mrope_delta"],
        "encoder_len": v["encoder_len"],
        "live": True,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "seed": params.seed,
        "needs": 2 + 8 + (32 if params.presence_penalty else 0),  # random, top k, penalties
        "presence_penalty": params.presence_penalty,
        "params": params,
        "blocks": [list(ids) + [0] * (w - len(ids)) for ids, w in zip(v["block_ids"], (4, 8), strict=True)],
        "num_blocks": [len(ids) for ids in v["block_ids"]],
        "embeds": v["prompt_embeds"].tolist(),
        "is_embedding": [*(~v["prompt_is_token_id"]).tolist()] + [False] * (16 - len(v["prompt_token_ids"])),
        "features": v["mm_features"],
        "mrope": v["mrope_positions"].tolist(),
        "pooling": v.get("pooling_params"),
    }


def test_an_admission_writes_every_field_of_its_row():
    states = make()
    for i in range(ROWS):
        assert states.add_request(NewRequest(f"r{i}", **values(i))) == i
    assert states.req_ids == ("r0", "r1", "r2", "r3")
    for i in range(ROWS):
        assert states.row_of(f"r{i}") == i
        assert fields(states, f"r{i}") == expected(f"r{i}", values(i))
        assert states.loras.users(4 + i) == (f"r{i}",)
    assert states.loras.in_use == (4, 5, 6, 7)


def test_the_row_freed_last_serves_the_next_request():
    states = make()
    for i in range(ROWS):
        states.add_request(NewRequest(f"r{i}", **values(i)))
    for rid in ("r1", "r3"):
        assert states.remove_request(rid)
    assert not states.remove_request("r1")
    again = {"x": values(2), "y": values(1, pooling_params=PoolingParams(dimensions=2))}
    assert [states.add_request(NewRequest(rid, **v)) for rid, v in again.items()] == [3, 1]
    assert {rid: fields(states, rid) for rid in again} == {rid: expected(rid, v) for rid, v in again.items()}


@pytest.mark.parametrize("move", ["swap", "condense"])
def test_a_row_moves_with_every_field_and_its_step_in_flight(move):
    states = make()
    given = [values(i, num_computed_tokens=4 + i) for i in range(3)]
    for i, v in enumerate(given):
        states.add_request(NewRequest(f"r{i}", **v))
    batch = prepare_inputs(states, {"r2": 1}, InputBuffers.for_states(states, 16))
    advance(states, batch)
    states.num_accepted_tokens[:] = 2, 3, 4, 1  # as verification steps would leave them
    if move == "swap":
        states.swap_rows(0, 2)
        assert [states.row_of(f"r{i}") for i in range(3)] == [2, 1, 0]
    else:
        states.remove_request("r0")
        assert states.condense() == [(2, 0)]
        assert [states.row_of(f"r{i}") for i in (1, 2)] == [1, 0]
    for i, v in list(enumerate(given))[move == "condense" :]:
        in_flight = int(i == 2)
        want = expected(f"r{i}", v | {"num_computed_tokens": 4 + i + in_flight}, in_flight, 2 + i)
        assert fields(states, f"r{i}") == want


def test_placeholders_are_what_the_steps_in_flight_will_add_at_most():
    states = make(drafts=2)
    for rid, tokens in (("a", [1]), ("b", [1, 2, 3, 4])):
        states.add_request(NewRequest(rid, tokens, [[1 + 2 * len(tokens), 2], [3, 4, 5 + len(tokens)]]))
    buffers = [InputBuffers.for_states(states, 16) for _ in range(2)]
    first = prepare_inputs(states, {"a": 3, "b": 2}, buffers[0], draft_tokens={"a": [7, 8]})
    advance(states, first)
    assert states.num_placeholders.tolist() == [3, 0, 0, 0]  # one sample and two drafts; b is a prompt chunk
    assert states.num_computed_tokens.tolist() == [3, 2, 0, 0]
    second = prepare_inputs(states, {"a": 1, "b": 2}, buffers[1])
    states.commit(first, {"a": [7, 9]})
    assert states.num_placeholders.tolist() == [0, 0, 0, 0]
    assert states.num_computed_tokens.tolist() == [2, 2, 0, 0]  # one draft was rejected
    resolve(second)
    states.commit(second, {"a": [4], "b": [5]})
    assert states.num_computed_tokens.tolist() == [3, 4, 0, 0]
    assert states.num_tokens.tolist() == [4, 5, 0, 0]
    assert states.last_sampled_token.tolist() == [4, 5, -1, -1]


def test_a_preempted_request_comes_back_in_the_row_that_is_returned():
    states, before = make(), values()
    states.add_request(NewRequest("other", **values(1)))
    states.add_request(NewRequest("a", **before))
    kept = preempt(states, "a")
    assert "a" not in states
    assert states.req_ids == ("other",)
    assert resume(states, kept, [[31], [32, 33]], 2) == states.row_of("a") == 1
    assert fields(states, "a") == expected("a", before | {"block_ids": [[31], [32, 33]], "num_computed_tokens": 2})


def test_columns_of_a_preempted_request_come_back():
    """A request admitted by columns has no parameters object; one with the defaults has no columns of its own."""
    states, two = make(), np.full(2, 2, np.int32)
    given = {"temperature": np.array([0.5, 0.75], np.float32), "top_k": np.array([3, 0], np.int32),
             "seed": np.array([-7, 8]), "min_p": np.array([0.25, 0.0], np.float32),
             "num_prompt_logprobs": np.array([4, -1], np.int32)}  # fmt: skip
    columns = {"token_ids": np.arange(4, dtype=np.int32), "num_tokens": two, "block_ids": [two, two],
               "num_blocks": [two // 2, two // 2]}  # fmt: skip
    states.add_requests(NewRequests(req_ids=["a", "b"], sampling=given, **columns))
    states.add_request(NewRequest("plain", [1], [[3], [3]]))
    kept = {rid: preempt(states, rid) for rid in ("a", "plain", "b")}
    assert states.sampling.needs.tolist() == [1] * ROWS
    for rid in ("plain", "b", "a"):
        row = resume(states, kept[rid], [[5], [6]], 0)
        i = {"a": 0, "b": 1}.get(rid)
        for name in given:
            default = -1 if name == "num_prompt_logprobs" else 0
            assert getattr(states.sampling, name)[row] == (default if i is None else given[name][i]), name
        # random, top k, min p, prompt log-probabilities
        assert states.sampling.needs[row] == {"a": 2 + 8 + 16 + 128, "b": 2, "plain": 1}[rid]


def test_a_table_row_holds_what_it_was_started_with_and_what_was_appended():
    states = make()
    states.add_request(NewRequest("a", [1], [[5], [6]]))
    table = states.block_tables[1]
    states.append_blocks("a", [[], [7, 8]])
    assert (table.table[0].tolist(), table.num_blocks[0]) == ([6, 7, 8, 0, 0, 0, 0, 0], 3)
    states.append_blocks_rows(np.array([0, 0], np.int32), np.array([9, 4], np.int32), group=1)
    assert (table.table[0].tolist(), table.num_blocks[0]) == ([6, 7, 8, 9, 4, 0, 0, 0], 5)
    assert (states.block_tables[0].table[0].tolist(), states.block_tables[0].num_blocks[0]) == ([5, 0, 0, 0], 1)
    before = table.content_id[0]
    make_changes(table.start(0, np.array([1, 2], np.int32)))
    assert (table.table[0].tolist(), table.num_blocks[0]) == ([1, 2, 0, 0, 0, 0, 0, 0], 2)
    assert table.content_id[0] != before
    make_changes(table.start(0, np.array([], np.int32)))
    assert (table.table[0].tolist(), table.num_blocks[0]) == ([0] * 8, 0)


def test_a_change_of_rows_carries_what_a_processor_needs():
    states, second = make(), values(2)
    states.add_request(NewRequest("first", **values(1)))
    updates = BatchUpdates(states)
    states.add_request(NewRequest("second", **second))
    states.swap_rows(0, 3)
    change = updates.take()
    assert (change.removed, change.moved) == ((), ((0, 3),))
    (added,) = change.added
    assert (added.row, added.req_id, added.params) == (1, "second", second["sampling_params"])
    assert added.prompt_token_ids.tolist() == second["prompt_token_ids"]
    assert added.output_token_ids.tolist() == second["output_token_ids"]
    states.remove_request("first")
    change = updates.take()
    assert (change.added, change.removed, change.moved) == ((), (3,), ())


def test_states_and_buffers_show_what_they_hold():
    states, buffers = states_and_buffers(KVGroup(2), KVGroup(4), rows=40, length=64, tokens=99)
    assert repr(states) == "<RequestStates: 0 of 40 rows live>"
    assert (
        str(states.explain())
        == "0 of 40 rows hold a request\nrequest  row  prompt  tokens  computed  in flight  blocks"
    )
    for name, prompt in (("first", [1, 2, 3]), ("b", [4])):
        states.add_request(NewRequest(name, prompt, [[7, 8], [9]]))
    batch = prepare_inputs(states, {"first": 2}, buffers)
    assert repr(buffers) == f"<InputBuffers: 1 of 40 requests, 2 of 99 tokens, {buffers.arena.nbytes} bytes>"
    states.commit(batch, {})
    assert repr(states) == (
        "<RequestStates: 2 of 40 rows live; 'first' (row 0): 3 tokens, 2 computed; 'b' (row 1): 1 tokens, 0 computed>"
    )
    assert str(states.explain()).splitlines() == [
        "2 of 40 rows hold a request",
        "request  row  prompt  tokens  computed  in flight  blocks",
        "first    0    3       3       2         0          [7, 8][9]",
        "b        1    1       1       0         0          [7, 8][9]",
    ]
    for i in range(38):
        states.add_request(NewRequest(str(i), [1], [list(range(1, 15)), []]))
    assert repr(states).endswith("'5' (row 7): 1 tokens, 0 computed; 32 more>")
    lines = str(states.explain()).splitlines()
    assert lines[-1] == "… 8 more"
    assert lines[-2].endswith("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, …][]")
    assert states.explain().rows[-1].blocks == (tuple(range(1, 15)), ())
