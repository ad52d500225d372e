"""The KV cache on real rows: hits, sharing, windows, copies, and no block lost."""

import numpy as np
import pytest

from foreword.batch import KVGroup, RequestStates
from foreword.cache import BlockRemoved, KVCacheManager, prefix_keys, with_adapter
from foreword.errors import CapacityError, RequestError
from foreword.scheduler import admit


def held(node) -> list[tuple[int, int]]:
    """(group, block) of every physical block with the content of a node."""
    first = [(g, b) for g, ids in enumerate(node.blocks) for b in ids.tolist() if b]
    found = first + [(g, b) for (g, _), spares in node.spares.items() for b in spares]
    assert len(found) == node.num_blocks
    return found


class Rig:
    """A cache with rows, and a simulated model that computes everything at once."""

    def __init__(self, *, blocks: int = 32, groups: list[KVGroup] | None = None, **options) -> None:
        self.states = RequestStates(
            max_num_reqs=8, max_model_len=64, vocab_size=1000, kv_groups=groups or [KVGroup(block_size=4)]
        )
        self.cache = KVCacheManager(self.states, blocks, **options)

    def start(self, name: str, prompt: list[int], keys=None):
        """Admit and compute the whole prompt. Returns the hit and the copies."""
        keys = keys or {}
        hit = self.cache.lookup(np.array(prompt, np.int32), keys)
        row, copies = admit(self.states, self.cache, name, prompt, hit, len(prompt), keys)
        self.states.num_computed_tokens[row] = len(prompt)
        self.cache.publish(row)
        return hit, copies

    def end(self, name: str) -> None:
        self.cache.free(self.states.row_of(name))
        self.states.remove_request(name)

    def extend(self, name: str, tokens: list[int]) -> None:
        row = self.states.row_of(name)
        rows = np.array([row], np.int32)
        for token in tokens:
            n = int(self.states.num_tokens[row])
            self.states.token_ids[row, n] = token
            self.states.num_tokens[row] = n + 1
            self.cache.free_expired(rows, np.array([n]))
            assert self.cache.grow_to(rows, np.array([n + 1]))
            self.states.num_computed_tokens[row] = n + 1

    def blocks(self, name: str, group: int = 0) -> list[int]:
        table, row = self.states.block_tables[group], self.states.row_of(name)
        return table.table[row, : table.num_blocks[row]].tolist()


def test_full_prefix_hit_recomputes_the_last_token():
    rig = Rig(partial_reuse=False)
    rig.start("a", [1, 2, 3, 4, 5, 6, 7, 8])
    hit = rig.cache.lookup(np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32))
    assert hit.num_tokens == 4
    assert rig.cache.lookup(np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32)).num_tokens == 8


def test_a_prompt_of_one_token_never_hits():
    rig = Rig()
    rig.start("a", [1, 2, 3, 4])
    assert rig.cache.lookup(np.array([1], np.int32)).num_tokens == 0


def test_shared_blocks_are_the_same_blocks_and_have_two_owners():
    rig = Rig()
    rig.start("a", [1, 2, 3, 4, 5, 6, 7, 8])
    rig.start("b", [1, 2, 3, 4, 9, 9, 9, 9])
    assert rig.blocks("a")[0] == rig.blocks("b")[0]
    assert rig.cache.pool.num_refs[rig.blocks("a")[0]] == 2
    rig.end("a")
    assert rig.cache.pool.num_refs[rig.blocks("b")[0]] == 1


def test_a_finished_request_leaves_its_prefix_until_it_is_evicted():
    rig = Rig(blocks=5)
    rig.start("a", list(range(1, 9)))
    rig.end("a")
    assert rig.cache.lookup(np.arange(1, 12, dtype=np.int32)).num_full == 8
    rig.start("b", [50] * 16)
    assert rig.cache.lookup(np.arange(1, 12, dtype=np.int32)).num_tokens == 0
    rig.end("b")


def test_of_a_freed_prompt_the_tail_is_evicted_first():
    rig = Rig(blocks=5, partial_reuse=False)
    rig.start("a", list(range(1, 17)))
    rig.end("a")
    rig.start("b", [50] * 4)
    assert rig.cache.lookup(np.arange(1, 18, dtype=np.int32)).num_full == 12


