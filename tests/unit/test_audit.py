"""`drafttools audit`: every case on every vLLM at hand, the published form, verdicts and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from drafttools import stock
from drafttools.audit import audit, compare_reports, open_for_audit
from drafttools.commands import audit as command
from tests.make_checkpoint import CASES, write_case, write_safetensors
from tests.processes import ROOT, VllmProcess, environment

Requests = Sequence[Mapping[str, Any]]
KNOWN = ("0.32.0", "0.33.0")

# Draft layers for which stock's choice contradicts the checkpoint, besides those that the cases themselves name.
ALSO_WRONG = {
    "S03-draft-in-ignored-layers": {"layers.4.ffn.experts": {"nvfp4"}},
    "Q17-fp8-block-mtp-metadata-remap": {"mtp.layers.2.mlp.experts": {"unquantized"}},
    "Q17b-alias-FP8_PB_WO": {"mtp.layers.2.mlp.experts": {"unquantized"}},
    "Q11-awq-target-bf16-mtp-experts": {"mtp.layers.2.mlp.experts": {"int4_awq"}},
    "Q13b-index-3-is-not-30": {"model.layers.31.mtp_block.mlp.experts": {"nvfp4"}},
    "Q29-root-swap": {"mtp.fc": {"fp8_block"}},
}
# Wrong in 0.32.0 only: it did not read exclude_modules from a flat ModelOpt config.
WRONG_BEFORE_33 = {"Q13-wildcard-exclude"}
CONFLICTS = {
    "Q30-dspark-under-mtp": CASES["Q30-dspark-under-mtp"]["problem"],
    "Q18-quark-mtp-keys": "stock cannot read the quantization config",  # the case's config is cut down
}


def run(*arguments: str) -> Any:
    app = typer.Typer()
    command.register(app)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def through(vllm_process: VllmProcess, monkeypatch: pytest.MonkeyPatch) -> VllmProcess:
    """The command's questions to stock go to a vLLM that is already imported, by the same function."""
    monkeypatch.setattr(stock, "ask", lambda requests: vllm_process.call(stock.answers, list(requests), mode="off"))
    return vllm_process


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases(case: dict[str, Any], tmp_path: Path, through: VllmProcess) -> None:
    directory = write_case(case, tmp_path / "checkpoint")
    target = ["--target-config", str(directory / "target")] if "target_config" in case else []
    asked = [word for ask in case["ask"] for word in ("--ask", ask["prefix"])]
    done = run(str(directory), "--method", case["method"], *target, *asked, "--json")
    result = json.loads(done.output)
    assert result.keys() == {"checkpoint", "vllm", "draft", "modules", "missing", "problems", "verdict"}
    rows = {row["prefix"]: row for row in result["modules"]}
    assert result["draft"]["kind"] == ("separate" if target else "embedded")
    fixed = False
    for ask in case["ask"]:
        row = rows[ask["prefix"]]
        assert (row["stored"], row["draft"]) == (ask["stored"], ask["draft"])
        assert set(row["tensors"]) <= set(case["tensors"])
        assert row["tensors"]
        if ask["draft"]:
            assert row["answer"] == ask["stored"]
            assert row["layer_index"] is None or row["layer_index"] in result["draft"]["layers"]
        else:
            assert row["answer"] == (row["stock"] or ask["stored"])  # the target's method is stock's
        wrong = {ask["stock"]} if ask.get("stock", ask["stored"]) != ask["stored"] else set()
        wrong |= ALSO_WRONG.get(case["id"], {}).get(ask["prefix"], set())
        if case["id"] in WRONG_BEFORE_33 and result["vllm"] == "0.32.0":
            wrong = {"nvfp4"} - {ask["stored"]}
        if wrong and row["stock"] == ask["stored"]:
            assert result["vllm"] not in KNOWN
            pytest.skip(f"not needed on vLLM {result['vllm']}: stock answers {row['stock']} for {ask['prefix']}")
        if row["stock"] is not None:
            assert {row["stock"]} == (wrong or {ask["stored"]} if ask["draft"] else {row["stock"]})
            assert row["agree"] is (row["stock"] == ask["stored"])
        fixed = fixed or (ask["draft"] and bool(wrong))
    if case["id"] in CONFLICTS:
        assert any(CONFLICTS[case["id"]] in problem for problem in result["problems"])
        assert result["verdict"] == "conflict"
    else:
        assert result["problems"] == []
        assert result["verdict"] == ("fixed" if fixed else "ok")
    assert result["missing"] == []
    assert done.exit_code == (1 if case["id"] in CONFLICTS else 0)


