"""Readers: neighbours of the cases, every other source, and input that is damaged or something else."""

from __future__ import annotations

import gzip
import http.server
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from drafttools import cli
from drafttools.acceptance.records import Rules
from drafttools.acceptance.sources import read, read_pair
from drafttools.acceptance.summary import summarize
from drafttools.errors import DraftToolsError

TAG = "(APIServer pid=1) INFO 10-01 12:00:00 [metrics.py:120] "


def line(accepted: int, drafts: int, positions: list[int], drafted: int | None = None) -> str:
    """A metrics line as vLLM 0.33.0 prints it."""
    drafted = drafts * len(positions) if drafted is None else drafted
    rates = ", ".join(f"{count / drafts:.3f}" for count in positions)
    return (
        f"{TAG}SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, Accepted throughput: 1.00 "
        f"tokens/s, Drafted throughput: 2.00 tokens/s, Accepted: {accepted} tokens, Drafted: {drafted} tokens, "
        f"Per-position acceptance rate: {rates}, Avg Draft acceptance rate: {100 * accepted / drafted:.1f}%"
    )


def summary(path: Path, text: str | bytes, **rules: Any) -> dict[str, Any]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return summarize(read(str(path), Rules(**rules)))


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    return lambda text, **rules: summary(tmp_path / "server.log", text, **rules)


# V0, as logged in public issue threads.
V0 = (
    "INFO 12-16 16:46:04 metrics.py:482] Speculative metrics: Draft acceptance rate: {}, System efficiency: {}, "
    "Number of speculative tokens: {}, Number of accepted tokens: {}, Number of draft tokens: {}, "
    "Number of emitted tokens: {}.\n"
)


def test_v0_counts_emitted_tokens(log: Any) -> None:
    """V0's accepted tokens go on after a rejection; 0.640 of 6 tokens a draft were emitted."""
    run = log(V0.format(0.797, 0.640, 5, 197711, 248165, 190541))
    assert run["drafts"] == 49633
    assert run["acceptance_length"] == pytest.approx(0.640 * 6, abs=0.003)


def test_v0_is_cumulative(log: Any) -> None:
    run = log(V0.format(0.5, 0.5, 2, 90, 200, 150) + V0.format(0.5, 0.5, 2, 180, 400, 310))
    assert (run["drafts"], run["intervals"], run["acceptance_length"]) == (200, 2, 1.55)


def test_v0_restart_is_a_counter_reset(log: Any) -> None:
    run = log(V0.format(0.5, 0.5, 2, 90, 200, 150) + V0.format(0.5, 0.5, 2, 9, 20, 16))
    assert (run["drafts"], run["accepted"], run["flags"]) == (110, 56, ["counter_reset"])


def test_first_v1_lines_count_an_interval(log: Any) -> None:
    text = (
        "Speculative metrics: Draft acceptance rate: 0.500, Number of accepted tokens: 30, Number of draft tokens: 60, "
    )
    run = log(f"INFO {text}\nINFO {text}\n", k=3)
    assert (run["drafts"], run["acceptance_length"]) == (40, 2.5)


def test_steps_shorter_than_k(log: Any) -> None:
    """Adaptive drafting: 100 drafts, 230 tokens drafted at k = 3; Drafted / k would be 76.7."""
    run = log(line(150, 100, [80, 50, 20], drafted=230))
    assert (run["drafts"], run["acceptance_length"], run["flags"]) == (100, 2.5, ["drafts_estimated"])


def test_divisible_but_shorter_than_k(log: Any) -> None:
    """Drafted / k is whole and still wrong: 240 / 3 = 80 contradicts what was printed."""
    assert log(line(150, 100, [80, 50, 20], drafted=240))["drafts"] == 100


def test_drafts_without_tokens(log: Any) -> None:
    """A grammar can invalidate all tokens of a draft, which still counts (v1/core/sched/scheduler.py)."""
    assert log(line(30, 40, [20, 10], drafted=60))["drafts"] == 40


def test_nothing_accepted_in_short_steps(log: Any) -> None:
    """Seven tokens at k = 3 take three drafts at least; with nothing accepted the length is 1 whatever the number."""
    run = log(line(0, 4, [0, 0, 0], drafted=7))
    assert (run["drafts"], run["acceptance_length"], run["flags"]) == (3, 1.0, ["drafts_estimated"])


