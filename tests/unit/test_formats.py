"""Formats and the safetensors container: what each is recognised by, and what damaged files say."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from drafttools.formats import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    Format,
    HeaderError,
    NoHeadersError,
    Tensor,
    classify,
    combine,
    read_checkpoint,
    read_header,
    split_name,
)
from tests.make_checkpoint import CASES, container, entries, write_case, write_safetensors


def parts(**roles: tuple[str, list[int]]) -> dict[str, Tensor]:
    return {role: Tensor(dtype, tuple(shape), "f") for role, (dtype, shape) in roles.items()}


MXFP4_BYTES = ("U8", [128, 128])  # 256 columns, two a byte: the same shape in MXFP4 and NVFP4
RECOGNISED: list[tuple[Format, dict[str, Tensor]]] = [
    (Format.UNQUANTIZED, parts(weight=("BF16", [256, 128]), bias=("BF16", [256]))),
    (Format.UNQUANTIZED, parts(weight=("F32", [256, 128]), e_score_correction_bias=("F32", [256]))),
    (Format.UNQUANTIZED, parts(markov_w1=("BF16", [256, 32]))),
    (Format.FP8_TENSOR, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("F32", []), input_scale=("F32", []))),
    (Format.FP8_TENSOR, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("F32", [1]))),
    (Format.FP8_TENSOR, parts(weight=("F8_E4M3", [4, 256, 512]), weight_scale=("F32", [4]))),
    (Format.FP8_CHANNEL, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("F32", [256, 1]))),
    (Format.FP8_CHANNEL, parts(weight=("F8_E4M3", [4, 256, 512]), weight_scale=("F32", [4, 256, 1]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [256, 512]), weight_scale_inv=("F32", [2, 4]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [200, 500]), weight_scale_inv=("BF16", [2, 4]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [128, 128]), weight_scale_inv=("F32", [1, 1]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("F32", [2, 1, 4, 1]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("F32", [2, 4]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [256, 512]), scale=("F8_E8M0", [2, 4]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [100, 100]), scale=("F8_E8M0", [1, 1]))),
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [256, 512]), scale=("F8_E8M0", [8, 16]))),  # DeepSeek-V4.1, 32x32
    (Format.FP8_BLOCK, parts(weight=("F8_E4M3", [8, 256, 512]), weight_scale_inv=("F32", [8, 2, 4]))),
    (Format.MXFP8, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("U8", [256, 16]))),
    (Format.MXFP8, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("F8_E8M0", [256, 16]))),
    (Format.MXFP4, parts(weight=MXFP4_BYTES, weight_scale=("U8", [128, 8]))),
    (Format.MXFP4, parts(weight=("I8", [128, 128]), scale=("F8_E8M0", [128, 8]))),
    (Format.MXFP4, parts(weight=("F4", [128, 256]), scale=("F8_E8M0", [128, 8]))),
    (Format.MXFP4, parts(weight_packed=MXFP4_BYTES, weight_scale=("U8", [128, 8]))),
    (Format.MXFP4, parts(blocks=("U8", [4, 128, 8, 16]), scales=("U8", [4, 128, 8]))),
    (Format.NVFP4, parts(weight=MXFP4_BYTES, weight_scale=("F8_E4M3", [128, 16]), weight_scale_2=("F32", []))),
    (
        Format.NVFP4,
        parts(weight_packed=MXFP4_BYTES, weight_scale=("F8_E4M3", [128, 16]), weight_global_scale=("F32", [1])),
    ),
    (Format.INT8_CHANNEL, parts(weight=("I8", [256, 128]), weight_scale=("F32", [256, 1]))),
    (
        Format.INT4_AWQ,
        parts(qweight=("I32", [256, 16]), qzeros=("I32", [2, 16]), scales=("F16", [2, 128])),
    ),
    (
        Format.INT4_GPTQ,
        parts(qweight=("I32", [32, 128]), qzeros=("I32", [2, 16]), scales=("F16", [2, 128]), g_idx=("I32", [256])),
    ),
    (
        Format.INT4_CT,
        parts(weight_packed=("I32", [128, 32]), weight_scale=("BF16", [128, 2]), weight_shape=("I64", [2])),
    ),
    (Format.ABSENT, {}),
    # Present and not one of ours: never guessed.
    (Format.UNKNOWN, parts(weight=MXFP4_BYTES, weight_scale=("F8_E4M3", [128, 16]))),  # no global scale
    (Format.UNKNOWN, parts(weight=MXFP4_BYTES, weight_scale=("F8_E4M3", [128, 8]), weight_scale_2=("F32", []))),
    (Format.UNKNOWN, parts(weight=MXFP4_BYTES, weight_scale=("U8", [128, 16]))),
    (Format.UNKNOWN, parts(weight=("F8_E4M3", [256, 512]))),
    (Format.UNKNOWN, parts(weight=("F8_E4M3", [256, 512]), weight_scale=("F32", [3, 5]))),
    (Format.UNKNOWN, parts(weight=("I8", [256, 128]), SCB=("F32", [256]))),
    (Format.UNKNOWN, parts(weight=("BF16", [256, 128]), weight_scale=("F32", [256, 1]))),
    (Format.UNKNOWN, parts(qweight=("I32", [64, 128]), qzeros=("I32", [2, 32]), scales=("F16", [2, 128]))),  # 8 bits
    (Format.UNKNOWN, parts(weight=("F8_E4M3", [256]), weight_scale=("F32", []))),
]


@pytest.mark.parametrize(("expected", "tensors"), RECOGNISED)
def test_format_is_recognised(expected: Format, tensors: dict[str, Tensor]) -> None:
    assert classify(tensors).format is expected


def test_every_format_has_an_example() -> None:
    assert {expected for expected, _ in RECOGNISED} | {Format.MIXED} == set(Format)


def test_block_sides_are_told() -> None:
    assert classify(parts(weight=("F8_E4M3", [256, 512]), scale=("F8_E8M0", [8, 16]))).block == (32, 32)
    assert classify(parts(weight=("F8_E4M3", [256, 512]), scale=("F8_E8M0", [2, 4]))).block == (128, 128)


def test_shards_that_disagree_are_mixed() -> None:
    bf16, fp8 = (classify(tensors) for _, tensors in (RECOGNISED[0], RECOGNISED[8]))
    assert combine([bf16, bf16]).format is Format.UNQUANTIZED
    assert combine([bf16, fp8]).format is Format.MIXED
    assert combine([bf16, fp8]).note == "fp8_block, unquantized"
    assert combine([]).format is Format.ABSENT


@pytest.mark.parametrize(
    ("name", "module", "role"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj", "weight"),
        ("mtp.0.ffn.experts.3.w1.scale", "mtp.0.ffn.experts.3.w1", "scale"),
        ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.gate_up_proj", "weight"),
        ("layers.0.mlp.experts.gate_up_proj_blocks", "layers.0.mlp.experts.gate_up_proj", "blocks"),
        ("layers.0.mlp.experts.down_proj_scales", "layers.0.mlp.experts.down_proj", "scales"),
        ("layers.0.mlp.experts.down_proj_scale_inv", "layers.0.mlp.experts.down_proj", "weight_scale_inv"),
        ("layers.0.mlp.experts.w13_weight_scale", "layers.0.mlp.experts.w13", "weight_scale"),
        ("layers.0.mlp.experts.down_proj_bias", "layers.0.mlp.experts.down_proj", "bias"),
        ("mtp.2.markov_head.markov_w1", "mtp.2.markov_head", "markov_w1"),
        ("layers.0.A_log", "layers.0", "A_log"),
    ],
)
def test_names_split_into_module_and_role(name: str, module: str, role: str) -> None:
    assert split_name(name) == (module, role)


# --- the container ---

ONE: dict[str, tuple[str, list[int]]] = {"a.weight": ("BF16", [4, 8])}


def broken_files() -> list[tuple[str, bytes, str]]:
    header, size = entries(ONE)
    good = json.dumps(header).encode()
    entry = header["a.weight"]

    def changed(**values: Any) -> bytes:
        return container(json.dumps({"a.weight": {**entry, **values}}).encode(), size)

    twice = b'{"a":' + json.dumps(entry).encode() + b',"a":' + json.dumps(entry).encode() + b"}"
    return [
        ("empty", b"", "too short"),
        ("seven bytes", b"1234567", "too short"),
        ("length past the end", container(good, size, length=10**6), "header says 1000000 bytes"),
        ("length of 2^63", container(good, size, length=2**63), "over the format's"),
        ("header over the limit", container(good, size, length=MAX_HEADER_BYTES + 1), "over the format's"),
        ("truncated data", container(good, size)[:-1], "tensors need 64 bytes"),
        ("data left over", container(good, size) + b"x", "tensors need 64 bytes"),
        ("not JSON", container(b"{]", 0), "not valid JSON"),
        ("not UTF-8", container(b"\xff\xfe{}", 0), "not valid JSON"),
        ("a list", container(b"[]", 0), "expected a JSON object"),
        ("deeply nested", container(b"[" * 100_000, 0), "not valid JSON"),
        ("duplicate tensor", container(twice, size), "'a' appears twice"),
        ("absurd dtype", changed(dtype="F3_E9"), "'F3_E9' is not one"),
        ("dtype of another type", changed(dtype=["BF16"]), "is not one"),
        ("huge dimension", changed(shape=[10**300, 8]), "do not hold shape"),
        ("negative dimension", changed(shape=[-4, -8]), "non-negative"),
        ("float dimension", changed(shape=[4.0, 8]), "non-negative"),
        ("boolean dimension", changed(shape=[True, 32]), "non-negative"),
        ("shape a string", changed(shape="48"), "non-negative"),
        ("three offsets", changed(data_offsets=[0, 32, 64]), "too many values"),
        ("offsets backwards", changed(data_offsets=[64, 0]), "do not hold"),
        ("hole", changed(data_offsets=[8, 72]), "starts at byte 8"),
        ("no dtype", container(json.dumps({"a": {"shape": [], "data_offsets": [0, 0]}}).encode(), 0), "'dtype'"),
        ("entry a number", container(b'{"a": 7}', 0), "'a'"),
    ]


@pytest.mark.parametrize(("what", "content", "words"), broken_files(), ids=[b[0] for b in broken_files()])
def test_broken_file_is_named(what: str, content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeaderError) as raised:
        read_header(path)
    assert str(path) in str(raised.value)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_huge_header_is_not_read(tmp_path: Path) -> None:
    """A sparse file of 200 MB whose header claims 100 MB and one byte: refused without allocating it."""
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(2 * MAX_HEADER_BYTES)
    tracemalloc.start()
    with pytest.raises(HeaderError, match="over the format's"):
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_only_the_header_is_read(tmp_path: Path) -> None:
    """The data is a hole of 8 GB: reading a byte of it by mistake would still work, reading all of it would not."""
    path = tmp_path / "model.safetensors"
    header = {"a.weight": {"dtype": "U8", "shape": [8 << 30], "data_offsets": [0, 8 << 30]}}
    raw = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + (8 << 30))
    tracemalloc.start()
    assert read_header(path)["a.weight"].shape == (8 << 30,)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_hundred_thousand_tensors(tmp_path: Path) -> None:
    """100,000 tensors in two shards: under 2 s, and memory in proportion to the headers."""
    names = [f"model.layers.{i // 1000}.mlp.experts.{i % 1000 // 4}.{'abcd'[i % 4]}.weight" for i in range(100_000)]
    for shard in (0, 1):
        write_safetensors(tmp_path / f"{shard}.safetensors", {n: ("U8", [1]) for n in names[shard::2]})
    weight_map = {n: f"{i % 2}.safetensors" for i, n in enumerate(names)}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}")
    start = time.process_time()
    checkpoint = read_checkpoint(tmp_path)
    seconds = time.process_time() - start
    assert len(checkpoint.tensors) == 100_000
    assert seconds < 2
    tracemalloc.start()
    read_checkpoint(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    header_bytes = sum((tmp_path / f"{shard}.safetensors").stat().st_size for shard in (0, 1))
    assert peak < 12 * header_bytes


# --- the checkpoint ---


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "one.safetensors", {"a.weight": ("BF16", [4, 4])})
    write_safetensors(tmp_path / "two.safetensors", {"b.weight": ("BF16", [4, 4])})
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    write_index(tmp_path, {"a.weight": "one.safetensors", "b.weight": "two.safetensors"})
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_of_an_index(sharded: Path) -> None:
    write_safetensors(sharded / "stray.safetensors", {"c.weight": ("BF16", [4, 4])})
    seen: list[tuple[int, int]] = []
    checkpoint = read_checkpoint(sharded, progress=lambda done, total: seen.append((done, total)))
    assert list(checkpoint.tensors) == ["a.weight", "b.weight"]  # a file outside the index is not part of it
    assert checkpoint.tensors["b.weight"].file == str(sharded / "two.safetensors")
    assert checkpoint.config == {"num_hidden_layers": 1}
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a.weight": "three.safetensors"}, "shard three.safetensors is missing"),
        ({"a.weight": "two.safetensors"}, "'a.weight' is not in two.safetensors"),
        ({"c.weight": "one.safetensors"}, "'c.weight' is not in one.safetensors"),
        ({"a.weight": "../one.safetensors"}, "outside the checkpoint"),
        ({"a.weight": "/etc/passwd"}, "outside the checkpoint"),
        ({"a.weight": 7}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_index_that_lies(sharded: Path, weight_map: Any, words: str) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(HeaderError, match=words) as raised:
        read_checkpoint(sharded)
    assert INDEX_NAME in str(raised.value)


def test_index_with_a_key_twice(sharded: Path) -> None:
    (sharded / INDEX_NAME).write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(HeaderError, match="'a' appears twice"):
        read_checkpoint(sharded)


def test_tensor_in_two_files(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    write_safetensors(sharded / "two.safetensors", {"a.weight": ("BF16", [4, 4])})
    with pytest.raises(HeaderError, match=r"two\.safetensors: tensor 'a.weight' is also in .*one\.safetensors"):
        read_checkpoint(sharded)


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(NoHeadersError, match="holds no safetensors file"):
        read_checkpoint(tmp_path)
    with pytest.raises(NoHeadersError, match="not a directory"):
        read_checkpoint(tmp_path / "model.gguf")
    write_safetensors(tmp_path / "model.safetensors", ONE)
    with pytest.raises(HeaderError, match=r"config\.json: cannot be read"):
        read_checkpoint(tmp_path)


def test_object_store_is_out_of_reach() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(NoHeadersError, match="neither a directory nor a hub id"):
        read_checkpoint("s3://bucket/model")


def test_written_by_safetensors_itself(tmp_path: Path) -> None:
    """The crate's own writer and its own reader agree with ours."""
    torch = pytest.importorskip("torch")
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {
        "a.weight": torch.zeros(3, 5, dtype=torch.bfloat16),
        "a.weight_scale": torch.zeros((), dtype=torch.float32),
        "b.weight": torch.zeros(4, 8, dtype=torch.float8_e4m3fn),
        "b.scale": torch.zeros(1, 1, dtype=torch.float8_e8m0fnu),
        "c.qweight": torch.zeros(0, 8, dtype=torch.int32),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = read_header(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        theirs = {k: (file.get_slice(k).get_dtype(), tuple(file.get_slice(k).get_shape())) for k in file.keys()}  # noqa: SIM118
    assert {name: (t.dtype, t.shape) for name, t in ours.items()} == theirs


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases_read_back(case: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_case(case, tmp_path))
    assert {n: [t.dtype, list(t.shape)] for n, t in checkpoint.tensors.items()} == case["tensors"]
