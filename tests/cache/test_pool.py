"""The block pool against a list that is kept in the order it should have."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from foreword.cache.pool import BlockNumbers, BlockPool
from foreword.errors import CapacityError, ConfigError


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def cached_free(pool: BlockPool, *blocks: int) -> None:
    pool.is_cached[list(blocks)] = True
    pool.free(ids(*blocks))


def test_blocks_are_handed_out_from_one_upwards_and_zero_never():
    pool = BlockPool(6)
    assert pool.allocate(5).tolist() == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    assert pool.num_used == 5


def test_allocating_too_many_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(CapacityError, match="4 blocks wanted, 3 of 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3
    assert pool.allocate(3).tolist() == [1, 2, 3]


def test_a_pool_of_the_null_block_alone_is_refused():
    with pytest.raises(ConfigError, match="null block"):
        BlockPool(1)


@pytest.mark.smoke
def test_uncached_blocks_are_reused_first_and_cached_ones_longest_free_first():
    pool = BlockPool(8)
    pool.allocate(7)
    cached_free(pool, 3, 2)
    pool.free(ids(5))
    cached_free(pool, 1)
    pool.free(ids(6))
    assert pool.allocate(5).tolist() == [6, 5, 3, 2, 1]


def test_two_owners_may_leave_in_one_call():
    pool = BlockPool(3)
    block = pool.allocate(1)
    pool.touch(block)
    pool.free(np.concatenate([block, block]))
    assert pool.num_free == 2
    assert sorted(pool.allocate(2).tolist()) == [1, 2]


def test_null_blocks_are_never_freed():
    pool = BlockPool(3)
    pool.free(ids(0, 0))
    assert pool.num_free == 2
    assert pool.num_refs[0] == 0


def test_a_second_pool_has_the_numbers_after_the_first():
    numbers, evicted = BlockNumbers(9), []
    blocks, states = (
        BlockPool(count, evicted.append, numbers=numbers, first=first) for count, first in ((5, 0), (4, 5))
    )
    assert (blocks.allocate(4).tolist(), states.allocate(3).tolist()) == ([1, 2, 3, 4], [5, 6, 7])
    assert (blocks.usage, states.usage) == (1, 3 / 4)
    cached_free(states, 6)
    cached_free(blocks, 2)
    assert (blocks.allocate(1).tolist(), states.allocate(2).tolist()) == ([2], [8, 6])
    assert [one.tolist() for one in evicted] == [[2], [6]]
    with pytest.raises(CapacityError, match="1 blocks wanted, 0 of 4 are free"):
        states.allocate(1)
    states.free_all()
    assert (blocks.num_free, sorted(states.allocate(4).tolist())) == (0, [5, 6, 7, 8])


def test_forgotten_blocks_are_taken_first():
    pool = BlockPool(6)
    pool.allocate(5)
    cached_free(pool, 4, 2, 3)
    pool.free(ids(1))
    pool.touch(ids(3))
    pool.is_cached[[2, 3]] = False
    pool.forget(ids(2, 3))  # 3 has an owner
    assert pool.num_free == 3
    assert pool.allocate(3).tolist() == [2, 1, 4]


class PoolMachine(RuleBasedStateMachine):
    """A list in the wanted order is the oracle; it is slow and simple."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, lambda blocks: self.evicted.extend(blocks.tolist()))
        self.order = list(range(1, 12))
        self.refs = dict.fromkeys(range(1, 12), 0)
        self.cached: set[int] = set()
        self.evicted: list[int] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > len(self.order):
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            return
        self.evicted.clear()
        taken, self.order = self.order[:count], self.order[count:]
        assert self.pool.allocate(count).tolist() == taken
        assert self.evicted == [b for b in taken if b in self.cached]
        self.cached -= set(taken)
        self.refs.update(dict.fromkeys(taken, 1))

    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        used = [b for b, n in self.refs.items() if n]
        for block in data.draw(st.lists(st.sampled_from(used), unique=True)) if used else []:
            self.cached.add(block)
            self.pool.is_cached[block] = True

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        used = [b for b, n in self.refs.items() if n]
        blocks = data.draw(st.lists(st.sampled_from(used), unique=True, min_size=1))
        self.pool.free(np.array(blocks, np.int32))
        for b in blocks:
            self.refs[b] -= 1
            if self.refs[b] == 0:
                if b in self.cached:
                    self.order.append(b)
                else:
                    self.order.insert(0, b)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1))
        self.pool.touch(np.array(blocks, np.int32))
        for b in blocks:
            self.refs[b] += 1
            if b in self.order:
                self.order.remove(b)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.order)
        assert self.pool.num_refs[1:].tolist() == [self.refs[b] for b in range(1, 12)]
        assert set(np.flatnonzero(self.pool.is_cached).tolist()) == self.cached


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=40)