def test_no_positions_and_more_than_one_k_fits(log: Any) -> None:
    """1.01 from 2 of 720 tokens is 133 to 400 drafts, so k is 2, 3, 4 or 5."""
    text = line(2, 240, [2, 0, 0]).replace(", Per-position acceptance rate: 0.008, 0.000, 0.000", "")
    run = log(text)
    assert run["k"] is None
    assert run["acceptance_length"] == pytest.approx(1.01, abs=0.005)
    assert log(text, k=3)["drafts"] == 240


def test_colours_inside_a_record(log: Any) -> None:
    text = (
        line(200, 100, [80, 70, 50])
        .replace("length: 3.00", "length: \x1b[32m3.00\x1b[0m")
        .replace("0.700", "\x1b[1m0.700")
    )
    run = log(text)
    assert (run["k"], run["drafts"]) == (3, 100)


def test_rust_line_whose_rates_are_from_another_snapshot(log: Any) -> None:
    text = line(200, 100, [80, 70, 50]).replace("0.800, 0.700, 0.500", "0.900, 0.800, 0.700")
    assert log(text)["drafts"] == 100


def test_a_record_inside_other_output(log: Any) -> None:
    text = line(200, 100, [80, 70, 50])
    run = log(f"\rProgress 50%\r{text}\rProgress 60%\r\n(Worker pid=3) {text}{text}\n")
    assert (run["intervals"], run["drafts"]) == (3, 300)


def test_a_cut_line_is_skipped_and_never_read_wrong(log: Any) -> None:
    text = line(200, 100, [80, 70, 50])
    start = text.index("metrics: ") + len("metrics: ")
    for end in range(start, len(text)):
        run = log(text[:end] + "\n" + text + "\n")
        assert (run["intervals"], run["skipped"], run["drafts"]) == (1, 1, 100), text[:end]


@pytest.mark.parametrize(
    "change",
    [("Accepted: 200", "Accepted: 999"), ("Drafted: 300", "Drafted: -3"), ("0.800", "8.000"), ("Drafted: 300", "x: 3")],
)
def test_impossible_figures_are_skipped(log: Any, change: tuple[str, str]) -> None:
    text = line(200, 100, [80, 70, 50])
    run = log(text.replace(*change) + "\n" + text)
    assert (run["intervals"], run["skipped"]) == (1, 1)


def test_no_speculation_in_a_log_without_it(log: Any) -> None:
    run = log("INFO Engine 000: Avg prompt throughput: 1.0 tokens/s\nINFO Perf metrics: fine\n")
    assert (run["speculation"], run["acceptance_length"], run["intervals"]) == (False, None, 0)


def test_empty_file(log: Any) -> None:
    assert log("")["speculation"] is False


def test_skip_first_and_exclude_above(log: Any) -> None:
    text = "\n".join(line(count, 100, [count, 0]) for count in (10, 90, 50, 20))
    run = log(text, skip_first=1, exclude_above=1.6)
    assert run["acceptance_length"] == 1.35
    reasons = [(sample["where"], sample["reason"]) for sample in run["excluded_samples"]]
    assert reasons == [("line 1", "one of the first 1"), ("line 2", "acceptance length above 1.6")]


def test_pooled_positions_and_conditional(log: Any) -> None:
    run = log(line(150, 100, [100, 50]) + "\n" + line(0, 100, [0, 0]))
    assert run["per_position"] == [0.5, 0.25]
    assert run["conditional"] == [0.5, 0.5]


def test_conditional_after_nothing_is_not_told(log: Any) -> None:
    assert log(line(0, 100, [0, 0]))["conditional"] == [0.0, None]


def test_k_of_two_lengths_varies(log: Any) -> None:
    run = log(line(50, 100, [50]) + "\n" + line(100, 100, [60, 40]))
    assert run["k"] is None
    assert "k_varies" in run["flags"]
    assert run["per_position"] == [0.55, 0.4]


