"""The server of this package has no fault; faults planted in its engine are found through its interface."""

import pytest
from server_rig import serving

from foreword.blackbox import Fuzzer, Target, examine
from foreword.cache import KVCacheManager

ENGINE = {"max_model_len": 640, "block_size": 8, "num_blocks": 81, "max_num_batched_tokens": 96}
"""A pool that a few prompts overflow, and prompts that need several steps."""


def searched(url: str, runs: int, *scenarios: str, route: str = "completions"):
    server = examine(Target(url, route=route, timeout=60), max_words=70)
    fuzzer = Fuzzer(server, seed=3, concurrency=4, block_sizes=[8, 16], scenarios=scenarios, max_trials=8)
    return server, fuzzer.run(seconds=120, max_conversations=runs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("route", "scenarios"), [("completions", ()), ("chat", ("turns", "salts"))])
def test_a_sound_server_shows_nothing(talker, route, scenarios):
    with serving(talker, engine=ENGINE) as running:
        server, report = searched(running.url, 5, *scenarios, route=route)
        running.check_nothing_is_left()
    assert report.finding is None
    assert (report.num_conversations, report.unconfirmed, dict(report.failures)) == (5, 0, {})
    assert report.noise.hit < 1e-4
    assert (server.target.cold, server.target.cold_is_certain) == ("cache_salt", True)
    assert (server.takes_salts, server.salts_are_promised, server.has_choices, server.has_streams) == (True,) * 4
    assert server.tokens_per_word == 1.0


@pytest.mark.long
def test_a_cache_that_ignores_salts_is_found(talker, monkeypatch):
    lookup, attach = KVCacheManager.lookup, KVCacheManager.attach
    monkeypatch.setattr(KVCacheManager, "lookup", lambda self, tokens, keys=None: lookup(self, tokens))
    monkeypatch.setattr(KVCacheManager, "attach", lambda self, row, hit, keys=None: attach(self, row, hit))
    with serving(talker, engine=ENGINE) as running:
        _, report = searched(running.url, 2, "salts")
    assert report.finding.num_cached > 0
    assert len(report.finding.conversation.asks) == 2
