"""Lesson 5: sharing a prefix."""

import numpy as np

from foreword.batch import InputBatch
from foreword.insight.svg import blocks_picture
from foreword.insight.toy import ToyEngine
from foreword.tour.lesson import Exercise, Lesson, Shown, function_fault
from foreword.tour.story import MAX_MODEL_LEN, NUM_BLOCKS, section, story_engine, text_of


def shared_step() -> InputBatch:
    """Return step 3 of the story with a fourth request that has the same beginning as request 2."""
    engine = story_engine(prefix_caching=True)
    for _ in range(2):
        engine.prepare()
        engine.commit()
    engine.add(8)
    batch = engine.prepare()
    assert batch is not None
    return batch


def _found(first: str, second: str, size: int) -> int:
    """Return how many characters of ``second`` the real cache finds after ``first`` was computed. Each character is a
    token.
    """
    engine = ToyEngine(
        lambda _, p: ord(first[p]) if p < len(first) else 0,
        max_num_reqs=1,
        budget=MAX_MODEL_LEN,
        block_size=size,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=128,
        prefix_caching=True,
    )
    engine.add(len(first))
    engine.prepare()
    engine.commit()
    return engine.cache.lookup(np.array(list(map(ord, second)), np.int32)).num_tokens


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Yield two prompts, and how much of the second the cache finds after the first was computed."""
    seconds = ("abcdefgh", "abcdefgx", "abcdefghij", "abcd", "abcde", "xbcd", "a", "ab", "abcdefghijk")
    given = [(a, b, size) for size in (1, 2, 3) for a in ("abcdefgh", "abcdefghi") for b in seconds]
    return [(one, _found(*one)) for one in given]


LESSON = Lesson(
    name="sharing-a-prefix",
    title="Sharing a prefix",
    parts=(
        'A fourth request arrives after step 2: "Once upon a time there lived a wolf". Its first seven words are the '
        "same as those of request 2. The key and value of a word depend only on this word and the words before it. So "
        "two prompts with the same first words (the same prefix) have the same keys and values there, which need not "
        "be computed twice.",
        "The cache keeps a tree of all full blocks. A block is found by its own words and all words before it. A new "
        "request starts with the blocks that match its prompt, and its `num_computed_tokens` is the number of words "
        "in these blocks.",
        Shown(
            "Step 3: request 3 holds blocks 4, 5 and 6 of request 2, and computes two words",
            lambda width: (
                section(shared_step(), "Requests", width) + "\n\n" + section(shared_step(), "Block table", width)
            ),
            lambda: blocks_picture(shared_step(), text_of, NUM_BLOCKS),
        ),
        "There are two rules. First, only whole blocks are shared, because a block has a single request that writes "
        'to it. The seventh word is the same too, but its block also contains "fox". (Foreword can copy the equal '
        "part of such a block; this tour does not use that.) Second, at least one token of a prompt is always "
        "computed, because its logits give the first new word.",
        "The cache counts the requests that hold a block. When the last of them ends, the block is free. Its content "
        "can still be reused until another request needs the block for other words.",
    ),
    exercise=Exercise(
        task="Write `reused(first, second, block_size)`. `first` and `second` are prompts; `first` has been computed. "
        "Return how many tokens of `second` are found in the cache.",
        start="def reused(first, second, block_size):\n"
        "    equal = 0\n"
        "    while equal < min(len(first), len(second)) and first[equal] == second[equal]:\n"
        "        equal += 1\n"
        "    return equal\n",
        hint="Apply both rules of the lesson: count whole blocks only, and leave at least one token to compute.",
        solution="def reused(first, second, block_size):\n"
        "    equal = 0\n"
        "    while equal < min(len(first), len(second) - 1) and first[equal] == second[equal]:\n"
        "        equal += 1\n"
        "    return equal // block_size * block_size\n",
        fault=function_fault("reused", cases),
    ),
)
