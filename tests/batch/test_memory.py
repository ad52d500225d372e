"""Where tensors are: one arena from the caller's memory, the same addresses in every step, pad values behind a step."""

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from batch_rig import address, arrays, every_backend, states_of

from foreword.batch import (
    ContextParallel,
    InputBatch,
    InputBuffers,
    KVGroup,
    MultiModalFeature,
    NewRequest,
    PlanError,
    RequestStates,
    StagingRing,
    discard_mask,
    encoder_seq_lens,
    is_token_ids,
    kernel_block_table,
    lora_mapping,
    micro_batches,
    mm_inputs,
    mrope_positions,
    prepare_inputs,
    share_prefill,
    state_indices,
)
from foreword.batch.adapters import (
    ascend_metadata,
    chunked_local,
    common_attention_metadata,
    flash_attn_varlen,
    flashinfer_plan,
    indexer_inputs,
    nano_vllm_context,
    sglang_forward_batch,
    token_tables,
)
from foreword.batch.state.layout import ROWS
from foreword.batch.step.layout import OPTIONAL, STEP
from foreword.errors import ConfigError
from foreword.native import native

R, M, T, D = 5, 24, 48, 2


def make(cp: ContextParallel | None = None, null: int = 0) -> RequestStates:
    """Three requests of each kind, in rows 0 … 2."""
    groups = KVGroup(4, kernel_block_size=2, context_parallel=cp is not None), KVGroup(3, sliding_window=5)
    states = states_of(*groups, rows=R, length=M, drafts=D, context_parallel=cp, null_block=null)
    for i in range(3):
        blocks = [list(range(20 * i + 1, 20 * i + 1 + t.width)) for t in states.block_tables]
        n = 8 + i
        states.add_request(
            NewRequest(
                f"r{i}", [1 + i] * n, blocks, lora_id=i, encoder_len=5 * i, mrope_delta=i,
                prompt_embeds=np.ones((n, 2), np.float32) if i == 1 else None,
                mm_features=(MultiModalFeature("image", 2, 4),) if i == 2 else (),
                mrope_positions=np.arange(3 * n).reshape(3, n) + i if i else None,
            )
        )  # fmt: skip
    return states


def steps(states: RequestStates, seed: int = 0) -> Iterator[tuple[dict, dict | None, tuple]]:
    """Plans of any size, with chunks, decodes, drafts and padding; the caller commits each."""
    rng = random.Random(seed)
    for _ in range(40):
        plan, drafts = {}, {}
        for rid in rng.sample(states.req_ids, len(states)):
            row = states.row_of(rid)
            known = int(states.num_tokens[row])
            rest = known - int(states.num_computed_tokens[row])
            if rng.random() < 0.3 or known + D + 1 > M:
                continue
            n = rng.choice([rest, rng.randint(1, rest)])
            k = rng.randint(0, D) if n == rest else 0
            plan[rid] = n + k
            if k:
                drafts[rid] = [4] * k
        pads = rng.choice([None, rng.randint(sum(plan.values()), T)]), rng.choice([None, rng.randint(len(plan), R)])
        yield plan, drafts or None, pads


