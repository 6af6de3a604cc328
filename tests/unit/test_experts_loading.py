"""FP8 experts through vLLM's own RoutedExperts: selection, allocation, the weight stream, and what is refused."""

import itertools
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
vllm = pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod  # noqa: E402

from drafttools.errors import DraftToolsError  # noqa: E402
from drafttools.experts.method import Fp8ExpertsMethod  # noqa: E402
from drafttools.experts.reference import fp8_experts_reference  # noqa: E402
from drafttools.experts.selection import choose  # noqa: E402
from drafttools.experts.storage import (  # noqa: E402
    ExpertSlice,
    ExpertWeightError,
    dequantize,
    quantize_rows,
    slice_block_fp8,
    touched_blocks,
)
from drafttools.patches import fp8_experts  # noqa: E402
from drafttools.patching import Applied, State  # noqa: E402
from drafttools.source import Tree  # noqa: E402
from tests.unit.expert_layers import (  # noqa: E402
    EXPERTS,
    HIDDEN,
    PREFIX,
    WIDTH,
    build,
    draft_load,
    fp8_stream,
    fp16_stream,
    quantization_config,
    speculative_config,
    volta,
    write_checkpoint,
)

pytestmark = pytest.mark.vllm

RANKS = [(tp, rank) for tp in (1, 2, 4, 8) for rank in range(tp)]
TARGETS = ["awq", "nvfp4", "mixed", "block_scales", "fp8"]
SHARDS = (("gate_proj", "w13", 0), ("up_proj", "w13", 1), ("down_proj", "w2", 0))


@pytest.fixture(scope="module", autouse=True)
def patched():
    applied = Applied(fp8_experts.PATCH)
    applied.try_apply(Tree(Path(vllm.__file__).parent))
    assert applied.state is State.APPLIED, applied.reason
    yield
    assert applied.undo() == []


