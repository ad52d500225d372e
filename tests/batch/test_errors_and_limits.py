"""A call that the batch layer refuses changes nothing; a value that it allows is allowed in every form."""

import batch_rig
import numpy as np
import pytest
from batch_rig import arrays, every_backend, every_check, states_of

import foreword.batch
from foreword.batch import (
    CapacityError,
    ContextParallel,
    InputBuffers,
    KVGroup,
    NewRequest,
    PlanError,
    RequestError,
    RequestStates,
    SamplingParams,
    StaleBatchError,
    prepare_inputs,
)
from foreword.batch.proof.spec import TENSORS, Level
from foreword.batch.step.layout import STEP
from foreword.errors import ConfigError

M, VOCAB = 9, 50


class World(batch_rig.World):
    """States with two groups, and everything that they and their buffers hold."""

    def __init__(self, rows: int = 3, drafts: int = 2):
        groups = KVGroup(2), KVGroup(4, sliding_window=3)
        super().__init__(*groups, rows=rows, length=M, vocab_size=VOCAB, drafts=drafts, tokens=8)

    def snapshot(self) -> dict[str, object]:
        s, directory = self.states, self.states._directory
        out: dict[str, object] = {"rows": dict(directory.rows), "free": list(directory.free), "step": s._step}
        for i, array in enumerate([*s._row_arrays(), s.token_ids]):
            out[f"state {i}"] = array.copy()
        for field in STEP:
            for g, array in enumerate(arrays(self.buffers[field.name])):
                out[f"{field.name} {g}"] = array.copy()
        return out | {"generation": self.buffers.generation, "scalars": list(self.buffers.written)}

    def assert_unchanged(self, before: dict[str, object]) -> None:
        after = self.snapshot()
        for key, value in before.items():
            assert np.array_equal(after[key], value), key


@pytest.fixture
def world() -> World:
    w = World()
    w.add("a", [1, 2, 3])
    w.add("b", [4, 5], room=4)
    return w


# -- nothing changes when a call raises ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (NewRequest("a", [1], [[9], [9]]), RequestError),
        (NewRequest("c", [], [[9], [9]]), RequestError),
        (NewRequest("c", None, [[9], [9]]), RequestError),
        (NewRequest("c", [1, VOCAB], [[9], [9]]), RequestError),
        (NewRequest("c", [1, -1], [[9], [9]]), RequestError),
        (NewRequest("c", [1.5], [[9], [9]]), RequestError),
        (NewRequest("c", [2**40], [[9], [9]]), RequestError),
        (NewRequest("c", [1] * (M + 1), [[9], [9]]), RequestError),
        (NewRequest("c", [1], [[9], [9]], output_token_ids=[VOCAB]), RequestError),
        (NewRequest("c", [1, 2], [[9], [9]], num_computed_tokens=2), RequestError),
        (NewRequest("c", [1, 2], [[9], [9]], num_computed_tokens=-1), RequestError),
        (NewRequest("c", [1], [[9]]), RequestError),
        (NewRequest("c", [1], [[-1], [9]]), RequestError),
        (NewRequest("c", [[1], [1, 2]], [[9], [9]]), RequestError),
        (NewRequest("c", [1], None), RequestError),
        (NewRequest("c", [1, 2], [[9], [9]], num_computed_tokens="1"), RequestError),
        (NewRequest("c", [1], [[9], [9]], lora_id=2**40), RequestError),
        (NewRequest("c", [1], [[9], [9]], lora_id="adapter"), RequestError),
        (NewRequest("c", [1], [[9], [9]], sampling_params={}), RequestError),
        (NewRequest("c", [1], [[9], [9]], sampling_params=SamplingParams(stop_token_ids=[VOCAB])), RequestError),
        (NewRequest("c", [1], [[9], [9]], sampling_params=SamplingParams(logit_bias={VOCAB: 1.0})), RequestError),
        (NewRequest("c", [1], [[9], [9]], sampling_params=SamplingParams(bad_words_token_ids=[[VOCAB]])), RequestError),
        (NewRequest("c", [1], [[9], [9]], mrope_delta=2**40), RequestError),
        (NewRequest("c", [1], [[9], [9]], encoder_len="long"), RequestError),
        (NewRequest("c", [1], [[9], [9]], mm_features=["image"]), RequestError),
        (NewRequest("c", None, [[9], [9]], prompt_embeds=np.zeros((0, 4))), RequestError),
        (NewRequest("c", None, [[9], [9]], prompt_embeds=[[1.0], [1.0, 2.0]]), RequestError),
        (NewRequest("c", [1], [[1] * 6, [9]]), CapacityError),
        (NewRequest("c", [1], [[1], [1] * 4]), CapacityError),
    ],
)
def test_a_refused_admission_changes_nothing(world, request_, error):
    before = world.snapshot()
    with pytest.raises(error):
        world.states.add_request(request_)
    world.assert_unchanged(before)


