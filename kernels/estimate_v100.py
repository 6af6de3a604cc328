"""Estimate, not measure, the kernel on a V100 from its machine code: no GPU needed.

    CUOBJDUMP=... python kernels/estimate_v100.py

For each kernel that streams weights: registers, resident warps a multiprocessor, and warp instructions and tensor-core
instructions per KiB of weights in its main loop (the loop with the most 128-bit loads). Then, per token count, the
experts in use under uniform routing, their bytes over 900 GB/s, and the time the instruction issue alone would take.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

from drafttools.experts.build import compile_with_nvrtc

# V100 SXM2 (NVIDIA, "Tesla V100 GPU Architecture", 2017): multiprocessors, boost clock, memory bandwidth,
# 32-bit registers, warps and warp schedulers of a multiprocessor.
PROCESSORS, CLOCK, BANDWIDTH, REGISTERS, WARPS, SCHEDULERS = 80, 1.53e9, 900e9, 65536, 64, 4
BLOCK_WARPS = 4  # kGateWarps, kDownWarps in fp8_experts.h
KERNELS = ("gate_up_direct", "down_direct", "gate_up_8", "down_8", "gate_up_16", "down_16")
EXPERTS, HIDDEN, LOCAL, TOP_K = 512, 2560, 160, 10


def registers(log: str) -> dict[str, int]:
    """Registers a thread of each kernel, from the assembler's report."""
    return {
        name: int(count) for name, count in re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL)
    }


def main_loop(sass: str) -> tuple[int, int, int]:
    """(instructions, HMMA, bytes a warp loads) of the loop with the most 128-bit loads."""
    instructions = [
        (int(at, 16), text.strip())
        for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?P\w+ )?\s*([A-Z][^;]*);", sass)
    ]
    branches = ((at, re.match(r"BRA\S* .*0x([0-9a-f]+)", text)) for at, text in instructions)
    loops = [(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) < at]
    best = (0, 0, 0)
    for first, last in loops:
        body = [text for at, text in instructions if first <= at <= last]
        wide = sum(text.startswith("LDG.E.NA.128") for text in body)
        if wide * 512 > best[2]:
            best = (len(body), sum(text.startswith("HMMA") for text in body), wide * 512)
    return best


def main() -> None:
    """Compile for sm_70, disassemble, print the two tables."""
    cubin, log = compile_with_nvrtc("sm_70")
    used = registers(log)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = os.environ.get("CUOBJDUMP", "cuobjdump")
        text = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    parts = re.split(r"Function : (\w+)", text)[1:]
    sass = dict(zip(parts[::2], parts[1::2], strict=True))
    print("| kernel | registers | resident warps | instructions / KiB | HMMA / KiB |\n|---|---|---|---|---|")
    per_byte = {}
    for name in KERNELS:
        count, hmma, loaded = main_loop(sass[name])
        blocks = REGISTERS // (-(-used[name] // 8) * 8 * 32 * BLOCK_WARPS)
        warps = min(WARPS, blocks * BLOCK_WARPS)
        per_byte[name] = count / loaded
        print(f"| {name} | {used[name]} | {warps} | {count / loaded * 1024:.0f} | {hmma / loaded * 1024:.0f} |")
    print("\n| M | experts in use | MB | us at 900 GB/s | us to issue |\n|---|---|---|---|---|")
    for tokens in (1, 2, 4, 8, 16, 64, 256):
        touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
        route, passes = ("direct", tokens * TOP_K) if tokens <= 16 else ("8", touched)
        issued = passes * LOCAL * HIDDEN * (2 * per_byte[f"gate_up_{route}"] + per_byte[f"down_{route}"])
        issue = issued / (PROCESSORS * SCHEDULERS * CLOCK)
        size = touched * 3 * LOCAL * HIDDEN
        print(f"| {tokens} | {touched:.0f} | {size / 1e6:.0f} | {size / BANDWIDTH * 1e6:.0f} | {issue * 1e6:.0f} |")


if __name__ == "__main__":
    main()
