"""Processes for tests: fresh interpreters with a scrubbed environment, and forks of one that has vLLM imported."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[1]
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


def environment(**extra: str) -> dict[str, str]:
    """A small environment without drafttools in it; `extra` is added."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | extra


def python(
    code: str, *arguments: str, flags: tuple[str, ...] = (), cwd: Path = ROOT, timeout: float = 60, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a snippet in a fresh interpreter. `flags` go before -c, `arguments` after the code."""
    return subprocess.run(
        [sys.executable, *flags, "-c", code, *arguments],
        env=environment(**extra),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def printed(code: str, *arguments: str, **options: Any) -> Any:
    """What a snippet that must succeed prints as JSON in its last line."""
    done = python(code, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def vllm_tree(variable: str = "DRAFTTOOLS_VLLM_TREE") -> Path | None:
    """The unpacked wheel that an environment variable names, to test against besides the installed vLLM."""
    value = os.environ.get(variable)
    return Path(value) if value else None


class VllmProcess:
    """A process that imported vLLM once; `call` runs functions in forks of it, so that each starts untouched."""

    def __init__(self, tree: Path | None = None) -> None:
        self.path = os.pathsep.join(str(p) for p in (tree, ROOT) if p is not None)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> VllmProcess:
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm_process"],
            env=environment(PYTHONPATH=self.path, DRAFTTOOLS="off", HF_HUB_OFFLINE="1", **quiet),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def call(self, function: Callable[..., Any], *arguments: Any, mode: str = "enforce", **environ: str) -> Any:
        """The JSON result of `function(*arguments)` in a fork where drafttools has been activated in `mode`.

        With mode "off" it is not. `environ` is set before. Raises AssertionError with the traceback of the child.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        source = Path(inspect.getfile(function)).relative_to(ROOT).with_suffix("")
        request = {
            "function": f"{'.'.join(source.parts)}:{function.__qualname__}",
            "arguments": arguments,
            "environment": {"DRAFTTOOLS": mode, **environ},
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the vLLM process died"
        reply = json.loads(line)
        assert "error" not in reply, reply["error"]
        return reply["result"]
