"""Lesson 8: a step in flight."""

from typing import NamedTuple

from foreword.batch import InputBatch, InputBuffers, advance, prepare_inputs, resolve
from foreword.insight.svg import step_picture
from foreword.insight.toy import ToyEngine
from foreword.tour.lesson import Exercise, Lesson, Shown, function_fault
from foreword.tour.story import BUDGET, section, story_engine, text_of


class Early(NamedTuple):
    """A step that was prepared while the one before ran: its ids at that time, and the arguments and result of
    `resolve`.
    """

    batch: InputBatch
    before: list[int]
    num_known: list[int]
    sampled: list[int]


def early_step(engine: ToyEngine, *, resolved: bool) -> Early:
    """Return the step after the next one, prepared while the next one runs. resolved: whether the samples of the next
    step are already known.
    """
    engine.prepare()
    first, samples = engine.plan, engine.samples()
    states = engine.states
    advance(states, engine.batch)
    buffers = InputBuffers.for_states(states, max_num_batched_tokens=BUDGET)
    plan = engine.scheduler.schedule(in_flight=first)
    early = prepare_inputs(states, (plan.rows, plan.num_scheduled), buffers)
    before, num_known = early.input_ids.tolist(), states.num_tokens[early.idx_mapping].tolist()
    of_row = dict(zip(engine.batch.idx_mapping.tolist(), samples.tolist(), strict=True))
    if resolved:
        engine.commit(samples)
        resolve(early)
    return Early(early, before, num_known, [of_row.get(row, -1) for row in plan.rows.tolist()])


def cases() -> list[tuple[tuple[object, ...], object]]:
    """Yield ids of steps that were prepared early, and the ids after `resolve`."""
    found: list[tuple[tuple[object, ...], object]] = []
    for done in range(6):
        engine = story_engine()
        for _ in range(done):
            engine.prepare()
            engine.commit()
        early = early_step(engine, resolved=True)
        batch = early.batch
        given = early.before, batch.req_indices.tolist(), batch.positions.tolist(), early.num_known, early.sampled
        found.append((given, batch.input_ids.tolist()))
    return found


LESSON = Lesson(
    name="a-step-in-flight",
    title="A step in flight",
    parts=(
        "If an engine prepares each step after the one before has ended, the GPU waits while the CPU prepares, and the "
        "CPU waits while the GPU computes. So an engine prepares step 2 while step 1 still runs (is in flight).",
        "Which results of step 1 does step 2 need? Each request gets exactly one more word, so the counts, positions, "
        "blocks and slots are known before. Only the sampled word itself is missing. Its id is 0 for now, and the "
        'table shows its text as "?".',
        Shown(
            "Step 2, prepared while step 1 runs: two words are not known",
            lambda width: section(early_step(story_engine(), resolved=False).batch, "Tokens", width),
            lambda: step_picture(early_step(story_engine(), resolved=False).batch, text_of),
        ),
        "`advance(states, batch)` counts the tokens of step 1 as computed, so that step 2 can be prepared. When the "
        "samples of step 1 arrive, they are committed, and `resolve(batch)` writes them into `input_ids` of step 2. "
        "It also removes the work for requests that have ended and for rejected drafts. Step 2 is then the same as if "
        "it had been prepared after step 1:",
        Shown(
            "Step 2 after the samples of step 1",
            lambda width: section(early_step(story_engine(), resolved=True).batch, "Tokens", width),
            lambda: step_picture(early_step(story_engine(), resolved=True).batch, text_of),
        ),
        "This is the end of the tour. `foreword explain` prints the tables of any step, `foreword run … --explain` "
        "those of a real model, and docs/tensors.md defines every tensor.",
    ),
    exercise=Exercise(
        task="Write `fill(input_ids, req_indices, positions, num_known, sampled)`, which completes a step that was "
        "prepared early. The first three lists have one entry per token: its id, the index of its request, and its "
        "position. The last two have one entry per request: the number of tokens that were known, and the token that "
        "was sampled since. Return the list of ids with the sampled tokens in their places.",
        start="def fill(input_ids, req_indices, positions, num_known, sampled):\n    return input_ids\n",
        hint="If n tokens are known, they have the positions 0 to n - 1. The sampled token has position n.",
        solution="def fill(input_ids, req_indices, positions, num_known, sampled):\n"
        "    return [\n"
        "        sampled[b] if p == num_known[b] else token\n"
        "        for token, b, p in zip(input_ids, req_indices, positions)\n"
        "    ]\n",
        fault=function_fault("fill", cases),
    ),
)
