"""The routing inside vLLM: real configs, real layers, real loaders, on each vLLM at hand, before 0.30 too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.make_checkpoint import CASES, write_case
from tests.processes import VllmProcess, vllm_tree
from tests.unit import routing_layers

pytestmark = pytest.mark.vllm

# vLLM's QuarkConfig refuses the config of this case, which was cut down to what the report showed.
UNREADABLE = {"Q18-quark-mtp-keys"}
READABLE = {k: v for k, v in CASES.items() if k not in UNREADABLE and "target_config" not in v}
V4 = {k: v for k, v in READABLE.items() if v["config"]["model_type"] == "deepseek_v4"}


def skip_before_v41(cls: str | None, vllm: VllmProcess) -> None:
    if cls == "v41" and vllm.path.startswith(str(vllm_tree("DRAFTTOOLS_OLD_VLLM_TREE"))):
        pytest.skip("this release has no DeepSeek-V4.1")


def formats(answers: list[dict[str, Any]]) -> list[str | None]:
    return [answer["format"] for answer in answers]


@pytest.mark.parametrize("case", READABLE.values(), ids=READABLE)
def test_cases(case: dict[str, Any], tmp_path: Path, any_vllm: VllmProcess) -> None:
    """In scope each draft layer gets the method for what is stored; outside the scope stock's answers stand."""
    directory = str(write_case(case, tmp_path / "checkpoint"))
    drafts = [ask for ask in case["ask"] if ask["draft"]]
    prefixes = [ask["prefix"] for ask in case["ask"]]
    routed = any_vllm.call(routing_layers.ask_all, directory, [ask["prefix"] for ask in drafts])
    assert formats(routed) == [ask["stored"] for ask in drafts]
    outside = any_vllm.call(routing_layers.ask_all, directory, prefixes, False)
    untouched = any_vllm.call(routing_layers.ask_all, directory, prefixes, False, mode="off")
    assert outside == untouched


@pytest.mark.parametrize("case", V4.values(), ids=V4)
def test_deepseek_v41_class(case: dict[str, Any], tmp_path: Path, vllm_process: VllmProcess) -> None:
    """The class that CUDA and ROCm use for V4 as well; a CPU never picks it, so it is made by hand."""
    directory = str(write_case(case, tmp_path / "checkpoint"))
    prefixes = [ask["prefix"] for ask in case["ask"] if ask["draft"]]
    stored = [ask["stored"] for ask in case["ask"] if ask["draft"]]
    stock = vllm_process.call(routing_layers.ask_all, directory, prefixes, True, "v41", mode="off")
    for ask, answer in zip([a for a in case["ask"] if a["draft"]], stock, strict=True):
        if "stock" in ask:
            assert answer["format"] == ask["stock"]  # still wrong where the report says so
    assert formats(vllm_process.call(routing_layers.ask_all, directory, prefixes, True, "v41")) == stored


@pytest.mark.parametrize("cls", [None, "v41"])
def test_index_rule_without_headers(cls: str | None, tmp_path: Path, any_vllm: VllmProcess) -> None:
    """No safetensors at all: draft experts of an NVFP4 trunk are MXFP4, whatever ignored_layers says."""
    skip_before_v41(cls, any_vllm)
    for name in ("Q01-nvfp4-trunk-mxfp4-mtp", "S03-draft-in-ignored-layers"):
        directory = write_case(CASES[name], tmp_path / name)
        (directory / "model.safetensors").unlink()
        prefixes = ["model.layers.3.mtp_block.ffn.experts", "model.layers.2.ffn.experts", "model.layers.3.e_proj"]
        routed = any_vllm.call(routing_layers.ask_all, str(directory), prefixes, True, cls)
        stock = any_vllm.call(routing_layers.ask_all, str(directory), prefixes, True, cls, mode="off")
        assert formats(routed) == ["mxfp4", *formats(stock)[1:]]
        assert stock[1]["format"] == "nvfp4"


