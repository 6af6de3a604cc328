"""The operator on the CPU against FP64, its registration, and torch.compile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools.experts.op import fp8_experts
from drafttools.experts.reference import fp8_experts_reference
from drafttools.experts.storage import slice_block_fp8, touched_blocks

HIDDEN, LOCAL, TOKENS = (128, 256, 2560), (16, 48, 80, 160, 256, 640), (0, 1, 2, 8, 64, 257)


@pytest.fixture(autouse=True)
def one_thread():
    """Small products on a shared machine: waiting for a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def routing(tokens: int, top_k: int, experts: int, generator: torch.Generator):
    ids = torch.randint(0, experts, (tokens, top_k), generator=generator, dtype=torch.int32)
    return torch.rand(tokens, top_k, generator=generator), ids


def finite_e4m3(shape, generator):
    """Random bytes with the two NaN ones cleared; about 130 in the mean square."""
    bytes_ = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return torch.where((bytes_ & 0x7F) == 0x7F, 0, bytes_).view(torch.float8_e4m3fn)


def scales(shape, width, generator):
    return torch.rand(shape, generator=generator) / (130 * width**0.5)


def row_arguments(experts, hidden, local, generator):
    w13, w2 = (
        finite_e4m3((experts, 2 * local, hidden), generator),
        finite_e4m3((experts, hidden, local), generator),
    )
    w13_scale = scales((experts, 2 * local), hidden, generator)
    return (w13, w13_scale, w2, scales((experts, hidden), local, generator)), (0, 0, 0, 0)


