"""Prompts, and how far two answers are apart."""

import math

import pytest

from foreword.blackbox.replay import (
    Answer,
    Ask,
    Choice,
    Conversation,
    Outcome,
    Target,
    Token,
    difference,
    leaked,
    turns_of,
    words,
)

TARGET = Target("http://localhost")


def choice(*tops: dict[str, float]) -> Choice:
    tokens = tuple(Token(max(top, key=top.get), top) for top in tops)
    return Choice("".join(token.text for token in tokens), tokens)


def test_a_segment_begins_alike_at_every_length_and_differs_between_copies():
    long = words(TARGET, "one", 3, 100)
    assert long.startswith(words(TARGET, "one", 3, 40))
    assert len(long.split()) == 100
    assert words(TARGET, "two", 3, 40) != words(TARGET, "one", 3, 40) != words(TARGET, "one", 4, 40)


def test_a_prompt_continues_the_prompt_and_the_answer_of_an_earlier_request():
    asks = [Ask(((0, 3),)), Ask(((1, 2),), continues=0), Ask(((2, 1),), continues=1)]
    answers = {0: Answer((choice({" yes": -0.1}),)), 1: Answer((choice({" no": -0.1}),))}
    expected = [words(TARGET, "c", 0, 3), " yes", words(TARGET, "c", 1, 2), " no", words(TARGET, "c", 2, 1)]
    assert turns_of(TARGET, "c", asks, 2, answers) == expected


def test_the_distance_is_the_largest_of_all_tokens_up_to_the_first_that_differs():
    a = choice({"x": -0.5, "y": -1.0}, {"x": -0.4, "y": -1.5}, {"x": -0.1, "y": -3.0})
    b = choice({"x": -0.5, "y": -1.2}, {"x": -0.7, "y": -1.4}, {"y": -0.1, "x": -3.0})
    one = difference(a, b)
    assert (one.index, one.distance) == (2, pytest.approx(2.9))
    other = choice({"x": -0.5, "y": -1.2}, {"y": -0.6, "x": -0.7}, {"z": 0.0, "y": -9.0})
    assert difference(a, other).index == 1
    assert difference(a, other).distance == pytest.approx(0.9)


def test_two_tokens_that_are_about_as_likely_may_change_places():
    a, b = choice({"x": -0.700, "y": -0.701}), choice({"y": -0.700, "x": -0.702})
    assert difference(a, b).distance == pytest.approx(0.002)


def test_a_token_that_its_own_answer_finds_unlikely_is_a_difference():
    top = {"x": -0.1, "y": -3.1}
    taken = Choice("y", (Token("y", top),))
    assert difference(choice(top), taken).distance == pytest.approx(1.5)


def test_a_text_that_one_list_lacks_is_at_most_as_likely_as_its_last():
    a, b = choice({"x": -0.5, "y": -1.0, "z": -4.0}), choice({"x": -0.5, "w": -1.0, "z": -4.0})
    assert difference(a, b).distance == pytest.approx(3.0)
    assert difference(choice({"x": -0.5, "y": -4.0}), choice({"x": -0.5, "z": -4.0})).distance == 0


def test_texts_alone_are_equal_or_infinitely_far_apart():
    assert difference(Choice("a", ()), Choice("a", ())).distance == 0
    assert difference(Choice("a", ()), Choice("b", ())).distance == math.inf


def test_a_hit_counts_as_a_leak_unless_a_request_with_the_salt_begins_alike():
    asks = [Ask(((0, 40),)), Ask(((0, 40),), salt="one"), Ask(((0, 40),), salt="one"), Ask(((0, 40),), salt="two")]
    hit = Answer((Choice("a", ()),), 40, 32)
    outcome = Outcome(dict.fromkeys(range(4), hit))
    assert [leaked(asks, i, outcome) for i in range(4)] == [0, 0, 0, 32]


def test_requests_are_numbered_through_the_waves():
    a, b, c = (Ask(((i, 1),)) for i in range(3))
    assert Conversation(((a,), (b, c))).asks == [a, b, c]
