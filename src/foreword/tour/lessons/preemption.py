"""Lesson 6: preemption."""

from foreword.batch import InputBatch
from foreword.insight.changes import StepChanges
from foreword.insight.svg import blocks_picture
from foreword.tour.lesson import Code, Exercise, Lesson, Shown
from foreword.tour.story import section, story_engine, text_of

SHORT = 9
"""Blocks of the pool in the lesson, block 0 included."""


def num_preemptions(num_blocks: int) -> int:
    """Return the number of preemptions in the story with a pool of this many blocks."""
    engine, count = story_engine(num_blocks=num_blocks), 0
    while engine.prepare() is not None:
        count += len(engine.plan.preempted)
        engine.commit()
    return count


def preempted_step() -> tuple[InputBatch, StepChanges]:
    """Return the first step of the story in which a request is preempted, and the changes up to the one before."""
    engine, changes = story_engine(num_blocks=SHORT), StepChanges(text_of)
    while (batch := engine.prepare()) is not None and not engine.plan.preempted:
        changes.since_last(batch)
        engine.commit()
    assert batch is not None
    return batch, changes


def _table(width: int | None) -> str:
    batch, changes = preempted_step()
    return section(batch, "Block table", width) + "\n\n" + changes.since_last(batch, width)


def fault(names: dict[str, object]) -> str:
    """Describe what is wrong with an answer."""
    given = names["NUM_BLOCKS"]
    if not isinstance(given, int):
        return "NUM_BLOCKS is not a whole number"
    least = next(n for n in range(SHORT, 100) if not num_preemptions(n))
    if given < least:
        return f"with {given} blocks a request is preempted, or does not fit"
    return "" if given == least else f"{given} blocks are enough, and fewer are too"


LESSON = Lesson(
    name="preemption",
    title="Preemption",
    parts=(
        "Running requests need more and more blocks, so the pool can run out of blocks. Then the scheduler preempts a "
        "request: the request that arrived last loses its row and all of its blocks, and waits again. The tokens that "
        "it has sampled are kept.",
        f"The same three requests are shown here with a pool of {SHORT} blocks. {SHORT - 1} of them can be used, since "
        "block 0 is reserved.",
        Shown("The first step without request 2", _table, lambda: blocks_picture(preempted_step()[0], text_of, SHORT)),
        "When enough blocks are free again, the request is admitted with a longer prompt: the words of its prompt and "
        "the words that it had sampled. It computes all of them again in chunks, and then continues. The answer is the "
        "same; only time is lost.",
        Code(
            "from foreword.tour.story import story_engine\n\n"
            f"engine = story_engine(num_blocks={SHORT})\n"
            "while engine.prepare() is not None:\n"
            "    for request in engine.plan.preempted:\n"
            "        print('step', engine.batch.step, 'runs without request', request.request_id)\n"
            "    engine.commit()\n"
        ),
    ),
    exercise=Exercise(
        task="Set `NUM_BLOCKS` to the smallest pool, block 0 included, in which none of the requests is preempted.",
        start=f"NUM_BLOCKS = {SHORT}\n",
        hint="18 blocks are enough for three requests of 12 words, but request 2 ends before the others are that long. "
        "Run the program of the lesson with other numbers.",
        solution="NUM_BLOCKS = 14\n",
        fault=fault,
    ),
)
