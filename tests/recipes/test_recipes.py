"""The recipes of CONTRIBUTING.md are enough: in a copy of the repository, a dummy of each is added as they say, and
every test that they name passes. ``make recipes`` shows that each edit is needed, and each recipe enough alone.

The copy has no native module, so NumPy prepares the steps, samples and computes: `native.py` builds it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from docpages import PAGES
from recipes import executor, family, policy, route, sampling_parameter, setting, tensor
from recipes.recipe import Edit, Recipe

ROOT = Path(__file__).parents[2]
MODULES = (setting, sampling_parameter, route, tensor, family, policy, executor)
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PARTS = ("src", "tests", "tools", "docs", "native", "benchmarks/results", "pyproject.toml", "CMakeLists.txt")
HARNESS = Edit(
    "tests/batch/batch_rig.py",
    lambda text: text.replace("BACKENDS = tuple(FUNCTIONS)", 'BACKENDS = ("loops", "numpy", "numpy")'),
    "",
)
"""In the copy, tests that compare the three backends of a step run NumPy's twice."""

every_recipe = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])


def section_of(recipe: Recipe) -> tuple[str, str]:
    """Return the numbered steps of a recipe, and what follows "Proof:"."""
    found = re.search(rf"^## {recipe.heading}\n(.*?)^Proof: (.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found, f"CONTRIBUTING.md has no recipe {recipe.heading!r}"
    return "\n".join(re.findall(r"^(?:\d\.|  ) .*$", found[1], re.M)), found[2]


def paths_in(text: str) -> set[str]:
    return set(re.findall(r"`((?:src|native|tests|docs|tools)/[\w./-]*)`", text))


def is_named(path: str, names: set[str]) -> bool:
    """Return whether a file, or a folder above it, is among the names."""
    return any(path == name or (name.endswith("/") and path.startswith(name)) for name in names)


@every_recipe
def test_a_recipe_names_the_files_that_are_edited_and_no_others(module):
    recipe: Recipe = module.RECIPE
    steps, proof = section_of(recipe)
    named, edited = paths_in(steps), {recipe.test, *(edit.path for edit in (*recipe.edits, *recipe.native))}
    assert [path for path in sorted(edited) if not is_named(path, named)] == []
    assert [name for name in sorted(named) if not any(is_named(path, {name}) for path in edited)] == sorted(
        recipe.not_followed
    )
    assert not edited & PAGES.keys()
    assert "`make pages`" in steps
    tests = {argument.partition("::")[0] for argument in (*recipe.proofs, *(edit.proof for edit in recipe.edits))}
    assert [path for path in sorted(tests - {recipe.test}) if not is_named(path, paths_in(proof))] == []


@every_recipe
def test_a_recipe_has_at_most_seven_lines_of_steps(module):
    steps, _ = section_of(module.RECIPE)
    assert len(steps.splitlines()) <= 7


class Copy:
    """A copy of the repository in which recipes are followed."""

    def __init__(self, folder: Path, *modules: ModuleType) -> None:
        self.folder, self.recipes = folder, [module.RECIPE for module in modules]
        for name in PARTS:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.so", "_build", ".hypothesis"))
            else:
                shutil.copy2(source, folder / name)
        for module in modules:
            shutil.copy2(module.__file__, folder / module.RECIPE.test)
            self.write(module.RECIPE.native)
        self.edits = [edit for recipe in self.recipes for edit in recipe.edits]
        self.files = {edit.path: self.read(edit.path) for edit in self.edits}

    def read(self, path: str) -> str | None:
        """Return the content of a file; None if there is none."""
        file = self.folder / path
        return file.read_text(encoding="utf-8") if file.exists() else None

    def write(self, edits: Sequence[Edit]) -> None:
        """Carry out the edits."""
        for edit in edits:
            content = self.read(edit.path)
            changed = edit.change(content or "")
            assert changed != content, f"{edit.path}: the edit changes nothing"
            (self.folder / edit.path).write_text(changed, encoding="utf-8")

    def follow(self, *, without: Edit | None = None) -> None:
        """Follow the recipes from their start, without one of the edits."""
        for path, content in self.files.items():
            if content is None:
                (self.folder / path).unlink(missing_ok=True)
            else:
                (self.folder / path).write_text(content, encoding="utf-8")
        self.write([edit for edit in self.edits if edit is not without])

    def prove(self) -> None:
        """Run the generators, and every proof, which passes."""
        tests = [test for recipe in self.recipes for test in (recipe.test, *recipe.proofs)]
        commands = [command for recipe in self.recipes for command in recipe.commands]
        for done in (self.make_pages(), *(self.python(*command) for command in commands)):
            assert done.returncode == 0, done.stderr
        done = self.pytest("tests/test_pages.py", *dict.fromkeys([*tests, *(edit.proof for edit in self.edits)]))
        assert done.returncode == 0, done.stdout + done.stderr

    def make_pages(self) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "docpages")

    def pytest(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env |= {"PYTHONPATH": os.pathsep.join(str(self.folder / name) for name in ("src", "tools"))}
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )


@pytest.mark.long
def test_the_recipes_are_enough(tmp_path):
    copy = Copy(tmp_path / "copy", *MODULES)
    copy.write([HARNESS])
    copy.follow()
    before = {name: copy.read(name) for name in PAGES}
    copy.prove()
    assert [name for name in before if copy.read(name) != before[name]], "`make pages` changes nothing"