@pytest.mark.parametrize(
    ("block_ids", "message"),
    [
        ([3], r"block_ids = '1 lists'.*2 KV groups.*one list of blocks per KV group: \[\[\], \[\]\] for none"),
        ([3, 4], r"block_ids = \[3, 4\].*a number in the place of a list of blocks.*\[\[3\]\] for block 3"),
        (np.array([3, 4]), r"block_ids = .*a number in the place of a list of blocks.*\[\[3\]\] for block 3"),
        ([[3], 4], r"block_ids = \[\[3\], 4\].*a number in the place of a list"),
    ],
)
def test_blocks_that_are_not_one_list_per_group_are_refused_with_the_form(world, block_ids, message):
    before = world.snapshot()
    with pytest.raises(RequestError, match=message):
        world.states.add_request(NewRequest("c", [1], block_ids))
    with pytest.raises(RequestError, match=message):
        world.states.append_blocks("b", block_ids)
    world.assert_unchanged(before)


def test_one_request_too_many_changes_nothing(world):
    world.add("c", [1])
    before = world.snapshot()
    with pytest.raises(CapacityError, match="max_num_reqs = 3"):
        world.states.add_request(NewRequest("d", [1], [[90], [91]]))
    world.assert_unchanged(before)


def test_removing_an_unknown_request_returns_false_and_changes_nothing(world):
    before = world.snapshot()
    assert world.states.remove_request("nobody") is False
    world.assert_unchanged(before)
    assert world.states.remove_request("a") is True
    assert world.states.remove_request("a") is False


def test_blocks_past_the_end_of_any_group_change_no_group(world):
    before = world.snapshot()
    with pytest.raises(CapacityError):
        world.states.append_blocks("b", [[70], [71, 72, 73]])
    with pytest.raises(CapacityError):
        world.states.append_blocks_rows(np.array([1, 0], np.int32), np.array([70, 71], np.int32), group=0)
    with pytest.raises(RequestError):
        world.states.append_blocks("b", [[70]])
    with pytest.raises(RequestError):
        world.states.append_blocks("nobody", [[70], []])
    world.assert_unchanged(before)


@pytest.mark.one_in(3)
@every_backend
@every_check
@pytest.mark.parametrize(
    ("plan", "how", "error"),
    [
        ({"nobody": 1}, {}, RequestError),
        ({"a": 0}, {}, PlanError),
        ({"a": -1}, {}, PlanError),
        ({"a": 4}, {}, PlanError),
        ({"b": 5}, {"draft_tokens": {"b": [1, 2, 3]}}, PlanError),
        ({"a": 4}, {"draft_tokens": {"a": [1, 2]}}, PlanError),
        ({"a": 4}, {"draft_tokens": {"a": [VOCAB]}}, PlanError),
        ({"a": 4}, {"draft_tokens": {"a": [-2]}}, PlanError),
        ({"a": 3}, {"draft_tokens": {"b": [1]}}, PlanError),
        ({"a": 3}, {"pad_to": (2, None)}, PlanError),
        ({"a": 3}, {"pad_to": (9, None)}, PlanError),
        ({"a": 3}, {"pad_to": (None, 0)}, PlanError),
        ({"a": 3}, {"pad_to": (None, 4)}, PlanError),
        ({"a": 3}, {"order": "random"}, PlanError),
        ({"a": 3}, {"backend": "abacus"}, PlanError),
        ((np.array([0, 0], np.int32), np.array([1, 1], np.int32)), {}, PlanError),
        ((np.array([2], np.int32), np.array([1], np.int32)), {}, PlanError),
        ((np.array([3], np.int32), np.array([1], np.int32)), {}, PlanError),
        ((np.array([-1], np.int32), np.array([1], np.int32)), {}, PlanError),
        ((np.array([0], np.int32), np.array([1, 1], np.int32)), {}, PlanError),
        (
            (np.array([0], np.int32), np.array([4], np.int32)),
            {"draft_tokens": np.array([[-1, 5]], np.int32)},
            PlanError,
        ),
        ((np.array([0], np.int32), np.array([2**31 - 1], np.int32)), {}, PlanError),
        ((np.array([0], np.int32), np.array([1.5])), {}, PlanError),
        ((np.array([2**32]), np.array([1], np.int32)), {}, PlanError),
        ((np.array([0], np.int32), np.array([3], np.int32)), {"draft_tokens": np.array([[0.5]])}, PlanError),
    ],
)
def test_a_refused_plan_changes_nothing_and_leaves_the_batch_before_it_usable(world, backend, check, plan, how, error):
    given = {"backend": backend, "check": check}
    world.step({"b": 1}, {}, **given)
    batch = world.prepare({"b": 1}, **given)
    before = world.snapshot()
    with pytest.raises(error):
        world.prepare(plan, **given | how)
    world.assert_unchanged(before)
    world.states.commit(batch, {"b": [9]})
    assert world.states.num_tokens[world.states.row_of("b")] == 3