def vllm_config_of(target: str, fp8: bool):
    """vLLM's own quantization config object for a target."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    raw = quantization_config(target, fp8)
    name = {"awq": "awq", "nvfp4": "modelopt_fp4", "fp8": "fp8"}.get(target, "modelopt_mixed")
    return get_quantization_config(name).from_config(raw)


def built(path, stream, target="awq", *, quant_config=None, separate=None, speculative=None, **where):
    """The layer on a simulated V100, and its checkpoint."""
    draft = write_checkpoint(path, stream, quantization_config(target, fp8=True))
    with draft_load(speculative or speculative_config(draft, separate)), volta():
        return build(quant_config, **where)


def load(layer, stream, order=None):
    items = list(stream.items())
    if order is not None:
        random.Random(order).shuffle(items)
    loaded = set(layer.load_weights(items))
    layer.quant_method.process_weights_after_loading(layer)
    return loaded


def half(tensor, which):
    return tensor.chunk(2, dim=0)[which]


def kept(layer, expert, stem, which, scale_name="weight_scale_inv"):
    """One shard as the layer keeps it: weight and scale."""
    weight, scale = (getattr(layer, f"{stem}_{name}")[expert] for name in ("weight", scale_name))
    return (weight, scale) if stem == "w2" else (half(weight, which), half(scale, which))


@pytest.mark.parametrize(("target", "rank"), [(t, r) for t, r in zip(itertools.cycle(TARGETS), RANKS, strict=False)])
def test_online_experts_are_quantized_rank_by_rank(tmp_path, target, rank):
    tp_size, tp_rank = rank
    stream = fp16_stream(tp_rank)
    config = vllm_config_of(target, fp8=False)
    layer = built(tmp_path, stream, target, quant_config=config, tp_size=tp_size, tp_rank=tp_rank)
    assert layer.quant_method.route == "online"
    assert load(layer, stream, order=tp_rank) == {"w13_weight", "w2_weight"}
    local = WIDTH // tp_size
    assert layer.w13_weight.shape == (EXPERTS, 2 * local, HIDDEN)
    assert layer.w2_weight.shape == (EXPERTS, HIDDEN, local)
    for expert, (name, stem, which) in itertools.product(range(EXPERTS), SHARDS):
        axis = 1 if stem == "w2" else 0
        part = stream[f"{expert}.{name}.weight"].narrow(axis, tp_rank * local, local)
        weight, scale = kept(layer, expert, stem, which, "weight_scale")
        expected, expected_scale = quantize_rows(part)
        assert torch.equal(weight.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize(("target", "rank"), [(t, r) for t, r in zip(itertools.cycle(TARGETS), RANKS, strict=False)])
def test_native_experts_keep_the_checkpoints_bytes(tmp_path, target, rank):
    tp_size, tp_rank = rank
    stream = fp8_stream(tp_rank)
    config = vllm_config_of(target, fp8=True)
    layer = built(tmp_path, stream, target, quant_config=config, tp_size=tp_size, tp_rank=tp_rank)
    assert layer.quant_method.route == "native"
    load(layer, stream, order=tp_rank)
    offset = touched_blocks(WIDTH // tp_size, tp_rank)[2]
    for expert, (name, stem, which) in itertools.product(range(EXPERTS), SHARDS):
        axis = -1 if stem == "w2" else -2
        source = stream[f"{expert}.{name}.weight"], stream[f"{expert}.{name}.weight_scale_inv"]
        expected = slice_block_fp8(*source, axis=axis, tp_size=tp_size, tp_rank=tp_rank)
        weight, scale = kept(layer, expert, stem, which)
        assert torch.equal(weight.view(torch.uint8), expected.weight.contiguous().view(torch.uint8))
        assert torch.equal(dequantize(ExpertSlice(weight, scale, offset, axis)), dequantize(expected))


@pytest.mark.parametrize("make", [fp16_stream, fp8_stream], ids=["online", "native"])
def test_the_ranks_compute_the_layer(tmp_path, make):
    """What four ranks' layers return adds up to FP64 over the unsharded layer."""
    stream = make(3)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, EXPERTS, (9, 2), dtype=torch.int32)
    weights = torch.rand(9, 2)
    total = torch.zeros(9, HIDDEN)
    for tp_rank in range(4):
        layer = built(tmp_path / str(tp_rank), stream, tp_size=4, tp_rank=tp_rank)
        load(layer, stream)
        total += layer.forward_modular(x, weights, ids)
    whole = built(tmp_path / "whole", stream)
    load(whole, stream)
    method = whole.quant_method
    held = [method._held(whole, name) for name in ("w13", "w13_scale", "w2", "w2_scale")]
    expected = fp8_experts_reference(x, *held, weights, ids, method.layout.block, method.layout.block, 0, 0)
    # a rank's down projection has its own row scales online, so ranks and whole differ by FP8 rounding there
    limit = 0.05 if method.route == "online" else 1e-5
    assert float((total.double() - expected).norm() / expected.norm()) < limit


@pytest.mark.parametrize(
    "stored",
    [
        {"suffix": "weight_scale"},
        {"suffix": "weight_scale", "four_d": True},
        {"suffix": "weight_scale_inv", "dtype": torch.bfloat16},
    ],
    ids=["name", "modelopt-4d", "bf16"],
)
def test_spellings_of_block_scales(tmp_path, stored):
    stream = fp8_stream(1, **stored)
    layer = built(tmp_path, stream, "mixed", tp_size=4, tp_rank=3)
    load(layer, stream)
    scale = stream[f"1.up_proj.{stored['suffix']}"].float().reshape(5, 2)
    assert torch.equal(kept(layer, 1, "w13", 1, stored["suffix"])[1], scale[3:5])


def test_a_separate_draft_is_read_from_its_own_checkpoint(tmp_path):
    stream = fp8_stream(1)
    target = write_checkpoint(
        tmp_path / "target", {"0.gate_proj.qweight": torch.zeros(1)}, quantization_config("awq", False)
    )
    layer = built(tmp_path / "draft", stream, "fp8", separate=target)
    load(layer, stream)
    assert layer.quant_method.route == "native"