def test_the_hit_report_names_the_first_difference():
    rig = Rig()
    rig.start("a", list(range(1, 17)))
    other = np.array([*range(1, 11), 99, 12, 13, 14, 15, 16], np.int32)
    hit = rig.cache.lookup(other)
    assert (hit.num_full, hit.num_partial) == (8, 2)
    assert str(hit) == "reused 10 of 16; differs at position 10"
    assert (
        str(rig.cache.lookup(np.arange(1, 17, dtype=np.int32))) == "reused 15 of 16; the last token is always computed"
    )
    assert str(rig.cache.lookup(np.array([7, 7], np.int32))) == "reused 0 of 2; differs at position 0"


def test_a_partial_block_is_reused_by_copy_and_never_written_by_two():
    rig = Rig()
    rig.start("a", [1, 2, 3, 4, 5, 6])
    hit, copies = rig.start("b", [1, 2, 3, 4, 5, 6, 7])
    assert hit.num_partial == 2
    assert copies.tolist() == [[rig.blocks("a")[1], rig.blocks("b")[1]]]
    assert copies[0, 0] != copies[0, 1]


def test_a_copy_source_survives_the_admission_that_reads_it():
    rig = Rig(blocks=4)
    rig.start("a", [1, 2, 3, 4, 5, 6])
    rig.end("a")
    hit, copies = rig.start("b", [1, 2, 3, 4, 5, 6, 7])
    assert hit.num_partial == 2
    assert copies[0, 0] != copies[0, 1]


def test_duplicates_are_kept_and_either_serves_a_hit():
    rig = Rig(blocks=16)
    prompt = [1, 2, 3, 4, 5]
    empty = rig.cache.lookup(np.array(prompt, np.int32))
    for name in ("a", "b"):  # both looked up before either was computed
        row, _ = admit(rig.states, rig.cache, name, prompt, empty, 5)
        rig.states.num_computed_tokens[row] = 5
        rig.cache.publish(row)
    assert rig.blocks("a") != rig.blocks("b")
    rig.end("a")
    assert rig.cache.lookup(np.array(prompt, np.int32)).num_full == 4


def test_output_blocks_can_be_hit_once_the_request_left():
    rig = Rig()
    rig.start("a", [1, 2, 3])
    rig.extend("a", [4, 5, 6, 7, 8, 9])
    follow_up = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], np.int32)
    rig.end("a")
    hit = rig.cache.lookup(follow_up)
    assert (hit.num_full, hit.num_partial) == (8, 1)


def test_rejected_or_uncomputed_tokens_are_not_published():
    rig = Rig()
    rig.start("a", [1, 2, 3, 4, 5, 6, 7, 8])
    row = rig.states.row_of("a")
    rig.states.num_tokens[row] = 12
    rig.states.token_ids[row, 8:12] = [9, 10, 11, 12]
    rig.cache.publish(row)
    assert rig.cache.lookup(np.arange(1, 14, dtype=np.int32)).num_full == 8


def test_adapters_salts_and_images_keep_equal_tokens_apart():
    rig = Rig()
    prompt = list(range(1, 10))
    rig.start("a", prompt, with_adapter({}, 1, "law"))
    ids = np.array(prompt, np.int32)
    assert rig.cache.lookup(ids).num_tokens == 0
    assert rig.cache.lookup(ids, with_adapter({}, 2, "law")).num_tokens == 0
    assert rig.cache.lookup(ids, with_adapter(prefix_keys(4, salt="tenant"), 1, "law")).num_tokens == 0
    assert rig.cache.lookup(ids, with_adapter({}, 1, "law")).num_full == 8
    image = prefix_keys(4, images=[("cat", 5, 3)])
    assert set(image) == {1}
    assert rig.cache.lookup(ids, {**with_adapter({}, 1, "law"), **image}).num_full == 4


