"""Random traffic: every block is owned exactly by the rows that hold it, and hits are never wrong."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from foreword.batch import KVGroup, RequestStates
from foreword.cache import BlockRemoved, BlockStored, KVCacheManager
from foreword.errors import CapacityError
from foreword.scheduler import admit

GROUPS = {
    "full": [KVGroup(block_size=3)],
    "window": [KVGroup(block_size=3, sliding_window=5)],
    "hybrid": [KVGroup(block_size=3), KVGroup(block_size=3, sliding_window=4)],
    "sizes": [KVGroup(block_size=2), KVGroup(block_size=4, sliding_window=6)],
    "states": [KVGroup(block_size=1, recurrent=True)],
    "hybrid states": [
        KVGroup(block_size=2),
        KVGroup(block_size=2, sliding_window=4),
        KVGroup(block_size=2, recurrent=True),
        KVGroup(block_size=4, recurrent=True),
    ],
}
M = 24


class Mirror:
    """The blocks that can be hit according to the events."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.whole: dict[int, int] = {}  # block → group, of those that a hit can share
        self.node_size = 0

    def __call__(self, event) -> None:
        if isinstance(event, BlockStored):
            assert event.block not in self.blocks
            self.blocks[event.block] = event.hash
            if len(event.token_ids) == self.node_size:
                self.whole[event.block] = event.group
        elif isinstance(event, BlockRemoved):
            assert self.blocks.pop(event.block) == event.hash
            self.whole.pop(event.block, None)
        else:
            self.blocks.clear()
            self.whole.clear()