@pytest.mark.parametrize("tp", [1, 4])
def test_it_weighs_what_the_layer_reports(tmp_path, tp):
    stream = fp16_stream()
    layer = built(tmp_path, stream, tp_size=tp)
    load(layer, stream)
    held = [*layer.parameters(), *(b for name, b in layer.named_buffers() if "scale" in name)]
    assert sum(t.nbytes for t in held) == layer.drafttools_fp8_experts["bytes_fp8"]
    assert layer.drafttools_fp8_experts["bytes_fp16"] == sum(t.nbytes for t in stream.values()) // tp


def test_a_second_load_replaces_the_first(tmp_path):
    layer = built(tmp_path, fp16_stream(0))
    load(layer, fp16_stream(0))
    load(layer, fp16_stream(1))
    expected, _ = quantize_rows(fp16_stream(1)["1.down_proj.weight"])
    assert torch.equal(layer.w2_weight[1].view(torch.uint8), expected.view(torch.uint8))
    layer.quant_method.process_weights_after_loading(layer)  # without a reload: nothing to complain about


def test_a_reload_reaches_weights_that_were_moved(tmp_path):
    layer = built(tmp_path, fp16_stream(0))
    load(layer, fp16_stream(0))
    layer.w2_weight.data = layer.w2_weight.data.clone()  # as CPU offloading does
    load(layer, fp16_stream(1))
    expected, _ = quantize_rows(fp16_stream(1)["1.down_proj.weight"])
    assert torch.equal(layer.w2_weight[1].view(torch.uint8), expected.view(torch.uint8))


# Who gets the method


def test_without_the_option_stock_decides(tmp_path):
    draft = write_checkpoint(tmp_path, fp16_stream(), quantization_config("awq", False))
    with draft_load(speculative_config(draft, option=None)):
        assert isinstance(build().quant_method, UnquantizedFusedMoEMethod)


def test_a_target_layer_is_left_alone(tmp_path):
    from vllm.config import VllmConfig, set_current_vllm_config

    draft = write_checkpoint(tmp_path, fp16_stream(), None)
    config = VllmConfig()
    config.speculative_config = speculative_config(draft)
    with set_current_vllm_config(config):
        assert isinstance(build().quant_method, UnquantizedFusedMoEMethod)


def test_native_experts_need_no_option_where_stock_has_no_way(tmp_path):
    speculative = speculative_config(tmp_path, option=None)
    layer = built(tmp_path, fp8_stream(), "fp8", speculative=speculative)
    assert layer.quant_method.route == "native"


def test_unquantized_experts_stay_without_the_option_on_volta(tmp_path):
    draft = write_checkpoint(tmp_path, fp16_stream(), None)
    stock = object()
    with draft_load(speculative_config(draft, option=None)), volta():
        assert choose(PREFIX, None, lambda: stock) is stock


def test_experts_in_another_format_are_refused(tmp_path):
    stream = {
        f"{e}.{p}.{role}": tensor
        for e in range(EXPERTS)
        for p in ("gate_proj", "up_proj", "down_proj")
        for role, tensor in (
            ("weight", torch.zeros(128, 128, dtype=torch.uint8)),
            ("weight_scale", torch.zeros(128, 16).to(torch.float8_e4m3fn)),
            ("weight_scale_2", torch.zeros(1)),
        )
    }
    with pytest.raises(DraftToolsError, match="holds nvfp4"):
        built(tmp_path, stream, "nvfp4")


def test_admission_guards_the_layer(tmp_path):
    draft = write_checkpoint(tmp_path, fp16_stream(), None)
    with draft_load(speculative_config(draft)), pytest.raises(DraftToolsError, match=r"platform must be CUDA, not cpu"):
        build()


def test_the_override_admits_and_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTTOOLS_FP8_EXPERTS_UNSUPPORTED", "1")
    draft = write_checkpoint(tmp_path, fp16_stream(), None)
    with draft_load(speculative_config(draft)):
        layer = build(dtype=torch.bfloat16)
    load(layer, fp16_stream())
    assert layer.drafttools_fp8_experts["unsupported_override"] is True


@pytest.mark.parametrize(
    "changes", [{"swiglu_limit": 7.0}, {"apply_router_weight_on_input": True}, {"is_fused_checkpoint_transposed": True}]
)
def test_other_computations_are_refused(tmp_path, changes):
    with pytest.raises(DraftToolsError, match="they use"):
        built(tmp_path, fp16_stream(), **changes)


