"""The rule of slots: what a step reads and writes by content, in each kind of KV group."""

from collections.abc import Mapping

import numpy as np
import pytest

from foreword.batch import (
    CacheContents,
    GroupUse,
    InputBuffers,
    KVGroup,
    MultiModalFeature,
    NewRequest,
    RequestStates,
    SlotFault,
    prepare_inputs,
)
from foreword.batch.values.block_ops import BlockOps
from foreword.errors import ConfigError
from foreword.shadow import Shadow

S = 2


class World:
    """States of a small cache, each step checked."""

    def __init__(self, group: KVGroup | None = None, *, attached: bool = False, use: GroupUse | None = None) -> None:
        self.states = RequestStates(
            max_num_reqs=4, max_model_len=24, vocab_size=100, kv_groups=[group or KVGroup(S)], max_num_draft_tokens=2
        )
        self.buffers = InputBuffers.for_states(self.states, 64)
        self.contents = CacheContents(self.states, 20, attached=attached, uses={0: use} if use else None)

    def add(self, rid, prompt, blocks, computed=0, **fields):
        self.states.add_request(NewRequest(rid, prompt, [blocks], num_computed_tokens=computed, **fields))

    def step(
        self, plan: Mapping[str, int], sampled: Mapping[str, list[int]], slots=None, table=None, drafts=None, **how
    ) -> list[SlotFault]:
        batch = prepare_inputs(self.states, plan, self.buffers, draft_tokens=drafts, **how)
        found = self.contents.check(batch, None if slots is None else [slots], None if table is None else [table])
        self.states.commit(batch, sampled)
        return found


def test_a_request_may_read_what_another_writes_in_the_same_step():
    world = World()
    world.add("a", [1, 2, 3], [1, 2])
    world.add("b", [1, 2, 4], [1, 3], computed=2)
    assert world.step({"b": 1, "a": 3}, {"a": [5], "b": [5]}) == []


def test_a_slot_that_two_contents_are_written_to_is_named_for_the_one_that_is_lost():
    world = World()
    world.add("a", [1, 2, 3], [1, 2])
    world.add("b", [4, 2, 3], [3, 2])
    faults = world.step({"a": 3, "b": 3}, {"a": [5], "b": [5]})
    assert [(f.request, f.position, f.slot, f.writer, f.is_written) for f in faults] == [
        (0, 2, 4, "b", True),
        (0, 2, 4, "b", False),
    ]


def test_equal_content_may_be_written_twice():
    world = World()
    world.add("a", [1, 2, 3], [1, 2])
    world.add("b", [1, 2, 3], [1, 2])
    assert world.step({"a": 3, "b": 3}, {"a": [5], "b": [6]}) == []


def test_a_fault_is_named_once_until_the_slot_is_written_again():
    world = World()
    world.add("a", [1, 2, 3], [1, 2, 3, 4])
    world.step({"a": 3}, {"a": [4]})
    world.add("b", [9], [1, 5, 6])
    assert world.step({"b": 1}, {"b": [8]}) == []
    faults = world.step({"a": 1}, {"a": [5]})
    assert [(f.position, f.slot, f.writer, f.count) for f in faults] == [(0, 2, "b", 1)]
    assert world.step({"a": 1}, {"a": [6]}) == []
    faults = world.step({"a": 1, "b": 1}, {"a": [7], "b": [7]})  # b writes slot 3
    assert [(f.position, f.slot) for f in faults] == [(1, 3)]


def test_a_prefix_of_other_tokens_is_found_in_a_later_step_too():
    world = World()
    world.add("a", [1, 2, 3], [1, 2])
    world.step({"a": 3}, {"a": [4]})
    world.add("b", [1, 9, 3, 4], [1, 3], computed=2)
    faults = world.step({"b": 1, "a": 1}, {"a": [5]})
    assert [(f.request, f.position, f.entry, f.writer) for f in faults] == [(0, 1, 0, "a")]


@pytest.mark.parametrize(("first", "second"), [({"lora_id": 1}, {}), ({"lora_id": 1}, {"lora_id": 2})])
def test_another_adapter_is_another_content(first, second):
    world = World()
    world.add("a", [1, 2, 3], [1, 2], **first)
    world.step({"a": 3}, {"a": [4]})
    world.add("b", [1, 2, 3], [1, 3], computed=2, **second)
    assert [f.position for f in world.step({"b": 1}, {"b": [4]})] == [0]


