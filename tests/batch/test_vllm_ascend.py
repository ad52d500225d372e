"""vllm-ascend's state, metadata and masks, against loops over the tokens of random steps."""

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from batch_rig import address, every_backend, states_and_buffers, states_of
from batch_scenes import scene

from foreword.batch import InputBuffers, KVGroup, NewRequest, PlanError, prepare_inputs
from foreword.batch.adapters.vllm_ascend import AscendMasks, AscendState, ascend_metadata, ascend_state
from foreword.errors import ConfigError

M, MAX_TOKENS, MAX_DRAFTS = 23, 40, 3
GROUPS = (
    KVGroup(4),
    KVGroup(4, kernel_block_size=2, sliding_window=3),
    KVGroup(6, kernel_block_size=2, sliding_window=1),
)


# -- the oracle ----------------------------------------------------------------------------------------------------


@dataclass
class Scheduled:
    """One request of a step: c computed tokens, n scheduled, k of them drafts, and its blocks per group."""

    c: int
    n: int
    k: int
    blocks: list[list[int]]


def state_of(step: list[Scheduled], own_scheduler: bool) -> str:
    if all(s.c == 0 for s in step):
        return "PrefillNoCache"
    if all(s.n == 1 for s in step):
        return "DecodeOnly"
    if all(s.n - s.k == 1 for s in step):
        return "SpecDecoding"
    return "PrefillCacheHit" if own_scheduler else "ChunkedPrefill"


def mask_of(step: list[Scheduled], state: str, window: int | None, num_input_tokens: int) -> list[list[bool]] | None:
    """One list per query, True where it sees the key."""
    if state == "DecodeOnly":
        return None
    if state == "PrefillNoCache":
        keys = max((s.n for s in step), default=0)
        positions = list(range(keys))
    else:
        keys = max(s.c + s.n for s in step)
        positions = [s.c + i for s in step for i in range(s.n)]
        positions += [0] * (num_input_tokens - len(positions))
    return [[j <= p and (window is None or p - j < window) for j in range(keys)] for p in positions]


