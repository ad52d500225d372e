"""Conversations are shrunk to the smallest that still shows what a predicate, in place of a server, asks for."""

from foreword.blackbox.replay import Ask, Conversation
from foreword.blackbox.shrink import shrink


def always() -> bool:
    return True


def test_what_is_not_needed_is_left_out():
    def shows(conversation: Conversation, number: int) -> bool:
        """The request reads 17 words of segment 5, and so did one before it whose answer had two tokens."""
        asks = conversation.asks
        is_long = [any(segment == 5 and count >= 17 for segment, count in ask.parts) for ask in asks]
        return is_long[number] and any(is_long[i] and asks[i].max_tokens > 1 for i in range(number))

    waves = (
        (Ask(((1, 9),)), Ask(((5, 64), (2, 5)), 48), Ask(((3, 3),))),
        (Ask(((4, 80),)),),
        (Ask(((5, 64), (6, 7)), 8, n=3), Ask(((7, 1),))),
    )
    small, number = shrink(Conversation(waves), 4, shows, always)
    assert (small, number) == (Conversation(((Ask(((5, 17),), 2),), (Ask(((5, 17),), 1),))), 1)


def test_a_request_that_another_continues_stays():
    def shows(conversation: Conversation, number: int) -> bool:
        return conversation.asks[number].continues >= 0

    waves = ((Ask(((0, 30),)),), (Ask(((1, 30),)),), (Ask(((2, 9),), continues=1),), (Ask(((3, 9),), continues=0),))
    small, number = shrink(Conversation(waves), 2, shows, always)
    assert [ask.continues for ask in small.asks] == [-1, 0]
    assert number == 1


def test_what_needs_requests_at_the_same_time_keeps_them_together():
    def shows(conversation: Conversation, number: int) -> bool:
        return max(map(len, conversation.waves)) >= 2

    waves = (tuple(Ask(((i, 12),)) for i in range(6)), (Ask(((0, 12),)),))
    small, _ = shrink(Conversation(waves), 3, shows, always)
    assert [len(wave) for wave in small.waves] == [2]


def test_the_search_ends_when_it_may_not_go_on_and_no_candidate_is_tried_twice():
    tried = []

    def shows(conversation: Conversation, number: int) -> bool:
        tried.append((conversation, number))
        return len(tried) % 7 == 0

    waves = tuple((Ask(((i, 100), (i + 9, 50)), 40),) for i in range(8))
    shrink(Conversation(waves), 7, shows, lambda: len(tried) < 50)
    assert len(tried) == len(set(tried)) == 50
