"""vllm-ascend's state, metadata and masks, against loops over the tokens of random steps."""

import random
from collections import Counter

import numpy as np
import pytest
from batch_model import Group, Model, Scheduled
from batch_rig import World, address, states_of
from batch_scenes import scene
from test_random_traces import Lives, Picks, Step, live

from foreword.batch import InputBuffers, KVGroup, NewRequest, PlanError, prepare_inputs
from foreword.batch.adapters.vllm_ascend import AscendMasks, AscendState, ascend_metadata, ascend_state
from foreword.errors import ConfigError

# -- the oracle ----------------------------------------------------------------------------------------------------


def state_of(step: list[Scheduled], own_scheduler: bool) -> str:
    if all(s.computed == 0 for s in step):
        return "PrefillNoCache"
    if all(s.num == 1 for s in step):
        return "DecodeOnly"
    if all(s.num - len(s.drafts) == 1 for s in step):
        return "SpecDecoding"
    return "PrefillCacheHit" if own_scheduler else "ChunkedPrefill"


def mask_of(step: list[Scheduled], state: str, window: int | None, num_input_tokens: int) -> list[list[bool]] | None:
    """One list per query, True where it sees the key."""
    if state == "DecodeOnly":
        return None
    if state == "PrefillNoCache":
        keys = max((s.num for s in step), default=0)
        positions = list(range(keys))
    else:
        keys = max(s.computed + s.num for s in step)
        positions = [s.computed + i for s in step for i in range(s.num)]
        positions += [0] * (num_input_tokens - len(positions))
    return [[j <= p and (window is None or p - j < window) for j in range(keys)] for p in positions]


class AscendLives(Lives):
    """Random traffic whose steps are compared with what vllm-ascend makes of them."""

    def __init__(self, masks: list[list[AscendMasks]], own_scheduler: bool) -> None:
        groups = [Group(4), Group(4, window=3, kernel_block_size=2), Group(6, window=1, kernel_block_size=2)]
        super().__init__(Model(max_num_reqs=5, max_model_len=23, groups=groups, max_drafts=3), max_tokens=40)
        self.masks, self.own_scheduler = masks, own_scheduler
        self.seen: Counter[str] = Counter()

    def compare(self, step: Step, pick: Picks) -> None:
        state = state_of(step.scheduled, self.own_scheduler)
        self.seen[state] += step.batches[0].is_gathered
        for batch in step.batches:
            for g in range(len(self.model.groups) if batch.is_gathered else 0):
                self.compare_group(step.scheduled, state, batch, g)

    def compare_group(self, step: list[Scheduled], state: str, batch, g: int) -> None:
        got = ascend_metadata(batch, g, masks=self.masks[g][0], chunked_prefill=not self.own_scheduler)
        B, T, R = len(step), sum(s.num for s in step), batch.num_reqs_padded
        numbers = {
            "num_reqs": B,
            "num_actual_tokens": T,
            "num_input_tokens": batch.num_tokens_padded,
            "max_query_len": max((s.num for s in step), default=0),
            "max_seq_len": max((s.computed + s.num for s in step), default=0),
        }
        assert got.attn_state.name == state
        assert {name: getattr(got, name) for name in numbers} == numbers
        slots = [self.model.slot(g, s, p) for s in step for p in range(s.computed, s.computed + s.num)]
        lists = {
            "query_start_loc": [sum(s.num for s in step[:b]) for b in range(B + 1)] + [T] * (R - B),
            "query_lens": [s.num for s in step],
            "num_computed_tokens": [s.computed for s in step],
            "seq_lens": [s.computed + s.num for s in step] + [0] * (R - B),
            "slot_mapping": slots + [-1] * (batch.num_tokens_padded - T),
        }
        assert {name: getattr(got, name).tolist() for name in lists} == lists
        assert got.block_tables[:B].tolist() == [self.model.kernel_row(g, s) for s in step]
        assert got.block_tables[B:].tolist() == [[0] * got.block_tables.shape[1]] * (R - B)
        want = mask_of(step, state, self.model.groups[g].window, batch.num_tokens_padded)
        for masks in self.masks[g]:
            mask = ascend_metadata(batch, g, masks=masks, chunked_prefill=not self.own_scheduler).attn_mask
            assert (mask is None) == (want is None)
            if want is not None:
                visible, hidden = (True, False) if masks.dtype == np.bool_ else (0.0, -np.inf)
                assert mask.dtype == masks.dtype
                expected = np.array(want, np.bool_).reshape(len(want), len(want[0]) if want else 0)
                assert np.array_equal(mask, np.where(expected, visible, hidden))


