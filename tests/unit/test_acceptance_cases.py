"""Every case of `tests/data/acceptance.json` through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafttools import cli

CASES = json.loads((Path(__file__).parents[1] / "data" / "acceptance.json").read_text())["cases"]


def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON that `drafttools WORDS --json` prints."""
    monkeypatch.setattr(sys, "argv", ["drafttools", *words, "--json"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    assert not stopped.value.code, err
    return json.loads(out)


def write(path: Path, lines: list[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def found(case: dict[str, Any], tmp_path: Path, monkeypatch: Any, capsys: Any) -> dict[str, Any]:
    if case.get("kind") == "prometheus_pair":
        paths = [write(tmp_path / f"{name}.prom", case[name].splitlines()) for name in ("before", "after")]
        return run_cli(monkeypatch, capsys, "acceptance", "--before", paths[0], "--after", paths[1])["runs"][0]
    if case.get("kind") == "compare":
        words = ["acceptance", "compare", "--margin", f"{case['margin_pct']}%"]
        for arm in ("baseline", "candidate"):
            sweeps = [write(tmp_path / f"{arm}{i}.log", lines) for i, lines in enumerate(case[arm])]
            words += [f"--{arm}", *sweeps]
        if "exclude_above" in case:
            words += ["--exclude-above", str(case["exclude_above"])]
        return run_cli(monkeypatch, capsys, *words)
    words = ["--k", str(case["k"])] if "k" in case else []
    return run_cli(monkeypatch, capsys, "acceptance", write(tmp_path / "a.log", case["lines"]), *words)["runs"][0]


def test_there_are_seventeen() -> None:
    assert len(CASES) == 17


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    answer = found(case, tmp_path, monkeypatch, capsys)
    for name, expected in case["expect"].items():
        words = isinstance(expected, list) and isinstance(expected[0], str)
        if words or expected is None or isinstance(expected, bool | str):
            assert answer[name] == expected, name
        else:
            assert answer[name] == pytest.approx(expected, abs=0.005), name


def test_the_excluded_samples_are_listed(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    case = next(case for case in CASES if case["id"].startswith("S01"))
    answer = found(case, tmp_path, monkeypatch, capsys)
    sweeps = answer["baseline"]["sweeps"] + answer["candidate"]["sweeps"]
    listed = [(sample["where"], sample["acceptance_length"]) for run in sweeps for sample in run["excluded_samples"]]
    assert listed == [("line 11", 4.6), ("line 12", 4.9), ("line 11", 4.4)]


def test_as_a_process(tmp_path: Path) -> None:
    """The figures come out of a real process, alone on its standard output."""
    log = write(tmp_path / "a.log", CASES[0]["lines"])
    words = [sys.executable, "-m", "drafttools.cli", "acceptance", log, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["runs"][0]["drafts"] == 1220


def test_from_a_pipe(monkeypatch: Any, capsys: Any) -> None:
    """`acceptance <(kubectl logs POD)`: a source that cannot seek."""
    readable, writable = os.pipe()
    with os.fdopen(writable, "w") as pipe:
        pipe.write("\n".join(CASES[0]["lines"]))
    assert run_cli(monkeypatch, capsys, "acceptance", f"/dev/fd/{readable}")["runs"][0]["drafts"] == 1220
    os.close(readable)
