"""Tensor formats of a checkpoint, read from its safetensors headers (no weights, no torch, no vLLM).

Container layout: https://huggingface.co/docs/safetensors/index#format and the `safetensors` crate 0.8.0
(`Metadata::validate`): 8 bytes little-endian header length, a JSON header of at most 100,000,000 bytes, data.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from drafttools.errors import DraftToolsError

MAX_HEADER_BYTES = 100_000_000
INDEX_NAME = "model.safetensors.index.json"

# Bits per element, as the safetensors crate names dtypes.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
FLOAT = frozenset({"BF16", "F16", "F32", "F64"})
FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
EXPONENT = frozenset({"F8_E8M0", "U8"})  # writers without an E8M0 dtype store the exponent byte as U8
BLOCK_SIDES = (32, 64, 128, 256, 512)


class HeaderError(DraftToolsError):
    """A safetensors file, index or config that cannot be trusted; the message names the file."""


class NoHeadersError(DraftToolsError):
    """The checkpoint has no safetensors header within reach (GGUF, pickled weights, hub id while offline)."""


class Format(StrEnum):
    """How a module's weight is stored."""

    UNQUANTIZED = "unquantized"
    FP8_TENSOR = "fp8_tensor"
    FP8_CHANNEL = "fp8_channel"
    FP8_BLOCK = "fp8_block"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT8_CHANNEL = "int8_channel"
    INT4_AWQ = "int4_awq"
    INT4_GPTQ = "int4_gptq"
    INT4_CT = "int4_ct"
    ABSENT = "absent"
    MIXED = "mixed"
    UNKNOWN = "unknown"  # present, but none of the above: never guessed

    @property
    def loadable(self) -> bool:
        """Whether the format names one way of reading the bytes."""
        return self not in (Format.ABSENT, Format.MIXED, Format.UNKNOWN)


class Tensor(NamedTuple):
    """One header entry: safetensors dtype name, shape in elements of that dtype, file it lies in."""

    dtype: str
    shape: tuple[int, ...]
    file: str


class Stored(NamedTuple):
    """A module's format, its weight dtype, the scale block (rows, columns) and, if not loadable, why."""

    format: Format
    dtype: str | None = None
    block: tuple[int, int] | None = None
    note: str = ""


Parts = Mapping[str, Tensor]  # a module's tensors by the name of their role: weight, weight_scale, qzeros, ...


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return found


def _parse_json(path: str | Path, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(value, dict):
        raise HeaderError(f"{path}: expected a JSON object, found {type(value).__name__}; download the file again")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return _parse_json(path, path.read_bytes())
    except OSError as error:
        raise HeaderError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def _check_entry(entry: Any) -> tuple[int, int]:
    """Return the entry's byte range; raise ValueError when dtype, shape and range disagree."""
    dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ValueError(f"dtype {dtype!r} is not one safetensors knows")
    if type(shape) is not list or set(map(type, numbers := [*shape, start, end])) != {int} or min(numbers) < 0:
        raise ValueError("shape and data_offsets must be non-negative integers")
    if math.prod(shape) * DTYPE_BITS[dtype] != 8 * (end - start):
        raise ValueError(f"{end - start} bytes do not hold shape {shape} of {dtype}")
    return start, end


def read_header(path: str | Path) -> dict[str, Tensor]:
    """Read one file's header: tensor name -> Tensor.

    Reads 8 bytes and the header, nothing after it. Raises HeaderError, naming the file, for a header longer
    than the file or than 100,000,000 bytes, invalid JSON, duplicate keys, unknown dtypes, and ranges that do
    not tile the data exactly (which is also how a truncated shard shows).
    """
    path = str(path)
    try:
        size = os.stat(path).st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise HeaderError(f"{path}: {size} bytes is too short for a safetensors file; download it again")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise HeaderError(f"{path}: header of {length} bytes is over the format's {MAX_HEADER_BYTES}")
            if length > size - 8:
                raise HeaderError(f"{path}: header says {length} bytes, the file has {size - 8}; download it again")
            raw = file.read(length)
    except OSError as error:
        raise HeaderError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    tensors: dict[str, Tensor] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in _parse_json(path, raw).items():
        if name == "__metadata__":
            continue
        try:
            ranges.append((*_check_entry(entry), name))
        except (KeyError, TypeError, ValueError) as error:
            raise HeaderError(f"{path}: tensor {name[:120]!r}: {error}; download the file again") from None
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), path)
    _check_tiling(path, ranges, size - 8 - length)
    return tensors