def test_colliding_hashes_cost_nothing_but_the_names_of_events():
    rig = Rig(hash_function=lambda parent, tokens, extra: b"x", on_event=lambda event: None)
    rig.start("a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    hit = rig.cache.lookup(np.array([7, 7, 7, 7, 7, 7], np.int32))
    assert hit.num_tokens == 0
    rig.start("b", [7, 7, 7, 7, 7, 7])
    assert rig.cache.lookup(np.array([1, 2, 3, 4, 9], np.int32)).num_full == 4
    assert rig.cache.lookup(np.array([7, 7, 7, 7, 9], np.int32)).num_full == 4
    rig.end("a")
    rig.end("b")
    assert rig.cache.pool.num_used == 0


def test_events_name_blocks_by_their_whole_prefix():
    events = []
    rig = Rig(on_event=events.append, partial_reuse=False)
    rig.start("a", list(range(1, 13)))
    rig.start("b", [*range(1, 9), 9, 9, 9, 9])  # diverges from a's run in the middle
    chain = {event.hash: event for event in events}
    for event in events:
        tokens = list(event.token_ids)
        while event.parent_hash in chain:
            event = chain[event.parent_hash]
            tokens[:0] = event.token_ids
        assert event.parent_hash == b"foreword.prefix."
        assert tokens in ([1, 2, 3, 4], list(range(1, 9)), list(range(1, 13)), [*range(1, 9), 9, 9, 9, 9])
    assert len(chain) == len(events) == 4


def test_reset_waits_for_the_last_owner_and_then_clears_everything():
    rig = Rig()
    rig.start("a", list(range(1, 11)))
    assert not rig.cache.reset()
    rig.end("a")
    assert rig.cache.reset()
    assert len(rig.cache.tree) == 0
    assert rig.cache.lookup(np.arange(1, 11, dtype=np.int32)).num_tokens == 0


def test_running_out_of_blocks_changes_nothing():
    rig = Rig(blocks=4)
    rig.start("a", [1, 2, 3, 4, 5])
    hit = rig.cache.lookup(np.array([1, 2, 3, 4, 8, 8, 8, 8, 9, 9], np.int32))
    refs = rig.cache.pool.num_refs.copy()
    assert rig.cache.blocks_to_admit(hit, 10) == 2
    with pytest.raises(CapacityError):
        rig.cache.allocate(hit, 10)
    assert (rig.cache.pool.num_refs == refs).all()


def test_a_request_that_gets_no_row_leaves_its_blocks_free():
    rig = Rig()
    rig.start("a", [1, 2, 3, 4, 5])
    prompt = [1, 2, 3, 4, 8]
    refs = rig.cache.pool.num_refs.copy()
    with pytest.raises(RequestError, match="'a'"):
        admit(rig.states, rig.cache, "a", prompt, rig.cache.lookup(np.array(prompt, np.int32)), 5)
    assert (rig.cache.pool.num_refs == refs).all()


def test_observers_of_the_pool_are_called_with_the_blocks_that_became_free_and_their_group():
    seen = []

    class Watcher:
        def blocks_freed(self, block_ids, group):
            seen.append((group, block_ids))

    rig = Rig(groups=[KVGroup(block_size=4), KVGroup(block_size=4, sliding_window=4)], prefix_caching=False)
    rig.cache.pool.observers.append(Watcher())
    rig.start("a", [1, 2, 3, 4, 5])
    full, window = rig.blocks("a", 0), rig.blocks("a", 1)
    rig.extend("a", [6, 7, 8, 9])
    assert seen == [(1, window[:1])]
    rig.end("a")
    assert [(g, len(ids)) for g, ids in seen[1:]] == [(0, 3), (1, 2)]
    assert seen[1][1][1:] == full[::-1]


def test_blocks_below_the_window_are_freed_and_nulled():
    rig = Rig(groups=[KVGroup(block_size=4, sliding_window=6)])
    rig.start("a", list(range(1, 5)))
    rig.extend("a", list(range(5, 22)))
    held = rig.blocks("a")
    assert held[:3] == [0, 0, 0]
    assert all(held[3:])
    assert rig.cache.pool.num_used == len(held) - 3
    rig.end("a")
    assert rig.cache.pool.num_used == 0


def test_a_window_hit_starts_with_null_blocks():
    rig = Rig(groups=[KVGroup(block_size=4, sliding_window=5)])
    rig.start("a", list(range(1, 18)))
    hit, _ = rig.start("b", [*range(1, 17), 99])
    assert hit.num_full == 16
    assert rig.blocks("b")[:3] == [0, 0, 0]
    assert rig.blocks("b")[3] == rig.blocks("a")[3]
    rig.end("a")
    rig.end("b")
    assert rig.cache.pool.num_used == 0


def test_a_hybrid_hit_is_what_all_groups_can_serve():
    rig = Rig(blocks=40, groups=[KVGroup(block_size=4), KVGroup(block_size=4, sliding_window=5)])
    rig.start("a", list(range(1, 8)))
    rig.extend("a", list(range(8, 30)))  # the window's early blocks are gone before they were published
    rig.end("a")
    full = rig.cache.lookup(np.arange(1, 31, dtype=np.int32))
    assert full.num_full == 28
    early = rig.cache.lookup(np.array([*range(1, 17), 99, 99], np.int32))
    assert early.num_known == 16
    assert early.num_tokens == 4  # the one window block that was published at the end of the prompt
    assert "gone" in str(early)


def test_groups_with_their_own_block_sizes_share_one_pool():
    rig = Rig(groups=[KVGroup(block_size=4), KVGroup(block_size=8)])
    rig.start("a", list(range(1, 20)))
    assert len(rig.blocks("a", 0)) == 5
    assert len(rig.blocks("a", 1)) == 3
    hit = rig.cache.lookup(np.array([*range(1, 15), 99], np.int32))
    assert hit.num_full == 8
    assert hit.num_partial == 0
    rig.end("a")
    assert rig.cache.pool.num_used == 0


def test_growth_gives_each_row_what_it_lacks():
    rig = Rig()
    rig.start("a", [1, 2, 3])
    rig.start("b", [4, 5, 6, 7, 8])
    rows = np.array([rig.states.row_of("a"), rig.states.row_of("b")], np.int32)
    free = rig.cache.pool.num_free
    assert rig.cache.grow_to(rows, np.array([20, 6]))
    assert free - rig.cache.pool.num_free == 4
    assert len(set(rig.blocks("a")) | set(rig.blocks("b"))) == 7
    assert rig.blocks("a")[1:] == [4, 5, 6, 7]


HYBRID = [KVGroup(block_size=4), KVGroup(block_size=4, recurrent=True)]


def compute(rig: Rig, name: str, until: int) -> list[int]:
    """Compute chunks until so many tokens are, as a scheduler would. Where the chunks ended."""
    row = rig.states.row_of(name)
    rows, ends = np.array([row], np.int32), []
    while (computed := int(rig.states.num_computed_tokens[row])) < until:
        at = rig.states.num_computed_tokens[rows]
        n = rig.cache.cut_chunks(rows, at, np.array([until - computed], np.int32))
        assert rig.cache.grow_to(rows, at + n)
        if computed:
            rig.cache.keep_states(rows, at)
        rig.states.num_computed_tokens[row] += n[0]
        rig.cache.publish(row)
        ends.append(computed + int(n[0]))
    return ends


def start_chunk(rig: Rig, name: str, prompt: list[int]):
    hit = rig.cache.lookup(np.array(prompt, np.int32))
    _, copies = admit(rig.states, rig.cache, name, prompt, hit, hit.num_tokens + 1)
    return hit, copies


def test_a_recurrent_state_is_one_block_per_request_whatever_its_length():
    rig = Rig(groups=HYBRID)
    rig.start("a", list(range(1, 15)))
    rig.extend("a", [1, 2, 3, 4, 5])
    assert len(rig.blocks("a", 0)) == 5
    assert len(rig.blocks("a", 1)) == 1
    rig.end("a")
    assert rig.cache.pool.num_used == 0


def test_a_hit_ends_at_a_snapshot_and_starts_from_a_copy_of_it():
    rig = Rig(groups=HYBRID)
    start_chunk(rig, "a", list(range(1, 15)))
    assert compute(rig, "a", 14) == [12, 14]
    hit, copies = start_chunk(rig, "b", list(range(1, 18)))
    sources, destinations = copies.T.tolist()
    assert (hit.num_tokens, [len(ids) for ids in hit.blocks]) == (12, [3, 0])
    assert rig.blocks("b", 0)[:3] == rig.blocks("a", 0)[:3]
    assert destinations == rig.blocks("b", 1) != rig.blocks("a", 1)
    assert sources not in (rig.blocks("a", 1), destinations)
    assert rig.cache.pool.num_refs[sources].tolist() == [0]
    assert compute(rig, "b", 17) == [16, 17]
    rig.end("a")
    rig.end("b")
    assert rig.cache.pool.num_used == 0


def test_a_state_can_be_hit_once_the_step_that_goes_on_from_it_is_done():
    rig = Rig(groups=HYBRID)
    start_chunk(rig, "a", list(range(1, 15)))
    row, ids = rig.states.row_of("a"), np.arange(1, 15, dtype=np.int32)
    rows = np.array([row], np.int32)
    compute(rig, "a", 12)
    sources, destinations = rig.cache.keep_states(rows, rig.states.num_computed_tokens[rows]).T.tolist()
    assert sources == rig.blocks("a", 1)
    assert rig.cache.pool.num_refs[destinations].tolist() == [1]
    rig.cache.publish_states()
    assert rig.cache.lookup(ids).num_tokens == 0
    rig.states.num_computed_tokens[row] = 13
    rig.cache.publish_states()
    assert rig.cache.lookup(ids).num_tokens == 12
    assert rig.cache.pool.num_refs[destinations].tolist() == [0]


def test_a_request_that_leaves_before_its_state_was_copied_leaves_none():
    rig = Rig(groups=HYBRID)
    start_chunk(rig, "a", list(range(1, 15)))
    rows = np.array([rig.states.row_of("a")], np.int32)
    compute(rig, "a", 12)
    assert len(rig.cache.keep_states(rows, np.array([12]))) == 1
    rig.end("a")
    assert rig.cache.pool.num_used == 0
    assert rig.cache.lookup(np.arange(1, 15, dtype=np.int32)).num_tokens == 0


def test_a_prompt_stops_where_it_leaves_known_content():
    rig = Rig(groups=HYBRID)
    start_chunk(rig, "a", list(range(1, 15)))
    compute(rig, "a", 14)
    hit, _ = start_chunk(rig, "b", [*range(1, 11), *range(50, 60)])
    assert (hit.num_tokens, hit.num_known) == (0, 10)
    assert compute(rig, "b", 20) == [8, 16, 20]
    assert rig.cache.lookup(np.array([*range(1, 9), 99], np.int32)).num_tokens == 8


def test_equal_states_are_kept_once():
    rig = Rig(groups=HYBRID)
    for name in "ab":
        start_chunk(rig, name, list(range(1, 15)))
    compute(rig, "a", 14)
    cached = int(rig.cache.pool.is_cached.sum())
    assert compute(rig, "b", 14) == [12, 14]
    assert int(rig.cache.pool.is_cached.sum()) == cached + 3  # the keys, which its row holds


def test_without_a_free_block_no_snapshot_is_kept():
    rig = Rig(groups=HYBRID, blocks=6)
    start_chunk(rig, "a", list(range(1, 15)))
    assert compute(rig, "a", 14) == [12, 14]
    assert rig.cache.pool.num_free == 0
    rig.end("a")
    assert rig.cache.lookup(np.arange(1, 15, dtype=np.int32)).num_tokens == 0


def test_of_what_a_request_leaves_its_state_is_lost_last():
    removed = []
    rig = Rig(groups=HYBRID, on_event=lambda e: removed.append(e.group) if isinstance(e, BlockRemoved) else None)
    start_chunk(rig, "a", list(range(1, 15)))
    compute(rig, "a", 14)
    rig.end("a")
    start_chunk(rig, "b", [99] * 10)
    rig.cache.pool.allocate(rig.cache.pool.num_free)
    assert removed == [0, 0, 0, 1]


def test_what_an_admission_needs_counts_the_state_it_starts_from():
    rig = Rig(groups=HYBRID, blocks=8)
    start_chunk(rig, "a", list(range(1, 15)))
    compute(rig, "a", 14)
    rig.end("a")
    hit = rig.cache.lookup(np.arange(1, 15, dtype=np.int32))
    assert hit.num_tokens == 12
    assert rig.cache.blocks_to_admit(hit, 14) == 3 + 1 + 1 + 1  # hit keys, new keys, own state, kept state
    assert rig.cache.blocks_to_admit(rig.cache.miss(14), 14) == 4 + 1
    rig.cache.pool.allocate(2)
    refs = rig.cache.pool.num_refs.copy()
    with pytest.raises(CapacityError):
        rig.cache.allocate(hit, 14)
    assert (rig.cache.pool.num_refs == refs).all()


def test_chunks_of_a_model_without_recurrent_layers_are_not_cut():
    rig = Rig()
    hit, _ = rig.start("a", list(range(1, 15)))
    rows, n = np.array([0], np.int32), np.array([9], np.int32)
    assert (hit.stops, hit.cut(9)) == ((), 9)
    assert rig.cache.cut_chunks(rows, rows, n) is n
    assert len(rig.cache.keep_states(rows, np.array([16]))) == 0
