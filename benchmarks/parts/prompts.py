"""Prompts whose answers repeat parts of the prompt to different degrees, for benchmarks of speculation."""

from __future__ import annotations

_CODE = """def read_measurements(path):
    values = []
    with open(path) as source:
        for number, line in enumerate(source):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            try:
                values.append(float(text))
            except ValueError:
                print("line", number, "is not a number:", text)
    return values


def moving_average(values, width):
    result = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        result.append(total / min(index + 1, width))
    return result
"""

_STATEMENTS = """create table harbour (id integer primary key, name text, depth real, country text);
insert into harbour values (1, 'Easthaven', 14.5, 'Norland');
insert into harbour values (2, 'Millquay', 9.0, 'Norland');
insert into harbour values (3, 'Port Ardel', 17.2, 'Sudmark');
insert into harbour values (4, 'Grayness', 11.8, 'Sudmark');
select name, depth from harbour where depth > 10 order by depth;"""

_LIGHTHOUSE = """The lighthouse at Skerry Point was built in three summers. In the first, the workers cut a stair
into the rock and laid the ground floor. In the second, they raised the tower to forty metres
and set the iron frame of the lantern. In the third, they fitted the lens, which had travelled
by ship for nine weeks, and lit the lamp on the last day of August. The first keeper, Maren
Olsholt, stayed for thirty-one years. She wrote down the weather every morning, and her
notebooks are still used to study how the storms of that coast have changed."""

_MEETING = """The committee met on Tuesday to discuss the new library. The architect showed two plans. The
first plan keeps the old reading room and adds a wing for children. The second plan replaces the
reading room with a larger hall. The treasurer said that the first plan costs four million and
the second plan costs six million. Most members preferred the first plan because it keeps the
old reading room. The committee will decide in May, after the public hearing."""

PROMPTS: dict[str, tuple[str, ...]] = {
    "edit": (
        f"Rename the variable `values` to `numbers` everywhere in this code and print all of the code:\n\n{_CODE}",
        f"Print these statements again, all of them, with the country 'Sudmark' changed to 'Sunmark':\n\n{_STATEMENTS}",
    ),
    "quote": (
        f"Repeat the following text word for word:\n\n{_LIGHTHOUSE}",
        f"Quote the following text exactly, in quotation marks:\n\n{_MEETING}",
    ),
    "summary": (
        f"Summarise this text in three sentences, with its own words where you can:\n\n{_LIGHTHOUSE}",
        f"List the main facts of this text:\n\n{_MEETING}",
    ),
    "chat": (
        "What should I think about before I adopt a dog?",
        "Tell me a short story about a clockmaker who loses track of time.",
    ),
}
"""Kind → user messages, each for the model's chat template."""
