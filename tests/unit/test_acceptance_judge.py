"""The judge: each verdict by the reason that must give it, and what the report and audit add."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttools import cli
from drafttools.acceptance import calibrate
from drafttools.acceptance.judge import compare
from drafttools.acceptance.records import MAX_BLOCKS, Pool, Rules, Run, Sample
from drafttools.patching import State


def sweep(lengths: Sequence[float], drafts: int = 1000, k: int = 5, **config: Any) -> Run:
    """A sweep whose intervals have these acceptance lengths."""
    run = Run("sweep", config=config)
    for length in lengths:
        accepted = round((length - 1) * drafts)
        rates = [(length - 1) / k] * k
        positions = tuple(round(rate * drafts) for rate in rates)
        run.take(Sample("interval", accepted, k * drafts, drafts, k, positions), Rules())
    return run


WAVE = (-0.04, 0.03, -0.01, 0.02, 0.04, -0.03, 0.01, -0.02)


def arm(length: float, sweeps: int = 2, **settings: Any) -> list[Run]:
    return [sweep([length + step for step in WAVE], **settings) for _ in range(sweeps)]


def test_the_same_data_is_no_change() -> None:
    result = compare(arm(3.5), arm(3.5))
    assert (result["verdict"], result["delta"]) == ("no_change", 0)


@pytest.mark.parametrize(("after", "verdict"), [(3.2, "lower"), (3.8, "higher"), (3.502, "no_change")])
def test_direction(after: float, verdict: str) -> None:
    result = compare(arm(3.5), arm(after))
    assert result["verdict"] == verdict
    assert result["delta"] == pytest.approx(after - 3.5)
    assert result["delta_pct"] == pytest.approx(100 * (after - 3.5) / 3.5)
    low, high = result["interval"]
    assert low < result["delta"] < high


def test_delta_over_the_baselines_standard_deviation() -> None:
    result = compare([sweep([3.4, 3.6]), sweep([3.4, 3.6])], arm(3.3))
    deviation = (4 / 3) ** 0.5 * 0.1  # four intervals, each 0.1 from their mean
    assert result["delta_over_sd"] == pytest.approx(-0.2 / deviation)


def test_wide_data_is_inconclusive_and_a_wide_margin_decides() -> None:
    wide = [sweep([3.0, 4.0, 3.2, 3.8, 3.4, 3.6]) for _ in range(2)]
    assert compare(wide, wide)["verdict"] == "inconclusive"
    assert compare(wide, wide, margin=0.2)["verdict"] == "no_change"


def test_a_small_real_drop_beyond_the_margin_is_lower() -> None:
    """3.94 -> 3.89: 1.3 %, seen from INT4 all-reduces."""
    assert compare(arm(3.94), arm(3.89, sweeps=3))["verdict"] == "lower"


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_one_sweep_is_inconclusive(side: str) -> None:
    arms = {"baseline": arm(3.5), "candidate": arm(2.5)}
    result = compare(*({**arms, side: arms[side][:1]}).values())
    assert result["verdict"] == "inconclusive"
    assert side in result["reasons"][0]


def test_a_sweep_without_drafts_does_not_count() -> None:
    assert compare(arm(3.5), [*arm(2.5, sweeps=1), Run("empty")])["verdict"] == "inconclusive"


def test_few_drafts_are_inconclusive() -> None:
    assert compare(arm(3.5), arm(2.5, drafts=10))["verdict"] == "inconclusive"


def test_nothing_at_all_is_inconclusive() -> None:
    result = compare([Run("a"), Run("b")], [Run("c"), Run("d")])
    assert (result["verdict"], result["delta"], result["interval"]) == ("inconclusive", None, None)


@pytest.mark.parametrize("sweeps", [1, 2])
@pytest.mark.parametrize("dead", ["baseline", "candidate"])
def test_dead_draft_needs_no_second_sweep(dead: str, sweeps: int) -> None:
    arms = {"baseline": arm(3.5), "candidate": arm(3.5), dead: [sweep([1.0, 1.0])] * sweeps}
    result = compare(*arms.values())
    assert (result["verdict"], result["reasons"]) == ("dead_draft", [f"{dead}: dead_draft"])


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [
        ("rejection_sample_method", "standard", "block"),
        ("draft_sample_method", "greedy", "probabilistic"),
        ("sampling", ["temperature=0.0"], ["temperature=1.0"]),
        ("k", 5, 6),
    ],
)
def test_other_settings_are_not_comparable(name: str, left: Any, right: Any) -> None:
    result = compare(arm(3.5, **{"config_" + name: 0}), arm(3.5))
    assert result["verdict"] == "no_change"
    arms = [[*arm(3.5)], [*arm(3.5)]]
    for runs, value in zip(arms, (left, right), strict=True):
        for run in runs:
            run.config[name] = value
    result = compare(*arms)
    assert result["verdict"] == "not_comparable"
    assert name in result["reasons"][0]


def test_another_k_is_not_comparable() -> None:
    result = compare(arm(3.5, k=5), arm(3.5, k=4))
    assert (result["verdict"], result["reasons"]) == ("not_comparable", ["k differs: 4, 5"])


def test_a_setting_only_one_side_tells_is_no_difference() -> None:
    assert compare(arm(3.5, rejection_sample_method="block"), arm(3.5))["verdict"] == "no_change"


def test_synthetic_by_configuration_is_not_evidence() -> None:
    result = compare(arm(3.5), arm(2.5, rejection_sample_method="synthetic"))
    assert result["verdict"] == "not_evidence"


def test_one_interval_a_sweep_keeps_the_sampling_noise() -> None:
    """Scrapes that agree by chance do not make a certain difference: 2,000 drafts, 1 % apart."""
    result = compare([sweep([3.50])] * 2, [sweep([3.465])] * 2)
    assert result["verdict"] == "inconclusive"
    low, high = result["interval"]
    assert high - low > 0.15


def test_without_positions_the_noise_is_at_its_largest() -> None:
    with_rates, without = sweep([3.5], k=5), sweep([3.5], k=5)
    with_rates.pool.position_accepted = [900, 700, 500, 300, 100]
    without.pool.position_accepted = []
    narrow, wide = (compare([run] * 2, [run] * 2)["interval"] for run in (with_rates, without))
    assert wide[1] > narrow[1]


def test_the_same_seed_gives_the_same_interval() -> None:
    assert compare(arm(3.5), arm(3.4)) == compare(arm(3.5), arm(3.4))


def test_a_long_log_is_merged_and_keeps_its_sums() -> None:
    pool = Pool()
    for index in range(3 * MAX_BLOCKS + 7):
        pool.add(Sample("interval", index % 4, 5, 1, 5))
    assert len(pool.blocks) <= MAX_BLOCKS
    assert sum(block.drafts for block in pool.blocks) == pool.drafts == 3 * MAX_BLOCKS + 7
    assert sum(block.accepted for block in pool.blocks) == pool.accepted


def test_the_simulated_data_have_the_length_they_claim() -> None:
    numpy = pytest.importorskip("numpy")
    scene = calibrate.SCENES[0]
    runs = calibrate.simulate_arm(scene, -0.03, numpy.random.default_rng(0))
    drafts = sum(run.pool.drafts for run in runs)
    length = 1 + sum(run.pool.accepted for run in runs) / drafts
    assert drafts == 20_000
    assert length == pytest.approx(0.97 * calibrate.acceptance_length(1.0), abs=0.04)


@pytest.mark.parametrize("scene", [scene for scene in calibrate.SCENES if not scene.hard], ids=lambda scene: scene.name)
def test_a_drop_of_three_percent_is_found(scene: calibrate.Scene) -> None:
    """A small part of the calibration; the whole is kept in docs/validation/acceptance-judge.md."""
    pytest.importorskip("numpy")
    assert calibrate.verdicts(scene, -0.03, simulations=20, seed=3, replicates=200)["lower"] >= 18
    assert calibrate.verdicts(scene, 0.0, simulations=20, seed=4, replicates=200)["lower"] <= 3


# What report and audit add, through the command line


def metrics(accepted: int) -> str:
    return json.dumps(
        {
            "spec_decode_num_drafts": 100_000,
            "spec_decode_draft_tokens": 300_000,
            "spec_decode_accepted_tokens": accepted,
            "spec_decode_per_position_acceptance_rates": [accepted / 300_000] * 3,
        }
    )


REPORT: dict[str, Any] = {
    "schema": 1,
    "run": "r",
    "host": "h",
    "pid": 1,
    "role": "worker",
    "rank": 0,
    "world_size": 1,
    "mode": "enforce",
    "way_in": "run",
    "written": 1.0,
    "vllm_version": "0.33.0",
    "patches": [{"name": "load_scope", "target": "t", "state": str(State.IN_EFFECT), "reason": ""}],
    "entry_points": {"propose": 3},
    "drafts": [
        {
            "class": "DeepSeekMTP",
            "architecture": "DeepSeekMTPModel",
            "checkpoint": "/hub/models--org--draft/snapshots/0123456789abcdef/",
            "dtypes": {"torch.bfloat16": 1000},
            "quant_methods": {"model.layers.0": "Fp8MoEMethod"},
            "kv_cache_dtype": "auto",
            "calls": {"forward": 3},
        }
    ],
    "gates": {"quick_reduce": {"asked": 2, "declined": 2}},
    "ungated": [],
    "failures": [],
}
AUDIT = {"verdict": "ok", "modules": [{"prefix": "a", "draft": True, "stored": "fp8"}, {"prefix": "b", "draft": False}]}


def drop(tmp_path: Path, monkeypatch: Any, capsys: Any, report: Any = None, audit: Any = None) -> dict[str, Any]:
    words = ["drafttools", "acceptance", "compare", "--json", "--html", str(tmp_path / "r.html")]
    for name, accepted in (("baseline", 200_000), ("candidate", 150_000)):
        words.append(f"--{name}")
        for index in range(2):
            path = tmp_path / f"{name}{index}.json"
            path.write_text(metrics(accepted + index))
            words.append(str(path))
    if report is not None:
        (tmp_path / "report").mkdir()
        (tmp_path / "report" / "drafttools-h-1.json").write_text(json.dumps(report))
        words += ["--report", str(tmp_path / "report")]
    if audit is not None:
        (tmp_path / "audit.json").write_text(json.dumps(audit))
        words += ["--audit", str(tmp_path / "audit.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    assert not stopped.value.code, err
    answer = json.loads(out)
    assert answer["verdict"] == "lower"
    return dict(answer)


@pytest.mark.parametrize("audit", [None, AUDIT])
def test_a_drop_with_clean_evidence(tmp_path: Path, monkeypatch: Any, capsys: Any, audit: Any) -> None:
    assert drop(tmp_path, monkeypatch, capsys, REPORT, audit)["explanation"] == "not explained by draft precision"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "observe"}, "mode is observe"),
        ({"ungated": ["marlin_input_dtype reaches the draft"]}, "rank 0: marlin_input_dtype reaches the draft"),
        ({"gates": {"quick_reduce": {"asked": 2, "declined": 1}}}, "quick_reduce"),
        ({"drafts": []}, "no worker reported a draft model"),
        ({"world_size": 2}, "1 of 2 workers did not report"),
    ],
)
def test_a_drop_with_unclean_evidence(
    tmp_path: Path, monkeypatch: Any, capsys: Any, change: dict[str, Any], words: str
) -> None:
    explanation = drop(tmp_path, monkeypatch, capsys, {**REPORT, **change}, AUDIT)["explanation"]
    assert explanation.startswith("draft precision may explain it")
    assert words in explanation


def test_a_drop_with_a_conflicting_audit(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    explanation = drop(tmp_path, monkeypatch, capsys, REPORT, {**AUDIT, "verdict": "conflict"})["explanation"]
    assert explanation == "draft precision may explain it: audit: conflict"


def test_a_drop_with_the_audit_alone(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    explanation = drop(tmp_path, monkeypatch, capsys, audit=AUDIT)["explanation"]
    assert explanation.startswith("not explained by draft precision")
    assert "no report of the running engine" in explanation


def test_a_drop_without_evidence_is_open(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert "is open" in drop(tmp_path, monkeypatch, capsys)["explanation"]


def test_the_page_has_the_reviewers_checklist(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    drop(tmp_path, monkeypatch, capsys, REPORT, AUDIT)
    page = (tmp_path / "r.html").read_text()
    for words in ("org/draft @ 0123456789abcdef", "fp8 x 1 (verdict ok)", "torch.bfloat16 1,000 parameters"):
        assert words in page
    for words in ("enforce by run", f"load_scope: {State.IN_EFFECT}", "quick_reduce 2/2", "vllm 0.33.0"):
        assert words in page