# -- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_field_of_random_steps_is_what_the_loops_say():
    masks = [[AscendMasks(dtype, window) for dtype in (np.bool_, np.float16, np.float32)] for window in (None, 3, 1)]
    seen: Counter[str] = Counter()
    for seed in range(12):
        pick, lives = Picks(random.Random(seed).randint), AscendLives(masks, own_scheduler=seed % 2 == 1)
        live(lives, pick, 60)
        seen += lives.seen
    assert min(seen[s.name] for s in AscendState) > 5


@pytest.mark.parametrize(
    ("computed", "scheduled", "drafts", "state"),
    [
        ([0, 0], [3, 1], [0, 0], "PrefillNoCache"),
        ([0, 0], [1, 1], [0, 0], "PrefillNoCache"),
        ([4], [6], [0], "ChunkedPrefill"),
        ([5, 2, 0], [1, 1, 1], [0, 0, 0], "DecodeOnly"),
        ([5, 4], [3, 1], [2, 0], "SpecDecoding"),
        ([5, 4], [3, 2], [2, 0], "ChunkedPrefill"),
        ([0], [4], [2], "PrefillNoCache"),
        ([0, 6], [2, 1], [1, 0], "SpecDecoding"),
        ([], [], [], "PrefillNoCache"),
    ],
)
def test_the_state_is_decided_by_the_counts_alone(computed, scheduled, drafts, state):
    states = states_of(KVGroup(16), length=16, drafts=2)
    for i, (c, n, k) in enumerate(zip(computed, scheduled, drafts, strict=True)):
        states.add_request(NewRequest(str(i), [1] * (c + n - k), [[i + 1]], num_computed_tokens=c))
    batch = prepare_inputs(
        states,
        {str(i): n for i, n in enumerate(scheduled)},
        InputBuffers.for_states(states, 16),
        draft_tokens={str(i): [2] * k for i, k in enumerate(drafts) if k},
    )
    assert ascend_state(batch).name == state
    own = "PrefillCacheHit" if state == "ChunkedPrefill" else state
    assert ascend_state(batch, chunked_prefill=False).name == own


def test_names_and_numbers_are_vllm_ascends():
    assert {state.name: state.value for state in AscendState} == {
        "PrefillNoCache": 0,
        "PrefillCacheHit": 1,
        "DecodeOnly": 2,
        "ChunkedPrefill": 3,
        "SpecDecoding": 4,
    }


@pytest.mark.parametrize("dtype", [np.bool_, np.float32])
def test_reserved_masks_keep_their_address_and_a_smaller_mask_is_a_slice(dtype):
    masks = AscendMasks(dtype, sliding_window=3)
    masks.reserve(max_query_len=9, max_num_tokens=9, max_seq_len=20)
    causal, rows = address(masks.causal(9)), address(masks.rows(np.arange(9), 20))
    whole = masks.causal(9)
    for size in range(1, 10):
        assert address(masks.causal(size)) == causal
        assert np.array_equal(masks.causal(size), whole[:size, :size])
        assert address(masks.rows(np.arange(size), 20)) == rows
        assert np.array_equal(masks.rows(np.arange(size), size), whole[:size, :size])


def test_a_causal_mask_is_made_again_only_to_grow():
    masks = AscendMasks()
    before = address(masks.causal(4))
    assert address(masks.causal(3)) == before
    assert masks.causal(5).shape == (5, 5)
    grown = address(masks.causal(5))
    assert address(masks.causal(8)) == grown
    assert np.array_equal(masks.causal(8), np.tril(np.ones((8, 8), np.bool_)))


def test_masks_are_read_only():
    masks = AscendMasks()
    for mask in (masks.causal(2), masks.rows(np.arange(2), 4)):
        with pytest.raises(ValueError, match="read-only"):
            mask[0, 0] = False


def test_fields_are_views_of_the_buffers_at_addresses_that_stay():
    world, found = World(KVGroup(4), rows=3, length=24), {}
    for rid in "abc":
        world.add(rid, [1, 2, 3])
    for plan in ({"a": 3}, {"a": 1, "b": 2, "c": 3}, {}, {"b": 1, "c": 1}):
        got = ascend_metadata(world.step(plan, {rid: [4] for rid in plan}))
        for name in ("query_start_loc", "query_lens", "num_computed_tokens", "seq_lens", "slot_mapping"):
            at = address(getattr(got, name))
            assert found.setdefault(name, at) == at


def test_what_a_mask_cannot_express_is_refused():
    with pytest.raises(ConfigError, match="int8"):
        AscendMasks(np.int8)
    world = World(KVGroup(4, sliding_window=3))
    world.add("a", [1, 2, 3])
    with pytest.raises(PlanError, match="window"):
        ascend_metadata(world.step({"a": 2}), masks=AscendMasks())
    with pytest.raises(PlanError, match="one rank"):
        ascend_metadata(scene("context parallel").batch)
