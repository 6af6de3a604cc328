"""Start engines side by side on one GPU, ask them in turn, and collect what they said."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import serve
from tests.gpu.shapes import LAYERS

ROOT = Path(__file__).parents[2]
PROBE = ROOT / "tests" / "engine" / "probe"
STAGGER_S = 1.0
POLL_S = 0.05
ROUND_S = 60.0  # the longest a round may take
SETTLE_S = 5.0  # between the last load and the first turn
INSPECTED = "inspected"
GLM = ("Glm4MoeForCausalLM", "Glm4MoeMTPModel")
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    "large": ("LlamaForCausalLM", "EagleLlamaForCausalLM"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3DSparkModel"),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepSeekMTPModel"),
    **dict.fromkeys(("experts_fp16", "experts_fp8", "mxfp4", "mixed"), GLM),
    "target": ("Qwen3MoeForCausalLM",),
}
INSPECT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from vllm.model_executor.models.registry import ModelRegistry
with ThreadPoolExecutor() as pool:
    list(pool.map(lambda name: ModelRegistry.models[name].inspect_model_cls(), sys.argv[1:]))
"""


@dataclass(frozen=True)
class Engine:
    """One engine to run.

    Attributes:
        name: unique; names its directory and its log.
        model: target checkpoint, by its directory's name.
        speculative: vLLM's speculative_config; its `model` is a directory's name, too.
        shim: run it through `drafttools run`.
        probe: load the scope probe, which counts every RowParallelLinear of draft and target.
        options: further arguments of vllm.LLM.
        environ: further environment variables.
        takes_turns: stays loaded until all others are done, then is timed in turns with its group.
        in_process: run the model in the serving process, where memory and the probe can be read at any time.
        question: asked in place of the common one.
    """

    name: str
    model: str
    speculative: dict[str, Any]
    shim: bool = False
    probe: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    takes_turns: str = ""
    in_process: bool = True
    question: dict[str, Any] | None = None


