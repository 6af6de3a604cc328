"""The device code, read without a GPU: compiled for Volta, it must not spill and must use the hardware as meant."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from drafttools.experts import build

HAVE_NVRTC = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cuda_nvrtc")
pytestmark = pytest.mark.skipif(not HAVE_NVRTC, reason="needs nvidia-cuda-nvrtc-cu12==12.9.86")

# Kernels that stream weights, in either route.
STREAMING = {"gate_up_direct", "gate_up_8", "gate_up_16", "down_direct", "down_8", "down_16"}


def disassembler() -> str | None:
    """A cuobjdump of CUDA 12 (13 refuses Volta): $CUOBJDUMP, or the one in the triton 3.2 wheel."""
    if "CUOBJDUMP" in os.environ:
        return os.environ["CUOBJDUMP"]
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    return shutil.which(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump")


compiled = functools.cache(build.compile_with_nvrtc)


@pytest.fixture(scope="module")
def volta() -> tuple[bytes, str]:
    return compiled("sm_70")


@pytest.fixture(scope="module")
def sass(volta: tuple[bytes, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Disassembly by kernel."""
    tool = disassembler()
    if tool is None:
        pytest.skip("needs a CUDA 12 cuobjdump: set CUOBJDUMP or install triton==3.2.0")
    cubin = tmp_path_factory.mktemp("sass") / "sm_70.cubin"
    cubin.write_bytes(volta[0])
    text = subprocess.run([tool, "-sass", cubin], check=True, capture_output=True, text=True).stdout
    parts = re.split(r"Function : (\w+)", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", ["sm_70", "sm_80", "sm_90"])
def test_no_kernel_spills(name: str) -> None:
    _, log = compiled(name)
    kernels = re.findall(r"Compiling entry function '(\w+)'", log)
    assert set(kernels) >= STREAMING | {"route", "reduce"}
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(frames) == len(kernels)
    assert {kernel: frame for kernel, frame in zip(kernels, frames, strict=True) if frame != ("0", "0", "0")} == {}


def test_volta_image_holds_every_kernel_the_host_asks_for(volta: tuple[bytes, str]) -> None:
    kernels = set(re.findall(r"Compiling entry function '(\w+)'", volta[1]))
    assert kernels == STREAMING | {"route", "reduce"}


def test_portable_ptx_is_for_volta_and_uses_its_tensor_cores() -> None:
    ptx = build.compile_with_nvrtc("compute_70")[0]
    assert ptx.endswith(b"\0")
    text = ptx.decode()
    assert re.search(r"^\.target sm_70$", text, re.MULTILINE)
    for kernel in STREAMING:
        body = text[text.index(f".entry {kernel}(") :]
        body = body[: body.index("\n}")]
        assert "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32" in body, kernel
        assert "ld.global.nc.L1::no_allocate.v4.u32" in body, kernel


def test_volta_weight_loads_are_128_bit(sass: dict[str, str]) -> None:
    for kernel in STREAMING:
        loads = re.findall(r"\bLDG\.E(?:\.\w+)*", sass[kernel])
        wide = [load for load in loads if ".128" in load]
        assert len(wide) >= 8, (kernel, loads)
        # The rest are ids, tiles and scales: single words, never bytes of a weight.
        assert not [load for load in loads if ".U8" in load or ".S8" in load or ".U16" in load], kernel


def test_volta_multiplies_on_tensor_cores(sass: dict[str, str]) -> None:
    for kernel in STREAMING:
        assert re.search(r"\bHMMA\.884\.F32\.F32", sass[kernel]), kernel
    assert "HMMA" not in sass["route"]


def test_volta_keeps_everything_in_registers(sass: dict[str, str]) -> None:
    for kernel, text in sass.items():
        assert not re.search(r"\b(LDL|STL)\b", text), kernel
