"""Lesson 2: prefill and decode are one."""

from foreword.insight.svg import step_picture
from foreword.tour.lesson import Exercise, Lesson, Shown, function_fault
from foreword.tour.story import section, step_of, story_engine, text_of


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Progress and plan of the story's steps, and the positions in them."""
    found: list[tuple[tuple[object, ...], object]] = []
    for budget in (10, 4, 3):
        engine = story_engine(budget=budget)
        while (batch := engine.prepare()) is not None:
            plan = batch.num_computed_tokens.tolist(), batch.num_scheduled_tokens.tolist()
            found.append((plan, batch.positions.tolist()))
            engine.commit()
    return found


LESSON = Lesson(
    name="prefill-and-decode-are-one",
    title="Prefill and decode are one",
    parts=(
        "Two words for the same thing: to compute a prompt is called prefill, to compute one more word of an answer "
        "is called decode. An engine needs neither. It needs two numbers per request: how many tokens are known, and "
        "how many are computed, that is, have their key and value in the cache.",
        "A step computes some of the tokens that are known and not computed yet. For a prompt these are many; after "
        "that there is one, the word that the last step sampled.",
        Shown(
            "The requests of step 2: requests 0 and 1 compute one word, request 2 the rest of its prompt",
            lambda width: section(step_of(2), "Requests", width),
        ),
        "All tokens of a step stand in one row, request after request. There is no padding between them: "
        "`query_start_loc` says where each request begins. A request's first position is the number of tokens that it "
        "has computed.",
        Shown(
            "The tokens of step 2",
            lambda width: section(step_of(2), "Tokens", width),
            lambda: step_picture(step_of(2), text_of),
        ),
        "Look at request 2: it has computed 5 words, so that its positions are 5, 6, 7. Request 0 has computed 3, so "
        'that its only position is 3: the word "on", which step 1 sampled.',
    ),
    exercise=Exercise(
        task="Write `positions(num_computed, num_scheduled)`: two lists with a number per request. Return the "
        "positions of all tokens of the step, in one list.",
        start="def positions(num_computed, num_scheduled):\n    return [p for n in num_scheduled for p in range(n)]\n",
        hint="Each request counts on from its own computed tokens. What is `range(start, end)` of request 2 in step 2?",
        solution="def positions(num_computed, num_scheduled):\n"
        "    return [p for c, n in zip(num_computed, num_scheduled) for p in range(c, c + n)]\n",
        fault=function_fault("positions", cases),
    ),
)