@pytest.mark.vllm
def test_quark_with_its_export_section(tmp_path: Path, through: VllmProcess) -> None:
    """The Quark case with the section that vLLM insists on: its MTP keys name no runtime prefix."""
    case = json.loads(json.dumps(CASES["Q18-quark-mtp-keys"]))
    case["config"]["quantization_config"]["export"] = {"kv_cache_group": [], "pack_method": "reorder"}
    directory = write_case(case, tmp_path / "checkpoint")
    prefix = "model.layers.3.mtp_block.attn.fused_wqa_wkv"
    result = json.loads(run(str(directory), "--ask", prefix, "--json").output)
    row = next(row for row in result["modules"] if row["prefix"] == prefix)
    assert (row["stored"], row["answer"]) == ("fp8_block", "fp8_block")
    assert row["stock"] != "fp8_block"


@pytest.mark.vllm
@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    """The real command with a vLLM process of its own."""
    directory = write_case(CASES["Q01-nvfp4-trunk-mxfp4-mtp"], tmp_path / "checkpoint")
    done = subprocess.run(
        [sys.executable, "-m", "drafttools.cli", "audit", str(directory)],
        env=environment(COLUMNS="200", HF_HUB_OFFLINE="1"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=stock.TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "model.layers.3.ffn.experts" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        "model.layers.3.ffn.experts",
        "3",
        "mxfp4",
        "nvfp4",
        "mxfp4",
    ]
    assert "verdict: fixed" in done.stdout


# --- without vLLM ---


def no_vllm(requests: Requests) -> list[dict[str, Any]]:
    return [{"vllm": None, "config": None, "error": "vLLM cannot be imported: no", "answers": {}} for _ in requests]


def answering(format: str | None) -> Callable[[Requests], list[dict[str, Any]]]:
    """A stock that gives one answer to everything."""

    def ask(requests: Requests) -> list[dict[str, Any]]:
        answers = {p: {"method": "M", "format": format, "error": None} for p, _ in requests[0]["prefixes"]}
        return [{"vllm": "9.9", "config": "C", "error": None, "answers": answers}]

    return ask


def test_no_vllm_importable(tmp_path: Path) -> None:
    """A vllm that raises on import stands before the real one: stock is null, the headers still speak."""
    directory = write_case(CASES["Q01-nvfp4-trunk-mxfp4-mtp"], tmp_path / "checkpoint")
    (tmp_path / "path" / "vllm").mkdir(parents=True)
    (tmp_path / "path" / "vllm" / "__init__.py").write_text("raise ImportError('no vLLM here')")
    done = subprocess.run(
        [sys.executable, "-m", "drafttools.cli", "audit", str(directory), "--json"],
        env=environment(PYTHONPATH=f"{tmp_path / 'path'}:{ROOT}"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    result = json.loads(done.stdout)
    assert done.returncode == 0
    assert result["vllm"] is None
    assert {row["stock"] for row in result["modules"]} == {None}
    assert {row["agree"] for row in result["modules"]} == {None}
    assert [row["answer"] for row in result["modules"]] == ["mxfp4", "fp8_block", "fp8_block"]
    assert result["problems"] == ["vLLM cannot be imported: no vLLM here"]


CONFIG = {"model_type": "glm4_moe", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
BF16, FP8 = ("BF16", [128, 128]), ("F8_E4M3", [128, 128])


def made(directory: Path, tensors: dict[str, Any], **config: Any) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    write_safetensors(directory / "model.safetensors", tensors)
    return str(directory)


TRUNK = {"model.layers.0.mlp.gate_proj.weight": BF16, "model.layers.0.mlp.up_proj.weight": BF16}


@pytest.mark.parametrize(
    ("tensors", "config", "answer", "verdict", "words"),
    [
        ({"model.layers.1.eh_proj.weight": BF16}, {}, "unquantized", "ok", ""),
        ({"model.layers.1.eh_proj.weight": BF16}, {}, None, "ok", ""),
        ({"model.layers.1.eh_proj.weight": BF16}, {}, "fp8_block", "fixed", ""),
        (TRUNK, {}, "unquantized", "absent", "declares 1 draft layers and the checkpoint holds none"),
        (TRUNK, {"num_nextn_predict_layers": 0}, "unquantized", "absent", ""),
        (
            {"model.layers.1.eh_proj.weight": BF16},
            {"num_nextn_predict_layers": 2},
            "unquantized",
            "incomplete",
            "draft layers [2] are declared",
        ),
        (
            {"model.layers.1.eh_proj.weight": BF16, "model.layers.2.eh_proj.weight": BF16},
            {},
            "unquantized",
            "incomplete",
            "layer 2 is outside the 1 draft layers declared",
        ),
        ({**TRUNK, "model.layers.1.mlp.gate_proj.weight": BF16}, {}, "unquantized", "incomplete", ""),
        (
            {"model.layers.1.mlp.gate_proj.weight": BF16, "model.layers.1.mlp.up_proj.weight": FP8, **TRUNK}
            | {"model.layers.1.mlp.up_proj.weight_scale_inv": ("F32", [1, 1])},
            {},
            "unquantized",
            "conflict",
            "several stored formats: fp8_block, unquantized",
        ),
        ({"model.layers.1.eh_proj.weight": FP8}, {}, "unquantized", "ok", "F8_E4M3 weight without a scale"),
    ],
)
def test_verdicts(
    tensors: dict[str, Any], config: dict[str, Any], answer: str | None, verdict: str, words: str, tmp_path: Path
) -> None:
    result = audit(made(tmp_path / "c", tensors, **config), ask_stock=answering(answer))
    assert result.verdict == verdict
    assert words in " ".join(result.problems)
    assert bool(words) is bool(result.problems)


def test_missing_is_listed(tmp_path: Path) -> None:
    directory = made(tmp_path / "c", {**TRUNK, "model.layers.1.mlp.gate_proj.weight": BF16})
    assert audit(directory, ask_stock=no_vllm).missing == ["model.layers.1.mlp.up_proj"]


def test_mtp_draft_under_dspark(tmp_path: Path) -> None:
    tensors = {"mtp.0.enorm.weight": ("BF16", [128]), "mtp.0.e_proj.weight": BF16}
    result = audit(made(tmp_path / "c", tensors), method="dspark", ask_stock=no_vllm)
    assert result.verdict == "conflict"
    assert "holds an MTP draft" in result.problems[0]


def test_dspark_draft_under_mtp(tmp_path: Path) -> None:
    case = CASES["Q30-dspark-under-mtp"]
    directory = str(write_case(case, tmp_path / "c"))
    assert audit(directory, method="mtp", ask_stock=no_vllm).problems[0] == case["problem"]
    assert audit(directory, method="dspark", ask_stock=answering("mxfp4")).verdict == "ok"


def test_norms_are_no_modules_to_route(tmp_path: Path) -> None:
    tensors = {"mtp.0.enorm.weight": ("BF16", [128]), "mtp.0.e_proj.weight": BF16}
    rows = audit(made(tmp_path / "c", tensors), ask_stock=no_vllm).modules
    assert [row["prefix"] for row in rows] == ["model.layers.1.e_proj"]


def test_out_of_range_question_is_reported(tmp_path: Path) -> None:
    directory = made(tmp_path / "c", {"mtp.0.e_proj.weight": BF16})
    result = audit(directory, asked=["model.layers.7.e_proj"], ask_stock=no_vllm)
    row = result.modules[-1]
    assert (row["draft"], row["layer_index"], row["stored"]) == (True, None, "absent")
    assert "layer 7 is outside the 1 draft layers declared" in result.problems[-1]


def test_separate_draft_option(tmp_path: Path) -> None:
    """--draft: the target is CHECKPOINT; EAGLE heads of the MiniCPM family take its quantization config."""
    target = made(tmp_path / "t", TRUNK, num_nextn_predict_layers=0, quantization_config={"quant_method": "fp8"})
    asked: list[Any] = []

    def ask(requests: Requests) -> list[dict[str, Any]]:
        asked.append(requests[0]["config"].get("quantization_config"))
        return answering("fp8_tensor")(requests)

    for number, (architecture, expected) in enumerate(
        [("LlamaForCausalLMEagle3", None), ("MiniCPMForCausalLM", {"quant_method": "fp8"})]
    ):
        draft = made(tmp_path / f"d{number}", {"midlayer.mlp.down_proj.weight": BF16}, architectures=[architecture])
        result = audit(target, draft=draft, method="eagle", ask_stock=ask)
        assert result.as_json()["draft"] == {"kind": "separate", "layers": [1]}
        assert [row["prefix"] for row in result.modules] == ["model.layers.1.mlp.down_proj"]
        assert asked[-1] == expected


def test_broken_file_and_usage(tmp_path: Path) -> None:
    directory = made(tmp_path / "c", TRUNK)
    shard = Path(directory) / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    done = run(directory)
    assert done.exit_code == 1
    assert str(shard) in done.stderr
    assert run().exit_code == 2
    assert run(directory, "--draft", "a", "--target-config", "b").exit_code == 2


# --- a running engine against the headers ---

LAYER = {"stored": "mxfp4", "stock": "nvfp4", "effective": "mxfp4", "method": "Mxfp4MoEMethod", "action": "replace"}


def reported(quantization: dict[str, Any], **changes: Any) -> list[dict[str, Any]]:
    draft = {"prefix": "", "dtypes": {"bfloat16": 10}, "quant_methods": {}, "shared_with_target": []}
    return [{"rank": 0, "pid": 7, "drafts": [{**draft, "details": {"quantization": quantization}, **changes}]}]


def test_report_agrees_or_not(tmp_path: Path) -> None:
    source = open_for_audit(str(write_case(CASES["Q01-nvfp4-trunk-mxfp4-mtp"], tmp_path / "c")))
    prefix = "model.layers.3.mtp_block.ffn.experts"
    assert compare_reports(source, reported({prefix: LAYER})) == []
    wrong = {**LAYER, "effective": "nvfp4", "method": "ModelOptNvFp4FusedMoE"}
    assert compare_reports(source, reported({prefix: wrong})) == [
        f"worker rank 0 (pid 7): {prefix} runs ModelOptNvFp4FusedMoE, the checkpoint holds mxfp4"
    ]
    # A worker without the routing patch is judged by the class of its methods; the target's modules are not.
    methods = {"model.layers.3.mtp_block.ffn.experts": "ModelOptNvFp4FusedMoE"}
    assert len(compare_reports(source, reported({}, quant_methods=methods))) == 1
    shared = reported({}, quant_methods=methods, shared_with_target=["model.layers.3.mtp_block"])
    assert compare_reports(source, shared) == []
    assert compare_reports(source, [{"rank": 0, "pid": 7, "drafts": []}]) == [
        "the reports name no draft model: nothing was loaded as one"
    ]


def test_report_in_another_dtype(tmp_path: Path) -> None:
    source = open_for_audit(made(tmp_path / "c", {"mtp.0.e_proj.weight": BF16}))
    assert compare_reports(source, reported({}, dtypes={"float32": 1, "bfloat16": 9})) == []
    assert compare_reports(source, reported({}, dtypes={"float32": 1, "float16": 9})) == [
        "worker rank 0 (pid 7): runs in float16, the checkpoint holds bfloat16"
    ]


def test_report_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "ask", no_vllm)
    directory = str(write_case(CASES["Q01-nvfp4-trunk-mxfp4-mtp"], tmp_path / "c"))
    (report,) = reported({"model.layers.3.ffn.experts": {**LAYER, "effective": "nvfp4"}})
    frame = {"schema": 1, "run": "r", "role": "worker", "mode": "enforce", "patches": [], "gates": {}, "written": 1.0}
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "drafttools-h-7.json").write_text(json.dumps({**frame, **report}))
    done = run(directory, "--report", str(tmp_path / "reports"))
    assert done.exit_code == 1
    assert "verdict: conflict" in done.output
    assert run(directory).exit_code == 0
