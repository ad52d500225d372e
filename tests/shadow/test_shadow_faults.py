"""Faults planted in a foreign engine's runner and scheduler: each is named at once, by request, tensor and origin."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from foreign_engine import Engine, Group, Request, Runner, Scheduler
from shadow_rig import followed, shadow_of

from foreword.shadow import Finding

FULL = [Group(4)]
WINDOW = [Group(4), Group(4, 11)]


def first_findings(engine: Engine, most: int = 3000) -> list[Finding]:
    """Follow the engine to the first step with findings."""
    shadow = shadow_of(engine)
    for _ in range(most):
        if found := followed(engine, shadow):
            return found
    raise AssertionError("no finding")


# -- the runner


def wrong_slot(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]) -> str | None:
    if engine.next_id < 8:
        return None
    tensors["slot_mapping"][0][0] += 1
    return names[tensors["req_indices"][0]]


def wrong_logits(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]) -> str | None:
    if engine.next_id < 8 or tensors["logits_indices"][-1] == 0:
        return None
    tensors["logits_indices"][-1] -= 1
    return names[-1]


def kept_chunk(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]) -> str | None:
    mask = tensors["discard_mask"]
    if not mask.any():
        return None
    b = int(np.argmax(mask))
    mask[b] = False
    return names[b]


def missing_draft(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]) -> str | None:
    ids, cu = tensors["draft_token_ids"], tensors["cu_num_draft_tokens"]
    if not len(ids) or ids[-1] == 0:
        return None
    ids[-1] = 0
    b = int(np.searchsorted(cu, len(ids) - 1, side="right")) - 1
    tensors["input_ids"][tensors["query_start_loc"][b + 1] - 1] = 0
    return names[b]


def position_after_preemption(
    engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]
) -> str | None:
    for rid in sorted(out.scheduled_cached_reqs.resumed_req_ids):
        mine = tensors["req_indices"] == names.index(rid)
        tensors["positions"][mine] += 1
        return rid
    return None


def lost_block(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]) -> str | None:
    cached = out.scheduled_cached_reqs
    for rid, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if blocks and blocks[0] and rid not in cached.resumed_req_ids and engine.next_id > 6:
            b, row = names.index(rid), engine.runner.find(rid)
            entry = len(row.blocks[0]) - 1
            tensors["block_table"][0][b, entry] = 0
            mine = (tensors["req_indices"] == b) & (tensors["positions"] // 4 == entry)
            tensors["slot_mapping"][0][mine] %= 4
            row.blocks[0][entry] = 0
            return rid
    return None


def wrong_last_token(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]) -> str | None:
    if engine.next_id < 8:
        return None
    tensors["input_ids"][0] ^= 1
    return names[tensors["req_indices"][0]]


def wrong_count(engine: Engine, out: SimpleNamespace, tensors: dict[str, Any], names: list[str]) -> str | None:
    if engine.next_id < 8:
        return None
    tensors["seq_lens"][-1] += 1
    return names[-1]


TENSOR_FAULTS = {
    wrong_slot: ({}, ["slot_mapping", "cache"]),
    wrong_logits: ({}, ["logits_indices"]),
    kept_chunk: ({}, ["discard_mask"]),
    missing_draft: ({"most_drafts": 3}, ["input_ids", "draft_token_ids"]),
    position_after_preemption: ({"num_blocks": 26}, ["positions"]),
    lost_block: ({}, ["block_table", "slot_mapping"]),
    wrong_last_token: ({}, ["input_ids"]),
    wrong_count: ({}, ["seq_lens"]),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS, ids=lambda fault: fault.__name__)
def test_a_wrong_tensor_is_named_in_its_step(fault):
    settings, tensors = TENSOR_FAULTS[fault]
    engine, planted = Engine(FULL, 1, **settings), list[str]()

    def plant(engine: Engine, out: SimpleNamespace, made: dict[str, Any]) -> None:
        names = [row.rid for row in engine.runner.batch(out)]
        if names and not planted and (rid := fault(engine, out, made, names)):
            planted.append(rid)

    engine.fault = plant
    shadow = shadow_of(engine)
    while not planted:
        found = followed(engine, shadow)
    assert [f.tensor for f in found if f.request == planted[0]] == tensors
    assert {f.request for f in found} == set(planted)
    assert {f.origin for f in found} == {"runner"}
    assert {f.step for f in found} == {shadow.report().num_steps}


class StaleBlocks(Runner):
    """A row that moves keeps the blocks of the request that was there."""

    moved: str | None = None

    def condense(self) -> None:
        self.left = [row for row in self.rows if row is not None]
        super().condense()

    def leave(self, rid: str) -> None:
        self.gone = self.find(rid)
        super().leave(rid)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        row = self.rows[target]
        if self.moved is None and row is not None and len(self.gone.blocks[0]) >= len(row.blocks[0]):
            self.moved, row.blocks[0][:] = row.rid, self.gone.blocks[0][: len(row.blocks[0])]


class LastTokenLost(Runner):
    """A runner whose rows lose their last token when they are moved."""

    moved: str | None = None

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        row = self.rows[target]
        if self.moved is None and row is not None and row.computed == len(row.tokens) - 1 and row.tokens[-1]:
            self.moved, row.tokens[-1] = row.rid, 0


class AdapterStays(Runner):
    """Adapters stay in their rows when requests move."""

    moved: str | None = None

    def leave(self, rid: str) -> None:
        self.gone = self.find(rid)
        super().leave(rid)

    def move(self, source: int, target: int) -> None:
        super().move(source, target)
        row = self.rows[target]
        if self.moved is None and row is not None and row.adapter != self.gone.adapter:
            self.moved, row.adapter = row.rid, self.gone.adapter


@pytest.mark.parametrize(
    ("runner", "settings", "tensors"),
    [
        (StaleBlocks, {}, ["block_table", "slot_mapping", "cache"]),
        (LastTokenLost, {}, ["input_ids"]),
        (AdapterStays, {"adapters": 2}, ["lora_tokens"]),
    ],
)
def test_a_row_that_moved_wrongly_is_named(runner, settings, tensors):
    engine = Engine(FULL, 3, runner=runner, **settings)
    found = first_findings(engine)
    assert found[0].request == engine.runner.moved
    assert [f.tensor for f in found if f.request == engine.runner.moved] == tensors
    assert {f.origin for f in found} == {"runner"}


# -- the scheduler


class FreedInUse(Scheduler):
    """The first block of a running request returns to the pool while it is in use."""

    victim: str | None = None

    def schedule(self, rng: np.random.Generator) -> SimpleNamespace:
        out = super().schedule(rng)
        for request in self.running if self.victim is None else ():
            block = request.blocks[0][0]
            if self.users[block] == 1 and request.computed > 4 and request.most - len(request.outputs) > 3:
                self.victim = request.rid
                if (key := self.key_of.pop(block, None)) is not None:
                    del self.cached[key]
                self.free.appendleft(block)
                break
        return out

    def release(self, request: Request) -> None:
        if request.rid == self.victim:
            request.blocks[0] = request.blocks[0][1:]
        super().release(request)


class HashIgnoresParent(Scheduler):
    def hash_of(self, request: Request, end: int) -> Any:
        return tuple(request.tokens[end - 4 : end]), request.adapter


class HashIgnoresAdapter(Scheduler):
    def hash_of(self, request: Request, end: int) -> Any:
        return tuple(request.tokens[:end])


class WindowTooShort(Scheduler):
    def unseen(self, group: Group, computed: int) -> int:
        return 0 if group.window is None else max(computed - group.window + 1 + 6, 0)


class RejectedDraftsKept(Scheduler):
    victim: str | None = None

    def update(self, output: SimpleNamespace, sampled: dict[str, list[int]], rng: np.random.Generator) -> None:
        before = {request.rid: request for request in self.running}
        super().update(output, sampled, rng)
        for rid, drafts in output.scheduled_spec_decode_tokens.items():
            request = before[rid]
            if self.victim is None and request in self.running and len(sampled.get(rid, ())) <= len(drafts):
                self.victim = rid
                request.computed += 1


@pytest.mark.parametrize(
    ("scheduler", "groups", "settings"),
    [
        (FreedInUse, FULL, {"num_blocks": 30}),
        (HashIgnoresAdapter, FULL, {"adapters": 2}),
        (WindowTooShort, WINDOW, {"num_blocks": 40}),
    ],
)
def test_a_scheduler_that_misuses_blocks_is_named(scheduler, groups, settings):
    engine = Engine(groups, 5, scheduler=scheduler, **settings)
    found = first_findings(engine)
    assert {(f.tensor, f.origin) for f in found} == {("cache", "scheduler")}
    assert all(f.request is not None and "key of position" in str(f.expected) for f in found)
    if isinstance(engine.scheduler, FreedInUse):
        assert found[0].request == engine.scheduler.victim


def test_a_hash_that_ignores_what_comes_before_is_named():
    engine = Engine(FULL, 5, scheduler=HashIgnoresParent)
    engine.prompts = [[1, 2, 3, i, *[7, 7, 7, 7] * 10] for i in range(3)]
    found = first_findings(engine)
    assert {(f.tensor, f.origin) for f in found} == {("cache", "scheduler")}


def test_drafts_that_the_scheduler_does_not_take_back_are_named():
    engine = Engine(FULL, 5, scheduler=RejectedDraftsKept, most_drafts=3)
    found = first_findings(engine)
    first = found[0]
    assert (first.tensor, first.origin, first.request) == ("num_computed_tokens", "scheduler", engine.scheduler.victim)
    assert first.got == first.expected + 1
    assert "tokens computed" in first.why


# -- after a finding


def test_a_fault_of_one_step_does_not_blind_the_next():
    """A slot written wrongly is found, nothing after it, and the next fault again."""
    engine, steps = Engine(FULL, 1), iter(range(10**6))

    def plant(engine: Engine, out: SimpleNamespace, made: dict[str, Any]) -> None:
        if next(steps) in (50, 100) and len(made["slot_mapping"][0]):
            made["input_ids"][0] ^= 1

    engine.fault = plant
    shadow = shadow_of(engine)
    found = [followed(engine, shadow) for _ in range(200)]
    assert [bool(f) for f in found] == [i in (50, 100) for i in range(200)]
