"""Checkouts of other commits with their native module, kept in a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_DIRECTORY = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "foreword" / "regress"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def default_base() -> str:
    """Return the last tag, or the parent of HEAD if there is none."""
    found = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else "HEAD~1"


def build(folder: Path) -> Path:
    """Build the native module of a checkout, with ccache if it is installed. Return the folder of its sources."""
    env = dict(os.environ)
    if shutil.which("ccache"):
        env.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
        env |= {"CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1"}  # what commits share is compiled once
    subprocess.run(["make", "native", f"PYTHON={sys.executable}"], cwd=folder, env=env, check=True, stdout=sys.stderr)
    return folder / "src"


def checkout(commit: str, directory: Path) -> Path:
    """Return the folder of the sources of a commit, which is built once."""
    folder = directory / git("rev-parse", "--verify", f"{commit}^{{commit}}")
    if not list((folder / "src" / "foreword").glob("_native*.so")):
        folder.mkdir(parents=True, exist_ok=True)
        with subprocess.Popen(["git", "archive", folder.name], cwd=ROOT, stdout=subprocess.PIPE) as archive:
            subprocess.run(["tar", "-x", "-C", str(folder)], stdin=archive.stdout, check=True)
        build(folder)
    return folder / "src"