# Streams that must not serve


def without(stream, name):
    return {key: tensor for key, tensor in stream.items() if key != name}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (fp16_stream, "1.up_proj.weight"),
        (fp8_stream, "0.down_proj.weight"),
        (fp8_stream, "1.gate_proj.weight_scale_inv"),
    ],
)
def test_missing(tmp_path, make, name):
    layer = built(tmp_path, make())
    with pytest.raises(ExpertWeightError, match=f"lacks {PREFIX}.{name};"):
        load(layer, without(make(), name))
    assert not layer.quant_method.loader.complete


@pytest.mark.parametrize(
    ("make", "name"), [(fp16_stream, "1.up_proj.weight"), (fp8_stream, "0.down_proj.weight_scale_inv")]
)
def test_duplicate(tmp_path, make, name):
    layer = built(tmp_path, make())
    stream = [*make().items(), (name, make()[name])]
    with pytest.raises(ExpertWeightError, match=f"{PREFIX}.{name} is in the checkpoint twice"):
        list(layer.load_weights(stream))


@pytest.mark.parametrize("expert", [EXPERTS, EXPERTS + 97])
def test_extra_expert(tmp_path, expert):
    layer = built(tmp_path, fp16_stream())
    stream = fp16_stream() | {f"{expert}.up_proj.weight": torch.zeros(WIDTH, HIDDEN).half()}
    with pytest.raises(ExpertWeightError, match=f"{PREFIX}.{expert}.up_proj.weight is an extra expert"):
        list(layer.load_weights(stream.items()))
    weight_loader = layer.w13_weight.weight_loader
    with pytest.raises(ExpertWeightError, match=f"no expert {expert}"):
        weight_loader(layer.w13_weight, stream["0.up_proj.weight"], "w13_weight", shard_id="w3", expert_id=expert)


NAN_BYTE = torch.full((1,), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("make", "name", "change"),
    [
        (fp16_stream, "0.up_proj.weight", lambda t: t[:-1]),
        (fp16_stream, "0.down_proj.weight", lambda t: t.T.contiguous()),
        (fp16_stream, "0.up_proj.weight", lambda t: t.float()),
        (fp16_stream, "0.up_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
        (fp16_stream, "0.up_proj.weight", lambda t: t * torch.inf),
        (fp8_stream, "0.up_proj.weight", lambda t: t[:, :128]),
        (fp8_stream, "0.up_proj.weight", lambda t: t.half()),
        (fp8_stream, "0.gate_proj.weight", lambda t: NAN_BYTE.expand(t.shape)),
        (fp8_stream, "0.up_proj.weight_scale_inv", lambda t: t[:1]),
        (fp8_stream, "0.up_proj.weight_scale_inv", lambda t: t.double()),
        (fp8_stream, "0.up_proj.weight_scale_inv", lambda t: -t),
        (fp8_stream, "0.down_proj.weight_scale_inv", lambda t: t * torch.nan),
        (fp8_stream, "0.down_proj.weight_scale_inv", lambda t: t / 0),
    ],
)
def test_wrong_tensor(tmp_path, make, name, change):
    layer = built(tmp_path, make())
    stream = make() | {name: change(make()[name])}
    with pytest.raises(ExpertWeightError, match=f"^{PREFIX}.{name}: "):
        load(layer, stream)
    with pytest.raises(ExpertWeightError, match="lacks"):  # nor can it be declared ready afterwards
        layer.quant_method.process_weights_after_loading(layer)


def test_a_scale_the_layer_did_not_expect(tmp_path):
    layer = built(tmp_path, fp16_stream())
    with pytest.raises(AttributeError, match="w13_weight_scale_inv"):
        list(layer.load_weights([("0.up_proj.weight_scale_inv", torch.ones(5, 2))]))


def test_method_is_the_base_class_of_this_release(tmp_path):
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    method = built(tmp_path, fp16_stream()).quant_method
    assert isinstance(method, FusedMoEMethodBase)
    assert isinstance(method, Fp8ExpertsMethod)
    assert not method.is_monolithic
    assert not method.supports_eplb
