"""Row quantization and block slices, by value."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools.experts.storage import (
    ExpertWeightError,
    dequantize,
    quantize_rows,
    slice_block_fp8,
    touched_blocks,
)

TP_BLOCKS = json.loads((Path(__file__).parents[1] / "data" / "tp_blocks.json").read_text())["cases"]
FLOAT32 = {"width": 32, "allow_nan": False, "allow_infinity": False, "min_value": 0.0}


def random_e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    """Every byte equally likely, NaN bytes included: slices keep bytes whatever they mean."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def half_step(values: torch.Tensor) -> torch.Tensor:
    """Half the distance between E4M3 neighbours around |values| (FP64), saturating at 448."""
    exponent = torch.floor(torch.log2(values.abs().clamp(min=2.0**-6))).clamp(max=8)
    return torch.exp2(exponent - 4)


@given(
    rows=st.integers(1, 5),
    columns=st.sampled_from([1, 16, 127, 256]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    exponent=st.integers(-130, 127),
    seed=st.integers(0, 2**16),
    zero_row=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_rows_are_within_half_a_step(rows, columns, dtype, exponent, seed, zero_row):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64) * 2.0**exponent
    limit = torch.finfo(dtype).max
    weight = values.clamp(-limit, limit).to(dtype)
    if zero_row:
        weight[0] = 0
    before = weight.clone()
    quantized, scale = quantize_rows(weight)
    assert same_bits(weight, before)
    assert quantized.dtype == torch.float8_e4m3fn
    assert scale.dtype == torch.float32
    assert scale.shape == (rows,)
    assert bool((scale > 0).all() and torch.isfinite(scale).all())
    on_grid = weight.double() / scale.double()[:, None]
    error = (quantized.double() - on_grid).abs()
    assert bool((error <= half_step(on_grid) * (1 + 2**-16)).all())


@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 65504.0, -65504.0, 2.0**-24, -(2.0**-24), 1.0, 0.3]),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=50, deadline=None)
def test_fp16_extremes_and_subnormals(row):
    weight = torch.tensor([row], dtype=torch.float16)
    quantized, scale = quantize_rows(weight)
    peak = weight.double().abs().max()
    if peak > 0:
        assert scale.item() == pytest.approx(peak.item() / 448, rel=1e-6)
    error = (quantized.double() * scale.double()[:, None] - weight.double()).abs()
    assert bool((error <= half_step(weight.double() / scale.double()) * scale.double() * (1 + 2**-16)).all())


def test_exact_values_survive():
    weight = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = weight[torch.isfinite(weight.float())].to(torch.float16)[None]
    quantized, scale = quantize_rows(finite)
    assert scale.item() == 1.0
    assert torch.equal(quantized.to(torch.float16), finite)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    weight = torch.zeros(3, 4, dtype=torch.bfloat16)
    weight[1, 2] = bad
    with pytest.raises(ExpertWeightError, match="NaN or infinity"):
        quantize_rows(weight)


@pytest.mark.parametrize("weight", [torch.zeros(2, 2), torch.zeros(4, dtype=torch.float16)])
def test_other_dtypes_and_vectors_are_refused(weight):
    with pytest.raises(ExpertWeightError, match="FP16 or BF16"):
        quantize_rows(weight)


