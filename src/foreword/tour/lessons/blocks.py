"""Lesson 1: why blocks."""

from foreword.insight.svg import blocks_picture
from foreword.tour.lesson import Code, Exercise, Lesson, Shown, function_fault
from foreword.tour.story import NUM_BLOCKS, section, step_of, story_engine, text_of


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Yield numbers of tokens and block sizes, and the blocks that real requests hold."""
    found: list[tuple[tuple[object, ...], object]] = []
    for size in (1, 2, 3, 4, 8):
        engine = story_engine(block_size=size)
        while (batch := engine.prepare()) is not None:
            for tokens, held in zip(batch.seq_lens.tolist(), batch.num_blocks[0].tolist(), strict=True):
                found.append(((tokens, size), held))
            engine.commit()
    return found


LESSON = Lesson(
    name="why-blocks",
    title="Why blocks",
    parts=(
        "A model computes a key and a value for each token, and every later token of the same request reads them. An "
        "engine keeps them in the KV cache. The question is where in the cache they are stored.",
        "All lessons of this tour use the same three requests, and one token is one word. The prompts have 3, 2 and 8 "
        "words, and each request may grow to 12 words, prompt and answer together. The simplest cache reserves 12 "
        "places for each request. These are 36 places, but after the prompts are computed, only 13 of them are used. "
        "No engine knows in advance how long an answer will be, so most of such a cache stays empty.",
        "Therefore the cache is divided into blocks of a few places: 2 in this tour, often 16 in real engines. When a "
        "request needs another block, it gets any free block. The block table has a row for each request, which lists "
        "the blocks of the request in order. The table below is that of the first step, which computes the prompts of "
        "requests 0 and 1 and the first five words of request 2.",
        Shown(
            "The block table after the plan of step 1",
            lambda width: section(step_of(1), "Block table", width),
            lambda: blocks_picture(step_of(1), text_of, NUM_BLOCKS),
        ),
        "In each request, at most one block is partly empty. Block 0 is never used for tokens: in the table, 0 means "
        '"no block".',
        Code(
            "from foreword.tour.story import story_engine\n\n"
            "engine = story_engine()\n"
            "batch = engine.prepare()  # plans and prepares step 1\n"
            "print(batch.block_table[0][:, :4])\n"
            "print(engine.cache.pool.num_used, 'blocks in use')\n"
        ),
    ),
    exercise=Exercise(
        task="Write `blocks_needed(num_tokens, block_size)`: return the number of blocks that a "
        "request with `num_tokens` tokens holds.",
        start="def blocks_needed(num_tokens, block_size):\n    return num_tokens // block_size\n",
        hint="3 tokens in blocks of 2 need 2 blocks: the last one is half empty. Round up.",
        solution="def blocks_needed(num_tokens, block_size):\n    return -(-num_tokens // block_size)\n",
        fault=function_fault("blocks_needed", cases),
    ),
)