@every_backend
def test_more_tokens_than_the_buffers_hold_change_nothing(world, backend):
    world.add("c", [1, 2, 3, 4, 5, 6])
    before = world.snapshot()
    with pytest.raises(CapacityError, match="max_num_batched_tokens is 8"):
        world.prepare({"a": 3, "c": 6}, backend=backend)
    world.assert_unchanged(before)


@every_backend
@every_check
def test_a_write_without_a_block_is_refused(world, backend, check):
    world.add("c", [1, 2, 3], room=2)
    before = world.snapshot()
    with pytest.raises(PlanError) as caught:
        world.prepare({"a": 1, "c": 3}, backend=backend, check=check)
    world.assert_unchanged(before)
    error = caught.value
    assert (error.request, error.tensor, error.index, error.expected, error.got) == ("c", "block_table[0]", 1, 2, 1)


@every_backend
def test_drafts_without_a_known_token_before_them_are_refused(backend):
    world = World()
    world.add("a", [1, 2])
    world.step({"a": 2}, {}, backend=backend)
    before = world.snapshot()
    with pytest.raises(PlanError, match="known token"):
        world.prepare({"a": 2}, draft_tokens={"a": [5, 6]}, backend=backend)
    world.assert_unchanged(before)


@every_backend
@pytest.mark.parametrize(
    ("sampled", "error"),
    [
        ({"a": [1], "nobody": [1]}, RequestError),
        ({"a": [VOCAB]}, RequestError),
        ({"a": [-1]}, RequestError),
        ({"a": [1, 2]}, PlanError),
        (np.array([1], np.int32), PlanError),
        (np.array([[1], [2], [3]], np.int32), PlanError),
        (np.array([1.0, 2.0]), PlanError),
        (np.array([1, VOCAB], np.int32), PlanError),
        (np.array([-2, 1], np.int32), PlanError),
        (np.array([[-1, 3], [1, -1]], np.int32), PlanError),
    ],
)
def test_a_refused_commit_changes_nothing_and_can_be_made_again(world, backend, sampled, error):
    batch = world.prepare({"a": 3, "b": 2}, backend=backend)
    before = world.snapshot()
    with pytest.raises(error):
        world.states.commit(batch, sampled)
    world.assert_unchanged(before)
    world.states.commit(batch, {"a": [7], "b": [8]})
    assert world.states.num_tokens[:2].tolist() == [4, 3]


@every_backend
def test_a_token_past_the_models_length_is_refused(backend):
    world = World()
    world.add("a", [1] * M)
    batch = world.prepare({"a": 8}, backend=backend)
    world.states.commit(batch, {})
    batch = world.prepare({"a": 1}, backend=backend)
    before = world.snapshot()
    with pytest.raises(CapacityError, match="max_model_len = 9"):
        world.states.commit(batch, {"a": [1]})
    world.assert_unchanged(before)
    world.states.commit(batch, {})


# -- how long a batch holds ----------------------------------------------------------------------------------------


def test_a_batch_ends_with_the_next_one_on_its_buffers(world):
    old = world.prepare({"a": 3})
    world.prepare({"b": 2})
    for read in (lambda: old.input_ids, lambda: old.num_reqs, lambda: old.block_table, lambda: old.attention_state,
                 lambda: old.req_ids, lambda: world.states.commit(old, {})):  # fmt: skip
        with pytest.raises(StaleBatchError):
            read()
    assert "replaced" in repr(old)