@pytest.mark.parametrize(
    ("positions", "drafted", "flags"),
    [
        ([900, 700, 0, 0], None, ["k_exceeds_block"]),
        ([900, 700, 0, 0], 2000, ["drafts_estimated"]),  # two tokens a step were drafted: nothing beyond to accept
        ([1000, 1000, 1000], None, []),  # a perfect draft
        ([1000, 240], None, ["synthetic_suspected"]),
        ([1000, 980], None, []),
        ([3, 0, 0], None, ["dead_draft"]),
        ([240, 0], None, ["k_exceeds_block"]),
        ([900, 700, 10], None, []),
    ],
)
def test_flags_from_the_shape(log: Any, positions: list[int], drafted: int | None, flags: list[str]) -> None:
    assert log(line(sum(positions), 1000, positions, drafted))["flags"] == flags


def test_few_drafts_have_no_shape(log: Any) -> None:
    assert log(line(22, 20, [20, 2, 0]))["flags"] == []


NON_DEFAULT = (
    "(APIServer pid=1) INFO 11-01 00:00:00 [utils.py:253] non-default args: {'model': 'm', "
    "'override_generation_config': {'temperature': 0.6}, 'speculative_config': {'method': 'mtp', 'model': 'org/draft', "
    "'num_speculative_tokens': 1%s}}\n"
)


def test_configuration_lines(log: Any) -> None:
    run = log(
        NON_DEFAULT
        % ", 'rejection_sample_method': 'block'"
        + "INFO Initializing a V1 LLM engine (v0.33.0) with config: model='m', speculative_config=SpeculativeConfig("
        "method='mtp', model='org/draft', num_spec_tokens=1), tokenizer='m'\n"
        + "INFO Received request: params: SamplingParams(n=1, temperature=0.5, top_p=0.9, top_k=0, min_p=0.0, seed=1)\n"
        + "INFO SpecDecoding metrics: Draft acceptance rate: 50.0%, Accepted: 50 tokens, Drafted: 100 tokens\n"
    )
    assert run["config"] == {
        "k": 1,
        "method": "mtp",
        "draft_model": "org/draft",
        "rejection_sample_method": "block",
        "draft_sample_method": "greedy",
        "override_generation_config": "{'temperature': 0.6}",
        "vllm_version": "0.33.0",
        "sampling": ["temperature=0.5, top_p=0.9, top_k=0, min_p=0.0"],
    }
    assert run["acceptance_length"] == 1.5


def test_synthetic_by_configuration(log: Any) -> None:
    run = log(NON_DEFAULT % ", 'rejection_sample_method': 'synthetic', 'synthetic_acceptance_rates': [0.7]")
    assert run["flags"] == ["synthetic"]


def test_configuration_in_escaped_json(log: Any) -> None:
    message = {"message": (NON_DEFAULT % ", 'synthetic_acceptance_length': 1.7").replace("'", '"')}
    run = log(json.dumps(message) + "\n")
    assert (run["config"]["k"], run["flags"]) == (1, ["synthetic"])


def test_two_starts_in_one_log(log: Any) -> None:
    assert log(NON_DEFAULT % "" + (NON_DEFAULT % "").replace("tokens': 1", "tokens': 2"))["flags"] == ["config_varies"]


# Metrics


def exposition(**counts: Any) -> str:
    """Metrics as prometheus_client itself writes them, with HELP, TYPE and _created."""
    registry = CollectorRegistry()
    for name, value in counts.items():
        positions = isinstance(value, list)
        labels = ["model_name", "engine", *(["position"] if positions else [])]
        counter = Counter(f"vllm:spec_decode_num_{name}", "About drafts.", labels, registry=registry)
        for position, count in enumerate(value if positions else [value]):
            counter.labels("m", "0", *([str(position)] if positions else [])).inc(count)
    return generate_latest(registry).decode()


SCRAPE = exposition(drafts=100, draft_tokens=300, accepted_tokens=200, accepted_tokens_per_pos=[90, 70, 40])
LATER = exposition(drafts=150, draft_tokens=450, accepted_tokens=230, accepted_tokens_per_pos=[110, 78, 42])


def pair(tmp_path: Path, before: str, after: str) -> dict[str, Any]:
    for name, text in (("before", before), ("after", after)):
        (tmp_path / name).write_text(text)
    return summarize(read_pair(str(tmp_path / "before"), str(tmp_path / "after"), Rules()))


def test_one_scrape(log: Any) -> None:
    assert "_created" in SCRAPE
    run = log(SCRAPE)
    assert (run["acceptance_length"], run["acceptance_rate"], run["k"], run["drafts"]) == (3.0, 2 / 3, 3, 100)
    assert run["per_position"] == [0.9, 0.7, 0.4]


