"""Lesson 4: chunked prefill, with a fault that the reader has to find."""

from foreword.batch import InputBatch
from foreword.insight.svg import step_picture
from foreword.tour.lesson import Exercise, Lesson, Shown
from foreword.tour.story import section, step_of, story_engine, text_of

STEP = 3


def faulty_step() -> InputBatch:
    """Return step 3 of the story with 4 tokens per step, and one wrong slot."""
    batch = step_of(STEP, story_engine(budget=4))
    wrong = batch.num_tokens - 1  # the last token of request 2's chunk, in the slot of the one before
    slots = batch.buffers.arrays["slot_mapping"][0]
    slots[wrong] = slots[wrong - 1]
    return batch


def fault(names: dict[str, object]) -> str:
    """Describe what is wrong with an answer."""
    token, slot = names["TOKEN"], names["SLOT"]
    right, faulty = step_of(STEP, story_engine(budget=4)), faulty_step()
    tokens = [t for t in range(right.num_tokens) if right.slot_mapping[0][t] != faulty.slot_mapping[0][t]]
    if [token] != tokens:
        return f"token {token} of the table has the correct slot"
    expected = int(right.slot_mapping[0][tokens[0]])
    return "" if slot == expected else f"TOKEN is right, but its slot is not {slot}"


LESSON = Lesson(
    name="chunked-prefill",
    title="Chunked prefill",
    parts=(
        "All requests of a step wait until the step ends, so a step must not be too long. Therefore it has a token "
        "budget: 10 tokens in this tour, often thousands in real engines. The budget is first given to requests that "
        "run already, then to waiting requests in the order of their arrival. A request that does not fit completely "
        "gets the tokens that are left.",
        "In step 1, requests 0 and 1 take 3 and 2 tokens. 5 tokens are left, so only 5 of the 8 words of request 2 are "
        "computed. Such a part of a prompt is called a chunk.",
        Shown(
            "Step 1: a chunk of request 2 fills the budget",
            lambda width: section(step_of(1), "Requests", width),
            lambda: step_picture(step_of(1), text_of),
        ),
        "If a chunk does not reach the end of the prompt, no token is sampled after it, since the next word of the "
        "prompt is known. The row of logits for the last token of the chunk is computed and discarded.",
        "Step 2 computes the rest of the prompt, together with the first decodes of the other requests. Nothing else "
        "is special about a chunk: its positions continue where the last chunk ended, and its slots follow from its "
        "positions.",
        Shown(
            f"For the exercise: step {STEP} with a budget of 4, and one wrong slot",
            lambda width: section(faulty_step(), "Tokens", width),
        ),
        "A fault like this raises no error. The model reads the key and value of another word, and all later words may "
        "be wrong. This is why Foreword has a specification of every tensor. "
        '`prepare_inputs(…, check="full")` and `foreword.batch.validate(batch)` compare a step with it.',
    ),
    exercise=Exercise(
        task="Find the fault. In the last table one token has a wrong slot, so it overwrites the key and value of "
        "another token. Set `TOKEN` to its index t, and `SLOT` to the correct slot.",
        start="TOKEN = 0\nSLOT = 0\n",
        hint="Compute n·2+o of each column, or look for a slot that appears twice.",
        solution="TOKEN = 3  # slot 14 appears twice, and this token has offset 1\nSLOT = 7 * 2 + 1\n",
        fault=fault,
    ),
)
