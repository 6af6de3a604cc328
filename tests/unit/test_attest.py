"""The report: written atomically, never in the way of a server, and read back with one clear error when it is broken."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools import attest
from drafttools import settings as drafttools_settings
from drafttools.errors import DraftToolsError
from drafttools.patching import Applied, State
from tests.processes import VllmProcess
from tests.unit import effects


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing has happened yet."""
    for name in ("_evidence", "_worker", "_applied"):
        monkeypatch.setattr(attest, name, {})
    for name in ("_drafts", "_notes", "_ungated", "_failures"):
        monkeypatch.setattr(attest, name, [])
    monkeypatch.setattr(attest, "entry_points", {})
    monkeypatch.setattr(attest, "_complained", False)
    monkeypatch.setattr(attest, "_pause", attest._FIRST_PAUSE_S)
    monkeypatch.setattr(attest, "_next_write", 0.0)


class Proposer:
    """Stands for a runner's proposer: only its name is reported."""


def a_draft(**changes: Any) -> attest.Draft:
    fields: dict[str, Any] = {"class_name": "Toy", "architecture": "ToyForMTP", "checkpoint": "/toy", "prefix": ""}
    fields |= {"dtypes": {"bfloat16": 3}, "quant_methods": {"layer": "Fp8LinearMethod"}, "kv_cache_dtype": "auto"}
    return attest.Draft(**fields | changes)


def registered() -> dict[str, Applied]:
    from drafttools import patches

    return {patch.name: Applied(patch) for patch in patches.ALL}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(drafttools_settings.REPORT_DIR, str(tmp_path / "reports"))
    monkeypatch.setattr(attest, "_applied", registered())
    return tmp_path / "reports"


def written(directory: Path) -> dict[str, Any]:
    [path] = directory.glob("drafttools-*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_report_has_every_field(directory: Path) -> None:
    attest.add_draft(a_draft())
    report = written(directory)
    named = "schema pid ppid role rank way_in mode drafttools_version vllm_version torch_version patches drafts gates ungated"
    assert set(named.split()) <= report.keys()
    assert report["schema"] == 1
    assert {patch["state"] for patch in report["patches"]} == {"registered"}
    assert {"name", "target", "state", "reason"} == report["patches"][0].keys()
    [draft] = report["drafts"]
    assert {
        "class",
        "architecture",
        "checkpoint",
        "dtypes",
        "quant_methods",
        "kv_cache_dtype",
        "calls",
        "captures",
    } <= draft.keys()
    assert draft["captures"] == {"full": 0, "piecewise": 0, "breakable": 0}
    assert {"quick_reduce", "a4w4"} <= report["gates"].keys()
    assert list(directory.iterdir()) == list(directory.glob("drafttools-*.json"))  # no temporary file is left


def test_it_is_updated(directory: Path) -> None:
    draft = a_draft()
    attest.add_draft(draft)
    draft.calls["forward"] += 2
    attest.count_captures("piecewise", 3)
    attest.evidence("quick_reduce").asked = 5
    attest.entry_points[Proposer, "propose"] = 1
    attest.entered(first=True)
    report = written(directory)
    assert report["drafts"][0]["calls"] == {"forward": 2}
    assert report["drafts"][0]["captures"]["piecewise"] == 3
    assert report["gates"]["quick_reduce"] == {"asked": 5, "declined": 0}
    assert report["entry_points"] == {"Proposer.propose": 1}


def test_it_is_written_ever_less_often(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written_at = 0.0, []
    monkeypatch.setattr(attest.time, "monotonic", lambda: now)
    monkeypatch.setattr(attest, "report", lambda: written_at.append(now) or {})
    for tenth in range(1200):
        now = tenth / 10
        attest.entered(first=tenth == 0)
    pauses = [later - earlier for earlier, later in pairwise(written_at)]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 30, 30], abs=0.2)
    attest.entered(first=True)
    assert written_at[-1] == now, "an entry point not seen before is written at once"


def test_nothing_is_written_when_nobody_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(drafttools_settings.REPORT_DIR, raising=False)
    monkeypatch.setattr(attest, "_applied", registered())
    monkeypatch.chdir(tmp_path)
    attest.add_draft(a_draft())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["file", "file/below", "\0"])
def test_a_server_outlives_a_report_that_cannot_be_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(attest.os, "environ", {drafttools_settings.REPORT_DIR: str(tmp_path / place)})
    for _ in range(3):
        attest.write()
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "cannot write the report" in err
    assert drafttools_settings.REPORT_DIR in err


def test_a_server_outlives_a_detail_that_is_not_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attest.add_draft(a_draft(details={"quantization": {"layer": object()}}))
    attest.write()
    assert len(capsys.readouterr().err.splitlines()) <= 1


# --- reading ---


def good(directory: Path, **changes: Any) -> dict[str, Any]:
    report = attest.report() | {"run": "r", "mode": "enforce", "role": "worker", "written": 1.0} | changes
    directory.mkdir(exist_ok=True)
    (directory / f"drafttools-host-{report['pid']}.json").write_text(json.dumps(report))
    return report


def test_reading_back(tmp_path: Path) -> None:
    report = good(tmp_path)
    assert attest.read(tmp_path) == [json.loads(json.dumps(report))]


def test_only_the_latest_run_is_read(tmp_path: Path) -> None:
    good(tmp_path, run="old", written=1.0, pid=1)
    good(tmp_path, run="new", written=3.0, pid=2)
    good(tmp_path, run="new", written=2.0, pid=3)
    assert sorted(report["pid"] for report in attest.read(tmp_path)) == [2, 3]