def block_arguments(experts, hidden, local, generator, rank=1):
    """A rank's slice: rank 1 begins at column `local`, inside a block for most widths."""
    _, blocks, offset = touched_blocks(local, rank)
    w13, w2 = (
        finite_e4m3((experts, 2 * local, hidden), generator),
        finite_e4m3((experts, hidden, local), generator),
    )
    w13_scale = scales((experts, 2 * blocks, -(-hidden // 128)), hidden, generator)
    w2_scale = scales((experts, -(-hidden // 128), blocks), local, generator)
    return (w13, w13_scale, w2, w2_scale), (128, 128, offset, offset)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm().clamp(min=1e-30))


@pytest.mark.parametrize("make", [row_arguments, block_arguments], ids=["rows", "blocks"])
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_against_fp64(make, hidden, local):
    generator = torch.Generator().manual_seed(hidden + local)
    experts = 2 if hidden == 2560 else 4
    weights, layout = make(experts, hidden, local, generator)
    for i, tokens in enumerate(TOKENS):
        # over the shapes every top-k from 1 to 10 occurs with every M; more choices than experts repeat ids
        top_k = 1 + (i + 3 * HIDDEN.index(hidden) + LOCAL.index(local)) % 10
        x = torch.randn(tokens, hidden, generator=generator).half()
        topk_weights, topk_ids = routing(tokens, top_k, experts, generator)
        arguments = (x, *weights, topk_weights, topk_ids, *layout)
        out = fp8_experts(*arguments)
        assert out.dtype == torch.float16
        assert out.shape == (tokens, hidden)
        assert relative_error(out, fp8_experts_reference(*arguments)) < 1e-3


@pytest.mark.parametrize("make", [row_arguments, block_arguments], ids=["rows", "blocks"])
def test_same_bits_every_time(make):
    generator = torch.Generator().manual_seed(5)
    weights, layout = make(4, 256, 160, generator)
    x = torch.randn(64, 256, generator=generator).half()
    arguments = (x, *weights, *routing(64, 10, 4, generator), *layout)
    assert torch.equal(fp8_experts(*arguments), fp8_experts(*arguments))


@given(
    tokens=st.integers(0, 9),
    top_k=st.integers(1, 10),
    experts=st.integers(1, 5),
    local=st.sampled_from([16, 48, 160]),
    rank=st.integers(0, 7),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    ids=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_every_rank_dtype_and_id(tokens, top_k, experts, local, rank, dtype, ids, seed):
    generator = torch.Generator().manual_seed(seed)
    weights, layout = block_arguments(experts, 128, local, generator, rank)
    x = torch.randn(tokens, 128, generator=generator).to(dtype)
    topk_weights, _ = routing(tokens, top_k, experts, generator)
    topk_ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator).to(ids)
    arguments = (x, *weights, topk_weights, topk_ids, *layout)
    limit = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}[dtype]
    assert relative_error(fp8_experts(*arguments), fp8_experts_reference(*arguments)) < limit


def sliced_arguments(whole, tp, rank):
    """Rank `rank`'s arguments, cut by slice_block_fp8 out of whole gate, up and down projections."""
    gate, up = (slice_block_fp8(*whole[name], axis=-2, tp_size=tp, tp_rank=rank) for name in ("gate", "up"))
    down = slice_block_fp8(*whole["down"], axis=-1, tp_size=tp, tp_rank=rank)
    w13 = torch.cat([gate.weight, up.weight], dim=-2), torch.cat([gate.scale, up.scale], dim=-2)
    return (*w13, down.weight.contiguous(), down.scale.contiguous()), (128, 128, gate.offset, down.offset)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_add_up_to_the_unsharded_layer(tp):
    """vLLM all-reduces after the layer: the ranks' outputs sum to the whole layer's."""
    generator = torch.Generator().manual_seed(7)
    whole = {
        "gate": (finite_e4m3((3, 640, 128), generator), scales((3, 5, 1), 128, generator)),
        "up": (finite_e4m3((3, 640, 128), generator), scales((3, 5, 1), 128, generator)),
        "down": (finite_e4m3((3, 128, 640), generator), scales((3, 1, 5), 640, generator)),
    }
    x, routed = torch.randn(5, 128, generator=generator), routing(5, 2, 3, generator)

    def layer(size, rank):
        weights, layout = sliced_arguments(whole, size, rank)
        return fp8_experts(x, *weights, *routed, *layout)

    assert relative_error(sum(layer(tp, rank) for rank in range(tp)), layer(1, 0).double()) < 1e-5


@pytest.fixture
def arguments():
    generator = torch.Generator().manual_seed(3)
    weights, layout = block_arguments(3, 128, 48, generator)
    x = torch.randn(4, 128, generator=generator).half()
    return (x, *weights, *routing(4, 2, 3, generator), *layout)


def test_opcheck(arguments, monkeypatch):
    # opcheck compares inputs before and after with allclose, which torch 2.13 lacks for E4M3 on the CPU
    allclose = torch.allclose

    def allclose_bytes(a, b, **kwargs):
        fp8 = a.dtype == torch.float8_e4m3fn
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if fp8 else allclose(a, b, **kwargs)

    monkeypatch.setattr(torch, "allclose", allclose_bytes)
    result = torch.library.opcheck(torch.ops.drafttools.fp8_experts.default, arguments)
    assert set(result.values()) == {"SUCCESS"}


def test_compiled_in_one_graph(arguments):
    def layer(x):
        return fp8_experts(x, *arguments[1:]) + 1

    explanation = torch._dynamo.explain(layer)(arguments[0])
    assert explanation.graph_break_count == 0
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(arguments[0]), layer(arguments[0]))


@pytest.mark.parametrize(
    ("position", "wrong"),
    [
        (0, torch.zeros(4, 256).half()),
        (1, torch.zeros(3, 96, 128)),
        (2, torch.ones(3, 2, 2)),
        (4, torch.ones(3, 1, 5)),
        (4, torch.ones(3, 1, 1).double()),
        (5, torch.ones(4, 3)),
        (7, 0),
        (9, -1),
    ],
)
def test_shapes_the_schema_does_not_mean(arguments, position, wrong):
    changed = list(arguments)
    changed[position] = wrong
    with pytest.raises(ValueError, match="fp8_experts"):
        fp8_experts(*changed)
