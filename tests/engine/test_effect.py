"""A lossy switch in the draft costs acceptance, and drafttools gives it back: measured on a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.effect import arms
from tests.engine.effect.acceptance import difference
from tests.engine.effect.arms import ARMS, EXACT, SWITCHES, Arm, Served

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GATES = {"INT4 all-reduce": "quick_reduce", "FP4 experts": "a4w4"}
# Per target forward: the reductions of the embedding and of two layers' attention and MoE; the MoE of two layers.
TARGET_LOWERED = {"INT4 all-reduce": 5, "FP4 experts": 2}

each_switch = pytest.mark.parametrize("switch", SWITCHES)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="module")
def results(reports: Path) -> dict[Arm, Served]:
    pytest.importorskip("vllm")
    return {arm: arms.run(arm, reports / str(arm)) for arm in ARMS}


@each_switch
def test_acceptance_falls_under_the_switch(results: dict[Arm, Served], switch: str) -> None:
    assert difference(results[EXACT].requests, results[Arm(switch)].requests).high < 0, arms.table(results)


@each_switch
def test_acceptance_recovers_under_drafttools(results: dict[Arm, Served], switch: str) -> None:
    lowered, restored = results[Arm(switch)], results[Arm(switch, drafttools=True)]
    assert difference(lowered.requests, restored.requests).low > 0, arms.table(results)


@each_switch
def test_nothing_of_the_draft_is_lowered_under_drafttools(results: dict[Arm, Served], switch: str) -> None:
    lowered, restored = results[Arm(switch)], results[Arm(switch, drafttools=True)]
    assert lowered.count("draft", "lowered") == lowered.count("draft", "asked") > 0
    assert restored.count("draft", "asked") > 0
    assert restored.count("draft", "lowered") == 0


@each_switch
def test_the_target_is_lowered_as_before(results: dict[Arm, Served], switch: str) -> None:
    assert results[EXACT].lowered_per_forward == 0
    assert results[Arm(switch)].lowered_per_forward == TARGET_LOWERED[switch]
    assert results[Arm(switch, drafttools=True)].lowered_per_forward == TARGET_LOWERED[switch]


@each_switch
def test_the_target_says_the_same_as_before(results: dict[Arm, Served], switch: str) -> None:
    same = arms.same_outputs(results[Arm(switch)], results[Arm(switch, drafttools=True)])
    # Other batches are verified, and a CPU may add in another order there: a few close calls may fall differently.
    assert same >= 0.95 * len(results[EXACT].requests)


@each_switch
def test_the_report_says_what_was_declined(results: dict[Arm, Served], reports: Path, switch: str) -> None:
    assert results
    directory = reports / str(Arm(switch, drafttools=True))
    written = [json.loads(path.read_text()) for path in directory.glob("drafttools-*.json")]
    gates = [report["gates"][GATES[switch]] for report in written if report["drafts"]]
    assert len(gates) == 2
    assert all(gate["declined"] == gate["asked"] > 0 for gate in gates), gates


def test_requests_add_up_to_the_engine_counters(results: dict[Arm, Served]) -> None:
    for served in results.values():
        assert sum(request["drafts"] for request in served.requests) == served.drafts
        assert sum(request["accepted"] for request in served.requests) == served.accepted


def test_prompts_and_outputs_are_as_many_in_every_arm(results: dict[Arm, Served]) -> None:
    shapes = {tuple(len(request["tokens"]) for request in served.requests) for served in results.values()}
    assert len(shapes) == 1