def test_two_batches_hold_on_two_buffers(world):
    first = world.prepare({"a": 3})
    second = prepare_inputs(world.states, {"b": 2}, InputBuffers.for_states(world.states, 8))
    assert (first.input_ids.tolist(), second.input_ids.tolist()) == ([1, 2, 3], [4, 5])


def test_a_step_is_committed_once(world):
    batch = world.prepare({"a": 3})
    world.states.commit(batch, {"a": [9]})
    with pytest.raises(PlanError, match="committed before"):
        world.states.commit(batch, {"a": [9]})


def test_a_batch_of_other_states_is_refused(world):
    batch = world.prepare({"a": 3})
    other = World()
    with pytest.raises(PlanError, match="other states"):
        other.states.commit(batch, {})
    with pytest.raises(PlanError, match="other states"):
        prepare_inputs(other.states, {}, world.buffers)


@pytest.mark.parametrize("move", [lambda s: s.swap_rows(0, 2), lambda s: (s.remove_request("a"), s.condense())])
def test_rows_that_moved_refuse_the_batch_before(world, move):
    batch = world.prepare({"b": 2})
    move(world.states)
    with pytest.raises(PlanError, match="rows moved"):
        world.states.commit(batch, {"b": [1]})


@every_backend
def test_a_late_result_of_a_request_that_left_is_ignored(world, backend):
    batch = world.prepare({"a": 3, "b": 2}, backend=backend)
    world.states.remove_request("a")
    row = world.add("c", [40])
    assert row == 0, "the freed row is used again"
    world.states.commit(batch, np.array([7, 8], np.int32))
    assert world.states.token_ids[0, :1].tolist() == [40]
    assert world.states.num_tokens.tolist() == [1, 3, 0]
    assert world.states.num_computed_tokens.tolist() == [0, 2, 0]


def test_the_arrays_of_a_batch_cannot_be_written(world):
    batch = world.prepare({"a": 3, "b": 2})
    for spec in TENSORS:
        if spec.level in (Level.SYSTEM, Level.STEP) or spec.attribute is not None:
            continue
        value = getattr(batch, spec.name)
        for array in arrays(value):
            if array is not None and array.size:
                with pytest.raises(ValueError, match="read-only"):
                    array[0] = 0
    with pytest.raises(AttributeError):
        batch.something = 1


# -- forms ---------------------------------------------------------------------------------------------------------


@every_backend
def test_all_ways_to_say_that_a_chunk_sampled_nothing_mean_the_same(backend):
    ends = []
    forms = (
        {},
        {"a": []},
        {"a": [9]},
        np.array([-1], np.int32),
        np.array([9], np.int32),
        np.array([[-1, -1]], np.int32),
    )
    for sampled in forms:
        world = World()
        world.add("a", [1, 2, 3])
        world.step({"a": 2}, sampled, backend=backend)
        ends.append([a[:1].tolist() for a in (*world.states._row_arrays(), world.states.token_ids[:, :3])])
    assert all(end == ends[0] for end in ends)


@every_backend
def test_drafts_accepted_as_lists_and_as_a_table_are_equal(backend):
    ends = []
    for sampled in ({"a": [5, 9], "b": [7]}, np.array([[5, 9, -1], [7, -1, -1]], np.int32)):
        world = World()
        world.add("a", [1, 2])
        world.add("b", [3])
        batch = world.prepare({"a": 4, "b": 1}, draft_tokens={"a": [5, 6]}, backend=backend)
        world.states.commit(batch, sampled)
        ends.append([world.states.num_tokens.tolist(), world.states.num_computed_tokens.tolist()])
    assert ends[0] == ends[1] == [[4, 2, 0], [3, 1, 0]]


# -- rows ----------------------------------------------------------------------------------------------------------


def test_a_row_used_again_equals_a_fresh_one():
    used, fresh = World(), World()
    used.add("old", [9] * 8, lora_id=3)
    used.states.commit(prepare_inputs(used.states, {"old": 8}, used.buffers), {"old": [1]})
    used.states.remove_request("old")
    used.next_block = fresh.next_block
    assert used.add("a", [1, 2]) == fresh.add("a", [1, 2])
    for mine, theirs in zip(used.states._row_arrays(), fresh.states._row_arrays(), strict=True):
        if (
            mine.dtype != np.int64 or mine is used.states.sampling.seed
        ):  # not the counters of row generations and contents
            assert np.array_equal(mine, theirs)


