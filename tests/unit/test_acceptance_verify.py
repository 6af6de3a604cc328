"""`drafttools verify`: what makes it fail, and what it refuses to start."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from drafttools import cli
from drafttools.acceptance.serve_prompts import _spec_decode
from drafttools.acceptance.verify import Served, Verification
from drafttools.status import Status

CONFIG = '{"method": "mtp", "num_speculative_tokens": 1}'


def served(mode: str, tokens: list[list[int]] | None, failure: str | None = None) -> Served:
    return Served(mode, tokens, 10.0, None, failure)


def verification(on: list[list[int]] | None, **changes: Any) -> Verification:
    values: dict[str, Any] = {"off": served("off", [[1, 2, 3], [4]]), "status": Status([], []), "greedy": True}
    return Verification(on=served("enforce", on), **{**values, **changes})


def test_equal_outputs_in_effect() -> None:
    found = verification([[1, 2, 3], [4]])
    assert (found.problems, found.as_json()["ok"], found.as_json()["outputs_compared"]) == ([], True, True)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ([[1, 9, 3], [4]], "request 0 differs from token 1"),
        ([[1, 2, 3], [4, 5]], "request 1 differs from token 1"),
        ([[1, 2], [4]], "request 0 differs from token 2"),
    ],
)
def test_different_greedy_outputs(on: list[list[int]], words: str) -> None:
    assert verification(on).problems == [f"greedy outputs differ: {words} on"]


def test_sampled_outputs_are_not_compared() -> None:
    found = verification([[9]], greedy=False)
    assert (found.problems, found.as_json()["outputs_compared"]) == ([], False)


def test_not_in_effect() -> None:
    assert verification([[1, 2, 3], [4]], status=Status([], ["why"])).problems == ["why"]


def test_no_report_at_all() -> None:
    assert "did not reach" in verification([[1, 2, 3], [4]], status=None).problems[0]


def test_engine_that_fails_with_the_shim() -> None:
    found = verification(None)
    found.on.failure = "boom"
    assert found.problems == ["the engine failed with the shim: boom"]


def test_engine_that_fails_only_without_the_shim_is_no_problem() -> None:
    """A draft that stock vLLM cannot load is what the shim is for; there is nothing to compare then."""
    found = verification([[1]], off=served("off", None, "KeyError"))
    assert (found.problems, found.as_json()["outputs_compared"]) == ([], False)


def test_counters_become_a_bench_result() -> None:
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    before, after = (
        {f"vllm:spec_decode_{name}": values for name, values in zip(names, rows, strict=True)}
        for rows in (([1], [2], [1], [1, 0]), ([11], [22], [13], [9, 4]))
    )
    assert _spec_decode(before, after) == {
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 20,
        "spec_decode_accepted_tokens": 12,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.4],
    }
    assert _spec_decode(before, before) == {}
    assert _spec_decode({}, {}) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--speculative-config", "{"], "--speculative-config: not JSON"),
        (["--speculative-config", "[]"], "--speculative-config: not a JSON object"),
        (["--speculative-config", CONFIG, "--engine-args", "3"], "--engine-args: not a JSON object"),
        (["--speculative-config", CONFIG, "--prompts", "/nonexistent"], "--prompts /nonexistent"),
        (["--speculative-config", json.dumps({"synthetic_acceptance_length": 2.0})], "synthetic acceptance"),
        (["--speculative-config", json.dumps({"rejection_sample_method": "synthetic"})], "synthetic acceptance"),
    ],
)
def test_refused_before_anything_starts(monkeypatch: Any, capsys: Any, words: list[str], message: str) -> None:
    monkeypatch.setattr(sys, "argv", ["drafttools", "verify", "--model", "m", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    err = capsys.readouterr().err
    assert stopped.value.code == 2
    assert message in err
    assert err.count("\n") == 1


def test_empty_prompt_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "prompts").write_text("\n\n")
    words = ["--model", "m", "--speculative-config", CONFIG, "--prompts", str(tmp_path / "prompts")]
    monkeypatch.setattr(sys, "argv", ["drafttools", "verify", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "empty" in capsys.readouterr().err
