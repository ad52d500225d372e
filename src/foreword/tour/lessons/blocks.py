"""Lesson 1: why blocks."""

from foreword.insight.svg import blocks_picture
from foreword.tour.lesson import Code, Exercise, Lesson, Shown, function_fault
from foreword.tour.story import NUM_BLOCKS, section, step_of, story_engine, text_of


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Tokens and block sizes, and the blocks that real requests hold."""
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
        "engine keeps them in the KV cache. The question is where.",
        "Three requests run through this tour. A token is a word. Their prompts have 3, 2 and 8 words; each request "
        "may grow to 12. The simplest cache reserves 12 places per request: 36 places, of which 13 hold something "
        "after the prompts. No engine knows how long an answer will be, so most of such a cache stays empty.",
        "So the cache is cut into blocks of a few places, 2 in this tour and often 16. A request takes a block when "
        "it needs one, from anywhere. Its row of the block table lists its blocks in order. This is the first step: "
        "the prompts of requests 0 and 1 and five words of request 2.",
        Shown(
            "The block table after the plan of step 1",
            lambda width: section(step_of(1), "Block table", width),
            lambda: blocks_picture(step_of(1), text_of, NUM_BLOCKS),
        ),
        'At most one block per request is partly empty. Block 0 is never used: it stands for "no block" in the table.',
        Code(
            "from foreword.tour.story import story_engine\n\n"
            "engine = story_engine()\n"
            "batch = engine.prepare()  # plans and prepares step 1\n"
            "print(batch.block_table[0][:, :4])\n"
            "print(engine.cache.pool.num_used, 'blocks in use')\n"
        ),
    ),
    exercise=Exercise(
        task="Write `blocks_needed(num_tokens, block_size)`: how many blocks a request of so many tokens holds.",
        start="def blocks_needed(num_tokens, block_size):\n    return num_tokens // block_size\n",
        hint="3 tokens in blocks of 2 need 2 blocks: the last one is half empty. Round up.",
        solution="def blocks_needed(num_tokens, block_size):\n    return -(-num_tokens // block_size)\n",
        fault=function_fault("blocks_needed", cases),
    ),
)
