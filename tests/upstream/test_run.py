"""The comparison itself, on a small directory in place of vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream import run as upstream

SAME = """
import os, pytest
class TestPlain:
    def test_passes(self): pass
def test_fails(): raise ValueError("no such thing")
@pytest.mark.skip
def test_is_skipped(): pass
def test_imports_vllm(): import vllm.envs
"""
DIFFERENT = """
import sys
def test_wants_no_drafttools(): assert "drafttools" not in sys.modules
"""
BROKEN = "raise ImportError('not here')"
ENVS = """
environment_variables = {}
def compile_factors(): return {name: value() for name, value in environment_variables.items()}
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    for name, text in (("same", SAME), ("different", DIFFERENT), ("broken", BROKEN)):
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "vllm").mkdir()  # a small one is enough for a patch to apply, and imports at once
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "envs.py").write_text(ENVS)
    return tmp_path


def test_outcomes_are_compared_test_by_test(directory: Path) -> None:
    files = ["tests/test_same.py", "tests/test_different.py", "tests/test_broken.py"]
    without, with_shim = (upstream.run(directory, files, shim=shim) for shim in (False, True))
    assert without.outcomes == {
        "tests.test_same.TestPlain::test_passes": "passed",
        "tests.test_same::test_fails": "failed",
        "tests.test_same::test_is_skipped": "skipped",
        "tests.test_same::test_imports_vllm": "passed",
        "tests.test_different::test_wants_no_drafttools": "passed",
        "tests.test_broken": "error",
    }
    assert without.applied == set()
    assert with_shim.applied == {"compile_cache"}
    name = "tests.test_different::test_wants_no_drafttools"
    assert upstream.differences(without, with_shim) == [f"{name}: passed without, failed with"]
    assert not upstream.same(without, with_shim)
    with_shim.outcomes[name] = "passed"
    assert upstream.same(without, with_shim)
    assert without.counts("tests/test_same.py") == "2/1/1/0"
    page = upstream.record("0", files, without, with_shim)
    assert "| test_broken.py | 0/0/0/1 | 0/0/0/1 |" in page
    assert "no such thing" in page


def test_a_run_in_which_the_shim_was_not_active_is_no_comparison() -> None:
    outcomes = {"tests.test_a::test_b": "passed"}
    without = upstream.Run(outcomes, {}, 1.0, set())
    assert not upstream.same(without, upstream.Run(outcomes, {}, 1.0, set()))
    assert upstream.same(without, upstream.Run(outcomes, {}, 1.0, {"load_scope"}))


def test_a_test_that_did_not_run_under_the_shim_is_a_difference() -> None:
    without = upstream.Run({"tests.test_a::test_b": "passed"}, {}, 1.0, set())
    gone = upstream.Run({}, {}, 1.0, {"load_scope"})
    assert upstream.differences(without, gone) == ["tests.test_a::test_b: passed without, not run with"]


def test_the_allow_list_names_files_once() -> None:
    files = upstream.allowed()
    assert len(files) == len(set(files)) > 10
    assert all(file.startswith("tests/") and file.endswith(".py") for file in files)
