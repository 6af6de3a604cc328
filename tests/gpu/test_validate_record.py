"""The GPU record and its verdicts from made-up engine outcomes, and the checkpoints it runs on; needs no GPU."""

from __future__ import annotations

import json
import os
import random
import stat
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import cases, engines, validate
from tests.gpu.engines import Engine, Outcome
from tests.gpu.shapes import EXPERTS, EXPERTS_HIDDEN, WIDTH

NAME = "eagle-v2-graphs"
CHECK = {check.name: check for check in cases.CHECKS}
METRICS = {"vllm:spec_decode_num_drafts": 40, "vllm:spec_decode_num_accepted_tokens": 42}


def counts(draft: str, *, host: int = 10, device: int = 30) -> dict[str, dict[str, int]]:
    """Probe counts with all draft calls under `draft` and all target calls out of scope."""
    zero = {"draft_in": 0, "draft_out": 0, "target_in": 0, "target_out": 0}
    return {
        "host": {**zero, draft: host, "target_out": host},
        "captured": {**zero, draft: 5, "target_out": 5},
        "device": {**zero, draft: device, "target_out": device},
    }


def outcome(draft: str = "draft_in", **changes: Any) -> Outcome:
    answer = {
        "tokens": cases.expected_tokens(cases.PROMPTS, cases.QUESTION["max_tokens"]),
        "seconds": 1.0,
        "metrics": METRICS,
        "probe_before": counts(draft, host=8, device=8),
        "probe": counts(draft),
    }
    turns = [{"count": 1000, "seconds": 1.0, "metrics": METRICS} for _ in range(cases.TURNS)]
    report = {
        "drafts": [
            {
                "class": "EagleLlamaForCausalLM",
                "captures": {"full": 3, "piecewise": 0, "breakable": 0},
                "details": {},
            }
        ]
    }
    made = Outcome(
        ready={"load_s": 60.0, "memory": 500 << 20, "vllm": "0.33.0", "torch": "2.11.0", "probe": {}},
        answers=[answer, *turns],
        reports=[report],
        status=0,
        status_text="in effect",
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def results(**outcomes: Outcome) -> dict[str, Any]:
    env = {
        "date": "2026-01-02",
        "command": "c",
        "gpu": "G, 1.2",
        "python": "3.12",
        "system": "Linux",
        "tilelang": "absent",
    }
    return {"environment": env, "outcomes": {name.replace("_", "-"): asdict(o) for name, o in outcomes.items()}}


def test_the_record_states_verdicts_and_versions() -> None:
    page = validate.record(results(eagle_v2_graphs_shim=outcome(), eagle_v2_graphs_stock=outcome("draft_out")))
    assert "vLLM 0.33.0, torch 2.11.0" in page
    assert f"| {NAME}: every draft call in scope, no target call | holds |" in page
    assert f"| {NAME}: without the shim nothing is in scope | holds |" in page
    assert f"| {NAME}: acceptance the same with and without the shim | holds | acceptance length 2.050, 2.050 |" in page
    assert "| routing: stock accepts nothing beside an NVFP4 trunk | not run |" in page
    assert "| eagle-v2-graphs-shim | 2.050 | 60 | 500.0 | median 1000.0000" in page


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        ("every draft call in scope, no target call", outcome("draft_out")),
        ("replays in scope", outcome("draft_out")),
        ("status exits 0", outcome(status=1)),
        ("graphs captured", outcome(reports=[{"drafts": [{"captures": {"full": 0}}]}])),
    ],
)
def test_a_check_of_the_shim_fails_on_a_broken_outcome(check: str, broken: Outcome) -> None:
    judged = CHECK[f"{NAME}: {check}"]
    assert judged.verdict({f"{NAME}-shim": outcome()})[0] == "holds"
    assert judged.verdict({f"{NAME}-shim": broken})[0] == "fails"


def test_device_counts_alone_can_fail_the_scope_check() -> None:
    """A replay that counts a draft kernel out of scope, while the host saw every call in scope."""
    seen = counts("draft_in")
    seen["device"]["draft_out"] = 1
    answer = {**outcome().answers[0], "probe": seen}
    assert CHECK[f"{NAME}: every draft call in scope, no target call"].verdict(
        {f"{NAME}-shim": outcome(answers=[answer])}
    ) == ("fails", cases.in_scope(outcome(answers=[answer]))[1])


