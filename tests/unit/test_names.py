"""Runtime prefixes and checkpoint names: one layer, many names, and only that layer."""

from __future__ import annotations

from typing import Any

import pytest

from drafttools.formats import Checkpoint, Tensor
from drafttools.names import Layout, Place, Resolver, layout_of, text_config
from tests.make_checkpoint import CASES, checkpoint

WEIGHT = Tensor("BF16", (4, 4), "f")


def made_of(*names: str, **config: Any) -> Checkpoint:
    return Checkpoint("memory", config, dict.fromkeys(names, WEIGHT))


EMBEDDED = Layout(hidden=48, drafts=3)
SAME_LAYER = (
    "mtp.1.e_proj",
    "mtp.layers.1.e_proj",
    "mtp.layers.49.e_proj",
    "mtp.49.e_proj",
    "model.mtp.1.e_proj",
    "model.mtp.layers.1.e_proj",
    "model.mtp_layers.1.e_proj",
    "layers.49.e_proj",
    "model.layers.49.e_proj",
    "model.layers.49.mtp_block.e_proj",
    "model.mtp.layers.1.transformer_layer.e_proj",
    "language_model.model.layers.49.e_proj",
    "model.language_model.layers.49.e_proj",
)


@pytest.mark.parametrize("name", SAME_LAYER)
def test_every_root_is_the_same_layer(name: str) -> None:
    place = EMBEDDED.place(name)
    assert place == Place(draft=True, index=49, tail="e_proj")
    assert EMBEDDED.place_stored(name) == place
    assert place.name == "layers.49.e_proj"  # 48 + 1 once, and never 48 again


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.mlp.up_proj", Place(False, 3, "mlp.up_proj")),
        ("model.layers.30.mlp.up_proj", Place(False, 30, "mlp.up_proj")),
        ("language_model.model.layers.47.mlp.up_proj", Place(False, 47, "mlp.up_proj")),
        ("mtp.fc", Place(True, None, "fc")),
        ("model.embed_tokens", Place(False, None, "embed_tokens")),
        ("lm_head", Place(False, None, "lm_head")),
        # Layers of another tower are not the language model's, whatever their number.
        ("vision_tower.encoder.layers.49.mlp.fc1", Place(False, None, "vision_tower.encoder.layers.49.mlp.fc1")),
        ("visual.blocks.49.mlp", Place(False, None, "visual.blocks.49.mlp")),
    ],
)
def test_target_and_outside(name: str, place: Place) -> None:
    assert EMBEDDED.place(name) == place


@pytest.mark.parametrize("name", ["model.layers.51.e_proj", "mtp.3.e_proj", "mtp.layers.51.e_proj", "layers.96.x"])
def test_out_of_range_is_reported(name: str) -> None:
    place = EMBEDDED.place(name)
    assert place.draft
    assert place.index is None
    assert "outside the 3 draft layers declared" in place.problem
    assert EMBEDDED.place(place.name) == place


def test_separate_draft() -> None:
    """An EAGLE head is numbered from 0 in its checkpoint and after the target's layers at runtime."""
    layout = Layout(hidden=4, drafts=2, separate=True)
    for stored in ("midlayer.mlp.up_proj", "layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"):
        assert layout.place_stored(stored) == Place(True, 4, "mlp.up_proj")
    assert layout.place("model.layers.4.mlp.up_proj") == Place(True, 4, "mlp.up_proj")
    assert layout.place("draft_model.model.layers.0.mlp.up_proj") == Place(True, 4, "mlp.up_proj")
    assert layout.place("model.layers.0.mlp.up_proj") == Place(False, 0, "mlp.up_proj")  # the target's own layer 0
    assert layout.place("model.fc") == layout.place_stored("fc") == Place(True, None, "fc")


def test_draft_split_off_an_mtp_checkpoint_keeps_its_numbers() -> None:
    draft = made_of("model.layers.46.eh_proj.weight", num_hidden_layers=46)
    layout = layout_of(draft, {"num_hidden_layers": 46})
    assert Resolver(draft, layout).find("model.layers.46.eh_proj").modules == ("model.layers.46.eh_proj",)


def test_layout_from_configs() -> None:
    declared = made_of(num_hidden_layers=3, num_nextn_predict_layers=1, n_mtp_layers=3)
    assert layout_of(declared) == Layout(3, 3)
    nested = made_of(text_config={"num_hidden_layers": 2, "mtp_num_hidden_layers": 1})
    assert layout_of(nested) == Layout(2, 1)
    assert text_config(nested.config)["num_hidden_layers"] == 2
    undeclared = made_of("model.layers.7.x.weight", "mtp.0.x.weight", num_hidden_layers=6)
    assert layout_of(undeclared) == Layout(6, 2)


def resolver_of(*modules: str, **config: Any) -> Resolver:
    found = made_of(
        *[f"{m}.weight" for m in modules], **{"num_hidden_layers": 2, "num_nextn_predict_layers": 1, **config}
    )
    return Resolver(found, layout_of(found))


def test_a_shared_head_is_found_by_the_prefix_it_is_built_with() -> None:
    """vLLM 0.33.0 leaves `shared_head` out of the prefix (deepseek_mtp.py, glm4_moe_mtp.py)."""
    module = "model.layers.2.shared_head.head"
    assert resolver_of(module).find("model.layers.2.head").modules == (module,)


