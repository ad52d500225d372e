"""Installs a wheel in a new environment that has no compiler and uses it there.

    python tools/wheels/check.py dist/foreword-*.whl                     make wheel and make wheels run it
    python tools/wheels/check.py --contents dist/foreword-*.whl          its size and files alone

Fails if the wheel is too large, has files that it should not have or is not for every Linux with a recent libc.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

LARGEST_MB = {"foreword": 3.3, "foreword_batch": 0.7}
"""Of `foreword`, kernels of six instruction sets are 1.4 MB, Python sources 1.6 MB, pages and vectors 0.1 MB."""
WANTED = {
    "foreword": ("foreword/cli/app.py", "foreword/models/known.json"),
    "foreword_batch": ("foreword/shadow/shadow.py", "foreword/vllm/kernels.py"),
}
WANTED_OF_BOTH = ("foreword/py.typed", "foreword/_native.pyi", "foreword/batch/__init__.py", "licenses/LICENSE",
                  "licenses/THIRD_PARTY_NOTICES.md")  # fmt: skip
STACK_PROTECTOR = b"__stack_chk_fail"
"""The function of the libc that a module for x86-64 with a stack protector calls. Into those for aarch64, zig links a
function of its own, whose name is not in the module.
"""
KINDS = (".py", ".pyi", ".so", ".typed", ".json", ".jsonl", ".html")
"""File types of the package; the wheel's own metadata has others."""

LIBRARY = """
import foreword.batch, foreword.native
assert foreword.native.available(), "no native module"
states = foreword.batch.RequestStates(max_num_reqs=1, max_model_len=8, vocab_size=9,
                                      kv_groups=[foreword.batch.KVGroup(block_size=2)])
buffers = foreword.batch.InputBuffers.for_states(states, max_num_batched_tokens=8)
states.add_request(foreword.batch.NewRequest("a", prompt_token_ids=[1, 2, 3], block_ids=[[1, 2]]))
assert foreword.batch.prepare_inputs(states, {"a": 3}, buffers).slot_mapping[0].tolist() == [2, 3, 4]
"""
QUESTION = ("What is the capital of France?", "--max-tokens", "16", "--quiet")
ANSWER = "Paris"
LAYER_ALONE = """
import importlib.metadata, foreword, foreword.shadow, foreword.vllm.kernels
assert {d.name for d in importlib.metadata.distributions()} <= {"numpy", "foreword-batch", "pip", "setuptools"}
try:
    foreword.LLM
except ImportError as error:
    assert "foreword-batch" in str(error), error
"""


def check_contents(wheel: Path) -> None:
    megabytes, name_of = wheel.stat().st_size / 1e6, wheel.name.partition("-")[0]
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        package = [name for name in names if name.startswith("foreword/")]
        modules = [archive.read(name) for name in package if name.endswith(".so")]
    faults = [
        f"no {end}" for end in (*WANTED_OF_BOTH, *WANTED[name_of]) if not any(name.endswith(end) for name in names)
    ]
    faults += [f"{name} is not expected in the package" for name in package if Path(name).suffix not in KINDS]
    if len(modules) != 1:
        faults.append("not exactly one native module")
    if "x86_64" in wheel.name and not all(STACK_PROTECTOR in module for module in modules):
        faults.append("the native module has no stack protector")
    if "manylinux" not in wheel.name:
        faults.append("not a manylinux wheel")
    if megabytes > LARGEST_MB[name_of]:
        faults.append(f"{megabytes:.2f} MB, and {LARGEST_MB[name_of]} MB are allowed")
    if faults:
        sys.exit(f"{wheel.name}: {'; '.join(faults)}")
    print(f"{wheel.name}: {megabytes:.2f} MB, {len(names)} files")


def check_installed(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder, "bin")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"PATH": str(programs), "CC": "/nonexistent", "CXX": "/nonexistent"}

        def run(*command: object) -> str:
            done = subprocess.run(
                [programs / str(command[0]), *map(str, command[1:])],
                cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, timeout=600,
            )  # fmt: skip
            if done.returncode:
                sys.exit(f"{wheel.name}: {' '.join(map(str, command))} failed")
            return done.stdout.strip()

        run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", wheel)
        run("python", "-W", "error", "-c", LIBRARY)
        if wheel.name.startswith("foreword_batch-"):
            run("python", "-W", "error", "-c", LAYER_ALONE)
            return
        print(run("foreword", "--version"))
        answer = run("foreword", "run", *QUESTION)
        if ANSWER not in answer:
            sys.exit(f"{wheel.name}: the answer is {answer!r}, without {ANSWER!r}")
        print(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--contents", action="store_true", help="do not install them")
    given = parser.parse_args()
    for wheel in given.wheels:
        check_contents(wheel.resolve())
        if not given.contents:
            check_installed(wheel.resolve())


if __name__ == "__main__":
    main()