def test_wrong_tokens_and_wrong_acceptance_fail() -> None:
    answer = outcome().answers[0]
    other = outcome(answers=[{**answer, "tokens": [[0] * 32, *answer["tokens"][1:]]}])
    assert cases.right_tokens(outcome(), other) == (False, "outputs that differ: [0, 1] of 4")
    nothing = outcome(answers=[{**answer, "metrics": {**METRICS, "vllm:spec_decode_num_accepted_tokens": 0}}])
    assert not cases.same_acceptance(outcome(), nothing)[0]
    assert not cases.same_acceptance(nothing, nothing)[0]
    assert cases.nothing_accepted(nothing)[0]
    assert not cases.nothing_accepted(outcome())[0]


def test_cost_is_judged_on_paired_turns_after_the_warm_up() -> None:
    first, *turns = outcome().answers
    slow = outcome(answers=[first, *({**turn, "seconds": 1.02} for turn in turns)])
    assert cases.not_slower(outcome(), outcome())[0]
    assert not cases.not_slower(outcome(), slow)[0]
    assert not cases.not_slower(outcome(), outcome(), outcome(), slow)[0], "every pair counts"
    assert not cases.not_slower(outcome(), outcome(answers=[first, *turns[:3]]))[0]
    draw = random.Random(0)
    uneven = [{**turn, "seconds": draw.uniform(0.7, 1.3)} for turn in turns]
    good, detail = cases.not_slower(outcome(), outcome(answers=[first, *uneven]))
    assert not good
    assert detail.startswith("too noisy to tell")


def test_memory_must_fall_by_half_of_the_experts() -> None:
    half = EXPERTS * 3 * EXPERTS_HIDDEN * WIDTH
    assert cases.less_memory(outcome(), outcome(ready={"memory": (500 << 20) - half}))[0]
    assert not cases.less_memory(outcome(), outcome())[0]


def test_an_engine_with_an_error_is_not_run() -> None:
    check = CHECK[f"{NAME}: status exits 0"]
    failed = outcome(error="RuntimeError: no kernel")
    assert check.verdict({f"{NAME}-shim": failed}) == ("not run", f"{NAME}-shim: RuntimeError: no kernel")
    assert check.verdict({})[0] == "not run"


def test_every_check_names_engines_that_exist() -> None:
    names = [engine.name for engine in cases.ENGINES]
    assert len(set(names)) == len(names)
    assert {name for check in cases.CHECKS for name in check.engines} <= set(names)
    assert len(CHECK) == len(cases.CHECKS)