def test_two_scrapes(tmp_path: Path) -> None:
    run = pair(tmp_path, SCRAPE, LATER)
    assert (run["drafts"], run["accepted"], run["drafted"], run["flags"]) == (50, 30, 150, [])
    assert run["per_position"] == [0.4, 0.16, 0.04]


def test_reset_between_scrapes(tmp_path: Path) -> None:
    run = pair(tmp_path, LATER, SCRAPE)
    assert (run["drafts"], run["accepted"], run["flags"]) == (100, 200, ["counter_reset"])


@pytest.mark.parametrize("counter", ["drafts_total", "draft_tokens_total", "accepted_tokens_total", 'position="2"'])
def test_reset_shown_by_one_counter_only(tmp_path: Path, counter: str) -> None:
    """After a restart the busier counters may already have passed what they were."""
    after = "\n".join(
        re.sub(r" [\d.]+$", " 7.0", line) if counter in line and "_created" not in line else line
        for line in LATER.splitlines()
    )
    assert pair(tmp_path, SCRAPE, after + "\n")["flags"] == ["counter_reset"]


def test_engine_that_went_away(tmp_path: Path) -> None:
    gone = SCRAPE.replace('engine="0"', 'engine="1"')
    run = pair(tmp_path, SCRAPE + gone, LATER)
    assert (run["drafts"], run["flags"]) == (50, ["engine_missing"])


def test_idle_between_scrapes_is_an_empty_interval(tmp_path: Path) -> None:
    run = pair(tmp_path, SCRAPE, SCRAPE)
    assert (run["acceptance_length"], run["intervals"], run["empty_intervals"]) == (None, 0, 1)


def test_server_without_speculation(log: Any) -> None:
    run = log('# HELP vllm:num_requests_running Running.\nvllm:num_requests_running{engine="0"} 1.0\n')
    assert (run["speculation"], run["acceptance_length"]) == (False, None)


def test_malformed_metric_lines_are_skipped_and_counted(log: Any) -> None:
    bad = 'vllm:spec_decode_num_drafts_total{engine="9" 7\nvllm:spec_decode_num_drafts_total{engine="9"} many\n'
    run = log(SCRAPE + bad + 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="9"} 7\n')
    assert (run["drafts"], run["skipped"]) == (100, 3)


class _Server(http.server.BaseHTTPRequestHandler):
    answers: list[tuple[int, str, str]]

    def do_GET(self) -> None:
        status, kind, body = self.answers.pop(0) if self.path == "/metrics" else (404, "text/plain", "")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    servers: list[http.server.HTTPServer] = []

    def start(*answers: tuple[int, str, str]) -> str:
        handler = type("Handler", (_Server,), {"answers": list(answers)})
        servers.append(http.server.HTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_live_server(serve: Any) -> None:
    url = serve((200, "text/plain", SCRAPE), (200, "text/plain", LATER))
    run = summarize(read(url, Rules(), interval_s=0.01))
    assert (run["source"], run["drafts"], run["accepted"]) == (url, 50, 30)


def test_live_server_since_its_start(serve: Any) -> None:
    assert summarize(read(serve((200, "text/plain", LATER)) + "/metrics", Rules()))["drafts"] == 150


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, "text/html", "<html>login</html>"), "answers HTML"),
        ((200, "text/plain", "<!doctype html>"), "answers HTML"),
        ((500, "text/plain", ""), "no metrics"),
    ],
)
def test_url_that_is_no_metrics(serve: Any, answer: tuple[int, str, str], words: str) -> None:
    with pytest.raises(DraftToolsError, match=words):
        read(serve(answer), Rules())


# JSON

BENCH = {
    "backend": "vllm",
    "request_throughput": 1.0,
    "spec_decode_acceptance_rate": 50.0,
    "spec_decode_acceptance_length": 2.0,
    "spec_decode_num_drafts": 400,
    "spec_decode_draft_tokens": 800,
    "spec_decode_accepted_tokens": 400,
    "spec_decode_per_position_acceptance_rates": [0.6, 0.4],
}
PER_REQUEST = {
    "mean_acceptance_length": 2.0,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [10, 20, 10],
    "num_spec_steps": 40,
    "num_accepted_draft_tokens": 40,
    "num_draft_tokens": 80,
    "num_spec_tokens": 2,
}
RESPONSE = {"id": "cmpl-1", "choices": [], "metrics": {"queue_time_ms": 1.0, "speculative_decoding": PER_REQUEST}}


