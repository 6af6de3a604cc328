"""The HTML report and the figure: complete, escaped, and a drawing that shows the data."""

from __future__ import annotations

import base64
import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from drafttools.acceptance.judge import compare
from drafttools.acceptance.records import Rules, Run, Sample
from drafttools.acceptance.report import draw, page, write_report
from drafttools.acceptance.tables import print_runs
from drafttools.errors import DraftToolsError

HOSTILE = '<script>alert("x")</script>&.log'


def run(name: str, length: float) -> Run:
    made = Run(name)
    rules = Rules(exclude_above=5.0)
    for step in (-0.02, 0.0, 0.02, 3.0):
        accepted = round((length - 1 + step) * 1000)
        made.take(Sample(f"line {step}", accepted, 5000, 1000, 5, (accepted // 5,) * 5), rules)
    return made


def report(name: str = HOSTILE) -> str:
    arms = {"baseline": [run("a", 3.0), run("b", 3.0)], "candidate": [run(name, 2.5), run("d", 2.5)]}
    result = compare(arms["baseline"], arms["candidate"])
    summaries = {arm: result[arm]["sweeps"] for arm in arms}
    return page(
        draw(dict(arms), {"baseline": result["baseline"]["sd"]}), summaries, [("draft <checkpoint>", "x")], result
    )


class _Tags(HTMLParser):
    """Tags left open, and the tags seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_escapes_names() -> None:
    text = report()
    tags = _Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in text


def test_page_needs_nothing_else() -> None:
    assert not re.search(r'(?:src|href)="(?!data:)', report())


def test_page_lists_every_excluded_sample_and_the_verdict() -> None:
    text = report("c")
    assert text.count("acceptance length above 5") == 4
    assert "lower: acceptance length fell" in text


def pixels(png: bytes) -> Any:
    image = pytest.importorskip("matplotlib.image")
    return image.imread(io.BytesIO(png))


def test_figure_shows_both_arms_and_changes_with_the_data() -> None:
    encoded = re.search(r"base64,([A-Za-z0-9+/=]+)", report("c"))
    assert encoded
    shown = pixels(base64.b64decode(encoded[1]))
    for color in ((0x1F, 0x77, 0xB4), (0xD6, 0x27, 0x28)):
        near = abs(shown[..., :3] * 255 - color).max(axis=-1) < 3
        assert near.sum() > 50
    other = pixels(draw({"baseline": [run("a", 3.0)], "candidate": [run("c", 1.5)]}, {}))
    assert other.shape != shown.shape or (other != shown).any()


def test_files_are_written(tmp_path: Path) -> None:
    runs = [run("a", 3.0)]
    write_report(tmp_path / "r.html", tmp_path / "r.png", {"run": runs}, {"run": []}, [])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_a_run_without_any_figure_can_be_drawn() -> None:
    assert draw({"run": [Run("empty")]}, {}).startswith(b"\x89PNG")


def test_unwritable_file_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DraftToolsError, match="nowhere"):
        write_report(None, tmp_path / "nowhere" / "r.png", {"run": [run("a", 3.0)]}, {"run": []}, [])


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DraftToolsError, match=r"drafttools\[plot\]"):
        draw({"run": [run("a", 3.0)]}, {})


def test_terminal_table_takes_square_brackets_in_names_as_text() -> None:
    """Rich would read [bold] as markup."""
    from rich.console import Console

    from drafttools.acceptance.summary import summarize

    out = io.StringIO()
    print_runs(Console(file=out, width=200), [summarize(run("sweep[bold].log", 3.0))])
    assert out.getvalue().count("sweep[bold].log") == 2  # its row, and that of its excluded sample
    assert "Excluded samples" in out.getvalue()