def test_another_salt_is_another_content():
    world = World()
    for rid, salt, blocks in (("a", "x", [1, 2]), ("b", "x", [1, 3]), ("c", "y", [1, 4])):
        world.add(rid, [1, 2, 3], blocks, computed=0 if rid == "a" else 2)
        world.contents.salt(rid, salt)
        faults = world.step({rid: 3 if rid == "a" else 1}, {rid: [4]})
        assert len(faults) == (rid == "c")


def test_another_image_behind_equal_placeholders_is_another_content():
    world = World()
    for rid, image, blocks in (("a", "cat", [1, 2, 3]), ("b", "cat", [1, 2, 4]), ("c", "dog", [1, 2, 5])):
        features = [MultiModalFeature(image, 2, 2)]
        world.add(rid, [1, 2, 7, 7, 5], blocks, computed=0 if rid == "a" else 4, mm_features=features)
        faults = world.step({rid: 5 if rid == "a" else 1}, {rid: [4]})
        assert [f.position for f in faults] == ([2] if rid == "c" else [])


@pytest.mark.parametrize(
    ("outputs", "last", "wrong"), [([6, 7], 5.0, []), ([6, 9], 5.0, [6]), ([6, 7], 9.0, [4])],
    ids=["equal", "another token", "another end of the prompt"],
)  # fmt: skip
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a prompt"])
@pytest.mark.parametrize("chunks", [(5,), (4, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("kind", ["embeddings", "image"])
def test_content_behind_a_prompt_of_more_than_tokens_is_that_of_all_before_it(
    kind, chunks, beside, outputs, last, wrong
):
    world = World()

    def step(rid, count, sampled):
        plan, beside_it = {rid: count}, "beside"
        if beside:
            world.add(beside_it, [3, 4], [14, 15])
            plan[beside_it] = 2
        found = world.step(plan, {rid: sampled, **({beside_it: [1]} if beside else {})})
        if beside:
            world.states.remove_request(beside_it)
        return found

    def add(rid, blocks, last, **fields):
        of_image = {"mm_features": [MultiModalFeature(f"image {last}", 4, 1)]}
        embeds = {"prompt_embeds": np.array([[1.0], [2.0], [3.0], [4.0], [last]])}
        world.add(rid, [0] * 5, blocks, **(embeds if kind == "embeddings" else of_image), **fields)

    world.add("before", [9] * 8, [10, 11, 12, 13])  # the row keeps their prints
    step("before", 8, [8])
    world.states.remove_request("before")
    add("a", [1, 2, 3, 4], 5.0)
    for i, count in enumerate(chunks):
        assert step("a", count, [6] if i == len(chunks) - 1 else []) == []
    assert [step("a", 1, [token]) for token in (7, 8, 9)] == [[], [], []]
    add("b", [1, 2, 3, 4, 5], last, computed=7, output_token_ids=[*outputs, 8])
    assert [f.position for f in step("b", 1, [9])] == wrong


def test_rejected_drafts_are_written_over():
    world = World()
    world.add("a", [1, 2], [1, 2, 3, 4])
    assert world.step({"a": 4}, {"a": [9]}, drafts={"a": [5, 6]}) == []
    assert world.step({"a": 3}, {"a": [7, 8, 1]}, drafts={"a": [7, 8]}) == []
    assert world.step({"a": 1}, {"a": [1]}) == []


def test_a_draft_whose_id_is_not_known_equals_any():
    world = World()
    world.add("a", [1, 2], [1, 2, 3, 4])
    assert world.step({"a": 4}, {"a": [5, 6, 7]}, drafts={"a": [-1, -1]}) == []
    assert world.step({"a": 1}, {"a": [8]}) == []


def test_tokens_that_no_step_computed_are_found():
    world = World()
    world.add("a", [1, 2, 3, 4], [1, 2])
    world.step({"a": 1}, {})
    world.states.num_computed_tokens[world.states.row_of("a")] = 3
    faults = world.step({"a": 1}, {"a": [5]})
    assert [(f.position, f.writer, f.count) for f in faults] == [(1, None, 2)]


def test_an_attached_rule_takes_what_it_did_not_see_for_right():
    world = World(attached=True)
    world.add("a", [1, 2, 3, 4], [1, 2, 5], computed=3)
    assert world.step({"a": 1}, {"a": [5]}) == []
    world.add("b", [7], [1])
    world.step({"b": 1}, {"b": [8]})
    assert [f.writer for f in world.step({"a": 1}, {"a": [6]})] == ["b"]


def test_blocks_copied_and_zeroed_carry_their_content():
    world = World()
    world.add("a", [1, 2, 3, 4], [1, 2])
    world.step({"a": 4}, {"a": [5]})
    world.add("b", [1, 2, 3, 9], [1, 3], computed=3)
    assert world.step({"b": 1}, {"b": [5]}, block_ops=BlockOps.of(copies=[(2, 3)])) == []
    world.add("c", [1, 2, 9], [1, 4], computed=2)
    faults = world.step({"c": 1}, {"c": [5]}, block_ops=BlockOps.of(zero=[1]))
    assert [(f.position, f.writer, f.count) for f in faults] == [(0, None, 2)]


def test_a_write_beside_its_place_marks_both_slots():
    world = World()
    world.add("a", [1, 2, 3], [1, 2, 3])
    faults = world.step({"a": 3}, {"a": [4]}, slots=np.array([2, 3, 5]))
    assert [(f.slot, f.is_stray) for f in faults] == [(4, True)]


def test_an_entry_that_leads_elsewhere_is_the_runners():
    world = World()
    world.add("a", [1, 2, 3], [1, 2])
    faults = world.step({"a": 3}, {"a": [4]}, table=np.array([[7, 2]]))
    assert [(f.slot, f.position, f.count, f.is_stray) for f in faults] == [(14, 0, 2, True)]


@pytest.mark.parametrize("block", [-5, 20, 2**31 - 1])
def test_an_entry_that_is_no_block_holds_nothing(block):
    world = World()
    world.add("a", [1, 2, 3], [1, 2])
    faults = world.step({"a": 3}, {"a": [4]}, table=np.array([[block, 2]], np.int32))
    assert [(f.position, f.writer) for f in faults] == [(0, None)]


def test_slots_outside_the_cache_are_written_nowhere():
    world = World()
    world.add("a", [1, 2, 3], [1, 2])
    faults = world.step({"a": 3}, {"a": [4]}, slots=np.array([2, -1, 4000]))
    assert [(f.position, f.slot, f.count) for f in faults] == [(1, 3, 2)]


def test_rows_that_move_keep_their_content():
    world = World()
    world.add("a", [1], [1])
    world.add("b", [1, 2, 3], [2, 3])
    world.step({"a": 1, "b": 3}, {"a": [4], "b": [4]})
    world.states.remove_request("a")
    assert world.states.condense() == [(1, 0)]
    assert world.step({"b": 1}, {"b": [4]}) == []


def test_below_a_window_anything_may_stand():
    world = World(KVGroup(S, sliding_window=3))
    world.add("a", [1, 2, 3, 4, 5], [1, 2, 3, 6])
    world.step({"a": 5}, {"a": [6]})
    world.add("b", [9], [1])
    assert world.step({"a": 1, "b": 1}, {"a": [7], "b": [7]}) == []
    world.add("c", [9, 9, 9], [3, 8])
    assert [(f.request, f.position) for f in world.step({"c": 3, "a": 1}, {"a": [7], "c": [7]})] == [(1, 4)]


def test_a_chunk_does_not_see_the_chunk_before():
    world = World(use=GroupUse(chunk=4))
    world.add("a", [1, 2, 3, 4, 5], [1, 2, 3, 6])
    world.step({"a": 5}, {"a": [6]})
    world.add("b", [9, 9, 9, 9], [1, 2])
    assert world.step({"a": 1, "b": 4}, {"a": [7], "b": [7]}) == []
    world.add("c", [9], [3])
    assert [f.position for f in world.step({"a": 1, "c": 1}, {"a": [7], "c": [7]})] == [4]


def test_a_group_without_slots_is_not_followed():
    world = World(use=GroupUse(slots=False))
    world.add("a", [1, 2, 3], [1, 2])
    assert world.step({"a": 3}, {"a": [4]}) == []


# -- rings


W = 5


def ring_shadow(tokens: int) -> Shadow:
    """A shadow of one request in a ring of 5 positions, blocks 3, 7 and 4 of 2 slots."""
    states = RequestStates(max_num_reqs=2, max_model_len=24, vocab_size=100, kv_groups=[KVGroup(S)])
    states.add_request(NewRequest("a", list(range(10, 10 + tokens)), [[3, 7, 4]]))
    return Shadow(states, max_num_batched_tokens=64, num_blocks=9, uses={0: GroupUse(ring=W)})


def ring_slots(first: int, end: int) -> list[int]:
    slots = [6, 7, 14, 15, 8]
    return [slots[p % W] for p in range(first, end)]


def test_a_ring_is_followed_around():
    shadow, known = ring_shadow(4), 4
    first, end = 0, 4
    for token in range(15):
        shadow.plan({"a": end - first})
        tensors = {"slot_mapping": [ring_slots(first, end)], "block_table": [[[3, 7, 4]]]}
        assert shadow.step(["a"], tensors) == []
        shadow.commit({"a": [token]})
        known += 1
        first, end = end, known


def test_a_ring_that_was_written_over_is_found():
    shadow = ring_shadow(4)
    shadow.plan({"a": 4})
    shadow.step(["a"], {})
    shadow.commit({"a": [1]})
    shadow.states.add_request(NewRequest("b", [1, 2], [[7]]))
    shadow.plan({"b": 2})
    shadow.step(["b"], {})
    shadow.commit({"b": [1]})
    shadow.plan({"a": 1})
    found = shadow.step(["a"], {})
    assert [(f.tensor, f.request, f.expected, f.got, f.count) for f in found] == [
        ("cache", "a", "the key of position 2", "what request 'b' wrote", 2)
    ]


def test_a_wrong_slot_of_a_ring_is_found():
    shadow = ring_shadow(4)
    shadow.plan({"a": 4})
    found = shadow.step(["a"], {"slot_mapping": [[6, 7, 14, 8]]})
    assert [(f.tensor, f.expected, f.got) for f in found] == [("slot_mapping", 15, 8)]


@pytest.mark.parametrize("values", [{"chunk": 0}, {"ring": -1}, {"ring": 4, "chunk": 4}])
def test_a_use_that_cannot_be_is_refused(values):
    with pytest.raises(ConfigError):
        GroupUse(**values)


def test_the_slots_that_a_step_reads_are_compared():
    states = RequestStates(max_num_reqs=2, max_model_len=24, vocab_size=100, kv_groups=[KVGroup(S), KVGroup(S)])
    states.add_request(NewRequest("a", list(range(7)), [[1, 2, 3, 4], [3, 7, 5, 6]]))
    shadow = Shadow(states, max_num_batched_tokens=64, num_blocks=9, uses={1: GroupUse(ring=W)})
    shadow.plan({"a": 6})
    shadow.step(["a"], {})
    shadow.commit({"a": []})
    shadow.plan({"a": 1})
    ring = [states.block_tables[1].table[0, p % W // S] * S + p % W % S for p in range(2, 6)]
    reads = [list(range(2, 9)), [*ring, -1]]
    assert shadow.step(["a"], {"read_slots": reads}) == []
    shadow.commit({"a": [1]})
    shadow.plan({"a": 1})
    found = shadow.step(["a"], {"read_slots": [[2, 3, 4, 5, 6, 7, 8, 0], None]})
    assert [(f.tensor, f.group, f.index, f.request, f.expected, f.got) for f in found] == [
        ("read_slots", 0, (7,), "a", 9, 0)
    ]


def test_of_a_long_step_only_what_fits_is_written_to_a_ring():
    shadow = ring_shadow(8)
    shadow.plan({"a": 8})
    assert shadow.step(["a"], {"slot_mapping": [[-1, -1, -1, *ring_slots(3, 8)]]}) == []
    shadow.commit({"a": [1]})
    shadow.plan({"a": 1})
    assert shadow.step(["a"], {"slot_mapping": [ring_slots(8, 9)]}) == []
