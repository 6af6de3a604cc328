"""A lossy all-reduce in the draft costs acceptance, and drafttools gives it back: measured on a real engine."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from tests.engine.effect import arms
from tests.engine.effect.acceptance import difference

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.slow]

TARGET_REDUCES = 5  # the embedding, and attention and MLP of two layers


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def served(report: pathlib.Path) -> dict[str, dict[str, Any]]:
    pytest.importorskip("vllm")
    results = {arm: arms.run(arm, report) for arm in arms.ARMS}
    print(arms.table(results))
    return results


def test_acceptance_falls_under_the_codec(served: dict[str, dict[str, Any]]) -> None:
    fall = difference(served["no codec"]["requests"], served["codec"]["requests"])
    assert fall.high < 0, fall


def test_acceptance_recovers_under_drafttools(served: dict[str, dict[str, Any]]) -> None:
    recovery = difference(served["codec"]["requests"], served[arms.SHIMMED]["requests"])
    assert recovery.low > 0, recovery


def test_no_reduction_of_the_draft_uses_the_codec_under_drafttools(served: dict[str, dict[str, Any]]) -> None:
    assert arms.reduces(served["codec"], "draft", "codec") == arms.reduces(served["codec"], "draft", "asked") > 0
    assert arms.reduces(served[arms.SHIMMED], "draft", "asked") > 0
    assert arms.reduces(served[arms.SHIMMED], "draft", "codec") == 0


def test_the_target_uses_the_codec_as_before(served: dict[str, dict[str, Any]]) -> None:
    assert arms.per_forward(served["no codec"]) == 0
    assert arms.per_forward(served["codec"]) == TARGET_REDUCES
    assert arms.per_forward(served[arms.SHIMMED]) == TARGET_REDUCES


def test_the_report_says_that_all_were_declined(served: dict[str, dict[str, Any]], report: pathlib.Path) -> None:
    workers = [json.loads(path.read_text()) for path in report.glob("drafttools-*.json")]
    gates = [worker["gates"]["quick_reduce"] for worker in workers if worker["drafts"]]
    assert len(gates) == 2
    for gate in gates:
        assert gate["declined"] == gate["asked"] > 0


def test_each_request_adds_up_to_the_engine_counters(served: dict[str, dict[str, Any]]) -> None:
    for counted in served.values():
        for what in ("drafts", "accepted"):
            assert sum(request[what] for request in counted["requests"]) == counted[what]