def outputs(batch: InputBatch, spread: bool = False) -> dict[str, np.ndarray]:
    """Every array that a function or an adapter makes of a step."""
    lora, found = lora_mapping(batch), {}
    found |= {f"lora {name}": getattr(lora, name) for name in ("requests", "tokens", "logits")}
    found["is_token_ids"] = is_token_ids(batch)
    found["is_mm_embed"] = mm_inputs(batch).is_mm_embed
    found["mrope"] = mrope_positions(batch)
    found["encoder"] = encoder_seq_lens(batch)
    found["discard"] = discard_mask(batch)
    for number, micro in enumerate(micro_batches(batch, [batch.num_tokens // 2] if batch.num_tokens > 1 else [])):
        own = "query_start_loc", "num_computed_tokens", "seq_lens", "logits_indices"
        found |= {f"micro {number} {name}": getattr(micro, name) for name in own}
    share = share_prefill(batch, 2, 1)
    found |= {f"share {name}": getattr(share, name) for name in share.__slots__ if name != "num_tokens"}
    for g in (0, 1):
        found[f"kernel_block_table {g}"] = kernel_block_table(batch, g)
        states = state_indices(batch, g)
        forms = {"read": states.read, "write": states.write}
        made = [("flash", flash_attn_varlen(batch, g)), ("flashinfer", flashinfer_plan(batch, g)),
                ("common", common_attention_metadata(batch, g, num_logits_padded=T))]  # fmt: skip
        if not spread:
            made += [("tokens", token_tables(batch, g)), ("ascend", ascend_metadata(batch, g))]
            made += [("nano", nano_vllm_context(batch, g)), ("indexer", indexer_inputs(batch, g))]
            made += [("sglang", sglang_forward_batch(batch, g))] if not len(batch.draft_token_ids) else []
            made += [("local", chunked_local(batch, 2 * batch.states.block_tables[g].tokens_per_block, g))]
        forms |= {f"{kind} {name}": getattr(form, name) for kind, form in made for name in form.__slots__}
        forms.pop("ascend attn_mask", None)  # made by the caller's AscendMasks
        found |= {f"{name} {g}": value for name, value in forms.items() if isinstance(value, np.ndarray)}
    return found


# -- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@every_backend
@pytest.mark.parametrize("null", [0, -1])
@pytest.mark.parametrize("spread", [False, True])
def test_every_array_of_a_feature_or_an_adapter_is_at_one_address_and_as_in_new_buffers(backend, null, spread):
    """A graph captured over one step reads the next one there, and nothing of an earlier or larger step."""
    states = make(ContextParallel(2, 1, 2) if spread else None, null)
    buffers, at = InputBuffers.for_states(states, T), {}
    for plan, drafts, pads in steps(states):
        fresh = InputBuffers.for_states(states, T)
        both = []
        for b in (fresh, buffers):
            batch = prepare_inputs(states, plan, b, draft_tokens=drafts, pad_to=pads, backend=backend)
            both.append(outputs(batch, spread))
        first, again = both
        assert set(first) == set(again)
        for name, array in again.items():
            assert np.array_equal(array, first[name]), name
            if array.size:
                assert at.setdefault(name, address(array)) == address(array), name
        states.commit(batch, {rid: [7] for rid in plan})
    made = {name for name, _, _ in buffers._optional}
    local = {"local_cu_seqlens_q", "local_seqlens_k", "local_block_table", "local_req_indices"}
    sglang = {"req_to_token_int32", "req_pool_indices", "input_ids_int64", "seq_lens_int64", "orig_seq_lens"}
    missing = {"bidirectional_ranges", "graph_query_start_loc"}  # test_bidirectional, test_graph_promise
    missing |= {"slot_mapping_int32", "req_to_token", "key_ranges"} | local | sglang if spread else set()
    assert made == {field.name for field in OPTIONAL} - missing
    assert all(address(buffers.optional(*key)) == address(array) for key, array in buffers._optional.items())


def test_a_padded_size_of_a_graph_has_an_address_of_its_own():
    states = make()
    buffers = InputBuffers.for_states(states, T)
    at: dict[int, int] = {}
    for size in (8, 16, 8, 16, 32):
        batch = prepare_inputs(states, {"r0": 3, "r1": 2}, buffers)
        padded = common_attention_metadata(batch, num_logits_padded=size).logits_indices_padded
        assert padded.tolist() == [2, 4] + [4] * (size - 2)
        assert at.setdefault(size, address(padded)) == address(padded)
    assert len(set(at.values())) == 3


# -- padding -------------------------------------------------------------------------------------------------------

PAD = {"idx_mapping": -1, "expanded_idx_mapping": -1, "num_computed_tokens": 0, "is_prefilling": False, "seq_lens": 0,
       "logits_indices": 0, "positions": 0, "input_ids": 0}  # fmt: skip
PER_GROUP = {"slot_mapping": -1, "block_table": "null"}


@every_backend
@pytest.mark.parametrize("null", [0, -1])
def test_behind_the_entries_of_a_step_are_pad_values_whatever_was_there_before(backend, null):
    states = make(null=null)
    buffers = InputBuffers.for_states(states, T)
    for plan, drafts, pads in steps(states, 5):
        batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts, pad_to=pads, backend=backend)
        for name, value in (PAD | PER_GROUP).items():
            capacity = len(arrays(buffers[name])[0])
            for whole, own in zip(arrays(batch.padded(name, capacity)), arrays(getattr(batch, name)), strict=True):
                assert np.array_equal(whole[: len(own)], own), name
                assert (whole[len(own) :] == (null if value == "null" else value)).all(), name
            size = (len(arrays(getattr(batch, name))[0]) + capacity) // 2
            assert [len(a) for a in arrays(batch.padded(name, size))] == [size] * len(arrays(buffers[name]))
        states.commit(batch, {rid: [7] for rid in plan})


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("num_scheduled_tokens", 4, "no pad value"),
        ("query_start_loc", 4, "no pad value"),
        ("lora_tokens", 4, "no pad value"),
        ("nothing", 4, "no pad value"),
        ("idx_mapping", 1, "out of range"),
        ("idx_mapping", R + 1, "out of range"),
        ("input_ids", 4, "out of range"),
        ("block_table", 4, "not gathered"),
    ],
)
def test_padding_that_a_tensor_does_not_have_is_refused(name, size, said):
    states = make()
    buffers = InputBuffers.for_states(states, T)
    batch = prepare_inputs(states, {"r2": 3, "r0": 2}, buffers, gather_block_tables=False)
    with pytest.raises(PlanError, match=said):
        batch.padded(name, size)


# -- the caller's memory -------------------------------------------------------------------------------------------


