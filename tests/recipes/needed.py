"""A recipe is enough alone, and without any one of its edits, a test that it names fails: ``make recipes``."""

import pytest

from recipes.test_recipes import HARNESS, MODULES, Copy


@pytest.mark.parametrize(
    ("module", "edit"),
    [
        pytest.param(module, edit, id=f"{module.__name__}-{number}")
        for module in MODULES
        for number, edit in enumerate(module.RECIPE.edits)
    ],
)
def test_an_edit_of_a_recipe_is_needed(module, edit, tmp_path):
    copy = Copy(tmp_path / "copy", module)
    copy.write([HARNESS])
    copy.follow(without=edit)
    copy.make_pages()
    done = copy.pytest(edit.proof)
    assert done.returncode != 0, f"{edit.proof} passes without the edit of {edit.path}"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_recipe_is_enough_alone(module, tmp_path):
    copy = Copy(tmp_path / "copy", module)
    copy.write([HARNESS])
    copy.follow()
    stale = copy.pytest("tests/test_pages.py")
    assert stale.returncode == 1, "no page changes, so that `make pages` need not be in the recipe"
    copy.prove()
