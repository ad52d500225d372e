"""A model without weights: each output depends on all tokens before it, and every read of the cache is checked.

A slot stores a hash of the whole token prefix up to its position. To compute a token, the hash of the prefix before it
is read from the cache, and all slots that an attention kernel would read are compared with the expected hashes.

A recurrent layer has no slots: it reads that hash from the block of the state before the step, and writes the hash
after the step's last token to the block of the state after it. No other memory of a request is kept.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foreword.batch import InputBatch, KVGroup, state_indices
from foreword.executors import Capability, HostExecutor

START = 12345


def following(prefix: int, token: int) -> int:
    x = (prefix * 6364136223846793005 + token * 1442695040888963407 + 1) & (2**63 - 1)
    return x ^ (x >> 29)


def logits_after(prefix: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(prefix).normal(size=vocab_size).astype(np.float32) * 2


class OracleExecutor(HostExecutor):
    capabilities = frozenset({Capability.RECURRENT_STATE, Capability.GRAMMAR})

    def __init__(self, vocab_size: int, kv_groups: Sequence[KVGroup], num_blocks: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.groups = kv_groups
        self.memory = [np.full((num_blocks, g.block_size), -1, np.int64) for g in kv_groups]
        self.recurrent = [g for g, group in enumerate(kv_groups) if group.recurrent]
        self.before: dict[int, int] = {}  # prefix → the prefix one token shorter
        self.num_tokens = 0
        self.num_steps = 0

    def copy_blocks(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        for memory in self.memory:
            memory[destinations] = memory[sources]

    def compute(self, batch: InputBatch, logits_indices: np.ndarray) -> np.ndarray:
        self.num_steps += 1
        self.num_tokens += batch.num_tokens
        prefixes = np.zeros(batch.num_tokens, np.int64)
        self.states = {g: state_indices(batch, g) for g in self.recurrent}
        for b in range(batch.num_reqs):
            start, stop = int(batch.query_start_loc[b]), int(batch.query_start_loc[b + 1])
            computed = int(batch.num_computed_tokens[b])
            prefix = self.read(batch, b, computed)
            for t in range(start, stop):
                shorter, prefix = prefix, following(prefix, int(batch.input_ids[t]))
                self.before[prefix] = shorter
                prefixes[t] = prefix
                for memory, slots in zip(self.memory, batch.slot_mapping, strict=True):
                    if slots[t] >= 0:
                        memory.reshape(-1)[slots[t]] = prefix
            for g, states in self.states.items():
                self.memory[g][states.write[b], 0] = prefix
        return np.stack([logits_after(int(prefixes[t]), self.vocab_size) for t in logits_indices])

    def read(self, batch: InputBatch, b: int, computed: int) -> int:
        """The prefix of ``computed`` tokens, after checking everything that the next token reads."""
        if computed == 0:
            return START
        found = set()
        for g, states in self.states.items():
            block = int(states.read[b])
            assert block > 0, "read of no state"
            found.add(int(self.memory[g][block, 0]))
        for group, memory, table in zip(self.groups, self.memory, batch.block_table, strict=True):
            if group.recurrent:
                continue
            size, window = group.block_size, group.sliding_window
            if window == 1:
                continue
            low = 0 if window is None else max(0, computed - window + 1)
            values = [int(memory[table[b, p // size], p % size]) for p in range(low, computed)]
            assert all(table[b, p // size] != 0 for p in range(low, computed)), "read of the null block"
            for shorter, longer in pairwise(values):
                assert self.before[longer] == shorter, f"request {batch.req_ids[b]}: wrong KV below {computed}"
            found.add(values[-1])
        assert len(found) == 1, f"request {batch.req_ids[b]}: groups disagree"
        return found.pop()


def plain_output(prompt: Sequence[int], choose, length: int, vocab_size: int) -> list[int]:
    """What a request must produce: ``choose(logits, position)`` token by token, with no engine at all."""
    prefix = START
    for token in prompt:
        prefix = following(prefix, token)
    out: list[int] = []
    while len(out) < length:
        out.append(int(choose(logits_after(prefix, vocab_size), len(prompt) + len(out))))
        prefix = following(prefix, out[-1])
    return out


class LetterTokenizer:
    """Token 0 is special; token i is the i-th letter from "a"; a few tokens are half a character."""

    HALVES = (20, 21)  # two of them in a row make "é"

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        return [ord(c) - 96 for c in text.lower() if c.isalpha()]

    def detokenizer(self, skip_special_tokens: bool = True, **options):
        return _Letters(skip_special_tokens)


class _Letters:
    def __init__(self, skip: bool) -> None:
        self.skip, self.half = skip, False

    def push(self, token_ids) -> str:
        out = ""
        for t in token_ids:
            if t in LetterTokenizer.HALVES:
                out, self.half = out + ("é" if self.half else ""), not self.half
            elif t == 0:
                out += "" if self.skip else "<end>"
            else:
                out += chr(96 + t)
        return out

    def finish(self) -> str:
        half, self.half = self.half, False
        return "\ufffd" if half else ""
