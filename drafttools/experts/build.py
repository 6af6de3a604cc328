"""Build the FP8 expert kernel: `python -m drafttools.experts.build`, on any Linux machine, no GPU needed.

Device code is compiled for each of IMAGES by NVRTC 12.9 (`pip install nvidia-cuda-nvrtc-cu12==12.9.86`) or by a
CUDA 12 toolkit's nvcc (`--nvcc`); CUDA 13 no longer targets Volta. The host part needs g++ and an installed torch
(2.10 or newer, the CPU build will do) for its headers. The result is one shared library beside this module, which
`drafttools.experts.extension` finds.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from drafttools.errors import DraftToolsError
from drafttools.experts.extension import LIBRARY

SOURCES = Path(__file__).resolve().parents[2] / "kernels"
# Native code for Volta (and Turing), Ampere (and Ada), Hopper; PTX of the first for the driver to compile where
# nothing else fits, of the last for what comes after Hopper.
IMAGES = ("sm_70", "compute_70", "sm_80", "sm_90", "compute_90")
TORCH_TARGET = "0x020a000000000000"  # 2.10, in the encoding of torch/csrc/stable/version.h


def main(argv: Sequence[str] | None = None) -> None:
    """Parse `argv`, build, print where the library is."""
    parser = argparse.ArgumentParser(prog="python -m drafttools.experts.build", description=__doc__)
    parser.add_argument("--nvcc", help="compile device code with this nvcc (CUDA 12.x) instead of NVRTC")
    parser.add_argument("--output", type=Path, default=LIBRARY, help="the library to write (default: %(default)s)")
    arguments = parser.parse_args(argv)
    try:
        build(arguments.output, arguments.nvcc)
    except DraftToolsError as error:
        print(f"drafttools: {error}", file=sys.stderr)
        sys.exit(2)
    print(arguments.output)


def build(output: Path, nvcc: str | None = None) -> None:
    """Compile all images and link them with the host part into `output`.

    Raises:
        DraftToolsError: sources, compiler or torch are missing, or a compiler refused.
    """
    if not (SOURCES / "fp8_experts.cu").is_file():
        raise DraftToolsError(f"no kernel sources in {SOURCES}: build from a checkout of drafttools")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in IMAGES:
            image = compile_with_nvcc(name, nvcc) if nvcc else compile_with_nvrtc(name)[0]
            (Path(folder) / name).write_bytes(image)
        (Path(folder) / "images.h").write_text(images_header(Path(folder)))
        link(Path(folder), output)


def compile_with_nvrtc(name: str) -> tuple[bytes, str]:
    """Device code for `name` (sm_XX: a cubin, compute_XX: PTX with its closing NUL) and the compiler's log.

    The log of a cubin holds the assembler's report of each kernel's registers, stack and spills.

    Raises:
        DraftToolsError: NVRTC 12 is not installed or the source does not compile (with the compiler's log).
    """
    headers = {"fp8_experts.h": (SOURCES / "fp8_experts.h").read_bytes()}
    source = (SOURCES / "fp8_experts.cu").read_bytes()
    options = [f"--gpu-architecture={name}", "--std=c++17", "--ptxas-options=-v"]
    return _Nvrtc().compile(source, headers, options, want_ptx=name.startswith("compute_"))


def compile_with_nvcc(name: str, nvcc: str) -> bytes:
    """As `compile_with_nvrtc`, by a CUDA 12 toolkit's nvcc."""
    with tempfile.NamedTemporaryFile(suffix=".image") as target:
        kind = "-ptx" if name.startswith("compute_") else "-cubin"
        _run([nvcc, kind, f"-arch={name}", "-std=c++17", "-o", target.name, str(SOURCES / "fp8_experts.cu")])
        image = Path(target.name).read_bytes()
    return image + b"\0" if name.startswith("compute_") else image


def images_header(folder: Path) -> str:
    """C++ that embeds the image files in `folder` (GNU assembler `.incbin`) and lists them as kImages."""
    lines = [
        "#pragma once",
        "struct Image { const char* name; int arch; bool is_ptx; const unsigned char* data; };",
    ]
    for name in IMAGES:
        lines.append(
            f'asm(".section .rodata\\n.balign 64\\nimage_{name}: .incbin \\"{folder / name}\\"\\n.previous\\n");\n'
            f'extern "C" __attribute__((visibility("hidden"))) const unsigned char image_{name}[];'
        )
    rows = [
        f'{{"{name}", {name.rsplit("_", 1)[1]}, {str(name.startswith("compute_")).lower()}, image_{name}}}'
        for name in IMAGES
    ]
    lines.append(f"static const Image kImages[] = {{{', '.join(rows)}}};")
    return "\n".join(lines) + "\n"


def link(folder: Path, output: Path) -> None:
    """Compile kernels/extension.cpp with the images in `folder` into the shared library `output`."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise DraftToolsError("torch is not installed: its headers are needed to build (the CPU build will do)")
    torch = Path(spec.origin).parent
    flags = ["-shared", "-fPIC", "-O2", "-std=c++17", "-fvisibility=hidden", "-Wall"]
    flags.append(f"-ffile-prefix-map={SOURCES}=kernels")  # no path of this machine in the library
    includes = [f"-I{folder}", f"-I{SOURCES}", f"-I{torch / 'include'}"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ldl"]
    source = str(SOURCES / "extension.cpp")
    _run(["g++", *flags, f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", *includes, source, "-o", str(output), *libraries])


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise DraftToolsError(f"{command[0]} is not installed, and the build needs it") from None
    except subprocess.CalledProcessError as error:
        raise DraftToolsError(f"{command[0]} failed:\n{error.stderr}") from None


class _Nvrtc:
    """The calls of NVRTC 12 that are needed, through ctypes (signatures: nvrtc.h of CUDA 12.9)."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
        if spec is None or not spec.submodule_search_locations:
            raise DraftToolsError("NVRTC 12 is not installed: pip install nvidia-cuda-nvrtc-cu12==12.9.86")
        self._library = ctypes.CDLL(str(Path(spec.submodule_search_locations[0]) / "lib" / "libnvrtc.so.12"))

    def compile(
        self, source: bytes, headers: dict[str, bytes], options: Sequence[str], want_ptx: bool
    ) -> tuple[bytes, str]:
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source, b"fp8_experts.cu", len(headers), texts, names
            )
        )
        try:
            result = self._library.nvrtcCompileProgram(program, len(options), flags)
            log = self._read(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode()
            if result:
                raise DraftToolsError(f"NVRTC refused the kernel ({options[0]}):\n{log}")
            kind = "PTX" if want_ptx else "CUBIN"
            return self._read(program, f"nvrtcGet{kind}Size", f"nvrtcGet{kind}"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, size_name: str, data_name: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, size_name)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, data_name)(program, buffer))
        return buffer.raw

    @staticmethod
    def _check(result: int) -> None:
        if result:
            raise DraftToolsError(f"NVRTC failed with error {result}")


if __name__ == "__main__":
    main()
