"""The recipes whose edits reach native code, with a native module that is built from them: ``make recipes``."""

import subprocess
import sys

import pytest

from recipes.test_recipes import MODULES, Copy

UNITY = "-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=12"


@pytest.mark.parametrize("module", [one for one in MODULES if one.RECIPE.native], ids=lambda one: one.__name__)
def test_a_recipe_is_enough_with_native_code(module, tmp_path):
    copy = Copy(tmp_path / "copy", module)
    copy.follow()
    options = "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}", *UNITY
    for command in (("cmake", "-S", ".", "-B", "build", *options), ("cmake", "--build", "build")):
        subprocess.run(command, cwd=copy.folder, check=True)
    (built,) = (copy.folder / "build").glob("_native*.so")
    built.rename(copy.folder / "src" / "foreword" / built.name)
    assert copy.python("-c", "from foreword.native import native; native.parameter_names()").returncode == 0
    copy.prove()
