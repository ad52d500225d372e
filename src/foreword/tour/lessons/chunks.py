"""Lesson 4: chunked prefill, and a planted fault."""

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
    """Return what is wrong with an answer."""
    token, slot = names["TOKEN"], names["SLOT"]
    right, faulty = step_of(STEP, story_engine(budget=4)), faulty_step()
    tokens = [t for t in range(right.num_tokens) if right.slot_mapping[0][t] != faulty.slot_mapping[0][t]]
    if [token] != tokens:
        return f"token {token} of the table goes where it should"
    expected = int(right.slot_mapping[0][tokens[0]])
    return "" if slot == expected else f"TOKEN is right, but its slot is not {slot}"


LESSON = Lesson(
    name="chunked-prefill",
    title="Chunked prefill",
    parts=(
        "A step has a budget of tokens, 10 in this tour and often thousands: longer steps make everyone wait. Running "
        "requests go first, then others in the order of their arrival; the one that does not fit gets what is left.",
        "In step 1 requests 0 and 1 take 3 and 2 tokens, so that 5 of the 8 words of request 2 fit. This is a chunk.",
        Shown(
            "Step 1: a chunk of request 2 fills the budget",
            lambda width: section(step_of(1), "Requests", width),
            lambda: step_picture(step_of(1), text_of),
        ),
        "A chunk that does not end the prompt samples nothing: what comes after the fifth word is known. The model's "
        "output for the last token of the chunk, a row of logits, is computed and discarded.",
        "The rest follows in step 2, beside the first decodes of the others. Nothing else is special about a chunk: "
        "its positions go on where the last chunk ended, and its slots follow from them.",
        Shown(
            f"For the exercise: step {STEP} with a budget of 4, and one wrong slot",
            lambda width: section(faulty_step(), "Tokens", width),
        ),
        "A fault like this gives no error. The model reads another word's key and value, and its answer is a little "
        "wrong from then on. So Foreword has a specification of every tensor, and checks steps against it: "
        '`prepare_inputs(…, check="full")`, or `foreword.batch.validate(batch)`.',
    ),
    exercise=Exercise(
        task="Find a fault. In the last table one token goes into a wrong slot, over the key and value of another. Set "
        "`TOKEN` to its number t and `SLOT` to the slot where it should go.",
        start="TOKEN = 0\nSLOT = 0\n",
        hint="Compute n·2+o of each column, or look for a slot that is there twice.",
        solution="TOKEN = 3  # slot 14 is there twice, and this one is at offset 1\nSLOT = 7 * 2 + 1\n",
        fault=fault,
    ),
)
