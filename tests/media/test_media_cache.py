"""The cache of encoded images and sounds: what it keeps, and what waits while something is encoded."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from foreword.executors.media_prompt import MediaCache


def medium(name, num_floats=1):
    return SimpleNamespace(digest=name, num_floats=num_floats)


class Encoder:
    """Gives a medium vectors of its size, and notes its name. It waits at each medium whose name has an event."""

    def __init__(self, **events):
        self.encoded, self.events, self.begun = [], events, threading.Event()

    def __call__(self, one):
        self.encoded.append(one.digest)
        if one.digest in self.events:
            self.begun.set()
            assert self.events[one.digest].wait(60)
        return SimpleNamespace(text="", vectors=np.zeros((one.num_floats, 1), np.float32))


def test_the_least_recently_used_go_and_one_that_is_larger_than_the_cache_displaces_none():
    encoder = Encoder()
    cache = MediaCache(encoder, 40)
    for name, size, kept in (
        ("a", 4, 16), ("b", 6, 40), ("a", 4, 40), ("huge", 11, 40), ("a", 4, 40), ("b", 6, 40), ("c", 1, 28),
        ("b", 6, 28), ("whole", 10, 40), ("c", 1, 4), ("nothing", 0, 4),
    ):  # fmt: skip
        assert len(cache.encoded(medium(name, size)).vectors) == size
        assert cache.num_bytes == kept
    assert encoder.encoded == ["a", "b", "huge", "c", "whole", "c", "nothing"]


def test_what_is_kept_is_found_while_another_is_encoded_and_that_is_encoded_once():
    go = threading.Event()
    encoder = Encoder(slow=go)
    cache = MediaCache(encoder, 1000)
    first = cache.encoded(medium("fast"))
    with ThreadPoolExecutor(3) as threads:
        try:
            slow = [threads.submit(cache.encoded, medium("slow")) for _ in range(2)]
            assert encoder.begun.wait(60)
            assert threads.submit(cache.encoded, medium("fast")).result(60) is first
            assert not slow[0].done()
        finally:
            go.set()
        assert slow[0].result(60) is slow[1].result(60)
    assert encoder.encoded == ["fast", "slow"]
