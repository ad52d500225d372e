"""A model without weights for storms: fast, and every token depends on the whole history as it is read from the cache.

A slot of the cache holds the token of its position and the hash of all tokens up to it. Before a token is computed, all
slots that an attention kernel would read are read, and their hashes are compared with their tokens; the hash at the
last one chooses the logits. So a block that was not written, that was copied too late, or that belongs to another
request raises `WrongRead` or gives another token. A recurrent layer keeps the hash alone, in the block of its state.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from foreword.batch import InputBatch, KVGroup, RequestStates, state_indices
from foreword.executors import Capability, HostExecutor

START = np.uint64(0x9E3779B97F4A7C15)
NUM_LOGITS = 8192  # different rows of logits


class WrongRead(AssertionError):
    """The cache does not hold the history of the request that reads it."""


def following(prefixes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The hashes of uint64 [n] histories with one more token each."""
    x = (prefixes + tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(29))


@cache
def logits_table(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(NUM_LOGITS, vocab_size)).astype(np.float32) * 2


def logits_after(table: np.ndarray, prefixes: np.ndarray) -> np.ndarray:
    """The logits [n, V] after these histories."""
    return table[(prefixes >> np.uint64(20)) % np.uint64(NUM_LOGITS)]


class HashExecutor(HostExecutor):
    capabilities = frozenset(
        {Capability.RECURRENT_STATE, Capability.DRAFTED_STATES, Capability.GRAMMAR, Capability.BLOCK_TRANSFER}
    )
    block_layout = "hashes"
    empty_prefix, following = START, staticmethod(following)

    def __init__(self, vocab_size: int, kv_groups: Sequence[KVGroup], num_blocks: int, num_states: int = 0) -> None:
        super().__init__()
        self.groups, self.first_state = kv_groups, num_blocks if num_states else None
        num_blocks += num_states
        self.table = logits_table(vocab_size)
        self.prefixes = [np.zeros((num_blocks, g.block_size), np.uint64) for g in kv_groups]
        self.tokens = [np.full((num_blocks, g.block_size), -1, np.int32) for g in kv_groups]
        self.num_steps = self.num_tokens = 0

    def logits_after(self, prefixes: np.ndarray) -> np.ndarray:
        return logits_after(self.table, prefixes)

    def copy_blocks(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        for memory in (*self.prefixes, *self.tokens):
            memory[destinations] = memory[sources]

    @property
    def block_bytes(self) -> int:
        return sum(12 * group.block_size for group in self.groups)

    @property
    def state_bytes(self) -> int:
        return 2 * self.block_bytes + 5 if self.first_state else 0

    def read_blocks(self, blocks: np.ndarray) -> np.ndarray:
        data = np.concatenate([memory[blocks].view(np.uint8) for memory in (*self.prefixes, *self.tokens)], axis=1)
        is_state = self.first_state is not None and blocks.min() >= self.first_state
        return np.pad(data, ((0, 0), (self.block_bytes + 5, 0))) if is_state else data

    def write_blocks(self, blocks: np.ndarray, data: np.ndarray) -> None:
        start = data.shape[1] - self.block_bytes
        assert data.shape[1] == (self.state_bytes if start else self.block_bytes)
        for memory in (*self.prefixes, *self.tokens):
            size = memory[0].nbytes
            memory[blocks] = np.ascontiguousarray(data[:, start : start + size]).view(memory.dtype)
            start += size

    def compute(self, batch: InputBatch, logits_indices: np.ndarray) -> np.ndarray:
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        states = {g: state_indices(batch, g) for g, group in enumerate(self.groups) if group.recurrent}
        prefix = self._read(batch, {g: s.read for g, s in states.items()})
        B, starts = batch.num_reqs, batch.query_start_loc[: batch.num_reqs + 1]
        lengths = np.diff(starts)
        ids = batch.input_ids[: batch.num_tokens]
        after = np.empty(batch.num_tokens, np.uint64)
        for j in range(int(lengths.max())):
            rows = (lengths > j).nonzero()[0]
            at = starts[rows] + j
            prefix[rows] = after[at] = self.following(prefix[rows], ids[at])
        for g, group in enumerate(self.groups):
            if group.recurrent:
                last = starts[1:] - 1  # token of each request, then of each of its drafts
                self.prefixes[g][states[g].write[:B], 0] = after[last - batch.num_draft_tokens]
                b, i = (states[g].drafts[:B] >= 0).nonzero()
                self.prefixes[g][states[g].drafts[b, i], 0] = after[last[b] - batch.num_draft_tokens[b] + 1 + i]
                continue
            slots = batch.slot_mapping[g][: batch.num_tokens]
            written = slots >= 0
            self.prefixes[g].reshape(-1)[slots[written]] = after[written]
            self.tokens[g].reshape(-1)[slots[written]] = ids[written]
        return self.logits_after(after[logits_indices])

    def _read(self, batch: InputBatch, states: dict[int, np.ndarray]) -> np.ndarray:
        """The hash [B] of each request's computed tokens, after checking everything that its next token reads."""
        B = batch.num_reqs
        computed = batch.num_computed_tokens[:B].astype(np.int64)
        prefix = np.full(B, self.empty_prefix)
        longest = int(computed.max())
        if not longest:
            return prefix
        goes_on, rows = computed > 0, np.arange(B)
        found: list[np.ndarray] = []
        for g, group in enumerate(self.groups):
            if group.recurrent:
                blocks = states[g][:B]
                self._expect(batch, blocks > 0, goes_on, "reads no recurrent state")
                found.append(self.prefixes[g][blocks, 0])
                continue
            if group.sliding_window == 1:
                continue
            window = longest + 1 if group.sliding_window is None else group.sliding_window
            positions = np.arange(longest)
            reads = (positions < computed[:, None]) & (positions >= computed[:, None] - window + 1)
            size = group.block_size
            blocks = batch.block_table[g][:B].take(positions // size, 1)
            slots = blocks * size + positions % size
            held, tokens = self.prefixes[g].reshape(-1).take(slots), self.tokens[g].reshape(-1).take(slots)
            before = np.empty_like(held)
            before[:, 0], before[:, 1:] = self.empty_prefix, held[:, :-1]
            wrong = self.following(before, tokens) != held
            wrong[:, 1:] &= reads[:, :-1]  # the first token of a window has no hash before it
            wrong |= blocks == 0
            wrong &= reads
            self._expect(batch, ~wrong.any(1), goes_on, f"reads wrong keys in group {g}")
            found.append(held[rows, computed - 1])
        for one, other in pairwise(found):
            self._expect(batch, one == other, goes_on, "has groups with different histories")
        return np.where(goes_on, found[0], prefix)

    def _expect(self, batch: InputBatch, right: np.ndarray, goes_on: np.ndarray, what: str) -> None:
        wrong = (goes_on & ~right).nonzero()[0]
        if wrong.size:
            name = batch.req_ids[int(wrong[0])]
            raise WrongRead(f"request {name!r} {what}, {int(batch.num_computed_tokens[wrong[0]])} tokens computed")


class HalfRight:
    """A drafter: the greedy next tokens of `HashExecutor`, of which every third is made wrong."""

    relative_cost = 0.0

    def __init__(self, states: RequestStates) -> None:
        self.states, self.table = states, logits_table(states.vocab_size)

    def propose(self, rows: np.ndarray, most: np.ndarray) -> np.ndarray:
        drafts = np.full((len(rows), self.states.max_num_draft_tokens), -1, np.int32)
        if not drafts.size or not most.any():
            return drafts
        known = self.states.num_tokens[rows]
        prefix = np.full(len(rows), START)
        for j in range(int(known.max())):
            grown = following(prefix, self.states.token_ids[rows, j])
            prefix = np.where(j < known, grown, prefix)
        for j in range(int(most.max())):
            guess = logits_after(self.table, prefix).argmax(1).astype(np.int32)
            guess[(known + j) % 3 == 0] = 3
            drafts[:, j] = np.where(j < most, guess, -1)
            prefix = following(prefix, guess)
        return drafts
