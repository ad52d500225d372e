"""Find the smallest conversation that still shows a difference, by leaving out requests, then words, tokens and
choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from foreword.blackbox.replay import Ask, Conversation

Candidate = tuple[Conversation, int]


def shrink(
    conversation: Conversation, number: int, shows: Callable[[Conversation, int], bool], goes_on: Callable[[], bool]
) -> Candidate:
    """Return a conversation, with the number of the request, of which no single reduction still shows the difference.

    shows: returns whether a conversation shows it. goes_on: returns False to end the search with the present result.
    """
    best, tried = (conversation, number), {(conversation, number)}
    for reductions in (_without_requests, _without_parts, _apart, _smaller):
        is_smaller = True
        while is_smaller and goes_on():
            is_smaller = False
            for candidate in reductions(*best):
                if not goes_on():
                    break
                if candidate in tried:
                    continue
                tried.add(candidate)
                if shows(*candidate):
                    best, is_smaller = candidate, True
                    break
    return best


def _without_requests(conversation: Conversation, number: int) -> Iterator[Candidate]:
    """Yield the conversation without the requests after this one, without half of the others, a quarter, … and without
    each single one.
    """
    count = len(conversation.asks)
    size = count // 2
    while size:
        for first in range(0, count, size):
            dropped = set(range(first, min(first + size, count))) - {number}
            candidate = _drop(conversation, number, dropped)
            if dropped and candidate is not None:
                yield candidate
        size //= 2


def _drop(conversation: Conversation, number: int, dropped: set[int]) -> Candidate | None:
    """Return the conversation without some requests; None if a remaining request continues one of them."""
    asks = conversation.asks
    kept = [i for i in range(len(asks)) if i not in dropped]
    numbers = {old: new for new, old in enumerate(kept)}
    if any(asks[i].continues >= 0 and asks[i].continues not in numbers for i in kept):
        return None
    waves, first = [], 0
    for wave in conversation.waves:
        stay = [i for i in range(first, first + len(wave)) if i in numbers]
        first += len(wave)
        if stay:
            waves.append(
                tuple(
                    replace(asks[i], continues=numbers[asks[i].continues]) if asks[i].continues >= 0 else asks[i]
                    for i in stay
                )
            )
    return Conversation(tuple(waves)), numbers[number]


def _without_parts(conversation: Conversation, number: int) -> Iterator[Candidate]:
    """Yield the conversation without one segment in all prompts."""
    for segment in sorted({part[0] for ask in conversation.asks for part in ask.parts}):

        def without(ask: Ask, segment: int = segment) -> Ask:
            return replace(ask, parts=tuple(part for part in ask.parts if part[0] != segment))

        changed = _each(conversation, without)
        if all(ask.parts for ask in changed.asks):
            yield changed, number


def _apart(conversation: Conversation, number: int) -> Iterator[Candidate]:
    """Yield the conversation with the requests of a wave sent one after the other."""
    for i, wave in enumerate(conversation.waves):
        if len(wave) > 1:
            single = tuple((ask,) for ask in wave)
            yield Conversation((*conversation.waves[:i], *single, *conversation.waves[i + 1 :])), number


def _smaller(conversation: Conversation, number: int) -> Iterator[Candidate]:
    """Yield the conversation with a smaller length of a segment or an answer, fewer choices, or fewer events of a
    stream.
    """
    for part in sorted({part for ask in conversation.asks for part in ask.parts}, key=lambda part: -part[1]):
        for length in _below(part[1]):
            new = part[0], length

            def shorter(ask: Ask, old: tuple[int, int] = part, new: tuple[int, int] = new) -> Ask:
                return replace(ask, parts=tuple(new if one == old else one for one in ask.parts))

            yield _each(conversation, shorter), number
    for i, ask in enumerate(conversation.asks):
        changes = [replace(ask, max_tokens=value) for value in _below(ask.max_tokens)]
        changes += [replace(ask, n=value) for value in _below(ask.n)]
        changes += [replace(ask, abort_after=value) for value in _below(ask.abort_after)]
        changes += [replace(ask, salt="")] if ask.salt else []
        for change in changes:
            yield _at(conversation, i, change), number


def _below(value: int) -> list[int]:
    """Yield smaller values ≥ 1, the smallest first: 1, half, three quarters, one less."""
    return sorted({1, value // 2, 3 * value // 4, value - 1} - {0}) if value > 1 else []


def _each(conversation: Conversation, change: Callable[[Ask], Ask]) -> Conversation:
    return Conversation(tuple(tuple(map(change, wave)) for wave in conversation.waves))


def _at(conversation: Conversation, number: int, ask: Ask) -> Conversation:
    waves, first = [], 0
    for wave in conversation.waves:
        at = number - first
        waves.append((*wave[:at], ask, *wave[at + 1 :]) if 0 <= at < len(wave) else wave)
        first += len(wave)
    return Conversation(tuple(waves))
