"""Decisions for one layer: what the headers say wins, and nothing is guessed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools.formats import Checkpoint, Format, Stored, Tensor, classify
from drafttools.names import Place
from drafttools.routing import (
    Action,
    Lookup,
    buildable,
    chosen_before,
    decide,
    is_nvfp4_deepseek_v4,
    read_by,
    source_of,
)
from tests.make_checkpoint import CASES, checkpoint

DRAFT = Place(True, 3, "ffn.experts")
MXFP4 = {"weight": Tensor("I8", (128, 128), "f"), "scale": Tensor("F8_E8M0", (128, 8), "f")}


def lookup(parts: dict[str, Tensor], place: Place = DRAFT) -> Lookup:
    return Lookup(place, classify(parts), ("m",), (), parts)


def decided(found: Lookup, stock: Format | None, experts: bool = True, nvfp4: bool = False, family: str = "fp8") -> Any:
    return decide(found, stock, routed_experts=experts, trunk_nvfp4=nvfp4, family=family)


def test_agreement_keeps_stock() -> None:
    assert decided(lookup(MXFP4), Format.MXFP4).action is Action.KEEP


def test_contradiction_replaces() -> None:
    decision = decided(lookup(MXFP4), Format.NVFP4)
    assert (decision.action, decision.answer) == (Action.REPLACE, Format.MXFP4)
    assert decision.reason == "stock reads nvfp4, the checkpoint holds mxfp4"


def test_contradiction_without_a_method_stops() -> None:
    """vLLM has no MXFP4 linear for this layout, and none for a format whose tensors are named for another."""
    assert decided(lookup(MXFP4), Format.NVFP4, experts=False).action is Action.STOP
    awq = {"qweight": Tensor("I32", (256, 16), "f"), "scales": Tensor("F16", (2, 128), "f")}
    assert decided(lookup(awq), Format.UNQUANTIZED).action is Action.STOP
    assert decided(lookup(awq), Format.UNQUANTIZED, family="awq").action is Action.REPLACE


def test_mixed_stops() -> None:
    decision = decided(Lookup(DRAFT, Stored(Format.MIXED, note="fp8_block, unquantized")), Format.UNQUANTIZED)
    assert decision.action is Action.STOP
    assert "fp8_block, unquantized" in decision.reason


@pytest.mark.parametrize("stored", [Stored(Format.ABSENT), Stored(Format.UNKNOWN, note="odd")])
def test_nothing_to_go_by_is_unverified(stored: Stored) -> None:
    decision = decided(Lookup(DRAFT, stored), Format.FP8_BLOCK)
    assert (decision.action, decision.answer) == (Action.UNVERIFIED, Format.FP8_BLOCK)
    assert decision.reason


def test_unknown_method_is_unverified() -> None:
    assert decided(lookup(MXFP4), None).action is Action.UNVERIFIED


def test_stock_without_an_answer_is_replaced() -> None:
    """vLLM raises for fused shards that its config describes differently; the tensors still say what they are."""
    rule = {"routed_experts": True, "trunk_nvfp4": False, "family": "quark", "stock_failed": True}
    decision = decide(lookup(MXFP4), None, **rule)
    assert (decision.action, decision.answer) == (Action.REPLACE, Format.MXFP4)
    assert "stock has no method" in decision.reason
    assert decide(lookup(MXFP4), Format.MXFP4, **rule).action is Action.KEEP  # the right one, without a kernel here


# --- the index rule ---


def test_index_rule_without_headers() -> None:
    absent = Lookup(DRAFT, Stored(Format.ABSENT))
    for stock in (Format.NVFP4, Format.UNQUANTIZED, None):  # unquantized: the layer is in ignored_layers
        decision = decided(absent, stock, nvfp4=True)
        assert (decision.action, decision.answer) == (Action.REPLACE, Format.MXFP4)
    assert decided(absent, Format.MXFP4, nvfp4=True).action is Action.KEEP
    assert decided(absent, Format.NVFP4, nvfp4=True, experts=False).action is Action.UNVERIFIED
    assert decided(absent, Format.NVFP4, nvfp4=False).action is Action.UNVERIFIED


def test_headers_win_over_the_index_rule() -> None:
    nvfp4 = lookup({"weight": Tensor("U8", (128, 128), "f"), "weight_scale": Tensor("F8_E4M3", (128, 16), "f")}
                   | {"weight_scale_2": Tensor("F32", (), "f")})  # fmt: skip
    assert decided(nvfp4, Format.NVFP4, nvfp4=True).action is Action.KEEP


@given(st.integers(1, 90), st.integers(0, 4), st.integers(0, 120), st.sampled_from(["model.layers", "layers"]))
@settings(max_examples=200, deadline=None)
def test_index_rule_is_for_draft_layers_only(hidden: int, drafts: int, number: int, root: str) -> None:
    config = {"model_type": "deepseek_v4", "num_hidden_layers": hidden, "num_nextn_predict_layers": drafts}
    config["quantization_config"] = {"moe_quant_algo": "NVFP4"}  # type: ignore[assignment]
    source = source_of(Checkpoint("memory", config, {}), note="offline")
    found = source.lookup(f"{root}.{number}.ffn.experts")
    decision = decided(found, Format.NVFP4, nvfp4=source.trunk_nvfp4)
    in_draft = hidden <= number < hidden + max(drafts, 0)
    assert (decision.answer is Format.MXFP4) is in_draft
    assert decision.action is (Action.REPLACE if in_draft else Action.UNVERIFIED)
    assert in_draft or decision.reason in ("offline",)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CASES["Q01-nvfp4-trunk-mxfp4-mtp"]["config"], True),
        (CASES["Q30-dspark-under-mtp"]["config"], False),  # MXFP4 trunk
        (CASES["Q13-wildcard-exclude"]["config"], False),  # NVFP4, another family
        ({"model_type": "deepseek_v41", "quantization_config": {"moe_quant_algo": "nvfp4"}}, True),
        ({}, False),
    ],
)
def test_trunks_that_the_rule_is_for(config: dict[str, Any], expected: bool) -> None:
    assert is_nvfp4_deepseek_v4(config) is expected


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases(case: dict[str, Any]) -> None:
    """The stored format of each prefix, and the decision against every answer stock could give."""
    source = source_of(checkpoint(case), case.get("target_config"))
    for ask in case["ask"]:
        found = source.lookup(ask["prefix"])
        assert found.stored.format == ask["stored"]
        assert found.place.draft is ask["draft"]
        experts = ask["prefix"].endswith("experts")
        for stock in (f for f in Format if f.loadable):
            decision = decide(found, stock, routed_experts=experts, trunk_nvfp4=source.trunk_nvfp4, family="")
            assert decision.answer == (ask["stored"] if decision.action is not Action.STOP else None)
            # the formats drafts of the cases have can be built, but for the target's AWQ
            assert decision.action is not Action.STOP or ask["stored"] == "int4_awq"


# --- names that methods have parameters for ---


@pytest.mark.parametrize(
    ("parts", "experts", "expected"),
    [
        ({"weight": ("BF16", [4, 4])}, False, True),
        ({"weight": ("F8_E4M3", [256, 256]), "weight_scale_inv": ("F32", [2, 2])}, True, True),
        ({"weight": ("F8_E4M3", [256, 256]), "weight_scale": ("F32", [2, 1, 2, 1])}, False, True),
        ({"weight": ("F8_E4M3", [256, 256]), "weight_scale": ("F32", [2, 1, 2, 1])}, True, False),
        ({"weight": ("F8_E4M3", [256, 256]), "weight_scale": ("F32", [2, 2])}, False, False),
        ({"weight": ("F8_E4M3", [256, 256]), "weight_scale": ("F32", [])}, False, True),
        ({"weight": ("F8_E4M3", [256, 256]), "weight_scale": ("F32", [256, 1])}, False, False),
        ({"weight": ("F8_E4M3", [256, 256]), "weight_scale": ("U8", [256, 8])}, False, True),
        ({"weight_packed": ("U8", [128, 128]), "weight_scale": ("U8", [128, 8])}, True, False),
        (
            {"weight": ("U8", [128, 128]), "weight_scale": ("F8_E4M3", [128, 16]), "weight_scale_2": ("F32", [])},
            False,
            True,
        ),
        (
            {"weight": ("U8", [128, 128]), "weight_scale": ("F8_E4M3", [128, 16]), "weight_global_scale": ("F32", [])},
            False,
            False,
        ),
    ],
)
def test_buildable(parts: dict[str, tuple[str, list[int]]], experts: bool, expected: bool) -> None:
    found = lookup({role: Tensor(dtype, tuple(shape), "f") for role, (dtype, shape) in parts.items()})
    assert found.stored.format.loadable
    assert buildable(found, routed_experts=experts, family="fp8") is expected


# --- what a method reads (the real classes are held to this in test_quantization) ---


def method(name: str, **attributes: Any) -> Any:
    return type(name, (), attributes)()


@pytest.mark.parametrize(
    ("chosen", "scheme", "expected"),
    [
        (None, None, Format.UNQUANTIZED),
        (method("SomebodysMethod"), None, None),
        (method("Fp8LinearMethod", quant_config=SimpleNamespace(weight_block_size=[128, 128])), None, Format.FP8_BLOCK),
        (method("Fp8MoEMethod", quant_config=SimpleNamespace(weight_block_size=None)), None, Format.FP8_TENSOR),
        (
            method("Fp8LinearMethod", quant_config=SimpleNamespace(is_checkpoint_fp8_serialized=False)),
            None,
            Format.UNQUANTIZED,
        ),
        (method("CompressedTensorsLinearMethod"), None, None),
        (
            method("CompressedTensorsLinearMethod"),
            method("CompressedTensorsW8A8Fp8", strategy="channel"),
            Format.FP8_CHANNEL,
        ),
        (method("QuarkLinearMethod"), method("QuarkW8A8Fp8", weight_qscheme="per_tensor"), Format.FP8_TENSOR),
        (method("MoeWNA16Method", quant_config=SimpleNamespace(linear_quant_method="gptq")), None, Format.INT4_GPTQ),
        (method("QuarkOCP_MX_MoEMethod", weight_dtype="mxfp6_e3m2"), None, None),
    ],
)
def test_read_by(chosen: Any, scheme: Any, expected: Format | None) -> None:
    assert read_by(chosen, scheme) is expected


def test_subclasses_read_like_their_base() -> None:
    base = type("ModelOptNvFp4FusedMoE", (), {})
    assert read_by(type("PlatformNvFp4", (base,), {})()) is Format.NVFP4


def test_method_whose_constructor_raised_still_tells() -> None:
    def construct(self: Any) -> None:
        raise NotImplementedError("no kernel here")

    for name, expected in (("Mxfp4MoEMethod", Format.MXFP4), ("SomethingElse", None)):
        with pytest.raises(NotImplementedError) as raised:
            type(name, (), {"__init__": type(construct)(construct.__code__.replace(co_name="__init__"), globals())})()
        assert read_by(chosen_before(raised.value) or SimpleNamespace()) is expected