@pytest.mark.parametrize("indent", [None, 2])
def test_bench_result(log: Any, indent: int | None) -> None:
    run = log(json.dumps(BENCH, indent=indent))
    assert (run["acceptance_length"], run["acceptance_rate"], run["k"], run["drafts"]) == (2.0, 0.5, 2, 400)
    assert run["per_position"] == [0.6, 0.4]


def test_bench_results_appended(log: Any) -> None:
    run = log(json.dumps(BENCH) + "\n" + json.dumps(BENCH) + "\n{broken\n")
    assert (run["drafts"], run["intervals"], run["skipped"]) == (800, 2, 1)


def test_bench_without_speculation_cannot_tell(log: Any) -> None:
    run = log(json.dumps({"request_throughput": 1.0}))
    assert (run["speculation"], run["acceptance_length"]) == (None, None)


@pytest.mark.parametrize("body", [PER_REQUEST, RESPONSE, [RESPONSE]])
def test_per_request_metrics(log: Any, body: Any) -> None:
    run = log(json.dumps(body))
    assert (run["acceptance_length"], run["drafts"], run["drafted"], run["k"]) == (2.0, 40, 80, 2)
    assert run["per_position"] == [0.75, 0.25]


def test_streamed_responses(log: Any) -> None:
    run = log("".join(f"data: {json.dumps(RESPONSE)}\n\n" for _ in range(3)) + "data: [DONE]\n")
    assert (run["drafts"], run["intervals"], run["skipped"]) == (120, 3, 0)


def test_json_of_the_wrong_shape_is_skipped(log: Any) -> None:
    assert log(json.dumps({**PER_REQUEST, "acceptance_histogram": "x"}))["skipped"] == 1


# Damage

GZIP = gzip.compress("\n".join(line(200 + i, 100, [80, 70, 50 + i]) for i in range(40)).encode())


def test_gzip(log: Any) -> None:
    assert log(GZIP)["intervals"] == 40


def test_truncated_gzip_is_read_as_far_as_it_goes(log: Any) -> None:
    run = log(GZIP[: len(GZIP) * 2 // 3])
    assert 0 < run["intervals"] < 40
    assert "truncated" in run["flags"]


def test_binary_garbage_around_records(log: Any) -> None:
    noise = bytes(range(256)) * 3000
    run = log(noise + b"\n" + line(200, 100, [80, 70, 50]).encode() + b"\n" + noise)
    assert run["drafts"] == 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<!DOCTYPE html><html></html>", "HTML"),
        (b"\x1f\x8b\x08\x00garbage", "damaged gzip"),
        (b'{"request_throughput": ', "not readable as JSON"),
    ],
)
def test_one_line_errors(tmp_path: Path, monkeypatch: Any, capsys: Any, content: bytes, words: str) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    code, err = failing(monkeypatch, capsys, "acceptance", str(path))
    assert code == 2
    assert words in err
    assert str(path) in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["acceptance", "/nonexistent"], "/nonexistent: No such file"),
        (["acceptance", "/"], "/: Is a directory"),
        (["acceptance", "--before", "x"], "--before together with --after"),
        (["acceptance", "http://127.0.0.1:9"], "http://127.0.0.1:9: no metrics"),
        (["acceptance", "compare", "--baseline", "a", "--candidate", "b", "--margin", "much"], "--margin much"),
        (["acceptance", "compare", "--baseline", "a", "a", "--candidate", "b"], "a is given twice"),
        (["acceptance", "--audit", "/nonexistent", "x"], "/nonexistent: not the JSON of an audit"),
        (["acceptance", "--report", "/nonexistent", "x"], "/nonexistent holds no drafttools"),
    ],
)
def test_bad_usage(monkeypatch: Any, capsys: Any, words: list[str], message: str) -> None:
    code, err = failing(monkeypatch, capsys, *words)
    assert code == 2
    assert message in err


def failing(monkeypatch: Any, capsys: Any, *words: str) -> tuple[Any, str]:
    """Exit code and the one line on standard error."""
    monkeypatch.setattr(sys, "argv", ["drafttools", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return stopped.value.code, err
