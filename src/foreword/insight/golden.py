"""Generate the golden traces with the defining backend (loops): ``python -m foreword.insight.golden DIRECTORY``."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

from foreword.batch import ContextParallel, InputBuffers, KVGroup, NewRequest, RequestStates, prepare_inputs
from foreword.trace.recorder import TraceRecorder

VOCAB = 100


class _Engine:
    """A minimal engine that runs scripted steps and records them."""

    def __init__(
        self, path: Path, *groups: KVGroup, max_model_len: int = 13, drafts: int = 0, cp: ContextParallel | None = None
    ) -> None:
        self.states = RequestStates(
            max_num_reqs=4,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            kv_groups=groups,
            max_num_draft_tokens=drafts,
            context_parallel=cp,
        )
        self.buffers = InputBuffers.for_states(self.states, 24)
        self.trace = TraceRecorder(path, self.states, self.buffers.max_num_batched_tokens)
        self.next_block = 1
        self.random = random.Random(path.stem)

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB) for _ in range(count)]

    def blocks(self, num_held: list[int], num_tokens: int) -> list[list[int]]:
        """Return new block ids per group, so that each group can hold this many tokens."""
        out = []
        for table, num_blocks in zip(self.states.block_tables, num_held, strict=True):
            count = max(-(-num_tokens // table.tokens_per_block) - num_blocks, 0)
            out.append(list(range(self.next_block, self.next_block + count)))
            self.next_block += count
        return out

    def admit(self, req_id: str, prompt: list[int], outputs: list[int] | None = None, computed: int = 0) -> None:
        known = len(prompt) + len(outputs or [])
        blocks = self.blocks([0] * len(self.states.block_tables), known)
        self.states.add_request(NewRequest(req_id, prompt, blocks, outputs or (), computed))

    def step(
        self,
        plan: dict[str, int],
        drafts: dict[str, list[int]] | None = None,
        accept: dict[str, int] | None = None,
        pad_to: tuple[int, int] | None = None,
    ) -> None:
        s = self.states
        for req_id, count in plan.items():
            row = s.row_of(req_id)
            num_held = [int(t.num_blocks[row]) for t in s.block_tables]
            s.append_blocks(req_id, self.blocks(num_held, int(s.num_computed_tokens[row]) + count))
        batch = prepare_inputs(s, plan, self.buffers, draft_tokens=drafts, pad_to=pad_to, backend="loops")
        self.trace.step(batch)
        sampled = {}
        for req_id, count in plan.items():
            row, ids = s.row_of(req_id), (drafts or {}).get(req_id, [])
            if int(s.num_computed_tokens[row]) + count - len(ids) == int(s.num_tokens[row]):
                kept = (accept or {}).get(req_id, 0)
                sampled[req_id] = ids[:kept] + self.tokens(1)
        s.commit(batch, sampled)
        self.trace.commit(batch, sampled)


def chunks_and_decodes(path: Path) -> _Engine:
    """Record a chunked prompt beside decodes, lengths on both sides of a block boundary, and a reused row."""
    e = _Engine(path, KVGroup(4))
    e.admit("a", e.tokens(9))
    e.admit("b", e.tokens(3))
    e.step({"a": 4, "b": 3})
    e.step({"b": 1, "a": 1})
    e.admit("c", e.tokens(4))
    e.step({"b": 1, "a": 3, "c": 4})
    e.step({"b": 1, "a": 1, "c": 1}, pad_to=(8, 4))
    e.states.remove_request("b")
    e.admit("d", e.tokens(1))
    e.step({"c": 1, "d": 1, "a": 1})
    return e


def hits_and_resumes(path: Path) -> _Engine:
    """Record requests that are admitted with computed tokens, and one that is resumed with its outputs."""
    e = _Engine(path, KVGroup(2))
    e.admit("full hit", e.tokens(6), computed=5)
    e.admit("half hit", e.tokens(7), computed=2)
    e.step({"full hit": 1, "half hit": 5})
    e.step({"half hit": 1, "full hit": 1})
    e.states.remove_request("half hit")
    e.admit("resumed", e.tokens(7), e.tokens(2), computed=4)
    e.step({"full hit": 1, "resumed": 3})
    e.step({"full hit": 1, "resumed": 2})
    return e


def groups_and_windows(path: Path) -> _Engine:
    """Record several KV groups with different block sizes, and windows that pass whole blocks."""
    e = _Engine(
        path, KVGroup(4), KVGroup(2, sliding_window=3), KVGroup(3, sliding_window=1), KVGroup(1, recurrent=True)
    )
    e.admit("a", e.tokens(7))
    e.step({"a": 7})
    for _ in range(4):
        e.step({"a": 1})
    e.admit("b", e.tokens(9), computed=6)
    e.step({"b": 3, "a": 1})
    return e


def drafts(path: Path) -> _Engine:
    """Record verification with all, some and no drafts accepted, beside rows without drafts, up to max_model_len."""
    e = _Engine(path, KVGroup(4), drafts=3)
    e.admit("a", e.tokens(4))
    e.admit("b", e.tokens(5))
    e.step({"a": 4, "b": 3})
    e.step({"a": 4, "b": 2}, {"a": e.tokens(3)}, {"a": 3})
    e.step({"b": 3, "a": 3}, {"b": e.tokens(2), "a": e.tokens(2)}, {"b": 1})
    e.step({"a": 3, "b": 1}, {"a": [7, -1]})
    return e


def context_parallel(path: Path) -> _Engine:
    """Record a group that is interleaved over ranks beside a group that each rank holds in full."""
    cp = ContextParallel(size=2, rank=1, interleave=2)
    e = _Engine(path, KVGroup(4, context_parallel=True), KVGroup(2), cp=cp, max_model_len=17)
    e.admit("a", e.tokens(11))
    e.admit("b", e.tokens(2))
    e.step({"a": 8, "b": 2}, pad_to=(12, 3))
    e.step({"b": 1, "a": 3})
    e.step({"b": 1, "a": 1})
    return e


SCRIPTS: tuple[Callable[[Path], _Engine], ...] = (
    chunks_and_decodes,
    hits_and_resumes,
    groups_and_windows,
    drafts,
    context_parallel,
)


def main(directory: Path) -> list[Path]:
    """Write every golden trace to the directory."""
    paths = []
    for script in SCRIPTS:
        paths.append(directory / f"{script.__name__}.jsonl")
        script(paths[-1]).trace.close()
    return paths


if __name__ == "__main__":
    main(Path(sys.argv[1]))
