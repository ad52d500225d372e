"""Lesson 2: prefill and decode are one."""

from foreword.insight.svg import step_picture
from foreword.tour.lesson import Exercise, Lesson, Shown, function_fault
from foreword.tour.story import section, step_of, story_engine, text_of


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Yield the progress and plan of the story's steps, and their positions."""
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
        "Computing a prompt is called prefill, and computing one more word of an answer is called decode. An engine "
        "can treat both in the same way. It needs only two numbers per request: how many tokens are known, and how "
        "many of them are computed. A token is computed when its key and value are in the cache.",
        "A step computes some of the tokens that are known but not yet computed. Of a new prompt, these are many "
        "tokens. Later it is a single token: the word that the previous step sampled.",
        Shown(
            "The requests of step 2: requests 0 and 1 compute one word each, request 2 the rest of its prompt",
            lambda width: section(step_of(2), "Requests", width),
        ),
        "All tokens of a step are in one flat array, one request after the other, without padding between them. "
        "`query_start_loc` says where the tokens of each request begin. The position of a request's first token in "
        "this step is the number of tokens that it has computed before.",
        Shown(
            "The tokens of step 2",
            lambda width: section(step_of(2), "Tokens", width),
            lambda: step_picture(step_of(2), text_of),
        ),
        "Request 2 has computed 5 words before, so its positions are 5, 6 and 7. Request 0 has computed 3 words, so "
        'its only position is 3. The token there is the word "on", which step 1 sampled.',
    ),
    exercise=Exercise(
        task="Write `positions(num_computed, num_scheduled)`. Both arguments are lists with one number per request. "
        "Return one list with the positions of all tokens of the step.",
        start="def positions(num_computed, num_scheduled):\n    return [p for n in num_scheduled for p in range(n)]\n",
        hint="The positions of a request start at its own number of computed tokens. Which `range(start, end)` does "
        "request 2 have in step 2?",
        solution="def positions(num_computed, num_scheduled):\n"
        "    return [p for c, n in zip(num_computed, num_scheduled) for p in range(c, c + n)]\n",
        fault=function_fault("positions", cases),
    ),
)
