"""Another engine, in plain Python: a scheduler in vLLM's protocol and a runner with rows that move, as lists.

It shares no code with Foreword: it is the independent definition that a shadow must agree with, and where faults are
planted. A block is offered to other requests as soon as the step that computes it is scheduled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

NULL = 0


class Group(NamedTuple):
    block_size: int
    window: int | None = None


@dataclass
class Request:
    rid: str
    prompt: list[int]
    most: int  # outputs
    adapter: int
    outputs: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    status: str = "waiting"
    drafts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


class Scheduler:
    """Decides steps. `hash_of` and `unseen` are methods so that faults can replace them."""

    def __init__(self, groups: Sequence[Group], num_blocks: int, rows: int, budget: int, most_drafts: int) -> None:
        self.groups, self.rows, self.budget, self.most_drafts = groups, rows, budget, most_drafts
        self.free: deque[int] = deque(range(1, num_blocks))
        self.users = [0] * num_blocks
        self.cached: dict[Any, int] = {}
        self.key_of: dict[int, Any] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.finished: set[str] = set()
        self.num_preemptions = self.num_hits = 0

    def hash_of(self, request: Request, end: int) -> Any:
        """The key of the block that ends at position ``end``: all tokens before it, and the adapter."""
        return tuple(request.tokens[:end]), request.adapter

    def unseen(self, group: Group, computed: int) -> int:
        """Tokens at the beginning that no later token sees."""
        return 0 if group.window is None else max(computed - group.window + 1, 0)

    # -- blocks

    def take(self) -> int:
        block = self.free.popleft()
        if (key := self.key_of.pop(block, None)) is not None:
            del self.cached[key]
        self.users[block] = 1
        return block

    def share(self, block: int) -> int:
        if self.users[block] == 0:
            self.free.remove(block)
        self.users[block] += 1
        return block

    def drop(self, block: int) -> None:
        if block == NULL:
            return
        self.users[block] -= 1
        if self.users[block] == 0:
            self.free.append(block)

    def hit(self, request: Request) -> int:
        """Share the longest cached prefix; the tokens that need not be computed."""
        size = max(group.block_size for group in self.groups)
        for end in range((len(request.tokens) - 1) // size * size, 0, -size):
            found = []
            for g, group in enumerate(self.groups):
                S = group.block_size
                first = self.unseen(group, end) // S
                found.append(
                    [NULL] * first
                    + [self.cached.get((g, self.hash_of(request, (k + 1) * S)), -1) for k in range(first, end // S)]
                )
            if all(-1 not in blocks for blocks in found):
                request.blocks = [[b if b == NULL else self.share(b) for b in blocks] for blocks in found]
                self.num_hits += 1
                return end
        return 0

    def missing(self, request: Request, total: int) -> int:
        held = request.blocks or [[] for _ in self.groups]
        return sum(max(-(-total // g.block_size) - len(b), 0) for g, b in zip(self.groups, held, strict=True))

    def grow(self, request: Request, total: int) -> list[list[int]]:
        new = []
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            ids = [self.take() for _ in range(-(-total // group.block_size) - len(blocks))]
            blocks += ids
            new.append(ids)
        return new

    def offer(self, request: Request, end: int) -> None:
        """Full blocks of known tokens can be hit from now on."""
        for g, group in enumerate(self.groups):
            for k in range(min(end, len(request.tokens)) // group.block_size):
                block, key = request.blocks[g][k], (g, self.hash_of(request, (k + 1) * group.block_size))
                if block != NULL and block not in self.key_of and key not in self.cached:
                    self.cached[key], self.key_of[block] = block, key

    def free_unseen(self, request: Request) -> None:
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            for k in range(min(self.unseen(group, request.computed) // group.block_size, len(blocks))):
                self.drop(blocks[k])
                blocks[k] = NULL

    def release(self, request: Request) -> None:
        for blocks in request.blocks:
            for block in reversed(blocks):
                self.drop(block)
        request.blocks = []

    # -- steps

    def schedule(self, rng: np.random.Generator) -> SimpleNamespace:
        new, entries, resumed, all_tokens, scheduled, drafts = [], [], set(), {}, {}, {}
        preempted: set[str] = set()
        left = self.budget
        for request in list(self.running):
            if request not in self.running or left == 0:
                continue
            ids = request.drafts[: max(left - 1, 0)]
            count = min(len(request.tokens) + len(ids) - request.computed, left)
            ids = ids[: max(count - (len(request.tokens) - request.computed), 0)]
            while self.missing(request, request.computed + count) > len(self.free):
                last = self.running.pop()
                self.release(last)
                last.status, last.computed, last.drafts = "preempted", 0, []
                self.waiting.appendleft(last)
                preempted.add(last.rid)
                self.num_preemptions += 1
                if last.rid in scheduled:
                    left += scheduled.pop(last.rid)
                    drafts.pop(last.rid, None)
                    entries = [entry for entry in entries if entry[0] != last.rid]
                if last is request:
                    break
            if request.status == "preempted":
                continue
            blocks = self.grow(request, request.computed + count)
            entries.append((request.rid, blocks if any(blocks) else None, request.computed, len(request.outputs)))
            scheduled[request.rid], left = count, left - count
            if ids:
                drafts[request.rid] = ids
            self.offer(request, request.computed + count)
        while self.waiting and left and len(self.running) < self.rows and not preempted:
            request = self.waiting[0]
            request.blocks = [[] for _ in self.groups]
            request.computed = self.hit(request)
            count = min(len(request.tokens) - request.computed, left)
            if self.missing(request, request.computed + count) > len(self.free) - len(self.running):
                self.release(request)
                break
            self.waiting.popleft()
            self.grow(request, request.computed + count)
            blocks = [list(ids) for ids in request.blocks]
            if request.status == "preempted":
                entries.append((request.rid, blocks, request.computed, len(request.outputs)))
                resumed.add(request.rid)
                all_tokens[request.rid] = list(request.tokens)
            else:
                new.append(new_data(request, blocks))
            request.status = "running"
            self.running.append(request)
            scheduled[request.rid], left = count, left - count
            self.offer(request, request.computed + count)
        finished, self.finished = self.finished, set()
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[e[0] for e in entries], resumed_req_ids=resumed, new_token_ids=[], all_token_ids=all_tokens,
                new_block_ids=[e[1] for e in entries], num_computed_tokens=[e[2] for e in entries],
                num_output_tokens=[e[3] for e in entries],
            ),
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=drafts, scheduled_encoder_inputs={}, num_common_prefix_blocks=[],
            finished_req_ids=finished, free_encoder_mm_hashes=[], preempted_req_ids=preempted,
        )  # fmt: skip

    def update(self, output: SimpleNamespace, sampled: dict[str, list[int]], rng: np.random.Generator) -> None:
        for request in list(self.running):
            count = output.num_scheduled_tokens.get(request.rid)
            if count is None:
                continue
            tokens, drafts = sampled.get(request.rid, []), output.scheduled_spec_decode_tokens.get(request.rid, [])
            request.computed += count - (self.rejected(len(drafts), len(tokens)) if tokens else 0)
            request.outputs += tokens
            request.drafts = []
            if len(request.outputs) >= request.most:
                self.finish(request)
            else:
                self.free_unseen(request)
                if tokens and self.most_drafts and rng.random() < 0.6:
                    request.drafts = rng.integers(1, 50, rng.integers(1, self.most_drafts + 1)).tolist()

    def rejected(self, num_drafts: int, num_sampled: int) -> int:
        return num_drafts - (num_sampled - 1)

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.release(request)
        self.finished.add(request.rid)


def new_data(request: Request, blocks: list[list[int]]) -> SimpleNamespace:
    lora = (
        SimpleNamespace(lora_int_id=request.adapter, lora_name=f"a{request.adapter}", lora_path="")
        if request.adapter
        else None
    )
    return SimpleNamespace(
        req_id=request.rid, prompt_token_ids=list(request.prompt), mm_features=[], sampling_params=None,
        pooling_params=None, block_ids=tuple(blocks), num_computed_tokens=request.computed, lora_request=lora,
        prompt_embeds=None, prefill_token_ids=None,
    )  # fmt: skip


class Row:
    """The data that the runner keeps of a request."""

    def __init__(self, rid: str, tokens: list[int], blocks: list[list[int]], computed: int, adapter: int) -> None:
        self.rid, self.tokens, self.computed, self.adapter = rid, tokens, computed, adapter
        self.blocks = [list(ids) for ids in blocks]


class Runner:
    """Makes the tensors of a step, by loops over lists. A hole is filled from the end, as in `condense`."""

    def __init__(self, groups: Sequence[Group], width: int) -> None:
        self.groups, self.width = groups, width
        self.rows: list[Row | None] = []
        self.kept: dict[str, Row] = {}  # rows of preempted requests

    def find(self, rid: str) -> Row:
        return next(row for row in self.rows if row is not None and row.rid == rid)

    def enter(self, row: Row) -> None:
        for i, other in enumerate(self.rows):
            if other is None:
                self.rows[i] = row
                return
        self.rows.append(row)

    def leave(self, rid: str) -> None:
        self.rows = [None if row is not None and row.rid == rid else row for row in self.rows]

    def move(self, source: int, target: int) -> None:
        self.rows[target], self.rows[source] = self.rows[source], None

    def update(self, out: SimpleNamespace) -> None:
        for rid in out.finished_req_ids:
            self.leave(rid)
            self.kept.pop(rid, None)
        for rid in out.preempted_req_ids:
            self.kept[rid] = self.find(rid)
            self.leave(rid)
        for data in out.scheduled_new_reqs:
            adapter = data.lora_request.lora_int_id if data.lora_request else 0
            self.enter(Row(data.req_id, list(data.prompt_token_ids), data.block_ids, data.num_computed_tokens, adapter))
        cached = out.scheduled_cached_reqs
        for rid, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if rid in cached.resumed_req_ids:
                old = self.kept.pop(rid)
                self.enter(Row(rid, list(cached.all_token_ids[rid]), blocks, computed, old.adapter))
                continue
            row = self.find(rid)
            row.computed = computed
            for held, ids in zip(row.blocks, blocks or (), strict=False):
                held += ids
        self.condense()

    def condense(self) -> None:
        while None in self.rows:
            hole = self.rows.index(None)
            while self.rows and self.rows[-1] is None:
                self.rows.pop()
            if hole < len(self.rows):
                self.move(len(self.rows) - 1, hole)

    def batch(self, out: SimpleNamespace) -> list[Row]:
        return [row for row in self.rows if row is not None and row.rid in out.num_scheduled_tokens]

    def prepare(self, out: SimpleNamespace) -> dict[str, Any]:
        rows = self.batch(out)
        ids, positions, owners, loc, lens, logits, adapters = [], [], [], [0], [], [], []
        slots: list[list[int]] = [[] for _ in self.groups]
        cu_drafts, draft_ids, targets, bonus, discard = [0], [], [], [], []
        for b, row in enumerate(rows):
            count, drafts = out.num_scheduled_tokens[row.rid], out.scheduled_spec_decode_tokens.get(row.rid, [])
            tokens = row.tokens + drafts
            for p in range(row.computed, row.computed + count):
                ids.append(tokens[p])
                positions.append(p)
                owners.append(b)
                adapters.append(row.adapter)
                for g, group in enumerate(self.groups):
                    slots[g].append(row.blocks[g][p // group.block_size] * group.block_size + p % group.block_size)
            loc.append(len(ids))
            lens.append(row.computed + count)
            targets += range(len(logits), len(logits) + len(drafts))
            logits += range(len(ids) - 1 - len(drafts), len(ids))
            bonus.append(len(logits) - 1)
            draft_ids += drafts
            cu_drafts.append(len(draft_ids))
            discard.append(row.computed + count - len(drafts) < len(row.tokens))
        tables = []
        for g in range(len(self.groups)):
            table = np.zeros((len(rows), self.width), np.int32)
            for b, row in enumerate(rows):
                table[b, : len(row.blocks[g])] = row.blocks[g]
            tables.append(table)
        return {
            "input_ids": np.array(ids, np.int32), "positions": np.array(positions), "req_indices": np.array(owners),
            "query_start_loc": np.array(loc, np.int32), "seq_lens": np.array(lens, np.int32),
            "slot_mapping": [np.array(s) for s in slots], "block_table": tables, "logits_indices": np.array(logits),
            "num_computed_tokens": np.array([row.computed for row in rows], np.int32),
            "num_scheduled_tokens": np.diff(loc), "max_query_len": max(np.diff(loc), default=0),
            "max_seq_len": max(lens, default=0), "num_tokens": len(ids), "num_reqs": len(rows),
            "cu_num_draft_tokens": np.array(cu_drafts), "draft_token_ids": np.array(draft_ids, np.int32),
            "target_logits_indices": np.array(targets, np.int64),
            "bonus_logits_indices": np.array(bonus, np.int64), "discard_mask": np.array(discard, bool),
            "lora_tokens": np.array(adapters, np.int32),
        }  # fmt: skip

    def commit(self, sampled: dict[str, list[int]]) -> None:
        for rid, tokens in sampled.items():
            self.find(rid).tokens += tokens


class Engine:
    """Random traffic: requests with shared beginnings, pairs of equal prompts, chunks, drafts, aborts, preemptions.

    faults: called as fault(engine, output, tensors) after the runner prepared a step, to change the tensors.
    """

    def __init__(
        self, groups: Sequence[Group], seed: int, *, num_blocks: int = 40, rows: int = 6, budget: int = 24,
        length: int = 96, most_drafts: int = 0, adapters: int = 0, scheduler: type[Scheduler] = Scheduler,
        runner: type[Runner] = Runner,
    ) -> None:  # fmt: skip
        self.rng = np.random.default_rng(seed)
        self.groups, self.num_blocks, self.rows, self.budget, self.length = groups, num_blocks, rows, budget, length
        self.most_drafts, self.adapters = most_drafts, adapters
        self.scheduler = scheduler(groups, num_blocks, rows, budget, most_drafts)
        self.runner = runner(groups, -(-length // min(g.block_size for g in groups)) + 3)
        self.prompts = [self.rng.integers(1, 50, length // 2).tolist() for _ in range(3)]
        self.next_id = 0
        self.fault: Callable[[Engine, SimpleNamespace, dict[str, Any]], None] | None = None
        self.shapes: set[str] = set()

    def arrive(self) -> None:
        rng = self.rng
        if len(self.scheduler.waiting) < 4 and rng.random() < 0.35:
            base = self.prompts[int(rng.integers(3))]
            shared = base[: int(rng.integers(0, len(base)))] if rng.random() < 0.7 else []
            own = rng.integers(1, 50, int(rng.integers(1, self.length // 4))).tolist()
            most, adapter = int(rng.integers(1, self.length // 5)), int(rng.integers(0, self.adapters + 1))
            for _ in range(2 if rng.random() < 0.3 else 1):
                self.scheduler.waiting.append(Request(f"r{self.next_id}", shared + own, most, adapter))
                self.next_id += 1
        if self.scheduler.running and rng.random() < 0.02:
            self.scheduler.finish(self.scheduler.running[int(rng.integers(len(self.scheduler.running)))])

    def decide(self) -> SimpleNamespace:
        self.arrive()
        return self.scheduler.schedule(self.rng)

    def prepare(self, out: SimpleNamespace) -> tuple[list[str], dict[str, Any]]:
        self.runner.update(out)
        tensors = self.runner.prepare(out)
        req_ids = [row.rid for row in self.runner.batch(out)]
        if self.fault is not None:
            self.fault(self, out, tensors)
        return req_ids, tensors

    def sample(self, out: SimpleNamespace) -> dict[str, list[int]]:
        sampled = {}
        for row in self.runner.batch(out):
            drafts = out.scheduled_spec_decode_tokens.get(row.rid, [])
            if row.computed + out.num_scheduled_tokens[row.rid] - len(drafts) >= len(row.tokens):
                accepted = int(self.rng.integers(0, len(drafts) + 1))
                sampled[row.rid] = [*drafts[:accepted], int(self.rng.integers(1, 50))]
        return sampled

    def finish_step(self, out: SimpleNamespace, sampled: dict[str, list[int]]) -> None:
        self.runner.commit(sampled)
        self.scheduler.update(out, sampled, self.rng)