class CacheMachine(RuleBasedStateMachine):
    """Physical memory is simulated: each slot remembers the whole token prefix whose KV was written there.

    A recurrent state is one more such slot: the first of its block.
    """

    @initialize(
        kind=st.sampled_from(sorted(GROUPS)), blocks=st.integers(8, 20), slots=st.integers(0, 9), mirrored=st.booleans()
    )
    def build(self, kind: str, blocks: int, slots: int, mirrored: bool) -> None:
        groups = GROUPS[kind]
        num_states = slots if any(group.recurrent for group in groups) else 0
        self.states = RequestStates(max_num_reqs=4, max_model_len=M, vocab_size=3, kv_groups=groups)
        self.mirror = Mirror() if mirrored else None
        self.cache = KVCacheManager(self.states, blocks, num_states=num_states, on_event=self.mirror)
        if self.mirror is not None:
            self.mirror.node_size = self.cache.tree.block_size
        ids = range(blocks + num_states)
        self.memory = [[[None] * (1 if g.recurrent else g.block_size) for _ in ids] for g in groups]
        self.kept: dict[int, list[tuple[int, list[int]]]] = {}  # row → copies of its state that are its own as yet
        self.count = 0

    def copy(self, copies: np.ndarray) -> None:
        sources, destinations = copies.T.tolist()
        assert len(set(destinations)) == len(destinations)
        for memory in self.memory:
            read = [list(memory[block]) for block in sources]
            for block, content in zip(destinations, read, strict=True):
                memory[block] = content

    def published(self, row: int) -> None:
        computed = int(self.states.num_computed_tokens[row])
        self.kept[row] = [(at, blocks) for at, blocks in self.kept.get(row, []) if at >= computed]

    def write(self, row: int, start: int, stop: int) -> None:
        tokens = self.states.token_ids[row, :stop].tolist()
        for table, memory in zip(self.states.block_tables, self.memory, strict=True):
            size = table.tokens_per_block
            if table.group.recurrent:
                memory[table.table[row, 0]][0] = tuple(tokens)
                continue
            for p in range(start, stop):
                memory[table.table[row, p // size]][p % size] = tuple(tokens[: p + 1])

    def check_reads(self, row: int, computed: int) -> None:
        tokens = self.states.token_ids[row, :computed].tolist()
        for table, memory in zip(self.states.block_tables, self.memory, strict=True):
            window, size = table.group.sliding_window, table.tokens_per_block
            if table.group.recurrent:
                assert not computed or memory[table.table[row, 0]][0] == tuple(tokens)
                continue
            low = 0 if window is None else max(0, computed - window + 1)
            for p in range(low, computed):
                assert memory[table.table[row, p // size]][p % size] == tuple(tokens[: p + 1])

    def longest_hit(self, prompt: list[int]) -> int:
        """Tokens in whole blocks, by definition: of all groups, what the next token reads is in some cached block."""
        tables = self.states.block_tables
        cached = [set() for _ in tables]
        for block, g in self.mirror.whole.items():
            cached[g].add(self.memory[g][block][-1])
        best = 0
        for n in range(1, len(prompt)):
            if all(n % t.group.block_size == 0 for t in tables) and all(
                tuple(prompt[: (p // size + 1) * size]) in known
                for t, known in zip(tables, cached, strict=True)
                for size in [t.group.block_size]
                for p in range(n - 1 if t.group.recurrent else max(0, n - (t.group.sliding_window or n + 1) + 1), n)
            ):
                best = n
        return best

    @rule(prompt=st.lists(st.integers(0, 2), min_size=1, max_size=M), chunk=st.integers(1, M))
    def admit(self, prompt: list[int], chunk: int) -> None:
        if len(self.states) == 4:
            return
        hit = self.cache.lookup(np.array(prompt, np.int32))
        assert hit.num_tokens < len(prompt)
        if self.mirror is not None:
            assert hit.num_full == self.longest_hit(prompt)
        stop = min(len(prompt), hit.num_tokens + hit.cut(chunk))
        short = self.cache.blocks_to_admit(hit, stop) > self.cache.pool.num_free
        short |= self.cache.states_to_admit(hit) > self.cache.state_pool.num_free
        self.count += 1
        name = str(self.count)
        if short:
            with pytest.raises(CapacityError):
                admit(self.states, self.cache, name, prompt, hit, stop)
            return
        row, copies = admit(self.states, self.cache, name, prompt, hit, stop)
        self.copy(copies)
        self.check_reads(row, hit.num_tokens)
        self.write(row, hit.num_tokens, stop)
        self.states.num_computed_tokens[row] = stop
        self.cache.publish(row)

    @rule(data=st.data(), token=st.integers(0, 2))
    def step(self, data: st.DataObject, token: int) -> None:
        if not len(self.states):
            return
        row = self.states.row_of(data.draw(st.sampled_from(self.states.req_ids)))
        computed, known = int(self.states.num_computed_tokens[row]), int(self.states.num_tokens[row])
        if computed == known:
            if known == M:
                return
            self.states.token_ids[row, known] = token
            known = self.states.num_tokens[row] = known + 1
        rows = np.array([row], np.int32)
        known = computed + int(self.cache.cut_chunks(rows, np.array([computed]), np.array([known - computed]))[0])
        self.cache.free_expired(rows, np.array([computed]))
        tables, free = self.states.block_tables, self.num_free()
        before = [int(t.num_blocks[row]) for t in tables]
        needed = [-(-known // t.tokens_per_block) for t in tables]
        grown = [max(pair) for pair in zip(before, needed, strict=True)]
        missing = [0, 0]
        for apart, was, now in zip(self.cache.is_apart, before, grown, strict=True):
            missing[apart] += now - was
        fits = missing[0] <= free[0] and missing[1] <= free[1]
        assert self.cache.grow_to(rows, np.array([known])) == fits
        assert [int(t.num_blocks[row]) for t in tables] == (grown if fits else before)
        if not fits:
            assert self.num_free() == free
            return
        copies = self.cache.keep_states(rows, np.array([computed]))
        if len(copies):
            sources, destinations = copies.T.tolist()
            assert sources == [int(t.table[row, 0]) for t in self.states.block_tables if t.group.recurrent]
            self.kept.setdefault(row, []).append((computed, destinations))
            self.cache.publish(row)  # no effect: the copy is not made yet
            self.published(row)
            self.copy(copies)
        self.check_reads(row, computed)
        self.write(row, computed, known)
        self.states.num_computed_tokens[row] = known
        if data.draw(st.booleans()):
            self.cache.publish(row)
            self.published(row)

    def num_free(self) -> tuple[int, int]:
        return self.cache.pool.num_free, self.cache.state_pool.num_free

    def num_used(self) -> int:
        pools = {id(pool): pool for pool in (self.cache.pool, self.cache.state_pool)}
        return sum(pool.num_used for pool in pools.values())

    @rule()
    def a_request_needs_the_slots_of_copies(self) -> None:
        if self.cache.has_state_pool:
            self.cache.num_free_states(self.cache.state_pool.num_free + 1)
            self.kept.clear()

    @rule()
    def publish_states(self) -> None:
        self.cache.publish_states()
        for row in self.kept:
            self.published(row)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if len(self.states):
            name = data.draw(st.sampled_from(self.states.req_ids))
            self.cache.free(self.states.row_of(name))
            self.kept.pop(self.states.row_of(name), None)
            self.states.remove_request(name)

    @rule()
    def reset(self) -> None:
        assert self.cache.reset() == (self.num_used() == 0)

    @invariant()
    def references_are_owners(self) -> None:
        if not hasattr(self, "cache"):
            return
        owners = np.zeros(len(self.cache.pool.num_refs), np.int32)
        for table in self.states.block_tables:
            for name in self.states.req_ids:
                row = self.states.row_of(name)
                held = table.table[row, : table.num_blocks[row]]
                np.add.at(owners, held[held > 0], 1)
        for own in self.kept.values():
            for _, blocks in own:
                owners[blocks] += 1
        assert owners.tolist() == self.cache.pool.num_refs.tolist()
        assert self.num_used() == np.count_nonzero(owners)
        for table, is_apart in zip(self.states.block_tables, self.cache.is_apart, strict=True):
            held = table.table[table.table > 0]
            assert ((held >= self.cache.pool.num_blocks) == is_apart).all()

    @invariant()
    def the_tree_holds_what_is_cached_and_nothing_else(self) -> None:
        if not hasattr(self, "cache"):
            return
        cached = []
        for node in self.cache.tree:
            assert self.cache.tree.nodes[node.serial] is node
            assert node.num_blocks or node.children or node.rows
            assert len(node.tokens) <= 4 * self.cache.tree.block_size * (node.end - node.start)
            held = [b for ids in node.blocks for b in ids.tolist() if b]
            held += [b for spares in node.spares.values() for b in spares]
            assert len(held) == node.num_blocks
            cached += held
        assert sorted(cached) == np.flatnonzero(self.cache.pool.is_cached).tolist()
        if self.mirror is not None:
            assert sorted(self.mirror.blocks) == sorted(cached)

    @invariant()
    def blocks_hold_the_tokens_of_their_node(self) -> None:
        if not hasattr(self, "cache"):
            return
        size = self.cache.tree.block_size
        for node in self.cache.tree:
            before, upper = b"", node.parent
            while upper.parent is not None:
                before, upper = upper.tokens + before, upper.parent
            prefix = np.frombuffer(before + node.tokens, np.int32).tolist()
            for g, ids in enumerate(node.blocks):
                group = self.states.block_tables[g].group
                ratio = group.block_size // size
                for i in np.flatnonzero(ids).tolist():
                    for block in [int(ids[i]), *node.spares.get((g, node.start + i), [])]:
                        if group.recurrent:
                            assert self.memory[g][block] == [tuple(prefix[: (node.start + i + 1) * size])]
                            continue
                        for offset in range(ratio * size):
                            p = (node.start + i + 1 - ratio) * size + offset
                            if p < len(prefix):
                                assert self.memory[g][block][offset] == tuple(prefix[: p + 1])

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for name in self.states.req_ids:
                self.cache.free(self.states.row_of(name))
                self.states.remove_request(name)
            assert self.num_used() == 0
            assert self.cache.reset()
            assert len(self.cache.tree) == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)
