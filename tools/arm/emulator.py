"""Run a static, single-threaded aarch64 Linux program on the Unicorn emulator, with the system calls it needs."""

from __future__ import annotations

import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from elftools.elf.elffile import ELFFile
from unicorn import UC_ARCH_ARM64, UC_HOOK_INTR, UC_MODE_ARM, Uc, UcError
from unicorn.arm64_const import (
    UC_ARM64_REG_CPACR_EL1,
    UC_ARM64_REG_SP,
    UC_ARM64_REG_X0,
    UC_ARM64_REG_X8,
    UC_CPU_ARM64_MAX,
)

PAGE = 4096
STACK, STACK_BYTES = 0x7F00_0000_0000, 8 << 20
HEAP, MAPPINGS = 0x1000_0000, 0x200_0000_0000
AT_PHDR, AT_PHENT, AT_PHNUM, AT_PAGESZ, AT_ENTRY, AT_HWCAP, AT_RANDOM = 3, 4, 5, 6, 9, 16, 25
FP, ASIMD, ASIMDDP = 1 << 0, 1 << 1, 1 << 20  # bits of HWCAP; ASIMDDP: dot product
NOT_IMPLEMENTED, NO_TERMINAL = 2**64 - 38, 2**64 - 25  # −ENOSYS, −ENOTTY


def run(program: Path) -> int:
    """Run the program and return its exit status. Its output goes to standard output."""
    return _Machine(program).run()


class _Machine:
    def __init__(self, program: Path) -> None:
        self.cpu = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self.cpu.ctl_set_cpu_model(UC_CPU_ARM64_MAX)
        self.cpu.reg_write(UC_ARM64_REG_CPACR_EL1, 3 << 20)  # enables floating point
        self.heap_end, self.next_mapping, self.status = HEAP, MAPPINGS, -1
        with program.open("rb") as file:
            self._load(ELFFile(file))
        self.cpu.hook_add(UC_HOOK_INTR, self._system_call)

    def run(self) -> int:
        self.cpu.emu_start(self.entry, 0)
        return self.status

    def _load(self, elf: ELFFile) -> None:
        base = 0x40_0000 if elf["e_type"] == "ET_DYN" else 0
        segments = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        low = min(s["p_vaddr"] for s in segments) // PAGE * PAGE
        self.cpu.mem_map(base + low, _pages(max(s["p_vaddr"] + s["p_memsz"] for s in segments) - low))
        for s in segments:
            self.cpu.mem_write(base + s["p_vaddr"], s.data())
        self.entry = base + elf["e_entry"]
        self.cpu.mem_map(STACK, STACK_BYTES)
        name = noise = STACK + STACK_BYTES - 512
        self.cpu.mem_write(name, b"check\0")
        auxiliary = {
            AT_PHDR: base + low + elf["e_phoff"],
            AT_PHENT: elf["e_phentsize"],
            AT_PHNUM: elf["e_phnum"],
            AT_PAGESZ: PAGE,
            AT_ENTRY: self.entry,
            AT_HWCAP: FP | ASIMD | ASIMDDP,
            AT_RANDOM: noise,
            0: 0,
        }
        words = [1, name, 0, 0, *(word for pair in auxiliary.items() for word in pair)]  # argc, argv, environment
        self.cpu.mem_write(STACK + STACK_BYTES - PAGE, struct.pack(f"<{len(words)}Q", *words))
        self.cpu.reg_write(UC_ARM64_REG_SP, STACK + STACK_BYTES - PAGE)

    def _system_call(self, cpu: Uc, _interrupt: int, _data: object) -> None:
        number = cpu.reg_read(UC_ARM64_REG_X8)
        a, b, c = (cpu.reg_read(UC_ARM64_REG_X0 + i) for i in range(3))
        result = 0
        match number:
            case 64:  # write
                result = self._write(b, c)
            case 66:  # writev
                pieces = struct.iter_unpack("<QQ", cpu.mem_read(b, 16 * c))
                result = sum(self._write(address, size) for address, size in pieces)
            case 93 | 94:  # exit, exit_group
                self.status = a
                cpu.emu_stop()
            case 113:  # clock_gettime
                cpu.mem_write(b, struct.pack("<QQ", *divmod(time.time_ns(), 10**9)))
            case 214:  # brk
                result = self._grow_heap(a)
            case 215:  # munmap
                with suppress(UcError):  # part of it may already be unmapped
                    cpu.mem_unmap(a, _pages(b))
            case 222:  # mmap
                result, self.next_mapping = self.next_mapping, self.next_mapping + _pages(b) + PAGE
                cpu.mem_map(result, _pages(b))
            case 29:  # ioctl
                result = NO_TERMINAL
            case 96 | 178:  # set_tid_address, gettid
                result = 1
            case 131 | 134 | 135 | 226 | 233:  # signals, mprotect, madvise
                pass
            case _:
                result = NOT_IMPLEMENTED
        cpu.reg_write(UC_ARM64_REG_X0, result)

    def _write(self, address: int, size: int) -> int:
        if size:
            sys.stdout.write(self.cpu.mem_read(address, size).decode(errors="replace"))
            sys.stdout.flush()
        return size

    def _grow_heap(self, end: int) -> int:
        if end > self.heap_end:
            mapped = HEAP + _pages(self.heap_end - HEAP)
            if end > mapped:
                self.cpu.mem_map(mapped, _pages(end - mapped))
            self.heap_end = end
        return self.heap_end


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
