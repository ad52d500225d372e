"""Conversations whose answers are right only if the prefix cache and the batch are.

Each scenario draws a conversation at random. Segments are numbered; equal numbers mean equal letters. S is the block
size that is assumed for the conversation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from foreword.blackbox.replay import Ask, Conversation
from foreword.blackbox.server import Server

SHORT, LONG = 8, 48  # tokens of an answer
Part = tuple[int, int]


@dataclass(slots=True)
class Draw:
    """Draws random lengths for a conversation with a server, and new segments."""

    server: Server
    rng: random.Random
    block_size: int
    concurrency: int
    segments: count[int] = field(default_factory=count)

    @property
    def model(self) -> str:
        return self.server.models[0]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the longest prompt, at least one."""
        return max(1, int(self.server.max_words * self.server.tokens_per_word) // self.block_size)

    def words(self, num_tokens: float, *, is_first: bool = True) -> int:
        """Return the number of words with this many tokens. is_first: whether the tokens include those of a prompt
        besides its words.
        """
        extra = self.server.num_extra if is_first else 0
        return min(self.server.max_words, max(1, round((num_tokens - extra) / self.server.tokens_per_word)))

    def near_border(self, most_blocks: int = 6) -> int:
        """Return the number of words of a prompt that ends at a block boundary, or one token before or after one."""
        blocks = self.rng.randint(1, min(most_blocks, self.num_blocks))
        return self.words(blocks * self.block_size + self.rng.choice((-1, 0, 1)))

    def some(self, most: int = 40) -> int:
        return self.rng.randint(1, most)

    def long(self) -> int:
        return self.rng.randint(max(1, self.server.max_words // 4), self.server.max_words)

    def new(self, num_words: int) -> Part:
        """Return a part with a new segment."""
        return next(self.segments), num_words

    def ask(self, *parts: Part, max_tokens: int = SHORT) -> Ask:
        """Return a request whose prompt is not longer than the longest."""
        room, kept = self.server.max_words, []
        for segment, num_words in parts:
            if room > 0:
                kept.append((segment, min(num_words, room)))
                room -= num_words
        return Ask(tuple(kept), max_tokens, model=self.model)


def again(draw: Draw) -> Conversation:
    """Send a prompt again after others (A, B, A), which may share its beginning."""
    first = draw.new(draw.near_border())
    a, others = draw.ask(first, draw.new(draw.some(3))), []
    for _ in range(draw.rng.randint(1, 3)):
        begins = draw.rng.choice(((), (first,), ((first[0], max(1, first[1] // 2)),)))
        others.append(draw.ask(*begins, draw.new(draw.near_border()), max_tokens=draw.rng.choice((1, SHORT, LONG))))
    return Conversation(tuple((ask,) for ask in (a, *others, a, draw.rng.choice(others), a)))


def shared_prefix(draw: Draw) -> Conversation:
    """Send prompts with a common beginning that ends at or beside a block boundary, one by one and together."""
    shared = next(draw.segments)
    asks = [
        draw.ask((shared, draw.near_border()), *([draw.new(draw.some())] if draw.rng.random() < 0.8 else ()))
        for _ in range(draw.rng.randint(3, 6))
    ]
    one_by_one = tuple((ask,) for ask in asks[:2])
    return Conversation((*one_by_one, tuple(asks), (asks[0],)))


def crossed(draw: Draw) -> Conversation:
    """Send equal blocks after different beginnings: [x c], [y d], [y c], [x d], and c at another place."""
    size = draw.words(draw.block_size * draw.rng.randint(1, max(1, min(3, draw.num_blocks // 3))))
    later = draw.words(draw.block_size, is_first=False)
    x, y = draw.new(size), draw.new(size)
    c, d, end = draw.new(later), draw.new(later), draw.new(2)
    prompts = [(x, c, end), (y, d, end), (y, c, end), (x, d, end), (x, d, c, end)]
    head, tail = prompts[:2], prompts[2:]
    draw.rng.shuffle(tail)
    return Conversation(tuple((draw.ask(*parts),) for parts in (*head, *tail)))


def aborts(draw: Draw) -> Conversation:
    """Close streams in the middle, then send their prompts again, and prompts that continue them."""
    prompts = [(draw.new(draw.near_border()),) for _ in range(draw.rng.randint(2, 4))]
    closed = [
        replace(draw.ask(*parts, max_tokens=4 * LONG), abort_after=draw.rng.choice((1, 1, 2, 5, 20)))
        for parts in prompts
    ]
    asks = [draw.ask(*parts) for parts in prompts]
    longer = [draw.ask(*parts, draw.new(draw.some())) for parts in prompts]
    fillers = [draw.ask(draw.new(draw.near_border()), max_tokens=LONG) for _ in range(2)]
    return Conversation((tuple(closed + fillers), tuple(asks), tuple(longer), (asks[0],)))


def load(draw: Draw) -> Conversation:
    """Send many long prompts with long answers together, so that requests are preempted, and then some of them
    again.
    """
    asks = [draw.ask(draw.new(draw.long()), max_tokens=LONG) for _ in range(draw.concurrency)]
    some = draw.rng.sample(asks, min(3, len(asks)))
    return Conversation((tuple(asks), *((ask,) for ask in some)))


def long_and_short(draw: Draw) -> Conversation:
    """Send short prompts among long ones, with answers of all lengths."""
    asks = []
    for i in range(draw.concurrency):
        num_words = draw.long() if i % 4 == 0 else draw.some(12)
        asks.append(draw.ask(draw.new(num_words), max_tokens=draw.rng.choice((1, 3, SHORT, LONG))))
    return Conversation((tuple(asks), tuple(draw.rng.sample(asks, max(1, len(asks) // 2)))))


def choices(draw: Draw) -> Conversation:
    """Ask for several choices of a prompt that ends near a block boundary, beside other requests, then send the prompt
    again.
    """
    parts = (draw.new(draw.near_border()),)
    several = replace(draw.ask(*parts, max_tokens=2 * SHORT), n=draw.rng.randint(2, 4))
    other = draw.ask(*parts, draw.new(draw.some()))
    return Conversation(((several, draw.ask(draw.new(draw.near_border()))), (other, draw.ask(*parts)), (several,)))


def turns(draw: Draw) -> Conversation:
    """Alternate two conversations of several turns. Each prompt begins with the last prompt and its answer.

    Prompt and answer together end at a block boundary, or one token before or after one.
    """
    waves: list[tuple[Ask, ...]] = []
    lengths: list[int] = []  # tokens of prompt and answer, unless an answer is shorter than requested
    for i in range(6):
        before = lengths[i - 2] if i > 1 else draw.server.num_extra
        num_words = draw.rng.randint(2, 12)
        length = before + round(num_words * draw.server.tokens_per_word)
        max_tokens = -length % draw.block_size + draw.rng.choice((-1, 0, 0, 1))
        max_tokens = max_tokens if 0 < max_tokens <= 2 * LONG else draw.rng.randint(4, 40)
        lengths.append(length + max_tokens)
        waves.append((replace(draw.ask(draw.new(num_words), max_tokens=max_tokens), continues=i - 2 if i > 1 else -1),))
    return Conversation(tuple(waves))


def salts(draw: Draw) -> Conversation:
    """Send one prompt under several salts, and without one. No salt may find blocks that another one has computed."""
    parts = (draw.new(draw.near_border() + draw.block_size), draw.new(draw.some()))
    names = draw.rng.sample(("", "one", "two"), 3)
    return Conversation(tuple((replace(draw.ask(*parts), salt=name),) for name in (*names, names[0])))


def models(draw: Draw) -> Conversation:
    """Send one prompt to each of the server's models, which may be adapters of one model, and then again."""
    parts = (draw.new(draw.near_border()), draw.new(draw.some()))
    names = [*draw.server.models]
    draw.rng.shuffle(names)
    return Conversation(tuple((replace(draw.ask(*parts), model=name),) for name in (*names, *names)))


SCENARIOS: dict[str, Callable[[Draw], Conversation]] = {
    one.__name__: one
    for one in (again, shared_prefix, crossed, aborts, load, long_and_short, choices, turns, salts, models)
}


def scenarios_of(server: Server) -> list[str]:
    """Return the names of the scenarios that a server can take part in."""
    lacking = {
        "aborts": not server.has_streams,
        "choices": not server.has_choices,
        "salts": not server.takes_salts,
        "models": len(server.models) < 2,
    }
    return [name for name in SCENARIOS if not lacking.get(name, False)]
