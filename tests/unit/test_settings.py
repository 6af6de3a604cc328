"""What the environment asks for, and what children are given."""

from __future__ import annotations

import os

import pytest

from drafttools import settings
from drafttools.errors import DraftToolsError


@pytest.mark.parametrize(
    ("value", "mode"),
    [(None, None), ("", None), ("  ", None), ("enforce", "enforce"), (" Observe ", "observe"), ("OFF", "off")],
)
def test_mode(value: str | None, mode: str | None) -> None:
    assert settings.mode({} if value is None else {settings.MODE: value}) == mode


@pytest.mark.parametrize("value", ["on", "1", "enforced", "enforce,observe", "\x1b[0m"])
def test_another_mode_is_one_line(value: str) -> None:
    with pytest.raises(DraftToolsError) as error:
        settings.mode({settings.MODE: value})
    assert repr(value) in str(error.value)
    assert "enforce, observe, off" in str(error.value)
    assert "\n" not in str(error.value)


def test_disabled() -> None:
    assert settings.disabled({}) == frozenset()
    assert settings.disabled({settings.DISABLE: " quick_reduce,,a4w4 ,"}) == {"quick_reduce", "a4w4"}


@pytest.mark.parametrize(("value", "allowed"), [("", False), ("0", False), ("1", True), ("true", False)])
def test_allow_unverified(value: str, allowed: bool) -> None:
    assert settings.allow_unverified({settings.ALLOW_UNVERIFIED: value}) is allowed


def prepared(**environ: str) -> dict[str, str]:
    settings.prepare_children(environ, mode="enforce", way_in="import")
    return environ


def test_children_are_given_what_they_need() -> None:
    environ = prepared()
    assert environ[settings.MODE] == "enforce"
    assert environ[settings.WAY_IN] == "import"
    assert environ[settings.RUN_ID].endswith(tuple("0123456789"))
    assert environ["PYTHONPATH"] == settings.inject_dir()
    assert os.path.isfile(os.path.join(settings.inject_dir(), "sitecustomize.py"))


def test_what_was_asked_for_stays() -> None:
    environ = prepared(DRAFTTOOLS="observe", DRAFTTOOLS_WAY_IN="run", DRAFTTOOLS_RUN_ID="mine")
    assert (environ[settings.MODE], environ[settings.WAY_IN], environ[settings.RUN_ID]) == ("observe", "run", "mine")


@pytest.mark.parametrize("empty", ["", " "])
def test_an_empty_mode_asks_for_nothing(empty: str) -> None:
    assert prepared(DRAFTTOOLS=empty)[settings.MODE] == "enforce"


@pytest.mark.parametrize("before", ["/a", "/a:/b", ":/a", "/a:", "/a::/b", ":"])
def test_pythonpath_keeps_its_entries(before: str) -> None:
    """An empty entry means the current directory, so none may be lost."""
    environ = prepared(PYTHONPATH=before)
    assert environ["PYTHONPATH"].split(":") == [settings.inject_dir(), *before.split(":")]


def test_ray_copies_our_variables_and_the_path() -> None:
    environ = prepared(**{settings.RAY_PREFIXES: "MINE_"})
    assert environ[settings.RAY_PREFIXES] == "MINE_,DRAFTTOOLS"
    assert environ[settings.RAY_NAMES] == "PYTHONPATH"


@pytest.mark.parametrize("before", [{}, {"PYTHONPATH": "/a"}, {"DRAFTTOOLS": "observe"}])
def test_preparing_twice_is_preparing_once(before: dict[str, str]) -> None:
    once = prepared(**before)
    assert prepared(**once) == once