def test_method_as_the_release_builds_it(tmp_path: Path, any_vllm: VllmProcess) -> None:
    """The replacement for draft experts is built like the trunk's own MXFP4 experts, `activation_key` included."""
    replaced = write_case(CASES["Q01-nvfp4-trunk-mxfp4-mtp"], tmp_path / "replaced")
    native = write_case(CASES["Q30-dspark-under-mtp"], tmp_path / "native")
    ours = any_vllm.call(routing_layers.ask_all, str(replaced), ["model.layers.3.ffn.experts"])
    theirs = any_vllm.call(routing_layers.ask_all, str(native), ["layers.5.ffn.experts"], True, mode="off")
    assert ours == theirs


def test_no_fitting_method_stops_the_load(tmp_path: Path, any_vllm: VllmProcess) -> None:
    case = {
        "id": "odd",
        "config": {**CASES["Q20-index-range"]["config"]},
        "tensors": {
            "model.layers.3.eh_proj.weight": ["I8", [128, 128]],
            "model.layers.3.eh_proj.scale": ["F8_E8M0", [128, 8]],
        },
    }
    directory = str(write_case(case, tmp_path / "odd"))
    (answer,) = any_vllm.call(routing_layers.ask_all, directory, ["model.layers.3.eh_proj"])
    for words in ("model.layers.3.eh_proj", "holds mxfp4", "Fp8Config", "fp8_block", "drafttools audit"):
        assert words in answer["refused"]
    for allowed in ({"mode": "observe"}, {"DRAFTTOOLS_ALLOW_UNVERIFIED": "1"}):
        (answer,) = any_vllm.call(routing_layers.ask_all, directory, ["model.layers.3.eh_proj"], **allowed)
        assert answer["format"] == "fp8_block"  # stock's choice stands


def test_observe_changes_nothing(tmp_path: Path, any_vllm: VllmProcess) -> None:
    directory = str(write_case(CASES["Q29-root-swap"], tmp_path / "checkpoint"))
    observed = any_vllm.call(routing_layers.ask_all, directory, ["mtp.fc"], mode="observe")
    assert formats(observed) == ["fp8_block"]


IGNORED = "model.layers.0.mlp.down_proj"
FP8 = {"is_checkpoint_fp8_serialized": True, "activation_scheme": "dynamic", "ignored_layers": [IGNORED]}


def test_draft_model_prefix(tmp_path: Path, any_vllm: VllmProcess) -> None:
    """The draft_model method's prefix hides layers from the draft's own ignore list, headers or none."""
    draft, target = tmp_path / "draft", tmp_path / "target"
    for directory in (draft, target):
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    prefix = f"draft_model.{IGNORED}"
    stock = any_vllm.call(routing_layers.ask_configured, FP8, str(draft), prefix, str(target), mode="off")
    ours = any_vllm.call(routing_layers.ask_configured, FP8, str(draft), prefix, str(target))
    other = any_vllm.call(
        routing_layers.ask_configured, FP8, str(draft), "draft_model.model.layers.0.mlp.up_proj", str(target)
    )
    assert [stock["format"], ours["format"], other["format"]] == ["fp8_tensor", "unquantized", "fp8_tensor"]
    assert any("unverified" in note for note in ours["notes"])


def test_broken_headers_are_unverified(tmp_path: Path, installed_vllm: VllmProcess) -> None:
    """vLLM's own loader is the one to refuse a broken file; the routing does not guess from it."""
    directory = write_case(CASES["Q29-root-swap"], tmp_path / "checkpoint")
    shard = directory / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    answer = installed_vllm.call(routing_layers.ask_configured, FP8, str(directory), "mtp.fc")
    assert answer["format"] == "fp8_tensor"
    assert any(str(shard) in note and "unverified" in note for note in answer["notes"])


