"""An engine with the data structures of nano-vllm, as lists and NumPy arrays: own code, without a model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB = 40


@dataclass(eq=False)
class Sequence:
    seq_id: int
    token_ids: list[int]
    most: int
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_scheduled_tokens: int = 0
    block_table: list[int] = field(default_factory=list)


@dataclass
class Context:
    is_prefill: bool
    slot_mapping: Any
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    context_lens: Any = None
    block_tables: Any = None


class Scheduler:
    """Prefills before decodes, blocks shared by the tokens that end in them. Methods are there to be replaced."""

    def __init__(self, config: Any, size: int) -> None:
        self.config, self.size = config, size
        self.free = deque(range(config.num_kvcache_blocks))
        self.users = [0] * config.num_kvcache_blocks
        self.cached: dict[Any, int] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_preemptions = self.num_hits = 0

    def key_of(self, seq: Sequence, end: int) -> Any:
        return tuple(seq.token_ids[:end])

    def take(self) -> int:
        block = self.free.popleft()
        self.cached = {key: other for key, other in self.cached.items() if other != block}
        self.users[block] = 1
        return block

    def release(self, seq: Sequence) -> None:
        for block in reversed(seq.block_table):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def admit(self, seq: Sequence) -> bool:
        S, known = self.size, len(seq.token_ids)
        total, hits = -(-known // S), list[int]()
        while len(hits) < total - 1 and (block := self.cached.get(self.key_of(seq, (len(hits) + 1) * S))) is not None:
            hits.append(block)
        if total - len(hits) + sum(not self.users[block] for block in hits) > len(self.free):
            return False
        for block in hits:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
        seq.block_table[:] = [*hits, *(self.take() for _ in range(total - len(hits)))]
        seq.num_cached_tokens = len(hits) * S
        self.num_hits += len(hits)
        return True

    def schedule(self) -> tuple[list[Sequence], bool]:
        out, left = list[Sequence](), self.config.max_num_batched_tokens
        while self.waiting and left and len(out) < self.config.max_num_seqs:
            seq = self.waiting[0]
            if not seq.block_table and not self.admit(seq):
                break
            rest = len(seq.token_ids) - seq.num_cached_tokens
            if rest > left and out:
                break
            seq.num_scheduled_tokens = min(rest, left)
            left -= seq.num_scheduled_tokens
            if seq.num_scheduled_tokens == rest:
                self.running.append(self.waiting.popleft())
            out.append(seq)
        if out:
            return out, True
        while self.running and len(out) < self.config.max_num_seqs:
            seq = self.running.popleft()
            needs = len(seq.token_ids) % self.size == 1
            while needs and not self.free:
                last = self.running.pop() if self.running else seq
                self.release(last)
                self.waiting.appendleft(last)
                self.num_preemptions += 1
                if last is seq:
                    break
            else:
                if needs:
                    seq.block_table.append(self.take())
                seq.num_scheduled_tokens = 1
                out.append(seq)
        self.running.extendleft(reversed(out))
        return out, False

    def update(self, seqs: list[Sequence], tokens: list[int]) -> None:
        for seq, token in zip(seqs, tokens, strict=True):
            start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
            for k in range(start // self.size, end // self.size):
                self.cached[self.key_of(seq, (k + 1) * self.size)] = seq.block_table[k]
            seq.num_cached_tokens, seq.num_scheduled_tokens = end, 0
            if end < len(seq.token_ids):
                continue
            seq.token_ids.append(token)
            if len(seq.token_ids) - seq.num_prompt_tokens == seq.most:
                self.running.remove(seq)
                self.release(seq)


class ModelRunner:
    """Prepares steps as nano-vllm does; a step's tokens are random."""

    def __init__(self, config: Any, size: int, rng: np.random.Generator) -> None:
        self.config, self.block_size, self.rng = config, size, rng
        self.context: Context | None = None

    def get_context(self) -> Context | None:
        return self.context

    def tables(self, seqs: list[Sequence]) -> Any:
        width = max(len(seq.block_table) for seq in seqs)
        rows = [seq.block_table + [-1] * (width - len(seq.block_table)) for seq in seqs]
        return np.array(rows, np.int32)

    def prepare_prefill(self, seqs: list[Sequence]) -> tuple[Any, Any]:
        ids, positions, slots, ends_q, ends_k = [], [], [], [0], [0]
        for seq in seqs:
            start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
            ids += seq.token_ids[start:end]
            positions += range(start, end)
            slots += [seq.block_table[p // self.block_size] * self.block_size + p % self.block_size
                      for p in range(start, end)]  # fmt: skip
            ends_q.append(ends_q[-1] + end - start)
            ends_k.append(ends_k[-1] + end)
        self.context = Context(
            True, np.array(slots, np.int32), np.array(ends_q, np.int32), np.array(ends_k, np.int32),
            int(np.diff(ends_q).max()), int(np.diff(ends_k).max()),
            block_tables=self.tables(seqs) if ends_k[-1] > ends_q[-1] else None,
        )  # fmt: skip
        return np.array(ids), np.array(positions)

    def prepare_decode(self, seqs: list[Sequence]) -> tuple[Any, Any]:
        lengths = np.array([len(seq.token_ids) for seq in seqs], np.int32)
        slots = [seq.block_table[-1] * self.block_size + (len(seq.token_ids) - 1) % self.block_size for seq in seqs]
        self.context = Context(
            False, np.array(slots, np.int32), context_lens=lengths, block_tables=self.tables(seqs)
        )  # fmt: skip
        return np.array([seq.token_ids[-1] for seq in seqs]), lengths - 1

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        (self.prepare_prefill if is_prefill else self.prepare_decode)(seqs)
        self.context = None
        return self.rng.integers(0, VOCAB, len(seqs)).tolist()


class Engine:
    def __init__(self, seed: int = 0, size: int = 4, blocks: int = 24) -> None:
        self.rng = np.random.default_rng(seed)
        self.config = SimpleNamespace(
            max_num_seqs=6, max_num_batched_tokens=24, max_model_len=64, num_kvcache_blocks=blocks,
            hf_config=SimpleNamespace(vocab_size=VOCAB),
        )  # fmt: skip
        self.scheduler = Scheduler(self.config, size)
        self.runner = ModelRunner(self.config, size, self.rng)
        self.count = 0
        self.prefix = self.rng.integers(0, VOCAB, 17).tolist()

    def add(self, tokens: list[int], most: int) -> None:
        self.scheduler.waiting.append(Sequence(self.count, tokens, most, len(tokens)))
        self.count += 1

    def traffic(self, steps: int) -> None:
        """Random requests, of which many begin alike."""
        for _ in range(steps):
            if len(self.scheduler.waiting) < 3:
                shared = self.prefix[: int(self.rng.choice([0, 4, 8, 12, 16, 17]))]
                own = self.rng.integers(0, VOCAB, int(self.rng.integers(1, 34))).tolist()
                self.add(shared + own, int(self.rng.integers(1, 12)))
            seqs, is_prefill = self.scheduler.schedule()
            if seqs:
                self.scheduler.update(seqs, self.runner.run(seqs, is_prefill))
