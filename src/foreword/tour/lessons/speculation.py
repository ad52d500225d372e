"""Lesson 7: speculation."""

import numpy as np

from foreword.batch import InputBatch
from foreword.insight.svg import step_picture
from foreword.sampling.verification import accepted_tokens
from foreword.tour.lesson import Exercise, Lesson, Shown, function_fault
from foreword.tour.story import VOCABULARY, section, story_engine, text_of, token_at

DRAFTS = ("the", "fox")
"""The words that are proposed after "The cat sat on"."""


def drafted_step() -> InputBatch:
    """Return step 2 of the story with two drafts for request 0."""
    engine = story_engine(max_num_draft_tokens=len(DRAFTS))
    engine.prepare()
    engine.commit()
    row = engine.states.row_of("0")
    drafts = np.array([[VOCABULARY.index(word) for word in DRAFTS]], np.int32)
    engine.scheduler.drafts.propose(np.array([row], np.int32), drafts)
    batch = engine.prepare()
    assert batch is not None
    return batch


def _logits(width: int | None) -> str:
    batch = drafted_step()
    rows = batch.logits_indices.tolist()
    words = [text_of(int(batch.input_ids[t])) for t in rows]
    drawn = [text_of(token_at(int(batch.req_ids[batch.req_indices[t]]), int(batch.positions[t]) + 1)) for t in rows]
    lines = [
        f"  logit row {i}: after {word:<6} the model draws {draw}"
        for i, (word, draw) in enumerate(zip(words, drawn, strict=True))
    ]
    return "\n".join([section(batch, "Tokens", width), "", "What the model draws", *lines])


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Yield drafts and draws, and the tokens that the library commits."""
    rng = np.random.default_rng(0)
    found: list[tuple[tuple[object, ...], object]] = []
    for _ in range(100):
        drafts = rng.integers(0, 2, rng.integers(0, 5)).astype(np.int32)
        drawn = rng.integers(0, 2, len(drafts) + 1).astype(np.int32)
        kept = accepted_tokens(drawn, drafts, np.array([0, len(drawn)], np.int32), len(drawn))[0]
        found.append(((drafts.tolist(), drawn.tolist()), kept[kept >= 0].tolist()))
    return found


LESSON = Lesson(
    name="speculation",
    title="Speculation",
    parts=(
        "A decode computes one token per request, but the machine could compute five tokens in nearly the same time. "
        "So a cheap method guesses the next words, and one step verifies all guesses. The guesses are called drafts.",
        f'Request 0 knows the words "The cat sat on", and the drafts are "{" ".join(DRAFTS)}". Step 2 computes the '
        'word "on" and both drafts, at the positions that follow. Drafts have slots like all other tokens.',
        Shown(
            "Step 2 with two drafts (dashed), and a logit row after each word of request 0",
            _logits,
            lambda: step_picture(drafted_step(), text_of),
        ),
        'From logit row 0, after "on", the model draws "the", so the first draft is right. From row 1, after "the", it '
        'draws "mat", so the second draft is wrong. But the word "mat" is valid, since all words before it are right. '
        'So the step gives two words: "the mat". Row 2 comes after a wrong word, and is discarded.',
        "In general, a step gives all drafts before the first wrong one, and one drawn word more. The answer is the "
        "same, word for word, as without drafts. The keys and values of wrong drafts stay in their slots until the "
        "next step overwrites them. `num_computed_tokens` does not count them.",
    ),
    exercise=Exercise(
        task="Write `accepted(drafts, drawn)`. `drawn[j]` is the token that the model draws at the place of "
        "`drafts[j]`; the last token of `drawn` comes after all drafts. Return the list of tokens that the request "
        "gets.",
        start="def accepted(drafts, drawn):\n    return [d for d, t in zip(drafts, drawn) if d == t]\n",
        hint="Go through `drawn` and keep each token. Stop after the first token that differs from its draft.",
        solution="def accepted(drafts, drawn):\n"
        "    kept = []\n"
        "    for j, token in enumerate(drawn):\n"
        "        kept.append(token)\n"
        "        if j == len(drafts) or drafts[j] != token:\n"
        "            break\n"
        "    return kept\n",
        fault=function_fault("accepted", cases),
    ),
)
