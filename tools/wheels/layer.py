"""Write the source tree of `foreword-batch`: the layer, and what is made of it alone, as a distribution of its own.

python layer.py SOURCE TARGET
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

PACKAGES = ("batch", "shadow", "trace", "vllm")
"""Of `foreword`; the modules that every package may import come along."""

README = """# foreword-batch

Step preparation for the forward pass of LLM engines: `foreword.batch` of Foreword, with `foreword.shadow`,
`foreword.trace` and `foreword.vllm`, and NumPy as its one dependency. It has the same modules by the same names as
`foreword`, which has the engine too: install one of the two.
"""


def write(source: Path, target: Path) -> None:
    """Copy the layer out of a source tree, and write the project file of its distribution."""
    shutil.rmtree(target, ignore_errors=True)
    package = target / "src" / "foreword"
    package.mkdir(parents=True)
    for path in sorted((source / "src" / "foreword").iterdir()):
        if path.suffix in (".py", ".pyi", ".typed") and path.name != "__main__.py":
            shutil.copy(path, package)
    for name in PACKAGES:
        shutil.copytree(
            source / "src" / "foreword" / name, package / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copytree(source / "native" / "batch", target / "native" / "batch")
    for name in ("native/module.cpp", "native/python_types.h", "CMakeLists.txt", "LICENSE", "THIRD_PARTY_NOTICES.md"):
        shutil.copy(source / name, target / name)
    (target / "README.md").write_text(README)
    whole = tomllib.loads((source / "pyproject.toml").read_text())
    (target / "pyproject.toml").write_text(tomli_w.dumps(project(whole)))


def project(whole: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of the layer's pyproject.toml, made from those of `foreword`: another name, NumPy alone, no
    extras, no command, no kernels.
    """
    about = {key: value for key, value in whole["project"].items() if key not in ("optional-dependencies", "scripts")}
    about["name"] = "foreword-batch"
    about["dependencies"] = [one for one in about["dependencies"] if one.startswith("numpy")]
    return {
        "build-system": whole["build-system"],
        "project": about,
        "tool": {"scikit-build": whole["tool"]["scikit-build"]},
    }


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