def slots_of(step: list[Scheduled], g: int) -> list[int]:
    size = GROUPS[g].block_size
    return [s.blocks[g][p // size] * size + p % size for s in step for p in range(s.c, s.c + s.n)]


def tables_of(step: list[Scheduled], g: int, num_reqs_padded: int) -> list[list[int]]:
    """Kernel blocks; null (0) on padding, past the end, and wholly below the window of the first scheduled token."""
    size, window = GROUPS[g].block_size, GROUPS[g].sliding_window
    ratio = size // (GROUPS[g].kernel_block_size or size)
    tables = []
    for s in step:
        row = []
        for i, block in enumerate(s.blocks[g]):
            below = window is not None and window >= 2 and (i + 1) * size - 1 < s.c - window + 1
            row += [0] * ratio if below else [block * ratio + j for j in range(ratio)]
        tables.append(row)
    return tables + [[0] * (-(-M // size) * ratio)] * (num_reqs_padded - len(step))


# -- random steps --------------------------------------------------------------------------------------------------


class Trace:
    """Requests that come, go on and leave; each step is of one kind, or a mixture."""

    KINDS = ("start", "chunk", "decode", "drafts", "one token", "any", "empty")

    def __init__(self, seed: int, backend: str) -> None:
        self.random, self.backend = random.Random(seed), backend
        self.states, self.buffers = states_and_buffers(*GROUPS, rows=5, length=M, drafts=MAX_DRAFTS, tokens=MAX_TOKENS)
        self.known: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.blocks: dict[str, list[list[int]]] = {}
        self.serial, self.next_block = 0, 1

    def admit(self) -> None:
        length = self.random.randint(1, M - 2)
        computed = self.random.choice([0, 0, self.random.randint(0, length - 1)])
        rid, self.serial = f"r{self.serial}", self.serial + 1
        blocks = []
        for group in GROUPS:
            count = -(-M // group.block_size)
            blocks.append(list(range(self.next_block, self.next_block + count)))
            self.next_block += count
        self.states.add_request(NewRequest(rid, [self.random.randrange(50) for _ in range(length)], blocks,
                                           num_computed_tokens=computed))  # fmt: skip
        self.known[rid], self.computed[rid], self.blocks[rid] = length, computed, blocks

    def choose(self, kind: str) -> dict[str, Scheduled]:
        step: dict[str, Scheduled] = {}
        left = MAX_TOKENS
        for rid in self.random.sample(sorted(self.known), len(self.known)):
            c, rest = self.computed[rid], self.known[rid] - self.computed[rid]
            n, k = 0, 0
            match kind:
                case "start" if c == 0:
                    n = self.random.randint(1, rest)
                case "chunk":
                    n = self.random.randint(1, rest)
                case "decode" if rest == 1:
                    n = 1
                case "drafts" if rest == 1:
                    k = self.random.randint(0, min(MAX_DRAFTS, M - 1 - self.known[rid]))
                    n = 1 + k
                case "one token":
                    n = 1
                case "any":
                    n = self.random.randint(1, rest)
                    if n == rest:
                        k = self.random.randint(0, min(MAX_DRAFTS, M - 1 - self.known[rid]))
                        n += k
            if 0 < n <= left:
                left -= n
                step[rid] = Scheduled(c, n, k, self.blocks[rid])
        return step

    def steps(self, count: int):
        """(step, batch, padded tokens, padded requests), committed after each is read."""
        for _ in range(count):
            for rid in [rid for rid in self.known if self.known[rid] >= M - 1 or self.random.random() < 0.05]:
                self.states.remove_request(rid)
                del self.known[rid]
            while len(self.known) < 5 and self.random.random() < 0.7:
                self.admit()
            step = self.choose(self.random.choice(self.KINDS))
            num_tokens = sum(s.n for s in step.values())
            pad_to = None
            if self.random.random() < 0.5:
                pad_to = self.random.randint(num_tokens, MAX_TOKENS), self.random.randint(len(step), 5)
            batch = prepare_inputs(
                self.states,
                {rid: s.n for rid, s in step.items()},
                self.buffers,
                draft_tokens={rid: [self.random.randrange(50) for _ in range(s.k)] for rid, s in step.items() if s.k},
                pad_to=pad_to,
                backend=self.backend,
            )
            yield list(step.values()), batch, *(pad_to or (num_tokens, len(step)))
            sampled = {}
            for rid, s in step.items():
                self.computed[rid] += s.n
                if s.c + s.n - s.k == self.known[rid]:
                    accepted = self.random.randint(0, s.k)
                    sampled[rid] = [self.random.randrange(50) for _ in range(1 + accepted)]
                    self.known[rid] += 1 + accepted
                    self.computed[rid] -= s.k - accepted
            self.states.commit(batch, sampled)


# -- tests ---------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("dtype", [np.bool_, np.float16, np.float32])
def test_every_field_of_random_steps_is_what_the_loops_say(backend, dtype):
    masks = [AscendMasks(dtype, group.sliding_window) for group in GROUPS]
    visible, hidden = (True, False) if dtype is np.bool_ else (0.0, -np.inf)
    seen: Counter[str] = Counter()
    for seed in range(12):
        for step, batch, padded_tokens, padded_reqs in Trace(seed, backend).steps(60):
            own_scheduler = seed % 2 == 1
            state = state_of(step, own_scheduler)
            seen[state] += 1
            T, B = sum(s.n for s in step), len(step)
            for g, group in enumerate(GROUPS):
                got = ascend_metadata(batch, g, masks=masks[g], chunked_prefill=not own_scheduler)
                assert got.attn_state.name == state
                assert (got.num_reqs, got.num_actual_tokens, got.num_input_tokens) == (B, T, padded_tokens)
                assert got.max_query_len == max((s.n for s in step), default=0)
                assert got.max_seq_len == max((s.c + s.n for s in step), default=0)
                starts = [sum(s.n for s in step[:b]) for b in range(B + 1)]
                assert got.query_start_loc.tolist() == starts + [T] * (padded_reqs - B)
                assert got.query_lens.tolist() == [s.n for s in step]
                assert got.num_computed_tokens.tolist() == [s.c for s in step]
                assert got.seq_lens.tolist() == [s.c + s.n for s in step] + [0] * (padded_reqs - B)
                assert got.slot_mapping.tolist() == slots_of(step, g) + [-1] * (padded_tokens - T)
                assert got.block_tables.tolist() == tables_of(step, g, padded_reqs)
                want = mask_of(step, state, group.sliding_window, padded_tokens)
                if want is None:
                    assert got.attn_mask is None
                    continue
                assert got.attn_mask.dtype == dtype
                shape = len(want), len(want[0]) if want else 0
                expected = np.where(np.array(want, np.bool_).reshape(shape), visible, hidden)
                assert np.array_equal(got.attn_mask, expected)
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
    trace, found = Trace(3, "numpy"), {}
    for _, batch, _, _ in trace.steps(30):
        got = ascend_metadata(batch)
        for name in ("query_start_loc", "query_lens", "num_computed_tokens", "seq_lens", "slot_mapping"):
            at = address(getattr(got, name))
            assert found.setdefault(name, at) == at


def test_what_a_mask_cannot_express_is_refused():
    with pytest.raises(ConfigError, match="int8"):
        AscendMasks(np.int8)
    for _, batch, _, _ in Trace(0, "numpy").steps(1):
        with pytest.raises(PlanError, match="window"):
            ascend_metadata(batch, 1, masks=AscendMasks())
    with pytest.raises(PlanError, match="one rank"):
        ascend_metadata(scene("context parallel").batch)
