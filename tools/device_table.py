"""Compile every kernel of `foreword.device.catalog` for each target, without a GPU: the table of docs/device.md.

    python tools/device_table.py             # write the table
    python tools/device_table.py --check     # fail if a kernel does not compile, spills, or is missing on the page
    python tools/device_table.py --models    # fail if attention spills for the shape of a model, or exceeds a GPU
    python tools/device_table.py --models "gemma-3, bfloat16" falcon     # of the lines that begin so

The counts are the compiler's: cuobjdump's of a cubin, the metadata of a code object. A register that spills is in the
stack, of which kernels use nothing else.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from foreword.device.attention import MOST_OF_FLOAT32, Tile
from foreword.device.catalog import KERNELS, Kernel, attend_kernel, constants_of, function_of

PAGE = Path(__file__).parents[1] / "docs" / "device.md"
BEGIN, END = "<!-- kernels -->\n", "<!-- end of kernels -->\n"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
MOST_SHARED = 99 << 10
"""Bytes of shared memory that a program may have on every GPU from sm_80 on: 99 KiB on L4 and 4090, more on others."""

MOST_OF_LARGE = 1 << 10, 227 << 10
"""Of the large tiles: bytes that may spill, and bytes of shared memory. On an H100 they were faster than smaller ones
that do not spill: most with 8-bit keys of 256, 800 bytes, in steps of prompts whose keys are split.
"""

MODELS = {  # heads, key heads, size of a head, of a value
    "smollm2-135m": (9, 3, 64, 64),
    "qwen-2.5-0.5b": (14, 2, 64, 64),
    "llama-3-8b": (32, 8, 128, 128),
    "qwen-2.5-7b": (28, 4, 128, 128),
    "gpt-oss": (64, 8, 64, 64),
    "phi-2": (32, 32, 80, 80),
    "phi-3": (32, 32, 96, 96),
    "gemma-3": (8, 4, 256, 256),
    "gemma-4": (16, 4, 512, 512),
    "deepseek": (16, 16, 192, 128),
    "deepseek-v2-lite": (16, 1, 576, 576),
    "deepseek-v3": (128, 1, 576, 576),
    "falcon": (71, 1, 64, 64),
    "starcoder": (48, 1, 128, 128),
    "128 heads of one key": (128, 1, 128, 128),
}
FORMATS = [(dot, fp8) for dot in ("bfloat16", "float16", "float32") for fp8 in (False, True)]
"""The types of the products' operands, and whether keys and values have 8 bits."""


_ALIGNED = ("key_stride", "value_stride")
"""Arguments that are multiples of 16 in every model, as addresses are."""


class Counts(NamedTuple):
    """Registers per thread, bytes or registers that spill, bytes of shared memory."""

    registers: int
    spilled: int
    shared: int

    def fits(self, most_spilled: int = 0, most_shared: int = MOST_SHARED) -> bool:
        return self.spilled <= most_spilled and self.shared <= most_shared


def counts(name: str, kernel: Kernel, target: GPUTarget) -> Counts:
    """Compile a kernel."""
    function = function_of(kernel, name)
    constants = constants_of(kernel.constants)
    types = iter(kernel.types)
    signature = {arg: "constexpr" if arg in constants else next(types) for arg in function.arg_names}
    at = {(function.arg_names.index(arg),): value for arg, value in constants.items()}
    names = function.arg_names
    aligned = [i for i, name in enumerate(names) if str(signature[name])[0] == "*" or name in _ALIGNED]
    attrs = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=at, attrs=attrs)
    compiled = compile_kernel(source, target=target, options={"enable_fp_fusion": False, **kernel.options})
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        found = {key: int(re.search(rf"\.{key}:\s+(\d+)", text).group(1)) for key in ("vgpr_count", "vgpr_spill_count")}
        return Counts(found["vgpr_count"], found["vgpr_spill_count"], compiled.metadata.shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK", "LOCAL"))
    return Counts(registers, stack + local, compiled.metadata.shared)


def of_models(begins: Sequence[str]) -> Iterator[tuple[str, Counts]]:
    """Compile attention for models and formats as `DeviceAttention` launches it, with and without splits: those whose
    description begins with one of ``begins``.
    """
    for name, (heads, kv_heads, dim, value_dim) in MODELS.items():
        for dot, fp8 in FORMATS:
            if dot == "float32" and max(dim, value_dim) > MOST_OF_FLOAT32:
                continue
            of = partial(Tile.of, heads // kv_heads, max(dim, value_dim), dot, fp8=fp8)
            tiles: dict[Tile, str] = {}  # with the words of the first steps that have them
            tiles.setdefault(of(), "")
            tiles.setdefault(of(large=True), ", large")
            tiles.setdefault(of(large=True, prompts=True), ", large, prompts")
            for (tile, steps), split in product(tiles.items(), (False, True)):
                for target in ("sm_90",) if steps else ("sm_80", "sm_90"):
                    words = f"{name}, {dot}{', fp8' * fp8}{steps}{', split' * split}, {target}"
                    if words.startswith(tuple(begins)):
                        kernel = attend_kernel(
                            heads, kv_heads, dim, value_dim, dot=dot, fp8=fp8, split=split, tile=tile,
                            fp8_unit=fp8 and steps != "",
                        )  # fmt: skip
                        yield words, counts("attend", kernel, TARGETS[target])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a kernel spills or is missing")
    parser.add_argument("--models", nargs="*", metavar="WORDS", help="compile attention for the shapes of models")
    given = parser.parse_args()
    if given.models is not None:
        found = dict(of_models(given.models or [""]))
        for words, number in found.items():
            print(words, *number)
        most = {words: MOST_OF_LARGE if ", large" in words else (0, MOST_SHARED) for words in found}
        if bad := [words for words, number in found.items() if not number.fits(*most[words])]:
            sys.exit(f"spills, or too many bytes of shared memory: {'; '.join(bad)}")
        return
    text = PAGE.read_text(encoding="utf-8")
    lines = [f"| kernel | {' | '.join(TARGETS)} |", f"|---|{'---|' * len(TARGETS)}"]
    for name, kernel in KERNELS.items():
        of_targets = [counts(name, kernel, target) for target in TARGETS.values()]
        if given.check and (not all(number.fits() for number in of_targets) or f"| `{name}` |" not in text):
            sys.exit(f"{name}: {of_targets} spills or is too large; or run tools/device_table.py")
        lines.append(f"| `{name}` | {' | '.join(f'{number.registers} / {number.shared}' for number in of_targets)} |")
    if not given.check:
        before, rest = text.split(BEGIN)
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
