"""The running example of all lessons: three requests of a few words, on the real scheduler, cache and input layer."""

from __future__ import annotations

from foreword.batch import InputBatch
from foreword.insight.toy import ToyEngine

STORIES = tuple(
    text.split()
    for text in (
        "The cat sat on the mat and slept all day and night",
        "Good morning to you all and have a very nice day friends",
        "Once upon a time there lived a fox who loved to count",
        "Once upon a time there lived a wolf who ate little lambs",
    )
)
"""The words of each request, 12 of them. The first ones are the prompt, and the model "samples" the others."""

PROMPT_LENS = (3, 2, 8, 8)
BUDGET, BLOCK_SIZE, MAX_MODEL_LEN, NUM_BLOCKS = 10, 2, 12, 14

VOCABULARY = ["?", *sorted({word for story in STORIES for word in story}, key=lambda word: (word.lower(), word))]
"""A token is a word, and its id is its index in this list. Id 0 means that a token is not known yet."""


def text_of(token_id: int) -> str:
    """Return the word of a token id."""
    return VOCABULARY[token_id]


def token_at(request: int, position: int) -> int:
    """Return the id of a word of a story."""
    return VOCABULARY.index(STORIES[request][position])


def story_engine(
    num_requests: int = 3,
    *,
    num_blocks: int | None = None,
    block_size: int = BLOCK_SIZE,
    budget: int = BUDGET,
    prefix_caching: bool = False,
    max_num_draft_tokens: int = 0,
) -> ToyEngine:
    """Return an engine with the first requests of the example. num_blocks: the size of its pool, by default enough for
    all.
    """
    engine = ToyEngine(
        token_at,
        max_num_reqs=len(STORIES),
        budget=budget,
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=num_blocks,
        vocab_size=len(VOCABULARY),
        prefix_caching=prefix_caching,
        max_num_draft_tokens=max_num_draft_tokens,
    )
    for length in PROMPT_LENS[:num_requests]:
        engine.add(length)
    return engine


def step_of(number: int, engine: ToyEngine | None = None) -> InputBatch:
    """Return a step of the example, prepared and not committed. number: from 1."""
    engine = engine or story_engine()
    for _ in range(number - 1):
        engine.prepare()
        engine.commit()
    batch = engine.prepare()
    assert batch is not None, f"the example has no step {number}"
    return batch


def section(batch: InputBatch, title: str, width: int | None) -> str:
    """Return the table of `InputBatch.explain` whose heading begins with ``title``."""
    parts = str(batch.explain(width=width, text_of=text_of)).split("\n\n")
    return next(part for part in parts if part.startswith(title))