class Running:
    """An engine's process."""

    def __init__(self, engine: Engine, checkpoints: Path, directory: Path) -> None:
        self.engine, self.directory = engine, directory / engine.name
        (self.directory / "cache").mkdir(parents=True)
        # What vLLM finds out about model classes is shared, compiled graphs are not.
        (self.directory / "cache" / "modelinfos").symlink_to(directory / INSPECTED / "modelinfos")
        self.reports, self.log = self.directory / "reports", self.directory / "stderr"
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.started = time.monotonic()
        self._process = subprocess.Popen(
            _command(engine, checkpoints, self.reports),
            env=_environment(engine, self.directory),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, request: dict[str, Any]) -> None:
        """Send a batch; its answer comes through `answer`."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:  # it has died: `answer` tells
            pass

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """The next answer. None when the process ended or `timeout_s` passed."""
        try:
            return self._answers.get(timeout=max(timeout_s, 0))
        except queue.Empty:
            return None

    def ended(self) -> bool:
        """Whether the process has gone."""
        return self._process.poll() is not None

    def stop(self, grace_s: float = 20) -> int:
        """Close its input, wait, and kill what is left of its session. Returns its exit status."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    def failure(self) -> str:
        """The last error its log names, or its last line."""
        text = "\n".join(
            path.read_text(errors="replace") for path in (self.directory / "stdout", self.log) if path.exists()
        )
        lines = [line.strip() for line in text.splitlines() if line.strip() and "%|" not in line]  # no progress bars
        errors = [line for line in lines if "Error" in line and "Traceback" not in line]
        return (errors or lines or ["no output"])[-1][-400:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        with (self.directory / "stdout").open("w") as copy:
            for line in self._process.stdout:
                if line.startswith(serve.MARK):
                    self._answers.put(json.loads(line.removeprefix(serve.MARK)))
                else:
                    copy.write(line)
        self._answers.put(None)


def _command(engine: Engine, checkpoints: Path, reports: Path) -> list[str]:
    speculative = dict(engine.speculative)
    if "model" in speculative:
        speculative["model"] = str(checkpoints / speculative["model"])
    options = {"model": str(checkpoints / engine.model), "speculative_config": speculative, **engine.options}
    command = [sys.executable, "-m", "tests.gpu.serve", json.dumps(options)]
    if engine.shim:
        return [sys.executable, "-m", "drafttools.cli", "run", "--report", str(reports), "--", *command]
    return command


def _environment(engine: Engine, directory: Path) -> dict[str, str]:
    """This process's environment without drafttools in it; the same for both arms of a pair."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTTOOLS") and k != "VLLM_PLUGINS"}
    paths = [str(PROBE)] if engine.probe else []
    paths += [str(ROOT), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "SCOPE_PROBE": str(directory / "probe") if engine.probe else "",
        "SCOPE_PROBE_TARGET_LAYERS": str(LAYERS),
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if engine.in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **engine.environ,
    }


def inspect_models(directory: Path, engines: Iterable[Engine]) -> subprocess.Popen[bytes]:
    """Let vLLM inspect the model classes once for all engines: each would start a process for each of its own."""
    names = sorted({name for engine in engines for name in ARCHITECTURES[Path(engine.model).name]})
    (directory / INSPECTED / "modelinfos").mkdir(parents=True)
    environ = {**os.environ, "VLLM_CACHE_ROOT": str(directory / INSPECTED), "DRAFTTOOLS": "off"}
    return subprocess.Popen([sys.executable, "-c", INSPECT, *names], env=environ, cwd=ROOT)


@dataclass
class Outcome:
    """What one engine gave: `ready` and `answers` as `serve` printed them, or `error`."""

    ready: dict[str, Any] = field(default_factory=dict)
    answers: list[dict[str, Any]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    status: int | None = None
    status_text: str = ""
    wall_s: float = 0.0
    error: str = ""


def run(
    engines: Iterable[Engine],
    checkpoints: Path,
    directory: Path,
    *,
    question: dict[str, Any],
    turn: dict[str, Any],
    turns: int,
    at_once: int,
    deadline: float,
    turns_s: float,
) -> dict[str, Outcome]:
    """Run every engine: `question` to each as soon as it is loaded, then `turns` timed rounds in each group.

    Args:
        at_once: processes alive at a time; the ones that take turns are started first and stay.
        deadline: time.monotonic() after which what is not ready is stopped and reported as such.
        turns_s: seconds after which no further round is begun.
    """
    waiting = sorted(engines, key=lambda engine: not engine.takes_turns)
    finishing = ThreadPoolExecutor()  # leaving takes seconds; the others must not wait for it
    outcomes = {engine.name: Outcome() for engine in waiting}
    alive: list[Running] = []
    parked: list[Running] = []
    asked: set[str] = set()
    next_start = 0.0
    while (waiting or alive) and time.monotonic() < deadline:
        if waiting and len(alive) + len(parked) < at_once and time.monotonic() >= next_start:
            alive.append(Running(waiting.pop(0), checkpoints, directory))
            next_start = time.monotonic() + STAGGER_S
        for running in list(alive):
            if _advance(running, outcomes[running.engine.name], asked, question):
                alive.remove(running)
                if running.engine.takes_turns and not outcomes[running.engine.name].error:
                    parked.append(running)
                else:
                    finishing.submit(_finish, running, outcomes[running.engine.name])
        time.sleep(POLL_S)
    for running in alive:
        outcomes[running.engine.name].error = f"not ready in time; last line: {running.failure()}"
        running.stop(grace_s=0)
    for engine in waiting:
        outcomes[engine.name].error = "not started: no time was left"
    finishing.shutdown(wait=True)  # so that nothing else runs during the turns
    if parked:
        time.sleep(SETTLE_S)
        _take_turns(parked, outcomes, turn, turns, time.monotonic() + turns_s)
    with ThreadPoolExecutor() as leaving:
        for running in parked:
            leaving.submit(_finish, running, outcomes[running.engine.name])
    return outcomes


def _advance(running: Running, outcome: Outcome, asked: set[str], question: dict[str, Any]) -> bool:
    """Take what the engine has said; True when it has answered the question, or has died."""
    ended = running.ended()
    answer = running.answer(0)
    if answer is None:
        if ended:
            outcome.error = running.failure()
        return ended
    if running.engine.name not in asked:
        asked.add(running.engine.name)
        outcome.ready = answer
        running.ask(running.engine.question or question)
        return False
    outcome.answers.append(answer)
    return True


def _take_turns(
    parked: list[Running], outcomes: dict[str, Outcome], turn: dict[str, Any], turns: int, deadline: float
) -> None:
    """Round after round, one engine after the other, so that what changes with time meets all of a group alike."""
    groups: dict[str, list[Running]] = {}
    for running in parked:
        groups.setdefault(running.engine.takes_turns, []).append(running)
    for members in groups.values():
        for number in range(turns):
            if time.monotonic() > deadline:
                return
            order = members if number % 2 == 0 else members[::-1]
            for running in order:
                running.ask(turn)
                answer = running.answer(ROUND_S)
                if answer is not None:
                    outcomes[running.engine.name].answers.append(_counted(answer))


def _counted(answer: dict[str, Any]) -> dict[str, Any]:
    """A timed answer without its tokens, which were compared before."""
    return {"count": sum(map(len, answer["tokens"])), "seconds": answer["seconds"], "metrics": answer["metrics"]}


def _finish(running: Running, outcome: Outcome) -> None:
    status = running.stop()
    outcome.wall_s = time.monotonic() - running.started
    if status and not outcome.error:
        outcome.error = f"exit status {status}: {running.failure()}"
    if running.engine.shim:
        outcome.reports = [json.loads(path.read_text()) for path in sorted(running.reports.glob("*.json"))]
        outcome.status, outcome.status_text = drafttools_status(running.reports)


def drafttools_status(reports: Path) -> tuple[int, str]:
    """Exit status and output of `drafttools status`."""
    command = [sys.executable, "-m", "drafttools.cli", "status", str(reports)]
    environ = {**os.environ, "DRAFTTOOLS": "off"}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout + done.stderr
