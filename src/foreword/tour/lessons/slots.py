"""Lesson 3: slots."""

import textwrap

from foreword.insight.svg import blocks_picture
from foreword.tour.lesson import Code, Exercise, Lesson, Shown, function_fault
from foreword.tour.story import NUM_BLOCKS, section, step_of, story_engine, text_of


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Block tables, positions and requests of real tokens, and their slots."""
    found: list[tuple[tuple[object, ...], object]] = []
    for size in (2, 3, 4):
        engine = story_engine(block_size=size)
        while (batch := engine.prepare()) is not None:
            given = batch.block_table[0].tolist(), batch.positions.tolist(), batch.req_indices.tolist(), size
            found.append((given, batch.slot_mapping[0].tolist()))
            engine.commit()
    return found


LESSON = Lesson(
    name="slots",
    title="Slots",
    parts=(
        "A place in the cache for one token is a slot. With blocks of S places, block n has the slots n·S to "
        "n·S + S - 1. A kernel that writes keys and values wants one number per token, its slot, and nothing else.",
        "A token at position p is in entry `p // S` of its request's row of the block table, at offset `p % S`. So:",
        "`slot = block_table[request][p // S] · S + p % S`",
        Shown(
            "Where the tokens of step 2 go; what the step writes has a border",
            lambda width: section(step_of(2), "Tokens", width),
            lambda: blocks_picture(step_of(2), text_of, NUM_BLOCKS),
        ),
        'The library says it in a sentence, here of token 3, the word "a" of request 2:',
        Shown(
            "Token 3 of step 2",
            lambda width: textwrap.fill(str(step_of(2).explain(token=3, text_of=text_of)), width or 100),
        ),
        "Reading goes the same way: attention reads positions 0 to p of the request through its row of the block "
        "table, wherever the blocks are.",
        Code(
            "from foreword.tour.story import step_of\n\n"
            "batch = step_of(2)\n"
            "print(batch.slot_mapping[0])\n"
            "print(batch.explain(token=3))\n"
        ),
    ),
    exercise=Exercise(
        task="Write `slot_mapping(block_table, positions, req_indices, block_size)`: the slot of each token. "
        "`block_table` is a list of rows, and token t is at `positions[t]` of the request in row `req_indices[t]`.",
        start="def slot_mapping(block_table, positions, req_indices, block_size):\n"
        "    return [block_table[b][p] * block_size for p, b in zip(positions, req_indices)]\n",
        hint="The formula is in the lesson. Position 7 with S = 2 is entry 3 at offset 1.",
        solution="def slot_mapping(block_table, positions, req_indices, block_size):\n"
        "    return [\n"
        "        block_table[b][p // block_size] * block_size + p % block_size\n"
        "        for p, b in zip(positions, req_indices)\n"
        "    ]\n",
        fault=function_fault("slot_mapping", cases),
    ),
)