def message(directory: Path) -> str:
    with pytest.raises(DraftToolsError) as error:
        attest.read(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_reports(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for place in (tmp_path, tmp_path / "missing", tmp_path / "other.json"):
        assert str(place) in message(place)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a complete report"),
        ("{", "not a complete report"),
        ('{"schema": 2}', "schema 2"),
        ("[]", "schema None"),
        ("null", "schema None"),
        ('{"schema": 1}', "lacks"),
        ('{"schema": "1"}', "schema 1"),
    ],
)
def test_a_broken_report_is_named(tmp_path: Path, text: str, words: str) -> None:
    good(tmp_path, pid=1)
    (tmp_path / "drafttools-host-2.json").write_text(text)
    assert words in message(tmp_path)
    assert "drafttools-host-2.json" in message(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "drafttools-host-2.json").write_bytes(b"\xff\xfe\x00")
    assert "not a complete report" in message(tmp_path)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_truncation_is_one_line(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("truncated")
    text = json.dumps(good(directory, pid=1))
    (directory / "drafttools-host-1.json").write_text(text[: data.draw(st.integers(0, len(text) - 1))])
    assert "drafttools-host-1.json" in message(directory)


# --- judging ---


def worker(**changes: Any) -> dict[str, Any]:
    draft = a_draft().as_json() | {"calls": {"forward": 3}}
    report: dict[str, Any] = {
        "mode": "enforce",
        "patches": [{"name": "load_scope", "state": "in_effect", "target": "", "reason": ""}],
        "drafts": [draft],
        "entry_points": {"Proposer.propose": 2},
        "gates": {"quick_reduce": {"asked": 2, "declined": 2}},
        "failures": [],
    }
    return report | changes


def test_a_worker_in_effect_has_no_problems() -> None:
    assert attest.problems(worker()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "observe"}, "mode is observe"),
        ({"patches": []}, "load_scope is missing"),
        ({"patches": [{"name": "load_scope", "state": "applied"}]}, "load_scope is applied"),
        ({"patches": [{"name": "load_scope", "state": "refused"}]}, "load_scope is refused"),
        ({"entry_points": {}}, "no runner entry point"),
        ({"drafts": [a_draft().as_json()]}, "never called"),
        ({"failures": ["patch a4w4 was refused"]}, "patch a4w4 was refused"),
        ({"gates": {"quick_reduce": {"asked": 5, "declined": 3}}}, "quick_reduce: 2 of 5 reached the draft"),
    ],
)
def test_each_problem_is_found(changes: dict[str, Any], words: str) -> None:
    [problem] = attest.problems(worker(**changes))
    assert words in problem


# --- by effect, in a process that loads a draft ---


def reported(directory: str) -> dict[str, Any]:
    """What a process that loads a draft and a target, and calls both, writes about itself."""
    from unittest import mock

    config = effects.real_config()
    speculative = config.speculative_config
    with mock.patch.dict("os.environ", {"VLLM_MARLIN_INPUT_DTYPE": "int8"}):
        target = effects.load(config, speculative.target_model_config)
        draft = effects.load(config, speculative.draft_model_config)
        for model in (target, draft):
            model()
            model.compute_logits()
    attest.write()
    return written(Path(directory))


@pytest.mark.vllm
def test_a_worker_reports_its_draft(vllm_process: VllmProcess, tmp_path: Path) -> None:
    found = vllm_process.call(reported, str(tmp_path), DRAFTTOOLS_REPORT_DIR=str(tmp_path))
    [draft] = found["drafts"]
    assert (draft["class"], draft["architecture"], draft["checkpoint"]) == ("Toy", "Toy", "draft")
    assert draft["dtypes"] == {"bfloat16": 3}
    assert draft["calls"] == {"__call__": 1, "compute_logits": 1}
    assert (found["role"], found["rank"], found["world_size"]) == ("worker", 0, 1)
    assert found["vllm_version"]
    states = {patch["name"]: patch["state"] for patch in found["patches"]}
    assert states["load_scope"] == "in_effect"
    assert states["marlin_input"] == "applied"  # switched on, but no layer of this draft asked
    assert states["graph_scope"] == "applied"


def forked(directory: str) -> list[Any]:
    """A child of a worker, as after fork: its report is its own."""
    import os

    reported(directory)
    pid = os.fork()
    if pid == 0:
        attest.write()
        os._exit(0)
    os.waitpid(pid, 0)
    reports = {path.name: json.loads(path.read_text()) for path in Path(directory).glob("*.json")}
    mine, child = (next(r for r in reports.values() if r["pid"] == p) for p in (os.getpid(), pid))
    return [len(mine["drafts"]), len(child["drafts"]), child["gates"]["quick_reduce"], child["ppid"] == mine["pid"]]


@pytest.mark.vllm
def test_a_forked_child_starts_anew(installed_vllm: VllmProcess, tmp_path: Path) -> None:
    found = installed_vllm.call(forked, str(tmp_path), DRAFTTOOLS_REPORT_DIR=str(tmp_path))
    assert found == [1, 0, {"asked": 0, "declined": 0}, True]


def test_every_state_is_written_as_it_is(directory: Path) -> None:
    for item, state in zip(attest._applied.values(), State, strict=False):
        item.state = state
    attest.write()
    assert {str(state) for state in State} <= {patch["state"] for patch in written(directory)["patches"]}
