"""The lessons of `foreword tour`: what they show is of real steps, and their exercises take right answers alone."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreword.batch import validate
from foreword.cli.app import app
from foreword.errors import PlanError
from foreword.insight.svg import blocks_picture, step_picture
from foreword.tour.answer import check
from foreword.tour.lesson import Code
from foreword.tour.lessons import LESSONS, chunks, in_flight, preemption, prefix, speculation
from foreword.tour.pages import as_text, file_name, pictures
from foreword.tour.story import BLOCK_SIZE, NUM_BLOCKS, PROMPT_LENS, STORIES, step_of, story_engine, text_of

NUMBERS = range(1, len(LESSONS) + 1)
SVG = "{http://www.w3.org/2000/svg}"


def tour(*arguments: str, columns: int = 80) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["tour", *arguments], env={"COLUMNS": str(columns)})
    return result.exit_code, result.output


def answer(folder: Path, text: str) -> str:
    file = folder / "answer.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


# -- exercises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_the_solution_is_right_and_the_beginning_is_not(number, tmp_path):
    exercise = LESSONS[number - 1].exercise
    taken = tour(str(number), "--check", answer(tmp_path, exercise.solution), columns=500)
    assert taken == (0, f"{tmp_path}/answer.py: right\n")
    code, text = tour(str(number), "--check", answer(tmp_path, exercise.start))
    assert code == 1
    assert "right\n" not in text


WRONG = {
    1: "def blocks_needed(num_tokens, block_size): return num_tokens // block_size + 1",
    2: "def positions(c, n): return [p for a, b in zip(c, n) for p in range(a + 1, a + b + 1)]",
    3: "def slot_mapping(table, p, b, s): return [table[j][i // s] * s for i, j in zip(p, b)]",
    4: "TOKEN, SLOT = 3, 14",
    5: "def reused(a, b, s):\n n = 0\n while n < min(len(a), len(b)) and a[n] == b[n]: n += 1\n return n // s * s",
    6: "NUM_BLOCKS = 19",
    7: "def accepted(drafts, drawn): return drawn",
    8: "def fill(ids, b, p, known, sampled): return [t or sampled[i] for t, i in zip(ids, b)][:1]",
}


@pytest.mark.parametrize("number", WRONG)
def test_an_answer_that_is_nearly_right_is_not_taken(number, tmp_path):
    assert tour(str(number), "--check", answer(tmp_path, WRONG[number]))[0] == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("x = 1", "does not define slot_mapping"),
        ("slot_mapping = 3", "slot_mapping is not a function"),
        ("def slot_mapping(*given):\n    return 1 / 0", "it fails in line 2: ZeroDivisionError"),
        ("def slot_mapping(*given):\n    return {}[1]", "it fails in line 2: KeyError"),
        ("import sys\nsys.exit(0)", "it fails in line 2: SystemExit"),
        ("def slot_mapping(:", "it fails in line 1: SyntaxError"),
        ("def slot_mapping(*given):\n    return [0]", "returned [0]; the right answer is [2, 3, 4, 6, 7, 8, 9"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(text, reason, tmp_path):
    fault = check(LESSONS[2].exercise, Path(answer(tmp_path, text)))
    assert reason in fault


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        check(LESSONS[0].exercise, tmp_path / "missing.py")


def test_the_planted_fault_is_one_that_the_checks_of_the_library_find():
    validate(step_of(chunks.STEP, story_engine(budget=4)))
    with pytest.raises(PlanError, match="slot_mapping"):
        validate(chunks.faulty_step())


def test_the_pool_of_the_solution_is_the_smallest_without_preemption():
    assert [preemption.num_preemptions(n) > 0 for n in range(9, 20)] == [True] * 5 + [False] * 6


# -- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 80, 120])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_fits_the_terminal(number, columns):
    code, text = tour(str(number), columns=columns)
    assert code == 0
    given = {line for part in LESSONS[number - 1].parts if isinstance(part, Code) for line in part.source.splitlines()}
    given |= set(LESSONS[number - 1].exercise.start.splitlines())
    prose = [line for line in text.splitlines() if line[4:] not in given]
    assert max(map(len, prose)) <= max(columns, 72)  # tables have headings of 70 characters
    assert text.startswith(f"{number}. {LESSONS[number - 1].title}\n")
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_a_lesson_is_short():
    for number in NUMBERS:
        assert len(as_text(number, 80).splitlines()) < 80


@pytest.mark.parametrize("number", NUMBERS)
def test_the_programs_of_a_lesson_run(number, capsys):
    for part in LESSONS[number - 1].parts:
        if isinstance(part, Code):
            exec(compile(part.source, "lesson", "exec"), {})
            assert capsys.readouterr().out


def test_the_first_lesson_is_shown_without_a_number_and_the_list_has_all():
    assert tour() == tour("1")
    lines = tour("list")[1].splitlines()
    assert lines == [f"{n}  {lesson.title}" for n, lesson in enumerate(LESSONS, 1)]
    assert len(lines) == 8


@pytest.mark.parametrize("number", NUMBERS)
def test_a_hint_and_a_solution_are_shown_alone(number):
    exercise = LESSONS[number - 1].exercise
    assert tour(str(number), "--hint", columns=400) == (0, f"{exercise.hint}\n")
    assert tour(str(number), "--solution") == (0, exercise.solution)


@pytest.mark.parametrize("word", ["0", "9", "-1", "x", "1.5", "", "٣", "9" * 5000])
def test_a_lesson_that_does_not_exist_is_refused(word):
    code, text = tour("--", word)
    assert code == 2
    assert "give 1 to 8, or list" in text


def test_options_of_one_lesson_are_refused_for_the_list():
    assert tour("list", "--hint")[0] == 2


def test_equal_beginnings_of_stories_are_where_the_lessons_say():
    assert all(len(story) == 12 for story in STORIES)
    assert STORIES[3][:7] == STORIES[2][:7]
    assert STORIES[3][7] != STORIES[2][7]
    assert sum(PROMPT_LENS[:3]) == 13
    batch = prefix.shared_step()
    assert batch.block_table[0][3, :4].tolist() == [*batch.block_table[0][2, :3].tolist(), 11]
    assert batch.num_computed_tokens.tolist() == [4, 3, 8, 6]


def test_a_step_in_flight_lacks_its_words_alone():
    early = in_flight.early_step(story_engine(), resolved=False).batch
    in_turn = step_of(2)
    assert early.input_ids.tolist() == [0, 0, *in_turn.input_ids[2:].tolist()]
    for name in ("positions", "seq_lens", "query_start_loc", "num_computed_tokens"):
        assert getattr(early, name).tolist() == getattr(in_turn, name).tolist()
    assert early.slot_mapping[0].tolist() == in_turn.slot_mapping[0].tolist()


def test_the_folder_of_the_pages_has_nothing_else():
    folder = Path(__file__).parents[2] / "docs" / "tour"
    expected = {file_name(n) for n in NUMBERS} | {name for n in NUMBERS for name in pictures(n)}
    assert {path.name for path in folder.iterdir()} == expected | {"README.md"}


# -- pictures --------------------------------------------------------------------------------------------------------


def boxes(svg: str) -> list[tuple[float, float, str, str]]:
    """(x, y, class, text) of each box of a picture."""
    elements = list(ElementTree.fromstring(svg))
    found = []
    for rect, text in pairwise(elements):
        if rect.tag == f"{SVG}rect":
            found.append((float(rect.get("x")), float(rect.get("y")), rect.get("class"), text.text or ""))
    return found


@pytest.mark.parametrize("number", range(1, 11))
def test_the_picture_of_a_step_has_its_tokens_positions_and_slots(number):
    batch = step_of(number)
    rows: dict[float, list[str]] = {}
    for _x, y, _kind, text in sorted(boxes(step_picture(batch, text_of))):
        rows.setdefault(y, []).append(text)
    requests, words, positions, slots = (rows[y] for y in sorted(rows))
    assert requests == [batch.req_ids[b] for b in batch.req_indices]
    assert positions == list(map(str, batch.positions))
    assert slots == list(map(str, batch.slot_mapping[0]))
    assert words == [STORIES[int(r)][int(p)] for r, p in zip(requests, positions, strict=True)]


def test_drafts_and_unknown_words_have_a_dashed_border():
    drafts = [text for _, _, kind, text in boxes(step_picture(speculation.drafted_step(), text_of)) if "d" in kind]
    assert drafts == list(speculation.DRAFTS)
    early = in_flight.early_step(story_engine(), resolved=False).batch
    assert [text for _, _, kind, text in boxes(step_picture(early, text_of)) if "d" in kind] == ["?", "?"]


@pytest.mark.parametrize("number", range(1, 11))
def test_the_picture_of_the_blocks_has_each_computed_word_in_its_slot(number):
    engine = story_engine(num_blocks=NUM_BLOCKS)
    batch = step_of(number, engine)
    expected = {}
    for req_id in batch.req_ids:
        row = engine.states.row_of(req_id)
        end = batch.seq_lens[batch.req_ids.index(req_id)]
        for p in range(end):
            block = int(engine.states.block_tables[0].table[row, p // BLOCK_SIZE])
            expected[block * BLOCK_SIZE + p % BLOCK_SIZE] = STORIES[int(req_id)][p]
    found = boxes(blocks_picture(batch, text_of, NUM_BLOCKS))
    num_entries = int(batch.num_blocks[0].sum())
    pool = found[num_entries:]
    assert [text for _, _, _, text in pool] == [
        expected.get(slot, "") for slot in range(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
    ]
    new = [slot for slot, (_, _, kind, _) in enumerate(pool, BLOCK_SIZE) if "n" in kind]
    assert new == sorted(batch.slot_mapping[0].tolist())


@pytest.mark.parametrize("number", NUMBERS)
def test_a_picture_is_a_small_file_that_asks_for_nothing_else(number):
    for shown in pictures(number).values():
        svg = shown.picture()
        assert len(svg) < 10_000
        assert "href" not in svg
        assert "url(" not in svg
        ElementTree.fromstring(svg)
