"""Limits of API keys: their form, and what is refused when."""

import pytest
from server_rig import HI, serving

from foreword.errors import ConfigError
from foreword.server.config import ServerConfig
from foreword.server.errors import HttpError
from foreword.server.key_limits import KeyLimits, KeyUses, digest_of, read_limit

ONE = digest_of(b"one")


@pytest.mark.parametrize(
    ("text", "key", "limits"),
    [
        ("one share=2", "one", KeyLimits(share=2.0)),
        ("a key requests=3 tokens_per_minute=60", "a key", KeyLimits(requests=3, tokens_per_minute=60)),
    ],
)
def test_a_limit_names_a_key_and_what_it_may_use(text, key, limits):
    assert read_limit(text) == (key, limits)
    config = ServerConfig(api_key=(key,), key_limit=(text,), replicas=2)
    ((digest, part),) = config.behind_front(api_key=("x",)).key_limits
    assert digest == f"sha256:{digest_of(key.encode())}"
    assert part == limits.of_replica(2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("one", "give a key and its limits"),
        ("one shares=2", "Did you mean 'share'"),
        ("one share=0", "from 1/1024"),
        ("one requests=1.5", "whole number above 0"),
        ("one requests=1 requests=2", "given twice"),
        ("two share=1", "not one of api_key"),
        (f"sha256:{ONE[1:]} share=1", "64 hexadecimal digits"),
        (f"sha256:{ONE.upper()} share=1", "in lower case"),
    ],
)
def test_a_wrong_limit_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        ServerConfig(api_key=("one",), key_limit=(text,))


def test_no_error_has_a_key():
    refused = (
        ({"api_key": ("one",), "key_limit": ("one share=1", "s3cret share=0")}, "key_limit: number 2: share: must be"),
        ({"key_limit": "s3cret share=1"}, "key_limit: give a list of texts"),
        ({"key_limit": ("s3cret",)}, "key_limit: number 1: give a key and its limits, such as"),
        ({"key_limit": ("s3cret share=1",)}, "key_limit: has a key that is not one of api_key"),
        ({"api_key": "s3cret"}, "api_key: expected"),
        ({"api_key": ("s3cret", 7)}, "api_key: expected"),
        ({"api_key": (" s3cret",)}, "api_key: a key begins or ends with a space"),
        ({"admin_key": ["s3cret"]}, "admin_key: expected"),
        ({"admin_key": "s3cret\n"}, "admin_key: a key begins or ends with a space"),
    )
    for settings, words in refused:
        with pytest.raises(ConfigError) as error:
            ServerConfig(**settings)
        assert str(error.value).startswith(words)
        assert "s3cret" not in str(error.value)
    shown = repr(ServerConfig(api_key=("s3cret",), admin_key="s3cret", key_limit=("s3cret share=2",)))
    assert shown.startswith("ServerConfig(host=")
    assert "s3cret" not in shown


@pytest.mark.parametrize("again", ["one share=2", f"sha256:{ONE} share=2"])
def test_a_key_with_two_texts_of_limits_is_refused(again):
    with pytest.raises(ConfigError, match="a key is given twice"):
        ServerConfig(api_key=("one",), key_limit=("one requests=1", again))


def test_the_completions_of_a_key_at_the_same_time_are_limited():
    uses = KeyUses([("one", KeyLimits(requests=2))])
    leave = uses.enter(ONE, 2)
    uses.enter(digest_of(b"two"), 9)
    with pytest.raises(HttpError, match="2 completions of your key"):
        uses.enter(ONE, 1)
    leave()
    uses.enter(ONE, 3)  # alone


def test_the_tokens_of_a_key_come_back_with_the_time():
    now = [0.0]
    uses = KeyUses([("one", KeyLimits(tokens_per_minute=60))], clock=lambda: now[0])
    uses.enter(ONE, 1)
    uses.add_tokens(ONE, 70)
    with pytest.raises(HttpError, match="has used its tokens_per_minute=60") as caught:
        uses.enter(ONE, 1)
    assert caught.value.headers["Retry-After"] == "10"
    now[0] = 11.0
    uses.enter(ONE, 1)


def test_a_key_beyond_its_limit_is_told_when_to_come_back_and_others_are_served(talker):
    limits = ("one tokens_per_minute=6", "two share=2")
    with serving(talker, api_key=("one", "two"), key_limit=limits, engine={"policy": "fair"}) as server:
        ask = lambda key: server.post(  # noqa: E731
            "/v1/chat/completions", {"messages": HI, "max_tokens": 3}, headers={"Authorization": f"Bearer {key}"}
        )
        assert ask("one").status_code == 200
        refused = ask("one")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        assert int(refused.headers["retry-after"]) > 1
        assert ask("two").status_code == 200
        server.check_nothing_is_left()
