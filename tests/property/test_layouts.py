"""Whatever VLLM_PLUGINS, PYTHONPATH and sitecustomize files there are, a process without vLLM runs as if we were not there."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools import settings as drafttools_settings
from tests.processes import ROOT, environment

INJECT = drafttools_settings.inject_dir()
SITES = {
    "a": "import os\nos.environ['SEEN'] = os.environ.get('SEEN', '') + 'a'\n",
    "b": "import os\nos.environ['SEEN'] = os.environ.get('SEEN', '') + 'b'\n",
    "raises": "raise ValueError('mine')\n",
    "broken": "def (\n",
    "exits": "raise SystemExit(4)\n",
    "inserts": "import sys\nsys.path.insert(0, '/inserted')\n",
}
PROGRAM = """
import os, sys
try:
    import vllm_is_not_here
except ImportError as error:
    print(error)
print([p for p in sys.path if not p.endswith(("inject", "drafttools_link"))], os.environ.get("SEEN"))
sys.exit(int(os.environ.get("CODE", "0")))
"""
ENTRIES = st.lists(st.sampled_from([*SITES, "", "/nowhere", ".", str(ROOT)]), max_size=4, unique=True).filter(
    lambda entries: entries != [""]  # no PYTHONPATH at all, unlike an empty entry among others
)
VALUES = {
    "DRAFTTOOLS": st.sampled_from(["", "enforce", "observe", "off", "on", "\u00e9", " "]),
    "DRAFTTOOLS_DISABLE": st.sampled_from(["", "quick_reduce", "nothing_like_it", ",,"]),
    "DRAFTTOOLS_REPORT_DIR": st.sampled_from(["", "/proc/no/such", "relative"]),
    "DRAFTTOOLS_WAY_IN": st.sampled_from(["", "plugin", "anything"]),
    "VLLM_PLUGINS": st.sampled_from(["", "drafttools", "other", "a,b,,"]),
    "CODE": st.sampled_from(["0", "3"]),
}
ENVIRON = st.fixed_dictionaries({}, optional=VALUES)


def outcome(paths: list[str], environ: dict[str, str], directory: str) -> tuple[int, str, str]:
    extra = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(**extra),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]


@given(ENTRIES, ENVIRON, st.integers(0, 4), st.booleans())
@settings(max_examples=15, deadline=None)
def test_a_process_without_vllm_does_not_notice(
    entries: list[str], environ: dict[str, str], position: int, twice: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, text in SITES.items():
            site = Path(directory, name)
            site.mkdir()
            (site / "sitecustomize.py").write_text(text)
        paths = [str(Path(directory, entry)) if entry in SITES else entry for entry in entries]
        without = outcome(paths, environ, directory)
        link = Path(directory, "drafttools_link")
        link.symlink_to(INJECT)
        ours = [INJECT, str(link)] if twice else [INJECT]
        with_us = outcome([*paths[:position], *ours, *paths[position:]], environ, directory)
    assert with_us == without