class Memory:
    """An allocator whose memory holds something already."""

    def __init__(self) -> None:
        self.given: list[np.ndarray] = []

    def __call__(self, num_bytes: int) -> np.ndarray:
        self.given.append(np.random.default_rng(len(self.given)).integers(0, 256, num_bytes, np.uint8))
        return self.given[-1]


def test_every_tensor_of_a_step_is_in_one_piece_of_the_callers_memory():
    states, memory = make(ContextParallel(2, 0, 1)), Memory()
    buffers = InputBuffers.for_states(states, T, allocator=memory)
    (given,) = memory.given
    assert (address(buffers.arena), buffers.arena.shape) == (address(given), given.shape)
    start, pieces = address(given), []
    for field in STEP:
        for array in arrays(buffers[field.name]):
            assert array.dtype == field.dtype
            assert (address(array) - start) % 64 == 0
            pieces.append((address(array) - start, array.nbytes))
    pieces.sort()
    assert all(a + size <= b for (a, size), (b, _) in pairwise(pieces))
    assert pieces[0][0] >= 0
    assert pieces[-1][0] + pieces[-1][1] <= len(given)
    assert len(given) < sum(size for _, size in pieces) + 64 * len(pieces)


def test_ordinary_memory_begins_at_a_cache_line():
    buffers = InputBuffers.for_states(make(), T)
    assert all(address(a) % 64 == 0 for f in STEP for a in arrays(buffers[f.name]))
    assert all(address(a) >= address(buffers.arena) for f in STEP for a in arrays(buffers[f.name]))


@pytest.mark.one_in(3)
@every_backend
@pytest.mark.parametrize("null", [0, -1])
def test_what_the_callers_memory_held_before_is_in_no_step(backend, null):
    states, memory = make(null=null), Memory()
    theirs, ours = InputBuffers.for_states(states, T, allocator=memory), InputBuffers.for_states(states, T)
    assert np.array_equal(theirs.arena, ours.arena)
    for plan, drafts, pads in steps(states, 2):
        made = []
        for buffers in (theirs, ours):
            batch = prepare_inputs(states, plan, buffers, draft_tokens=drafts, pad_to=pads, backend=backend)
            made.append(outputs(batch))
        for name, array in made[0].items():
            assert np.array_equal(array, made[1][name]), name
        assert np.array_equal(theirs.arena, ours.arena)
        states.commit(batch, {rid: [7] for rid in plan})
    for key, array in theirs._optional.items():
        assert any(address(given) <= address(array) < address(given) + len(given) for given in memory.given), key


def test_each_slot_of_a_ring_has_memory_of_its_own():
    memory = Memory()
    ring = StagingRing(make(), max_num_batched_tokens=T, depth=3, allocator=memory)
    slots = [ring.acquire() for _ in range(3)]
    assert [address(buffers.arena) for buffers in slots] == [address(given) for given in memory.given]


def read_only(num_bytes: int) -> np.ndarray:
    given = np.zeros(num_bytes, np.uint8)
    given.flags.writeable = False
    return given


@pytest.mark.parametrize(
    "allocator",
    [
        lambda n: np.zeros(n + 1, np.uint8),
        lambda n: np.zeros(n - 1, np.uint8),
        lambda n: np.zeros(n, np.int8),
        lambda n: np.zeros((n, 1), np.uint8),
        lambda n: np.zeros(2 * n, np.uint8)[::2],
        lambda n: np.zeros(n + 1, np.uint8)[1:],
        lambda n: [0] * n,
        lambda n: None,
        read_only,
    ],
)
def test_memory_of_another_size_or_kind_is_refused(allocator):
    with pytest.raises(ConfigError, match="allocator"):
        InputBuffers.for_states(make(), T, allocator=allocator)


# -- the native side -----------------------------------------------------------------------------------------------


def test_the_native_cores_take_the_arrays_of_the_tables_by_name_and_type():
    names = native.array_names()
    assert sorted(names) == ["rows", "step"]
    assert len(set(names["rows"])) == len(names["rows"])
    only_python = {"rope_delta", "encoder_len"}  # extras: native code refuses requests that bring them
    assert set(names["rows"]) == {(f.name, f.dtype) for f in ROWS if f.name not in only_python}
    assert sorted(names["step"]) == sorted((f.name, f.dtype) for f in STEP)


def test_what_is_attached_to_buffers_is_made_once_per_key_and_buffers():
    states = RequestStates(max_num_reqs=1, max_model_len=4, vocab_size=5, kv_groups=[KVGroup(2)])
    first, second = (InputBuffers.for_states(states, 4) for _ in range(2))
    made = []

    def make(buffers: InputBuffers) -> list[InputBuffers]:
        made.append(buffers)
        return [buffers]

    assert [first.attach("a", make)[0], first.attach("a", make)[0], second.attach("a", make)[0]] == [
        first,
        first,
        second,
    ]
    assert first.attach("b", make) is not first.attach("a", make)
    assert made == [first, second, first]