def test_is_mxfp4_quant_mirrors(tmp_path: Path, any_vllm: VllmProcess) -> None:
    """vLLM 0.26 and older ask it before they have a method; the class here is defined after activation."""
    directory = str(write_case(CASES["Q01-nvfp4-trunk-mxfp4-mtp"], tmp_path / "checkpoint"))
    prefixes = ["model.layers.3.mtp_block.ffn.experts", "model.layers.2.ffn.experts"]
    assert any_vllm.call(routing_layers.mxfp4_mirror, directory, prefixes, mode="off") == [False, False]
    assert any_vllm.call(routing_layers.mxfp4_mirror, directory, prefixes) == [True, False]


def test_shared_config_does_not_leak(tmp_path: Path, any_vllm: VllmProcess) -> None:
    directory = str(write_case(CASES["Q01-nvfp4-trunk-mxfp4-mtp"], tmp_path / "checkpoint"))
    state = any_vllm.call(routing_layers.shared_state, directory)
    assert state["inside"] == [None, "fp4", "NVFP4"]  # the target's memo is not the draft's
    assert state["after"] == ["fp8", "TARGET", ["a"]]  # and the other way round
    assert state["same_objects"]
    assert "added" not in state["mapping"]
    assert not state["left_behind"]


@pytest.mark.parametrize("cls", [None, "v41"])
def test_routed_experts_by_value(cls: str | None, tmp_path: Path, any_vllm: VllmProcess) -> None:
    """MXFP4 draft experts beside an NVFP4 trunk: built, loaded by vLLM, and compared with a dequantized reference."""
    skip_before_v41(cls, any_vllm)
    directory = tmp_path / "checkpoint"
    any_vllm.call(routing_layers.write_mxfp4_draft, str(directory))
    (directory / "config.json").write_text(json.dumps(CASES["Q01-nvfp4-trunk-mxfp4-mtp"]["config"]))
    prefix = "model.layers.3.mtp_block.ffn.experts"
    ours = any_vllm.call(routing_layers.experts_output, str(directory), prefix, True, cls)
    assert ours["method"] == "Mxfp4MoEMethod"
    assert ours["load"] == ""
    assert ours["error"] < 1e-2
    stock = any_vllm.call(routing_layers.experts_output, str(directory), prefix, True, cls, mode="off")
    assert stock["method"] == "ModelOptNvFp4FusedMoE"
    assert stock["load"] or stock["error"] > 0.5


def test_block_fp8_metadata_of_old_releases(tmp_path: Path, old_vllm: VllmProcess, tree_vllm: VllmProcess) -> None:
    """ModelOpt's FP8_BLOCK_SCALES experts of a draft: before 0.30 stock takes them for unquantized."""
    directory = str(write_case(CASES["Q17-fp8-block-mtp-metadata-remap"], tmp_path / "checkpoint"))
    draft, target = "mtp.layers.0.mlp.experts", "language_model.model.layers.0.mlp.experts"
    stock = [old_vllm.call(routing_layers.ask_all, directory, [draft, target], mode="off")]
    stock.append(tree_vllm.call(routing_layers.ask_all, directory, [draft, target], mode="off"))
    assert [formats(answers) for answers in stock] == [["unquantized", "nvfp4"], ["fp8_block", "nvfp4"]]
    assert formats(old_vllm.call(routing_layers.ask_all, directory, [draft, target])) == ["fp8_block", "nvfp4"]


def test_quark_mtp_layers(tmp_path: Path, any_vllm: VllmProcess) -> None:
    """Quark keys its MTP layers `model.mtp.0`, which no runtime prefix is: the tensors say FP8 blocks."""
    case = json.loads(json.dumps(CASES["Q18-quark-mtp-keys"]))
    case["config"]["quantization_config"]["export"] = {"kv_cache_group": [], "pack_method": "reorder"}
    directory = str(write_case(case, tmp_path / "checkpoint"))
    prefixes = [ask["prefix"] for ask in case["ask"]]
    assert formats(any_vllm.call(routing_layers.ask_all, directory, prefixes)) == ["fp8_block", "nvfp4"]