@pytest.mark.parametrize(
    ("prefix", "stored"),
    [
        ("model.layers.2.self_attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("model.layers.2.mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"]),
        ("model.layers.2.ffn.shared_experts.gate_up_proj", ["ffn.shared_experts.w1", "ffn.shared_experts.w3"]),
        ("model.layers.2.ffn.shared_experts.down_proj", ["ffn.shared_experts.w2"]),
        ("model.layers.2.attn.fused_wqa_wkv", ["attn.wq_a", "attn.wkv"]),
        ("model.layers.2.self_attn.fused_qkv_a_proj", ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]),
        ("model.layers.2.mlp.experts", [f"mlp.experts.{e}.{w}" for e in (0, 1) for w in ("gate_proj", "down_proj")]),
        ("model.layers.2.mlp.experts.routed_experts", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("model.layers.2.self_attn.qkv_proj", ["self_attn.qkv_proj"]),  # stored fused
        ("model.layers.2.shared_head.head", ["shared_head.head"]),
    ],
)
def test_fused_modules(prefix: str, stored: list[str]) -> None:
    modules = tuple(f"mtp.0.{name}" for name in stored)
    resolver = resolver_of(*modules, "model.layers.0.mlp.down_proj")
    found = resolver.find(prefix)
    assert sorted(found.modules) == sorted(modules)
    assert found.missing == ()
    # and back: the runtime name for those modules is the prefix again
    assert {resolver.layout.place(p) for p in resolver.draft_prefixes()} == {
        resolver.layout.place(prefix.removesuffix(".routed_experts"))
    }


def test_packed_modules_mapping_is_asked_first() -> None:
    resolver = resolver_of("mtp.0.attn.a", "mtp.0.attn.b")
    assert resolver.find("model.layers.2.attn.ab").modules == ()
    assert resolver.find("model.layers.2.attn.ab", {"ab": ["a", "b"]}).modules == ("mtp.0.attn.a", "mtp.0.attn.b")


def test_missing_shards_and_experts() -> None:
    experts = [f"mtp.0.mlp.experts.{e}.{w}" for e in range(3) for w in ("w1", "w2", "w3") if (e, w) != (1, "w2")]
    resolver = resolver_of(
        *experts, "mtp.0.mlp.gate_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
    )
    assert resolver.find("model.layers.2.mlp.experts").missing == ("mtp.0.mlp.experts.1.w2",)
    assert resolver.find("model.layers.2.mlp.gate_up_proj").missing == ("mtp.0.mlp.up_proj",)
    assert "model.layers.2.mlp.gate_up_proj" in resolver.draft_prefixes()  # the trunk fuses it, so the draft does
    declared = resolver_of(*[e for e in experts if ".1." not in e and ".2." not in e], n_routed_experts=2)
    assert declared.find("model.layers.2.mlp.experts").missing == tuple(f"mtp.0.mlp.experts.1.w{i}" for i in (1, 2, 3))


@pytest.mark.parametrize(
    ("method", "config", "stored", "prefix"),
    [
        ("mtp", {}, "model.layers.2.eh_proj", "model.layers.2.eh_proj"),
        ("mtp", {}, "mtp.0.e_proj", "model.layers.2.e_proj"),
        ("dspark", {}, "mtp.0.e_proj", "layers.2.e_proj"),
        ("mtp", {}, "mtp.layers.0.mlp.down_proj", "mtp.layers.0.mlp.down_proj"),
        ("mtp", {"model_type": "qwen4_exp_text"}, "mtp.layers.0.mlp.down_proj", "mtp.layers.2.mlp.down_proj"),
        ("mtp", {}, "mtp.fc", "mtp.fc"),
    ],
)
def test_prefixes_as_vllm_builds_them(method: str, config: dict[str, Any], stored: str, prefix: str) -> None:
    assert resolver_of(stored, **config).draft_prefixes(method) == [prefix]


@pytest.mark.parametrize(
    ("method", "prefix"), [("eagle", "model.layers.9.a.b"), ("draft_model", "draft_model.model.layers.0.a.b")]
)
def test_prefixes_of_separate_drafts(method: str, prefix: str) -> None:
    draft = made_of("model.layers.0.a.b.weight", num_hidden_layers=1)
    resolver = Resolver(draft, layout_of(draft, {"num_hidden_layers": 9}))
    assert resolver.draft_prefixes(method) == [prefix]
    assert resolver.find(prefix).modules == ("model.layers.0.a.b",)


def test_layers_beyond_the_declared_are_problems() -> None:
    resolver = resolver_of("mtp.0.a.b", "mtp.1.a.b")
    assert resolver.layers() == [2]
    assert resolver.problems() == ["layer 1 is outside the 1 draft layers declared"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases(case: dict[str, Any]) -> None:
    found = checkpoint(case)
    layout = layout_of(found, case.get("target_config"))
    for ask in case["ask"]:
        place = layout.place(ask["prefix"])
        assert place.draft is ask["draft"]
        assert place.problem == ""
        assert layout.place(place.name) == place
