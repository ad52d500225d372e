"""Memos: what was made for a key, until an owner changes."""

from __future__ import annotations

from foreword.versions import Memo


class Owner:
    version = 0


def test_a_value_is_found_for_the_same_key_alone():
    memo = Memo[list[int], str]()
    key = [1]
    assert memo.find(key) is None
    assert memo.keep(key, "made") == "made"
    assert memo.find(key) == "made"
    assert memo.find([1]) is None, "an equal key is another one"


def test_a_change_of_any_owner_forgets():
    key, first, second = object(), Owner(), Owner()
    memo = Memo[object, str](first, second)
    for owner in (first, second):
        memo.keep(key, "made")
        assert memo.find(key) == "made"
        owner.version += 1
        assert memo.find(key) is None


def test_a_value_is_found_as_often_as_it_may_be_used():
    memo = Memo[object, str]()
    key = object()
    memo.keep(key, "made", uses=2)
    assert [memo.find(key) for _ in range(3)] == ["made", "made", None]
    memo.keep(key, "made", uses=0)
    assert memo.find(key) is None


def test_the_last_keys_are_remembered_and_the_oldest_is_replaced():
    a, b, c = object(), object(), object()
    memo = Memo[object, str](size=2)
    memo.keep(a, "a")
    memo.keep(b, "b")
    memo.keep(a, "again")
    memo.keep(c, "c")
    assert [memo.find(key) for key in (a, b, c)] == ["again", None, "c"]


def test_a_memo_that_was_told_to_forget_has_nothing():
    memo = Memo[object, str](size=2)
    key = object()
    memo.keep(key, "made")
    memo.forget()
    assert memo.find(key) is None
