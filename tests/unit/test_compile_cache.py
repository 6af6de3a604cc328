"""The fingerprint that joins vLLM's compile-cache key: the same for the same patches, another for anything else."""

from __future__ import annotations

import pytest

import drafttools
from drafttools.patches.compile_cache import fingerprint


def test_mode_version_and_switches_each_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTOOLS", "enforce")
    seen = [fingerprint()]
    monkeypatch.setenv("DRAFTTOOLS", "observe")
    seen.append(fingerprint())
    monkeypatch.setenv("DRAFTTOOLS_DISABLE", "quick_reduce")
    seen.append(fingerprint())
    monkeypatch.setattr(drafttools, "__version__", "0.0.0")
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


def test_it_is_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTOOLS", "enforce")
    monkeypatch.setenv("DRAFTTOOLS_DISABLE", "a4w4,quick_reduce")
    before = fingerprint()
    monkeypatch.setenv("DRAFTTOOLS_DISABLE", " quick_reduce,a4w4")
    monkeypatch.setenv("DRAFTTOOLS_REPORT_DIR", "/elsewhere")
    assert fingerprint() == before
