"""Routers: their choices against definitions over all replicas, with replicas that come and go."""

from random import Random

import pytest

from foreword.errors import CapacityError, ConfigError
from foreword.routing import ROUTERS, PrefixIndex, make_router, text_prefix
from foreword.routing.routers import NEW_TOKEN_WEIGHT, REQUEST_TOKENS


def test_prefixes_are_found_on_the_replicas_that_had_them():
    random, index = Random(1), PrefixIndex(10**6)
    sent: list[tuple[list[int], int]] = []
    for _ in range(300):
        pieces: list[int] = []
        for _ in range(random.randrange(6)):
            pieces.append(hash((tuple(pieces), random.randrange(2))))
        had = dict.fromkeys(range(4), 0)
        for other, replica in sent:
            common = [a == b for a, b in zip(other, pieces, strict=False)]
            had[replica] = max(had[replica], [*common, False].index(False))
        assert index.matches(pieces) == {replica: n for replica, n in had.items() if n}
        replica = random.randrange(4)
        index.add(pieces, replica)
        sent.append((pieces, replica))
    index.forget(2)
    assert all(2 not in index.matches(pieces) for pieces, _ in sent)


def test_the_memory_of_prefixes_is_bounded_and_keeps_what_is_used():
    index = PrefixIndex(100)
    for i in range(10_000):
        index.add([i], i % 7)
        index.add([-1], 3)
        assert len(index) <= 102
    assert index.matches([-1]) == {3: 1}
    assert index.matches([0]) == {}
    assert index.matches([9_999]) == {9_999 % 7: 1}


def test_equal_beginnings_of_texts_have_equal_names():
    text = "abcdefghij" * 30
    whole, part = text_prefix(text, size=64), text_prefix(text[:200] + "?" + text[201:], size=64)
    assert len(whole) == 4
    assert [a == b for a, b in zip(whole, part, strict=True)] == [True, True, True, False]
    assert len(set(whole)) == 4
    assert text_prefix("short") == []


@pytest.mark.parametrize("name", ROUTERS)
def test_work_is_what_is_in_progress_and_closed_replicas_get_none(name: str):
    random, router = Random(2), make_router(name, 5)
    running = []
    for i in range(2000):
        if i % 50 == 0:
            for replica in range(5):
                router.open(replica)
                if random.random() < 0.5:
                    router.close(replica)
        pieces = [random.randrange(8)] + [random.randrange(10**9)] * 2
        if not any(map(router.is_open, range(5))):
            with pytest.raises(CapacityError):
                router.choose(1000, pieces)
            continue
        placement = router.choose(random.randrange(1, 3000), pieces, 100)
        assert router.is_open(placement.replica)
        running.append(placement)
        if random.random() < 0.9 and len(running) > 3:
            router.ended(running.pop(random.randrange(len(running))))
        assert router.work.tolist() == [sum(p.work for p in running if p.replica == r) for r in range(5)]


def test_choices_are_those_of_the_definitions():
    robin = make_router("round-robin", 3)
    assert [robin.choose(10).replica for _ in range(5)] == [0, 1, 2, 0, 1]
    least = make_router("least-loaded", 3)
    assert [least.choose(n).replica for n in (500, 10, 20, 30, 40)] == [0, 1, 2, 1, 2]
    sticky, prefix = make_router("sticky", 3), make_router("prefix", 3)
    assert [sticky.choose(1000, [1, 2], 500).replica for _ in range(20)] == [0] * 20
    chosen = [prefix.choose(1000, [1, 2], 500) for _ in range(7)]
    has_it, lacks_it = REQUEST_TOKENS, 1000 + REQUEST_TOKENS
    stays = 1 + (NEW_TOKEN_WEIGHT * 1000 - lacks_it) // has_it + 1  # until its work is above that of the whole prompt
    assert [p.replica for p in chosen] == [0] * stays + [1] * (7 - stays)
    assert [p.work for p in chosen] == [lacks_it] + [has_it] * (stays - 1) + [lacks_it] * (7 - stays)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="router='best': must be one of 'round-robin'"):
        make_router("best", 2)
    with pytest.raises(ConfigError, match="replicas=0"):
        make_router("prefix", 0)
