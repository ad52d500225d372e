"""A scheduling policy: the longest prompt first."""

from pathlib import Path

from foreword.scheduler import SchedulerConfig
from recipes.recipe import Edit, Recipe, after, before

TEST = "tests/scheduler/test_dummy_policy.py"
TABLE = "src/foreword/scheduler/policies.py"
FUNCTION = '''def dummy(request: Request) -> tuple[int, ...]:
    """Return a key by prompt tokens, more first."""
    return (-len(request.prompt), request.arrival)


'''
RECIPE = Recipe(
    heading="A scheduling policy",
    test=TEST,
    edits=(
        Edit(TABLE, before("POLICIES = {\n", FUNCTION), TEST),
        Edit(TABLE, after("    for policy in (\n", '        Policy("dummy", dummy),\n'), TEST),
    ),
    proofs=("tests/scheduler/test_random_load.py",),
)


def test_the_policy_is_chosen_by_name():
    from scheduler_rig import Rig  # in the folder that the copy has this file in

    rig = Rig(policy="dummy", max_num_seqs=2)
    for name, length in (("a", 3), ("b", 9), ("c", 5)):
        rig.add(name, length)
    assert list(rig.step()) == ["b", "c"]
    assert SchedulerConfig(policy="dummy").order.name == "dummy"
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| `policy` |"))
    assert "dummy, fcfs" in row