def test_later_results_replace_earlier_ones_that_have_no_answer(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    late = {"answers": [], "error": "late"}
    old = results(cost_a_stock=outcome(**late), cost_a_shim=outcome(), retired=outcome())
    first.write_text(json.dumps(old))
    second.write_text(json.dumps(results(cost_a_stock=outcome(), cost_a_shim=outcome(**late))))
    merged = validate.outcomes_of(validate.merged([first, second]))
    assert {name: each.error for name, each in merged.items()} == {"cost-a-stock": "", "cost-a-shim": ""}


def ranks(draft: str = "custom", target: str = "quick", host: int = 2, device: int = 9) -> list[dict[str, Any]]:
    """Both ranks' all-reduces, each place's on one path."""
    zero = dict.fromkeys(("quick", "custom", "symm_mem", "nccl"), 0)
    counts = {
        side: {"target": {**zero, target: number}, "draft": {**zero, draft: number}}
        for side, number in (("host", host), ("device", device))
    }
    return [{**counts, "decisions": "same"} for _ in range(2)]


def two_gpus(reduced: list[dict[str, Any]], **changes: Any) -> Outcome:
    made = outcome()
    made.ready["all_reduces"] = ranks(host=1, device=1)
    made.answers[0] |= {"all_reduces": reduced, **changes}
    return made


def test_all_reduces_are_judged_by_path_on_both_ranks() -> None:
    stock, shim = two_gpus(ranks(draft="quick")), two_gpus(ranks())
    assert cases.draft_is_lossy(stock)[0]
    assert not cases.draft_is_lossy(shim)[0]
    assert cases.draft_is_exact(shim)[0]
    assert not cases.draft_is_exact(stock)[0]
    assert not cases.draft_is_exact(two_gpus(ranks(target="nccl")))[0]
    assert not cases.draft_is_exact(two_gpus(ranks()[:1]))[0]
    assert cases.ranks_alike(stock, shim)[0]
    assert not cases.ranks_alike(shim, two_gpus([ranks()[0], ranks(draft="nccl")[0]]))[0]
    assert cases.replayed(shim)[0]
    assert not cases.replayed(two_gpus(ranks(host=9, device=9)))[0]


def test_acceptance_is_given_back_beyond_chance() -> None:
    def served(accepted: int) -> Outcome:
        requests = [{"drafts": 10, "accepted": accepted + i % 3} for i in range(40)]
        return two_gpus(ranks(), requests=requests)

    assert cases.given_back(served(20), served(14), served(18))[0]
    assert not cases.given_back(served(20), served(14), served(14))[0]
    assert not cases.given_back(served(20), served(20), served(20))[0]


FAKE = """#!{python}
import json, sys
if "--dies" in sys.argv[-1]: sys.exit("ValueError: no such kernel")
print("ANSWER " + json.dumps(dict(memory=1)), flush=True)
for line in sys.stdin:
    count = json.loads(line)["max_tokens"]
    print("a log line")
    print("ANSWER " + json.dumps(dict(tokens=[[0] * count], seconds=1.0, metrics={{}})), flush=True)
"""


def test_engines_run_side_by_side_and_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes that speak the protocol in place of engines: one dies, one never gets ready, two take turns."""
    fake = tmp_path / "fake"
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    sleeper = ["sleep", "60"]
    monkeypatch.setattr(
        engines, "_command", lambda engine, *_: sleeper if engine.name == "late" else [str(fake), f"--{engine.model}"]
    )
    monkeypatch.setattr(engines, "STAGGER_S", 0.0)
    monkeypatch.setattr(engines, "SETTLE_S", 0.0)
    listed = [
        Engine("one", "runs", {}, takes_turns="g"),
        Engine("two", "runs", {}, takes_turns="g"),
        Engine("dead", "dies", {}),
        Engine("late", "late", {}),
        Engine("plain", "runs", {}),
    ]
    outcomes = engines.run(
        listed,
        tmp_path,
        tmp_path / "work",
        question={"max_tokens": 3},
        turn={"max_tokens": 7},
        turns=4,
        at_once=4,
        deadline=time.monotonic() + 4,
        turns_s=10,
    )
    assert [len(outcomes[name].answers) for name in ("one", "two", "plain")] == [5, 5, 1]
    assert outcomes["one"].answers[1]["count"] == 7
    assert outcomes["one"].ready == {"memory": 1}
    assert outcomes["dead"].error == "ValueError: no such kernel"
    assert outcomes["late"].error.startswith("not ready in time")
    assert not any(outcomes[name].error for name in ("one", "two", "plain"))


def test_an_engine_s_environment_has_no_drafttools_but_what_the_case_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "DRAFTTOOLS_REPORT_DIR", "elsewhere")
    by_name = {engine.name: engine for engine in cases.ENGINES}
    stock = engines._environment(by_name["cost-a-stock"], tmp_path / "x")
    shim = engines._environment(by_name["cost-a-shim"], tmp_path / "x")
    assert stock == shim
    assert not [name for name in stock if name.startswith("DRAFTTOOLS")]
    assert engines._environment(by_name["experts-fp8-online"], tmp_path)["DRAFTTOOLS_FP8_EXPERTS_UNSUPPORTED"] == "1"


def test_four_bit_experts_round_trip() -> None:
    torch = pytest.importorskip("torch")
    from tests.gpu import checkpoints

    weight = checkpoints._projections(256, 256, active=True, draft=True)["down_proj"]
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for store, group in ((checkpoints._mxfp4, 32), (checkpoints._nvfp4, 16)):
        stored = store(weight)
        packed, scale = stored["weight"], stored["weight_scale"]
        exponents = torch.exp2(scale.float() - 127) if group == 32 else scale.float()
        values = torch.stack([magnitudes[(packed & 15).long()], magnitudes[(packed >> 4).long()]], dim=-1)
        assert torch.equal(values.reshape(256, -1, group) * exponents[..., None], weight.reshape(256, -1, group))


def test_an_fp8_expert_is_its_weight_within_rounding() -> None:
    torch = pytest.importorskip("torch")
    from tests.gpu import checkpoints

    weight = torch.randn(256, 384)
    stored = checkpoints._fp8(weight)
    scale = stored["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    error = (stored["weight"].float() * scale - weight).abs() / weight.abs().clamp(min=0.05)
    assert error.max() < 0.07
