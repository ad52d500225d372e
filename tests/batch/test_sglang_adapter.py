"""SGLang's `ForwardBatch`, against loops over the requests of random steps."""

import random
from collections import Counter

import pytest
from batch_model import Group, Model, Scheduled
from batch_rig import World, address
from test_random_traces import Lives, Picks, Step, live

from foreword.batch import KVGroup, PlanError
from foreword.batch.adapters import ForwardMode, sglang_forward_batch


class SGLangLives(Lives):
    """Random traffic whose steps are compared with what SGLang makes of them."""

    def __init__(self) -> None:
        groups = [Group(4), Group(1), Group(2, window=3), Group(1, window=5)]
        super().__init__(Model(max_num_reqs=5, max_model_len=23, groups=groups, max_drafts=0), max_tokens=40)
        self.seen: Counter[str] = Counter()

    def compare(self, step: Step, pick: Picks) -> None:
        for batch in step.batches:
            for g in range(len(self.model.groups) if batch.is_gathered else 0):
                self.compare_group(step.scheduled, batch, g)

    def compare_group(self, step: list[Scheduled], batch, g: int) -> None:
        got = sglang_forward_batch(batch, g)
        decodes = [s.computed >= s.request.prefill_len for s in step]
        mode = "MIXED" if any(decodes) else "EXTEND"
        if all(decodes):
            mode = "DECODE" if step else "IDLE"
        self.seen[mode] += 1
        positions = [p for s in step for p in range(s.computed, s.computed + s.num)]
        lens = [s.computed + s.num for s in step]
        assert got.forward_mode.name == mode
        assert (got.batch_size, got.seq_lens_sum, got.rids) == (len(step), sum(lens), batch.req_ids)
        lists = {
            "input_ids": ("int64", [s.request.tokens[p] for s in step for p in range(s.computed, s.computed + s.num)]),
            "positions": ("int64", positions),
            "seq_lens": ("int64", lens),
            "seq_lens_cpu": ("int64", lens),
            "orig_seq_lens": ("int32", [max(n, len(s.request.prompt)) for n, s in zip(lens, step, strict=True)]),
            "out_cache_loc": (
                "int64",
                [self.model.slot(g, s, p) for s in step for p in range(s.computed, s.computed + s.num)],
            ),
            "extend_seq_lens": ("int32", [s.num for s in step]),
            "extend_prefix_lens": ("int32", [s.computed for s in step]),
            "extend_start_loc": ("int32", [sum(s.num for s in step[:b]) for b in range(len(step))]),
        }
        for name, (dtype, want) in lists.items():
            array = getattr(got, name)
            if name.startswith("extend") and mode in ("DECODE", "IDLE"):
                assert array is None
            else:
                assert (array.dtype.name, array.tolist()) == (dtype, want), name
        assert got.extend_num_tokens == (None if mode in ("DECODE", "IDLE") else len(positions))
        assert (got.req_to_token.dtype.name, got.req_pool_indices.dtype.name) == ("int32", "int64")
        window = self.model.groups[g].window
        for b, s in enumerate(step):
            row = got.req_to_token[got.req_pool_indices[b]]
            first = 0 if window is None else max(0, s.computed - window + 1)
            held = [self.model.slot(g, s, p) if self.model.block(g, s, p) else 0 for p in range(first, lens[b])]
            assert row[first : lens[b]].tolist() == held


@pytest.mark.long
def test_every_field_of_random_steps_is_what_the_loops_say():
    seen: Counter[str] = Counter()
    for seed in range(3):
        lives = SGLangLives()
        live(lives, Picks(random.Random(seed).randint), 50)
        seen += lives.seen
    assert min(seen[mode.name] for mode in ForwardMode) > 5


def test_a_table_with_a_slot_per_token_is_the_states_own():
    world = World(KVGroup(1))
    world.add("gone", [1])
    row = world.add("a", [1, 2, 3])
    world.states.remove_request("gone")
    got = sglang_forward_batch(world.prepare({"a": 3}, gather_block_tables=False))
    assert address(got.req_to_token) == address(world.states.block_tables[0].table)
    assert got.req_pool_indices.tolist() == [row] == [1]
    with pytest.raises(ValueError, match="read-only"):
        got.req_to_token[0, 0] = 1


def test_a_step_with_drafts_is_refused_with_the_request():
    world = World(KVGroup(1), drafts=2)
    world.add("a", [1, 2], num_computed_tokens=1)
    world.add("b", [1, 2], num_computed_tokens=1)
    batch = world.prepare({"a": 1, "b": 3}, draft_tokens={"b": [3, 4]})
    with pytest.raises(PlanError, match="spec_info") as caught:
        sglang_forward_batch(batch)
    assert (caught.value.request, caught.value.got) == ("b", 2)
