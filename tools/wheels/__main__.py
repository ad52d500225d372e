"""Build the files of a release in dist/, and use each in an environment of its own.

    python tools/wheels                 everything: source archive, wheels, layer, list of parts, hashes (make wheels)
    python tools/wheels --here          the wheel of this Python and machine alone (make wheel)
    python tools/wheels --layer         that of the layer alone
    python tools/wheels --twice         everything, two times in two folders: ends with 1 if a byte differs

PYTHONS names more interpreters, separated by spaces (default: python3.12, python3.13 and python3.14, where they are).
One of them builds the wheel for Python 3.12 and later; each of them uses it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHECK = HERE / "check.py"
BUILD = ROOT / "build" / "wheels"
DIST = ROOT / "dist"
PYTHONS = os.environ.get("PYTHONS", "python3.12 python3.13 python3.14")
LOCKED = ROOT / "tools" / "locked"
TOOLS, TOOLS_OF_RELEASE = LOCKED / "wheel.txt", LOCKED / "release.txt"
"""Versions and hashes of what builds a wheel of this machine, and a release."""
OLDEST_LIBC = (2, 34)
"""Of the machines that docs/platforms.md promises wheels of a release for."""
STABLE = (3, 12)  # the first Python whose stable interface is enough for the native module


@dataclass(frozen=True)
class Interpreter:
    """A Python that builds or uses wheels, in an environment with the tools of the build."""

    version: tuple[int, int]
    python: Path

    @property
    def is_stable(self) -> bool:
        return self.version >= STABLE

    def run(self, *arguments: object, cwd: Path = ROOT) -> None:
        """Run a module or file of this environment. Its errors are shown; a failure ends the build."""
        command = [str(self.python), *map(str, arguments)]
        programs = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        environment = os.environ | {"PATH": programs, "SOURCE_DATE_EPOCH": date_of_sources()}
        if subprocess.run(command, cwd=cwd, env=environment, check=False).returncode:
            sys.exit(f"failed: {' '.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one = parser.add_mutually_exclusive_group()
    for name in ("here", "layer", "twice"):
        one.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    DIST.mkdir(exist_ok=True)
    is_release = not (given.here or given.layer)
    here = interpreter(sys.executable, TOOLS_OF_RELEASE if is_release else TOOLS)
    assert here is not None
    if not is_release:
        wheel = build(here, layer_source(ROOT, here) if given.layer else ROOT, DIST)
        use(here, wheel)
        return
    first = release(here, DIST)
    if given.twice:
        again = release(here, BUILD / "again", used=False)
        different = [name for name in first if first[name] != again.get(name)]
        sys.exit(f"differ: {', '.join(different)}" if different else None)


def release(here: Interpreter, folder: Path, *, used: bool = True) -> dict[str, str]:
    """Build everything in a folder, which is emptied first; return the hashes by name. used: and try each wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    compile_everything_again()
    others = [found for name in PYTHONS.split() if (found := interpreter(name, TOOLS_OF_RELEASE)) is not None]
    stable = next((one for one in (here, *others) if one.is_stable), None)
    if stable is None:
        print(f"No Python of {PYTHONS} is here: there is no wheel for Python 3.12 and later.", flush=True)
    source = unpacked(here, folder)
    builders = [one for one in (None if here.is_stable else here, stable) if one is not None]
    for project in (source, layer_source(source, here)):
        for builder in builders:
            wheel = build(builder, project, folder)
            check_libc(wheel)
            users = [one for one in (here, *others) if one.is_stable] if builder.is_stable else [builder]
            for user in users if used else ():
                use(user, wheel)
            foreign = arm(builder, project, wheel, folder)
            if used:
                builder.run(HERE / "emulated.py", foreign, BUILD / "emulated")
    here.run(HERE / "parts.py", folder)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}
    (folder / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in hashes.items()))
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path.name}")
    return hashes


def compile_everything_again() -> None:
    """Remove the objects that zig keeps, and turn ccache off: they would hide that a compiler writes other bytes."""
    cache = BUILD / "zig-cache"
    shutil.rmtree(cache, ignore_errors=True)
    os.environ.update(CCACHE_DISABLE="1", ZIG_GLOBAL_CACHE_DIR=str(cache))


def interpreter(name: str, tools: Path) -> Interpreter | None:
    """Return the interpreter of this name with an environment that has these tools; None if there is none."""
    ask = "import sys; print(*sys.version_info[:2])"
    try:
        told = subprocess.run([name, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    version = int(told[0]), int(told[1])
    python = BUILD / f"env-{version[0]}.{version[1]}" / "bin" / "python"
    if not python.exists():
        subprocess.run([name, "-m", "venv", python.parents[1]], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--require-hashes", "-r", tools], check=True)
    return Interpreter(version, python)


def date_of_sources() -> str:
    """Return the time of the last commit in seconds, which files of archives have, or that of pyproject.toml."""
    git = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip() or str(int((ROOT / "pyproject.toml").stat().st_mtime))


def unpacked(here: Interpreter, folder: Path) -> Path:
    """Build the source archive, and return the folder of its files: the wheels are built from what it has."""
    here.run("-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    archive = next(folder.glob("*.tar.gz"))
    target = BUILD / "source"
    shutil.rmtree(target, ignore_errors=True)
    with tarfile.open(archive) as files:
        files.extractall(target, filter="data")
    return next(target.iterdir())


def layer_source(source: Path, here: Interpreter) -> Path:
    """Return the source tree of the layer, written out of another."""
    target = BUILD / "layer"
    here.run(HERE / "layer.py", source, target)
    return target


def build(builder: Interpreter, project: Path, folder: Path) -> Path:
    """Build a wheel of a source tree, in a folder, for this processor and a libc as old as its symbols allow."""
    plain = BUILD / "plain"
    shutil.rmtree(plain, ignore_errors=True)
    settings = ["--config-settings", "wheel.py-api=cp312"] if builder.is_stable else []
    builder.run("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-build-isolation", "--no-deps",
                *settings, "--wheel-dir", plain, project)  # fmt: skip
    repaired = BUILD / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    builder.run("-m", "auditwheel", "repair", "-z", "9", "--wheel-dir", repaired, next(plain.glob("*.whl")))
    wheel = next(repaired.glob("*.whl"))
    return Path(shutil.move(wheel, folder / wheel.name))


def check_libc(wheel: Path) -> None:
    """End the program if the wheel needs a newer libc than promised: a newer compiler may use newer symbols."""
    needed = min((int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name))
    if needed > OLDEST_LIBC:
        sys.exit(f"{wheel.name}: needs glibc {needed[0]}.{needed[1]}; {OLDEST_LIBC[0]}.{OLDEST_LIBC[1]} is promised")


def use(user: Interpreter, wheel: Path) -> None:
    """Install the wheel in a new environment without a compiler, and run what it has."""
    user.run(CHECK, wheel)


def arm(builder: Interpreter, project: Path, wheel: Path, folder: Path) -> Path:
    """Build the wheel for Linux on aarch64 from that of this machine: its native module is another. Return it."""
    tag = "manylinux_2_28_aarch64"
    builder.run(HERE / "cross.py", project, wheel, BUILD / "arm", tag, folder)
    name = re.sub(r"-[^-]+\.whl$", f"-{tag}.whl", wheel.name)
    builder.run(CHECK, "--contents", folder / name)
    return folder / name


if __name__ == "__main__":
    main()
