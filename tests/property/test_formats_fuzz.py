"""Damaged containers never crash the reader: it returns what the file really holds or names the file."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools.formats import DTYPE_BITS, HeaderError, Tensor, classify, read_header, split_name
from tests.make_checkpoint import container, entries

SHAPES = st.lists(st.integers(0, 40), max_size=4)
DTYPES = st.sampled_from(sorted(d for d, bits in DTYPE_BITS.items() if bits >= 8))
HEADERS = st.dictionaries(st.text(min_size=1, max_size=20), st.tuples(DTYPES, SHAPES), max_size=5).map(
    lambda header: {name: spec for name, spec in header.items() if name != "__metadata__"}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def read(content: bytes) -> dict[str, Tensor] | None:
    """What the reader returns, or None when it refuses by naming the file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.safetensors"
        path.write_bytes(content)
        try:
            return read_header(path)
        except HeaderError as error:
            refusal = str(error)
    assert str(path) in refusal
    return None


def file_of(header: dict[str, tuple[str, list[int]]]) -> bytes:
    listed, size = entries(header)
    return container(json.dumps(listed).encode(), size)


@given(HEADERS)
@settings(max_examples=60, deadline=None)
def test_whole_files_are_read(header: dict[str, tuple[str, list[int]]]) -> None:
    found = read(file_of(header))
    assert found is not None
    assert {name: (t.dtype, list(t.shape)) for name, t in found.items()} == header


@given(HEADERS, st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_is_noticed_or_harmless(header: dict[str, tuple[str, list[int]]], data: st.DataObject) -> None:
    content = bytearray(file_of(header))
    cut = data.draw(st.integers(0, len(content)), label="cut")
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3), label="places"):
        content[place] = data.draw(st.integers(0, 255))
    found = read(bytes(content[:cut]))
    if found is not None:  # whatever was damaged, what is reported fits the bytes that are there
        assert sum(math.prod(t.shape) * DTYPE_BITS[t.dtype] for t in found.values()) <= 8 * cut


@given(JSON, st.integers(0, 64))
@settings(max_examples=150, deadline=None)
def test_arbitrary_json(header: object, data_bytes: int) -> None:
    read(container(json.dumps(header).encode(), data_bytes))


@given(st.fixed_dictionaries({"a": st.fixed_dictionaries({"dtype": JSON, "shape": JSON, "data_offsets": JSON})}))
@settings(max_examples=150, deadline=None)
def test_arbitrary_entries(header: object) -> None:
    read(container(json.dumps(header).encode(), 16))


ROLES = ("weight", "weight_scale", "weight_scale_inv", "weight_scale_2", "scale", "scales", "qweight", "qzeros")
MORE_ROLES = ("weight_packed", "weight_global_scale", "blocks", "bias", "anything")


@given(
    st.dictionaries(
        st.sampled_from(ROLES + MORE_ROLES), st.tuples(st.sampled_from(sorted(DTYPE_BITS)), SHAPES), max_size=6
    )
)
@settings(max_examples=300, deadline=None)
def test_any_mixture_of_tensors_is_classified(parts: dict[str, tuple[str, list[int]]]) -> None:
    stored = classify({role: Tensor(dtype, tuple(shape), "f") for role, (dtype, shape) in parts.items()})
    assert stored.format.loadable or stored.note or not parts


@given(st.lists(st.sampled_from(["model", "layers", "3", "mtp", "experts", "w1", "weight", "x_y"]), min_size=2))
@settings(deadline=None)
def test_split_names_join_again(words: list[str]) -> None:
    name = ".".join(words)
    module, role = split_name(name)
    assert name in (f"{module}.{role}", module)  # a fused stack's own name carries no role
