"""The compiled FP8 expert kernel on a real GPU: values, determinism, graphs, refusals."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from drafttools.experts import extension  # noqa: E402
from drafttools.experts.op import fp8_experts  # noqa: E402
from drafttools.experts.reference import fp8_experts_reference  # noqa: E402

MISSING = extension.unavailable() if torch.cuda.is_available() else "needs a CUDA device"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

TOLERANCE = 1e-3  # relative L2 against FP64
BLOCK = 128


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    extension.load()


def random_fp8(*shape: int) -> torch.Tensor:
    """Every finite E4M3 byte, subnormals and both zeros included."""
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    return finite[torch.randint(len(finite), shape, device="cuda")].view(torch.float8_e4m3fn)


def make_arguments(
    tokens: int, experts: int, hidden: int, local: int, top_k: int, block: int = 0, offset: int = 0
) -> list[object]:
    """Random operator arguments; scales keep activations and outputs near one."""
    w13, w2 = random_fp8(experts, 2 * local, hidden), random_fp8(experts, hidden, local)
    if block:
        blocks = -(-(offset + local) // block)
        w13_shape = (experts, 2 * blocks, -(-hidden // block))
        w2_shape = (experts, -(-hidden // block), blocks)
    else:
        w13_shape, w2_shape = (experts, 2 * local), (experts, hidden)
    w13_scale = (torch.rand(w13_shape, device="cuda") + 0.5) * (0.01 / hidden**0.5)
    w2_scale = (torch.rand(w2_shape, device="cuda") + 0.5) * (0.01 / local**0.5)
    x = torch.randn(tokens, hidden, device="cuda").half()
    weights = torch.rand(tokens, top_k, device="cuda")
    ids = torch.randint(experts, (tokens, top_k), device="cuda", dtype=torch.int32)
    return [x, w13, w13_scale, w2, w2_scale, weights, ids, block, block, offset, offset]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 17, 64, 200, 1024, 4200])
@pytest.mark.parametrize(("block", "offset"), [(0, 0), (BLOCK, 0), (BLOCK, 32), (BLOCK, 64), (BLOCK, 96)])
def test_matches_fp64(tokens: int, block: int, offset: int) -> None:
    arguments = make_arguments(tokens, 32, 512, 160, 10, block, offset)
    assert relative_error(fp8_experts(*arguments), fp8_experts_reference(*arguments)) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 5, 40, 700])
@pytest.mark.parametrize(
    ("experts", "hidden", "local", "top_k"),
    [(1, 128, 16, 1), (3, 128, 48, 2), (7, 384, 80, 4), (5, 256, 640, 3), (4, 640, 1024, 12), (600, 128, 32, 8)],
)
@pytest.mark.parametrize("block", [0, BLOCK])
def test_other_shapes_match_fp64(tokens: int, experts: int, hidden: int, local: int, top_k: int, block: int) -> None:
    arguments = make_arguments(tokens, experts, hidden, local, top_k, block)
    assert relative_error(fp8_experts(*arguments), fp8_experts_reference(*arguments)) < TOLERANCE


@pytest.mark.parametrize("tokens", [2, 40, 80, 200])
@pytest.mark.parametrize("block", [0, BLOCK])
def test_every_kernel_once(tokens: int, block: int) -> None:
    """Both routes and all tile sizes at small shapes; what compute-sanitizer is run on (kernels/README.md)."""
    arguments = make_arguments(tokens, 16, 256, 160, 2, block)
    assert relative_error(fp8_experts(*arguments), fp8_experts_reference(*arguments)) < TOLERANCE


@pytest.mark.parametrize("tokens", [3, 30, 2000])
def test_ids_may_be_int64_repeated_or_out_of_range(tokens: int) -> None:
    arguments = make_arguments(tokens, 16, 256, 160, 6)
    ids = arguments[6].long()
    ids[:, 1] = ids[:, 0]
    ids[::2, 2] = -1
    ids[::3, 3] = 16
    ids[0] = -1
    arguments[6] = ids
    got = fp8_experts(*arguments)
    assert relative_error(got, fp8_experts_reference(*arguments)) < TOLERANCE
    assert not got[0].any()


def test_one_expert_takes_every_token() -> None:
    arguments = make_arguments(500, 16, 256, 160, 4)
    arguments[6].fill_(11)
    assert relative_error(fp8_experts(*arguments), fp8_experts_reference(*arguments)) < TOLERANCE


def test_no_tokens() -> None:
    arguments = make_arguments(0, 4, 128, 16, 2)
    assert fp8_experts(*arguments).shape == (0, 128)


@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 1500])
def test_same_bits_every_time(tokens: int) -> None:
    arguments = make_arguments(tokens, 64, 512, 160, 10)
    first = fp8_experts(*arguments)
    for _ in range(10):
        assert torch.equal(fp8_experts(*arguments), first)


@pytest.mark.parametrize("tokens", [1, 2, 8, 64])
@pytest.mark.parametrize(("block", "offset"), [(0, 0), (BLOCK, 0), (BLOCK, 32), (BLOCK, 64), (BLOCK, 96)])
def test_graph_replay_follows_its_inputs(tokens: int, block: int, offset: int) -> None:
    arguments = make_arguments(tokens, 64, 512, 160, 10, block, offset)
    fp8_experts(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fp8_experts(*arguments)
    for seed in range(3):
        torch.manual_seed(seed)
        arguments[0].normal_()
        arguments[6].random_(0, 64)  # other experts, other tiles
        arguments[1].view(torch.uint8).copy_(random_fp8(*arguments[1].shape).view(torch.uint8))
        graph.replay()
        assert torch.equal(captured, fp8_experts(*arguments))
        assert relative_error(captured, fp8_experts_reference(*arguments)) < TOLERANCE


def test_refuses_what_it_does_not_support() -> None:
    good = make_arguments(2, 4, 256, 32, 2, BLOCK)
    for index, value, message in [
        (0, good[0].bfloat16(), "x has the wrong dtype"),
        (0, good[0][:, ::2], "multiple of 128|wrong shape|not contiguous"),
        (1, good[1].transpose(1, 2), "w13"),
        (4, good[4][:, :1], "w2_scale"),
        (5, good[5].half(), "topk_weights"),
        (6, good[6].short(), "topk_ids"),
        (7, 48, "scale blocks"),
        (9, 8, "offsets"),
        (10, 128, "offsets"),
    ]:
        bad = list(good)
        bad[index] = value
        with pytest.raises(RuntimeError, match=message):
            fp8_experts(*bad)