def test_swapping_twice_is_the_identity(world):
    before = {k: v for k, v in world.snapshot().items() if k != "free"}
    world.states.swap_rows(0, 2)
    assert world.states.row_of("a") == 2
    assert world.states.token_ids[2, :3].tolist() == [1, 2, 3]
    assert not world.states.block_tables[0].table[0].any()
    world.states.swap_rows(2, 0)
    world.assert_unchanged(before)


def test_condense_moves_the_last_row_into_the_lowest_hole():
    world = World(rows=5)
    for i, rid in enumerate("abcde"):
        assert world.add(rid, [i + 1]) == i
    for rid in "bad":
        world.states.remove_request(rid)
    assert world.states.condense() == [(4, 0), (2, 1)]
    assert [world.states.row_of(r) for r in "ec"] == [0, 1]
    assert world.states.condense() == []
    assert world.add("f", [9]) == 2


# -- the package ---------------------------------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_there():
    names = foreword.batch.__all__
    assert names == sorted(names)
    assert all(getattr(foreword.batch, name) is not None for name in names)
    with pytest.raises(AttributeError):
        _ = foreword.batch.nothing


@pytest.mark.parametrize(
    "plan",
    [
        None,
        7,
        {"a": 1.5},
        {"a": "3"},
        {"a": None},
        {"a": 2**40},
        {"a": True},
        {"a": [3]},
        (np.array([0.5]), np.array([1])),
        (np.array([0]),),
        (np.array([0]), np.array([1]), np.array([1])),
        ([[0], [0, 1]], [1]),
    ],
)
def test_a_malformed_plan_is_refused(plan):
    world = World()
    world.add("a", [1, 2, 3])
    before = world.snapshot()
    with pytest.raises(PlanError):
        world.prepare(plan)
    world.assert_unchanged(before)


def test_a_count_that_is_not_a_number_is_refused_by_request(world):
    with pytest.raises(PlanError, match=r"request 'b'.*got '2'"):
        world.prepare({"a": 3, "b": "2"})


@pytest.mark.parametrize("drafts", [{"a": None}, {"a": 5}, {"a": [0.5]}, {"c": [1]}, np.array([1, 2]), [[1]]])
@pytest.mark.parametrize("form", ["names", "rows"])
def test_drafts_that_are_not_lists_are_refused(world, drafts, form):
    plan = {"a": 3, "b": 2}
    if form == "rows":
        plan = (np.array([world.states.row_of(rid) for rid in plan], np.int32), np.array([3, 2], np.int32))
    before = world.snapshot()
    with pytest.raises(PlanError):
        world.prepare(plan, draft_tokens=drafts)
    world.assert_unchanged(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: KVGroup(block_size=2.0),
        lambda: KVGroup(block_size="2"),
        lambda: KVGroup(block_size=4, kernel_block_size=2.0),
        lambda: KVGroup(block_size=4, sliding_window=1.5),
        lambda: ContextParallel(size=2, rank=0.0),
        lambda: states_of(rows=1.5),
        lambda: states_of(length="4"),
        lambda: RequestStates(max_num_reqs=1, max_model_len=4, vocab_size=5, kv_groups=KVGroup(2)),
        lambda: states_of(2),
        lambda: InputBuffers.for_states(World().states, "8"),
    ],
)
def test_a_configuration_of_other_types_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("pad_to", [(-1, None), (None, -5), ("8", None), (8,), 8])
@pytest.mark.parametrize("form", ["names", "rows"])
def test_padding_that_is_not_a_number_is_refused(pad_to, form):
    world = World()
    world.add("a", [1, 2, 3])
    plan = {"a": 3} if form == "names" else (np.array([world.states.row_of("a")], np.int32), np.array([3], np.int32))
    with pytest.raises(PlanError, match="pad"):
        world.prepare(plan, pad_to=pad_to)


@pytest.mark.parametrize("sampled", [{"a": 5}, {"a": "x"}, {"a": [1.5]}, {"a": [None]}])
def test_samples_that_are_not_tokens_are_refused_by_request(sampled):
    world = World()
    world.add("a", [1, 2, 3])
    batch = world.prepare({"a": 3})
    with pytest.raises(RequestError, match="request 'a': sampled"):
        world.states.commit(batch, sampled)
    world.states.commit(batch, {"a": [4]})  # nothing was lost