@pytest.mark.parametrize("case", TP_BLOCKS, ids=lambda case: f"{case['width']}-tp{case['tp']}")
@pytest.mark.parametrize("axis", [0, 1])
def test_handed_cases(case, axis):
    shape = [256, 256]
    shape[axis] = case["width"]
    blocks = [-(-size // 128) for size in shape]
    weight = random_e4m3(*shape)
    scale = torch.rand(*blocks)
    for rank, (first, count, offset) in enumerate(case["ranks"]):
        assert touched_blocks(case["local"], rank) == (first, count, offset)
        part = slice_block_fp8(weight, scale, axis=axis, tp_size=case["tp"], tp_rank=rank)
        assert part.offset == offset
        assert torch.equal(part.scale, scale.narrow(axis, first, count))
        assert same_bits(part.weight, weight.narrow(axis, rank * case["local"], case["local"]))


def whole(weight: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Dequantized by brute force: each block's values times its scale."""
    out = weight.float()
    for i in range(scale.shape[-2]):
        for j in range(scale.shape[-1]):
            at = (..., slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            out[at] = out[at] * scale[..., i, j, None, None]
    return out


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    local=st.sampled_from([1, 3, 16, 48, 80, 127, 128, 160]),
    other=st.sampled_from([1, 130, 256]),
    axis=st.sampled_from([0, 1, -1, -2]),
    block=st.sampled_from([128, 16]),
    scales=st.lists(st.floats(**FLOAT32), min_size=1, max_size=8),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None)
def test_a_slice_dequantizes_to_the_slice_of_the_whole(tp, local, other, axis, block, scales, seed):
    shape = [other, other]
    shape[axis] = local * tp
    weight = random_e4m3(*shape, seed=seed)
    blocks = [-(-size // block) for size in shape]
    count = math.prod(blocks)
    scale = torch.tensor((scales * count)[:count], dtype=torch.float32).reshape(blocks)
    expected = whole(weight, scale, block)
    for rank in range(tp):
        part = slice_block_fp8(weight, scale, axis=axis, tp_size=tp, tp_rank=rank, block=block)
        assert list(part.weight.shape)[axis] == local
        assert same_bits(dequantize(part), expected.narrow(axis, rank * local, local))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_narrower_scales_widen_exactly(dtype):
    weight, scale = random_e4m3(256, 128), torch.tensor([[0.5], [2.0**-9]]).to(dtype)
    part = slice_block_fp8(weight, scale, axis=0, tp_size=2, tp_rank=1)
    assert part.scale.dtype == torch.float32
    assert part.scale.item() == 2.0**-9


def test_stacked_experts_slice_like_each_of_them():
    weight, scale = random_e4m3(3, 640, 256), torch.rand(3, 5, 2)
    stacked = slice_block_fp8(weight, scale, axis=-2, tp_size=4, tp_rank=3)
    for expert in range(3):
        one = slice_block_fp8(weight[expert], scale[expert], axis=0, tp_size=4, tp_rank=3)
        assert same_bits(dequantize(stacked)[expert], dequantize(one))


@pytest.mark.parametrize("bad", [-1.0, -1e-45, math.nan, math.inf, -math.inf])
def test_bad_scales_are_refused(bad):
    scale = torch.ones(1, 2)
    scale[0, 1] = bad
    with pytest.raises(ExpertWeightError, match="negative, NaN or infinite"):
        slice_block_fp8(random_e4m3(128, 256), scale, axis=0, tp_size=1, tp_rank=0)


@pytest.mark.parametrize("extreme", [0.0, 1e-45, torch.finfo(torch.float32).max])
def test_every_finite_scale_is_accepted(extreme):
    part = slice_block_fp8(random_e4m3(128, 128), torch.full((1, 1), extreme), axis=0, tp_size=2, tp_rank=1)
    assert part.scale.item() == torch.tensor(extreme, dtype=torch.float32).item()


@pytest.mark.parametrize(
    ("weight", "scale", "axis", "tp", "rank"),
    [
        (torch.zeros(128, 128), torch.ones(1, 1), 0, 1, 0),
        (random_e4m3(128, 128), torch.ones(1, 1, dtype=torch.float64), 0, 1, 0),
        (random_e4m3(128, 128), torch.ones(2, 1), 0, 1, 0),
        (random_e4m3(128, 128), torch.ones(1, 1), 0, 3, 0),
        (random_e4m3(128, 128), torch.ones(1, 1), 0, 2, 2),
        (random_e4m3(128, 128), torch.ones(1, 1), 2, 1, 0),
    ],
    ids=["dtype", "scale-dtype", "scale-shape", "indivisible", "rank", "axis"],
)
def test_wrong_slices_are_refused(weight, scale, axis, tp, rank):
    with pytest.raises(ExpertWeightError):
        slice_block_fp8(weight, scale, axis=axis, tp_size=tp, tp_rank=rank)