def _check_tiling(path: str, ranges: list[tuple[int, int, str]], data_bytes: int) -> None:
    at = 0
    for start, end, name in sorted(ranges):
        if start != at:
            raise HeaderError(f"{path}: tensor {name[:120]!r} starts at byte {start}, expected {at}; download it again")
        at = end
    if at != data_bytes:
        raise HeaderError(f"{path}: tensors need {at} bytes of data, the file has {data_bytes}; download it again")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config.json and every tensor its headers name."""

    source: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @cached_property
    def modules(self) -> dict[str, dict[str, Tensor]]:
        """Module name -> role -> Tensor; a fused expert stack counts as a module of its own."""
        modules: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self.tensors.items():
            module, role = split_name(name)
            modules.setdefault(module, {})[role] = tensor
        return modules

    @cached_property
    def tensor_names(self) -> dict[str, list[str]]:
        """Module name -> full names of its tensors."""
        names: dict[str, list[str]] = {}
        for name in self.tensors:
            names.setdefault(split_name(name)[0], []).append(name)
        return names


def read_config(source: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Read config.json of a local directory or a hub id. Raises HeaderError or NoHeadersError."""
    local = local_directory(source, revision)
    return _read_json(local / "config.json" if local else _hub_config(str(source), revision))


def read_checkpoint(
    source: str | Path, revision: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Checkpoint:
    """Read config.json and the safetensors headers of a local directory, a cached hub id or a hub id.

    `progress(done, total)` is called once a file. Raises HeaderError for what is there but broken,
    NoHeadersError when there is nothing to read.
    """
    local = local_directory(source, revision)
    if local is None:
        return Checkpoint(str(source), read_config(source, revision), _hub_tensors(str(source), revision))
    with _collector_paused():
        tensors = _local_tensors(local, progress)
        return Checkpoint(str(source), read_config(local), tensors)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Headers are trees of small objects without cycles; collecting while they grow takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _local_tensors(local: Path, progress: Callable[[int, int], None] | None) -> dict[str, Tensor]:
    weight_map = _weight_map(local / INDEX_NAME)
    files = sorted(set(weight_map.values())) if weight_map is not None else _safetensors_files(local)
    tensors: dict[str, Tensor] = {}
    for done, name in enumerate(files):
        for tensor, entry in read_header(local / name).items():
            if tensor in tensors:
                raise HeaderError(f"{local / name}: tensor {tensor!r} is also in {tensors[tensor].file}; remove one")
            tensors[tensor] = entry
        if progress:
            progress(done + 1, len(files))
    paths = {name: str(local / name) for name in files}
    for tensor, name in (weight_map or {}).items():
        if tensor not in tensors or tensors[tensor].file != paths[name]:
            raise HeaderError(f"{local / INDEX_NAME}: {tensor!r} is not in {name}; download the checkpoint again")
    return tensors


def local_directory(source: str | Path, revision: str | None = None) -> Path | None:
    """The directory of `source` here, hub cache included; None when it has to come from the hub."""
    path = Path(source)
    if path.is_dir():
        return path
    if path.exists() or str(source).startswith((".", "/", "~")):
        raise NoHeadersError(f"{source}: not a directory; give a checkpoint directory or a hub id")
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(str(source), "config.json", revision=revision)
    except ValueError:  # an object store's URL, for one
        raise NoHeadersError(f"{source}: neither a directory nor a hub id, so no header is in reach") from None
    directory = Path(cached).parent if isinstance(cached, str) else None
    return directory if directory and list(directory.glob("*.safetensors")) else None


def _weight_map(index: Path) -> dict[str, str] | None:
    if not index.is_file():
        return None
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise HeaderError(f"{index}: no weight_map of tensor to file; download the file again")
    for name in set(weight_map.values()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise HeaderError(f"{index}: shard {name!r} lies outside the checkpoint; do not use this checkpoint")
        if not (index.parent / name).is_file():
            raise HeaderError(f"{index}: shard {name} is missing; download it")
    return weight_map


def _safetensors_files(directory: Path) -> list[str]:
    files = sorted(p.name for p in directory.glob("*.safetensors"))
    # Mistral repositories hold the weights twice; only vLLM's mistral format reads consolidated*.safetensors.
    files = [f for f in files if not f.startswith("consolidated")] or files
    if not files:
        raise NoHeadersError(f"{directory}: holds no safetensors file, so nothing can be read from headers")
    return files


def _hub_config(repo_id: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise NoHeadersError(f"{repo_id}: not a directory; install drafttools[hub] to read hub ids") from None
    try:
        return Path(hf_hub_download(repo_id, "config.json", revision=revision))
    except Exception as error:  # the hub client raises httpx, OSError and its own errors
        raise NoHeadersError(f"{repo_id}: config.json is out of reach ({_one_line(error)})") from None


def _hub_tensors(repo_id: str, revision: str | None) -> dict[str, Tensor]:
    from huggingface_hub import HfApi

    try:
        metadata = HfApi().get_safetensors_metadata(repo_id, revision=revision)
    except Exception as error:
        raise NoHeadersError(f"{repo_id}: safetensors headers are out of reach ({_one_line(error)})") from None
    return {
        name: Tensor(str(info.dtype), tuple(info.shape), file)
        for file, header in metadata.files_metadata.items()
        for name, info in header.tensors.items()
    }


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


_ROLES = frozenset({
    "weight", "bias", "scale", "scales", "qweight", "qzeros", "g_idx", "blocks", "weight_packed",
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "weight_shape",
    "weight_zero_point",
    "weight_g_idx", "input_scale", "input_global_scale", "input_zero_point", "k_scale", "v_scale", "q_scale",
    "kv_scale",
})  # fmt: skip
# One tensor for all experts, named without ".weight": `experts.gate_up_proj`, `experts.down_proj_blocks`, ...
_STACK = re.compile(
    r"(?P<module>.*\bexperts\.(?:gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3))_?(?P<role>[a-z_0-9]*)"
)
_STACK_ROLES = {"": "weight", "scale": "weight_scale", "scale_inv": "weight_scale_inv"}


def split_name(name: str) -> tuple[str, str]:
    """Split a tensor name into module and role; a plain parameter keeps its own name as the role."""
    parent, _, last = name.rpartition(".")
    if last in _ROLES:
        return parent, last
    if stack := _STACK.fullmatch(name):
        role = _STACK_ROLES.get(stack["role"], stack["role"])
        if role in _ROLES:
            return stack["module"], role
    return parent, last


def classify(parts: Parts) -> Stored:
    """Decide a module's format from dtypes, group sizes and companions together, never from shape alone."""
    if not parts:
        return Stored(Format.ABSENT)
    if "qweight" in parts:
        return _classify_qweight(parts)
    if "weight_packed" in parts:
        return _classify_packed(parts, parts["weight_packed"])
    if "blocks" in parts:
        return _classify_blocks(parts)
    if "weight" not in parts:
        return _classify_parameters(parts)
    weight = parts["weight"]
    scale = parts.get("weight_scale_inv") or parts.get("weight_scale") or parts.get("scale")
    if weight.dtype in FLOAT:
        return (
            Stored(Format.UNQUANTIZED, weight.dtype)
            if scale is None
            else _unknown(weight, "a float weight with a scale")
        )
    if scale is None:
        return _unknown(weight, f"{weight.dtype} weight without a scale")
    if weight.dtype in FP8:
        return _classify_fp8(weight, scale, inverse="weight_scale_inv" in parts)
    if weight.dtype == "I8" and scale.dtype in FLOAT:
        rows = _rows(weight)
        if scale.shape in (rows, (*rows, 1)):
            return Stored(Format.INT8_CHANNEL, weight.dtype)
        return _unknown(weight, f"I8 weight {weight.shape} with scale {scale.shape}")
    return _classify_packed(parts, weight)


def _unknown(weight: Tensor, note: str) -> Stored:
    return Stored(Format.UNKNOWN, weight.dtype, note=note)


def _rows(weight: Tensor) -> tuple[int, ...]:
    return weight.shape[:-1]


def _classify_qweight(parts: Parts) -> Stored:
    """AWQ packs 8 outputs into an int32 ([in, out/8]); GPTQ packs 8 inputs ([in/8, out])."""
    weight, scales, zeros = parts["qweight"], parts.get("scales"), parts.get("qzeros")
    if weight.dtype != "I32" or scales is None or not weight.shape or not scales.shape:
        return _unknown(weight, "qweight that is not I32 with scales")
    out = scales.shape[-1]
    if weight.shape[-1] * 8 == out:
        return Stored(Format.INT4_AWQ, weight.dtype)
    if weight.shape[-1] == out and (zeros is None or zeros.shape[-1:] == (out // 8,)):
        return Stored(Format.INT4_GPTQ, weight.dtype)
    return _unknown(weight, f"qweight {weight.shape} with scales {scales.shape} is not 4 bits wide")


def _classify_packed(parts: Parts, weight: Tensor) -> Stored:
    """4-bit floats, two a byte: MXFP4 has an E8M0 scale for 32, NVFP4 an E4M3 for 16 and a global scale."""
    scale = parts.get("weight_scale") or parts.get("scale")
    if scale is None or not weight.shape:
        return _unknown(weight, "packed weight without a scale")
    if weight.dtype == "I32" and "weight_packed" in parts:
        return Stored(Format.INT4_CT, weight.dtype)
    same_rank = len(scale.shape) == len(weight.shape)
    if weight.dtype not in ("U8", "I8", "F4") or not same_rank or scale.shape[:-1] != _rows(weight):
        return _unknown(weight, f"{weight.dtype} {weight.shape} with scale {scale.dtype} {scale.shape}")
    columns = weight.shape[-1] * (1 if weight.dtype == "F4" else 2)
    if scale.dtype == "F8_E4M3" and scale.shape[-1] == math.ceil(columns / 16):
        if "weight_scale_2" in parts or "weight_global_scale" in parts:
            return Stored(Format.NVFP4, weight.dtype, (1, 16))
        return _unknown(weight, "NVFP4 weight and scale without the global scale")
    if scale.dtype in EXPONENT and scale.shape[-1] == math.ceil(columns / 32):
        return Stored(Format.MXFP4, weight.dtype, (1, 32))
    return _unknown(weight, f"{weight.dtype} {weight.shape} with scale {scale.dtype} {scale.shape}")


def _classify_blocks(parts: Parts) -> Stored:
    """gpt-oss stores MXFP4 as blocks [..., groups, 16] bytes with one exponent byte a group."""
    blocks, scales = parts["blocks"], parts.get("scales")
    if blocks.dtype == "U8" and scales and scales.dtype in EXPONENT and (*scales.shape, 16) == blocks.shape:
        return Stored(Format.MXFP4, blocks.dtype, (1, 32))
    return _unknown(blocks, "blocks without matching scales")


def _classify_parameters(parts: Parts) -> Stored:
    first = next(iter(parts.values()))
    if all(t.dtype in FLOAT for t in parts.values()) and not parts.keys() & (_ROLES - {"bias"}):
        return Stored(Format.UNQUANTIZED, first.dtype)
    return _unknown(first, f"no weight beside {sorted(parts)}")


def _classify_fp8(weight: Tensor, scale: Tensor, inverse: bool) -> Stored:
    stacked = weight.shape[:1] if len(weight.shape) == 3 else ()
    if len(weight.shape) - len(stacked) != 2:
        return _unknown(weight, f"FP8 weight of shape {weight.shape}")
    shape = scale.shape[len(stacked) :] if scale.shape[: len(stacked)] == stacked else scale.shape
    rows, columns = weight.shape[-2:]
    if scale.dtype in EXPONENT and shape == (rows, math.ceil(columns / 32)):
        return Stored(Format.MXFP8, weight.dtype, (1, 32))
    # A matrix smaller than one block has a single 2-D scale too; only DeepSeek's name tells it from a scalar.
    single_block = scale.dtype in EXPONENT or len(shape) == 4 or (inverse and len(shape) == 2)
    if math.prod(shape) == 1 and not single_block:
        return Stored(Format.FP8_TENSOR, weight.dtype)
    if shape in ((rows,), (rows, 1)) and scale.dtype in FLOAT:
        return Stored(Format.FP8_CHANNEL, weight.dtype)
    if len(shape) == 4 and shape[1] == shape[3] == 1:  # ModelOpt's FP8_PB_WO: [rows/128, 1, columns/128, 1]
        shape = (shape[0], shape[2])
    if len(shape) == 2 and scale.dtype in FLOAT | EXPONENT:
        for side in (128, *BLOCK_SIDES):
            if shape == (math.ceil(rows / side), math.ceil(columns / side)):
                return Stored(Format.FP8_BLOCK, weight.dtype, (side, side))
    return _unknown(weight, f"FP8 {weight.shape} with scale {scale.dtype} {scale.shape}")


def combine(shards: Iterable[Stored]) -> Stored:
    """Format of a fused module: the shards' own if they agree, `mixed` if not, `absent` if there are none."""
    found = list(dict.fromkeys(shards))
    formats = sorted({s.format for s in found})
    if not found:
        return Stored(Format.ABSENT)
    if len(formats) > 1:
        return Stored(Format.MIXED, note=", ".join(formats))
    return found[0]
