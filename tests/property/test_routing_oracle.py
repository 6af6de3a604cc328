"""Routing against an oracle that knows nothing of headers: it decodes the bytes and compares the values.

A random matrix is stored in a format. The oracle tries every format's reference decoder on the stored tensors and
keeps the one that gives the matrix back; routing, which sees dtypes, shapes and names only, has to name the same
one, whatever stock chose and whatever the layer is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools.formats import Checkpoint, Format, Tensor
from drafttools.routing import Action, decide, source_of

Array = np.ndarray[Any, Any]
Parts = dict[str, tuple[str, Array]]
ROWS, COLUMNS, BLOCK, GROUP = 256, 256, 128, 64


def _fp8_values() -> Array:
    """The 256 values of E4M3 (OCP 8-bit floating point specification 1.0), NaN as infinity so that it never matches."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(codes & 127) == 127] = np.inf
    return np.where(codes >> 7, -magnitude, magnitude)


E4M3 = _fp8_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nearest(table: Array, values: Array) -> Array:
    order = np.argsort(table, kind="stable")
    ordered = table[order]
    middles = (ordered[1:] + ordered[:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


FINITE = np.where(np.isinf(E4M3), 448.0, E4M3)


def fp8(values: Array) -> Array:
    return nearest(FINITE, np.clip(values, -448, 448))


def spread(scale: Array, rows: int, columns: int) -> Array:
    """A scale for blocks of rows x columns, at every element."""
    return np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)


def per_block(weight: Array, rows: int, columns: int) -> Array:
    """Largest magnitude in each block."""
    blocks = np.abs(weight).reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    return blocks.max(axis=(1, 3))


def exponents(values: Array) -> Array:
    return np.clip(np.ceil(np.log2(values)) + 127, 0, 254).astype(np.uint8)


def power(codes: Array) -> Array:
    return 2.0 ** (codes.astype(float) - 127)


def pack_nibbles(codes: Array) -> Array:
    return (codes[:, ::2] | (codes[:, 1::2] << 4)).astype(np.uint8)


def nibbles(packed: Array) -> Array:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


AWQ_ORDER, PLAIN = (0, 2, 4, 6, 1, 3, 5, 7), tuple(range(8))


def pack_words(codes: Array, order: tuple[int, ...]) -> Array:
    words = codes.reshape(codes.shape[0], -1, 8).astype(np.uint32)
    return sum(words[..., source] << np.uint32(4 * place) for place, source in enumerate(order))  # type: ignore[return-value]


def words(packed: Array, order: tuple[int, ...]) -> Array:
    out = np.empty((*packed.shape, 8), dtype=np.uint32)
    for place, source in enumerate(order):
        out[..., source] = (packed >> np.uint32(4 * place)) & np.uint32(15)
    return out.reshape(packed.shape[0], -1)


# --- encoders: the matrix [out, in] as the tensors a checkpoint holds ---


def encode_unquantized(w: Array) -> Parts:
    return {"weight": ("BF16", w)}  # the decoder takes the numbers; rounding to BF16 is not what is tested


def encode_fp8(w: Array, scale: Array, role: str, dtype: str, stored: Array | None = None) -> Parts:
    return {"weight": ("F8_E4M3", fp8(w / scale)), role: (dtype, scale if stored is None else stored)}


def encode_fp8_tensor(w: Array) -> Parts:
    return encode_fp8(w, np.abs(w).max() / 448, "weight_scale", "F32")


def encode_fp8_channel(w: Array) -> Parts:
    return encode_fp8(w, np.abs(w).max(axis=1, keepdims=True) / 448, "weight_scale", "F32")


def encode_fp8_block(w: Array) -> Parts:
    scale = per_block(w, BLOCK, BLOCK) / 448
    return encode_fp8(w, spread(scale, BLOCK, BLOCK), "weight_scale_inv", "F32", scale)


def encode_mxfp8(w: Array) -> Parts:
    code = exponents(per_block(w, 1, 32) / 448)
    return encode_fp8(w, spread(power(code), 1, 32), "weight_scale", "U8", code)


def encode_mxfp4(w: Array) -> Parts:
    code = exponents(per_block(w, 1, 32) / 6)
    return {"weight": ("U8", pack_nibbles(nearest(E2M1, w / spread(power(code), 1, 32)))), "scale": ("F8_E8M0", code)}


def encode_nvfp4(w: Array) -> Parts:
    largest = per_block(w, 1, 16)
    overall = largest.max() / (6 * 448)
    code = fp8(largest / 6 / overall)
    scale = np.maximum(E4M3[code] * overall, 1e-30)
    packed = pack_nibbles(nearest(E2M1, w / spread(scale, 1, 16)))
    scales: Parts = {"weight_scale": ("F8_E4M3", code), "weight_scale_2": ("F32", np.array(overall))}
    return {"weight": ("U8", packed), **scales}


def encode_int8_channel(w: Array) -> Parts:
    scale = np.abs(w).max(axis=1, keepdims=True) / 127
    return {"weight": ("I8", np.round(w / scale).astype(np.int8)), "weight_scale": ("F32", scale)}


def int4_groups(w: Array) -> tuple[Array, Array]:
    """Codes [in, out] around 8, and scales [groups, out]."""
    scale = per_block(w.T, GROUP, 1) / 7
    return (np.round(w.T / spread(scale, GROUP, 1)) + 8).astype(np.uint32), scale


def encode_int4_awq(w: Array) -> Parts:
    codes, scale = int4_groups(w)
    zeros = pack_words(np.full(scale.shape, 8, np.uint32), AWQ_ORDER)
    return {"qweight": ("I32", pack_words(codes, AWQ_ORDER)), "qzeros": ("I32", zeros), "scales": ("F16", scale)}


def encode_int4_gptq(w: Array) -> Parts:
    codes, scale = int4_groups(w)
    zeros = pack_words(np.full(scale.shape, 7, np.uint32), PLAIN)  # stored less one
    return {"qweight": ("I32", pack_words(codes.T, PLAIN).T), "qzeros": ("I32", zeros), "scales": ("F16", scale)}


def encode_int4_ct(w: Array) -> Parts:
    codes, scale = int4_groups(w)
    return {"weight_packed": ("I32", pack_words(codes.T, PLAIN)), "weight_scale": ("BF16", scale.T)}


# --- reference decoders: None when the tensors cannot even be tried ---


def fp8_with(parts: Parts, scale: Array) -> Array:
    return E4M3[parts["weight"][1].astype(np.uint8)] * scale


def first(parts: Parts) -> Array:
    return next(parts[role] for role in ("weight_scale_inv", "weight_scale", "scale") if role in parts)[1]


def decode_unquantized(p: Parts) -> Array:
    return p["weight"][1].astype(float)


def decode_fp8_tensor(p: Parts) -> Array:
    return fp8_with(p, first(p).flat[0])


def decode_fp8_channel(p: Parts) -> Array:
    return fp8_with(p, first(p).reshape(ROWS, -1)[:, :1])


def decode_fp8_block(p: Parts) -> Array:
    return fp8_with(p, spread(first(p), BLOCK, BLOCK)[:ROWS, :COLUMNS])


def decode_mxfp8(p: Parts) -> Array:
    return fp8_with(p, spread(power(first(p)), 1, 32))


def decode_mxfp4(p: Parts) -> Array:
    scale = first(p)
    return E2M1[nibbles(p["weight"][1].astype(np.uint8))] * spread(power(scale), 1, COLUMNS // scale.shape[1])


def decode_nvfp4(p: Parts) -> Array:
    scale = E4M3[first(p).astype(np.uint8)] * p.get("weight_scale_2", ("F32", np.array(1.0)))[1]
    return E2M1[nibbles(p["weight"][1].astype(np.uint8))] * spread(scale, 1, COLUMNS // scale.shape[1])


def decode_int8_channel(p: Parts) -> Array:
    return p["weight"][1].astype(float) * first(p).reshape(ROWS, -1)[:, :1]


def decode_int4(codes: Array, zeros: Array, p: Parts) -> Array:
    scale = p["scales"][1]
    return ((codes.astype(float) - spread(zeros.astype(float), GROUP, 1)) * spread(scale, GROUP, 1)).T


def decode_int4_awq(p: Parts) -> Array:
    return decode_int4(words(p["qweight"][1], AWQ_ORDER), words(p["qzeros"][1], AWQ_ORDER), p)


def decode_int4_gptq(p: Parts) -> Array:
    return decode_int4(words(p["qweight"][1].T, PLAIN).T, words(p["qzeros"][1], PLAIN) + 1, p)


def decode_int4_ct(p: Parts) -> Array:
    return (words(p["weight_packed"][1], PLAIN).astype(float) - 8) * spread(p["weight_scale"][1], 1, GROUP)


FORMATS = [f for f in Format if f.loadable]
ENCODE: dict[Format, Callable[[Array], Parts]] = {f: globals()[f"encode_{f}"] for f in FORMATS}
DECODE: dict[Format, Callable[[Parts], Array]] = {f: globals()[f"decode_{f}"] for f in FORMATS}


def matching(parts: Parts, weight: Array) -> list[Format]:
    """The oracle: the formats whose decoder gives the matrix back."""
    found = []
    for candidate, decode in DECODE.items():
        try:
            with np.errstate(all="ignore"):
                decoded = decode(parts)
        except (KeyError, ValueError, IndexError, TypeError, StopIteration):
            continue
        if decoded.shape == weight.shape and np.linalg.norm(decoded - weight) < 0.25 * np.linalg.norm(weight):
            found.append(candidate)
    return found


def random_weight(seed: int) -> Array:
    """Blocks, rows and runs of columns of very different size, so that no scale can stand in for another."""
    generator = np.random.default_rng(seed)
    blocks = generator.permutation(2.0 ** np.array([-6, -2, 2, 6])).reshape(2, 2)
    rows = generator.permutation(np.tile(2.0 ** np.arange(-2, 2), ROWS // 4)).reshape(ROWS, 1)
    runs = np.repeat(generator.permutation(np.tile([0.5, 1.0, 2.0, 4.0], COLUMNS // 64)), 16)
    return generator.normal(size=(ROWS, COLUMNS)) * spread(blocks, BLOCK, BLOCK) * rows * runs


@given(
    stored=st.sampled_from(FORMATS),
    stock=st.sampled_from(FORMATS),
    seed=st.integers(0, 2**32 - 1),
    hidden=st.integers(1, 40),
    names=st.sampled_from(
        [
            ("mtp.0.mlp.down_proj", "model.layers.{}.mtp_block.mlp.down_proj"),
            ("mtp.layers.0.a", "mtp.layers.{}.a"),
            ("model.layers.{}.eh_proj", "layers.{}.eh_proj"),
            ("model.mtp.0.a.b", "model.mtp.layers.0.a.b"),
        ]
    ),
)
@settings(max_examples=80, deadline=None)
def test_routing_answers_what_the_values_say(
    stored: Format, stock: Format, seed: int, hidden: int, names: tuple[str, str]
) -> None:
    weight = random_weight(seed)
    parts = ENCODE[stored](weight)
    truth = matching(parts, weight)
    assert truth == [stored]  # one format, and only one, gives the values back

    module, prefix = (name.format(hidden) for name in names)
    tensors = {f"{module}.{role}": Tensor(dtype, values.shape, "f") for role, (dtype, values) in parts.items()}
    config = {"num_hidden_layers": hidden, "num_nextn_predict_layers": 1}
    source = source_of(Checkpoint("memory", config, tensors))
    decision = decide(
        source.lookup(prefix), stock, routed_experts=False, trunk_nvfp4=False, family="compressed-tensors"
    )
    if stock is stored:
        assert decision.action is Action.KEEP
    else:
        assert decision.action in (Action.REPLACE, Action.STOP)
    assert decision.answer is (None if decision.action is Action.STOP else truth[0])
