"""Checkpoint directories from headers: random but repeatable bytes; only dtype, shape and name carry meaning."""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafttools.formats import DTYPE_BITS, Checkpoint, Tensor

CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "data" / "routing.json").read_text())["cases"]
}
Header = Mapping[str, tuple[str, Sequence[int]]]


def checkpoint(case: Mapping[str, Any]) -> Checkpoint:
    """A case in memory."""
    tensors = {name: Tensor(dtype, tuple(shape), "memory") for name, (dtype, shape) in case["tensors"].items()}
    return Checkpoint("memory", case["config"], tensors)


def write_case(case: Mapping[str, Any], directory: Path) -> Path:
    """A case as a directory; a target's config, if it has one, goes to `directory/target`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(case["config"]))
    if "target_config" in case:
        (directory / "target").mkdir()
        (directory / "target" / "config.json").write_text(json.dumps(case["target_config"]))
    write_safetensors(directory / "model.safetensors", case["tensors"])
    return directory


def write_safetensors(path: Path, tensors: Header) -> None:
    """One safetensors file."""
    header, offset = entries(tensors)
    path.write_bytes(container(json.dumps({"__metadata__": {"format": "pt"}, **header}).encode(), offset))


def entries(tensors: Header) -> tuple[dict[str, dict[str, Any]], int]:
    """Header entries that tile the data, and the number of data bytes."""
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    return header, offset


def container(header: bytes, data_bytes: int, length: int | None = None) -> bytes:
    """Length, header and data; `length` lies about the header's."""
    data = random.Random(data_bytes).randbytes(data_bytes)
    return struct.pack("<Q", len(header) if length is None else length) + header + data
