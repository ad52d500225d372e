"""Compile every kernel of `foreword.device.catalog` for each target, without a GPU: the table of docs/device.md.

    python tools/device_table.py            # write the table
    python tools/device_table.py --check    # fail if a kernel does not compile, spills, or is missing on the page

The counts are the compiler's: cuobjdump's of a cubin, the metadata of a code object.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from foreword.device.catalog import KERNELS, constants_of, load

PAGE = Path(__file__).parents[1] / "docs" / "device.md"
BEGIN, END = "<!-- kernels -->\n", "<!-- end of kernels -->\n"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


def counts(name: str, target: GPUTarget) -> tuple[int, int, int]:
    """(registers per thread, spilled bytes or registers, bytes of shared memory) of a kernel."""
    kernel, function = KERNELS[name], load(name)
    constants = constants_of(kernel.constants)
    types = iter(kernel.types)
    signature = {arg: "constexpr" if arg in constants else next(types) for arg in function.arg_names}
    at = {(function.arg_names.index(arg),): value for arg, value in constants.items()}
    source = ASTSource(fn=function, signature=signature, constexprs=at)
    compiled = compile_kernel(source, target=target, options={"enable_fp_fusion": False})
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found = {key: int(re.search(rf"\.{key}:\s+(\d+)", text).group(1)) for key in ("vgpr_count", "vgpr_spill_count")}
        return found["vgpr_count"], found["vgpr_spill_count"], compiled.metadata.shared
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, local = (int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "LOCAL"))
    return registers, local, compiled.metadata.shared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a kernel spills or is missing")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    lines = [f"| kernel | {' | '.join(TARGETS)} |", f"|---|{'---|' * len(TARGETS)}"]
    for name in KERNELS:
        found = [counts(name, target) for target in TARGETS.values()]
        if check and (any(spilled for _, spilled, _ in found) or f"| `{name}` |" not in text):
            sys.exit(f"{name}: spills {[spilled for _, spilled, _ in found]}; or run tools/device_table.py")
        lines.append(f"| `{name}` | {' | '.join(f'{registers} / {shared}' for registers, _, shared in found)} |")
    if not check:
        before, rest = text.split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
