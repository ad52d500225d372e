"""Lesson 3: slots."""

import textwrap

from foreword.insight.svg import blocks_picture
from foreword.tour.lesson import Code, Exercise, Lesson, Shown, function_fault
from foreword.tour.story import NUM_BLOCKS, section, step_of, story_engine, text_of


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Yield block tables, positions and requests of real tokens, and their slots."""
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
        "A slot is the place of one token in the cache. With blocks of S slots, block n consists of the slots n·S to "
        "n·S + S - 1. A kernel that writes keys and values needs only one number per token: its slot.",
        "The block of the token at position p is entry `p // S` of its request's row of the block table, and `p % S` "
        "is the offset of the token in that block. So the slot is:",
        "`slot = block_table[request][p // S] · S + p % S`",
        Shown(
            "The slots of the tokens of step 2; the slots that the step writes have a border",
            lambda width: section(step_of(2), "Tokens", width),
            lambda: blocks_picture(step_of(2), text_of, NUM_BLOCKS),
        ),
        'The library can explain one token in words. This is token 3, the word "a" of request 2:',
        Shown(
            "Token 3 of step 2",
            lambda width: textwrap.fill(str(step_of(2).explain(token=3, text_of=text_of)), width or 100),
        ),
        "Attention finds the keys and values that it reads in the same way: it looks up the slots of positions 0 to p "
        "in the request's row of the block table. The blocks may be anywhere in the cache.",
        Code(
            "from foreword.tour.story import step_of\n\n"
            "batch = step_of(2)\n"
            "print(batch.slot_mapping[0])\n"
            "print(batch.explain(token=3))\n"
        ),
    ),
    exercise=Exercise(
        task="Write `slot_mapping(block_table, positions, req_indices, block_size)`. Return a list with the slot of "
        "each token. `block_table` is a list of rows. Token t is at position `positions[t]` of the request in row "
        "`req_indices[t]`.",
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
