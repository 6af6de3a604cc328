"""The extension around the FP8 expert kernel: finding it, refusing it, and what the build puts into it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from drafttools.errors import DraftToolsError
from drafttools.experts import build, extension, op


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with placeholder device images: everything of the extension but the kernels themselves."""
    folder = tmp_path_factory.mktemp("extension")
    for name in build.IMAGES:
        (folder / name).write_bytes(name.encode() + b"\0")
    (folder / "images.h").write_text(build.images_header(folder))
    build.link(folder, folder / "fp8_experts.so")
    return folder / "fp8_experts.so"


def in_new_process(code: str) -> str:
    """Standard output of `code`; loading a torch extension cannot be undone, so not in this process."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


def test_missing_library_is_one_sentence_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DraftToolsError) as caught:
        extension.load(tmp_path / "none.so")
    message = str(caught.value)
    assert str(tmp_path / "none.so") in message
    assert "python -m drafttools.experts.build" in message
    assert "\n" not in message


def test_old_torch_is_refused_by_version(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.9.1+cpu")
    assert extension.unavailable(library) == "the FP8 expert kernel needs torch 2.10 or newer, this is 2.9.1+cpu"


def test_missing_driver_is_one_sentence(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: object) -> None:
        assert name == "libcuda.so.1"
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(DraftToolsError, match="needs an NVIDIA driver") as caught:
        extension.load(library)
    assert "\n" not in str(caught.value)


def test_broken_library_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(extension, "unavailable", lambda _: None)
    with pytest.raises(DraftToolsError, match="does not load"):
        extension.load(broken)


def test_library_implements_the_operator_for_cuda_and_leaves_the_cpu_alone(library: Path) -> None:
    # Loaded into a CPU build of torch: nothing in it may need CUDA before a CUDA tensor arrives.
    output = in_new_process(
        f"""
import torch
import drafttools.experts.op as op
torch.ops.load_library({str(library)!r})
print(torch._C._dispatch_has_kernel_for_dispatch_key(op.NAME, "CUDA"))
fp8 = torch.float8_e4m3fn
weights = torch.ones(1, 32, 128).to(fp8), torch.ones(1, 32), torch.ones(1, 128, 16).to(fp8), torch.ones(1, 128)
out = op.fp8_experts(torch.ones(1, 128), *weights, torch.ones(1, 1), torch.zeros(1, 1).int(), 0, 0, 0, 0)
print(float(out[0, 0]))
"""
    ).split()
    assert output == ["True", str(16.0 * 128 * 128)]


def test_library_links_to_no_cuda(library: Path) -> None:
    needed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    assert "libtorch_cpu.so" in needed
    assert "cuda" not in needed.lower()
    undefined = subprocess.run(["nm", "-D", "-u", library], check=True, capture_output=True, text=True).stdout
    torch_symbols = [line.split()[-1] for line in undefined.splitlines() if "torch" in line]
    assert torch_symbols
    assert all(name.startswith(("aoti_torch_", "torch_")) for name in torch_symbols), torch_symbols  # the stable C ABI


def test_each_device_gets_its_image(library: Path) -> None:
    expected = {
        60: None,
        70: "sm_70",
        75: "sm_70",
        80: "sm_80",
        86: "sm_80",
        89: "sm_80",
        90: "sm_90",
        100: "compute_90",
        120: "compute_90",
    }
    output = in_new_process(
        f"""
import ctypes, torch
import drafttools.experts.op
torch.ops.load_library({str(library)!r})
pick = ctypes.CDLL({str(library)!r}).drafttools_fp8_experts_image
pick.restype = ctypes.c_char_p
print({{capability: pick(capability) and pick(capability).decode() for capability in {list(expected)}}})
"""
    )
    assert output.strip() == str(expected)


def test_build_without_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(DraftToolsError, match="build from a checkout"):
        build.build(tmp_path / "out.so")


def test_build_without_a_compiler_names_it(tmp_path: Path) -> None:
    with pytest.raises(DraftToolsError, match="no-such-nvcc is not installed"):
        build.build(tmp_path / "out.so", nvcc="no-such-nvcc")


def test_schema_is_the_one_the_kernel_was_written_for() -> None:
    source = (build.SOURCES / "extension.cpp").read_text()
    signature = source[source.index("Tensor fp8_experts(") :].split(")")[0]
    names = [part.split()[-1].lstrip("&") for part in signature.split("(")[1].split(",")]
    assert names == [part.split()[-1] for part in op.SCHEMA.split(")")[0].lstrip("(").split(",")]
