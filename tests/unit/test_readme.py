"""README.md says what the records and the command line say."""

from __future__ import annotations

import re
from pathlib import Path

from drafttools.patches import document

README = (Path(__file__).parents[2] / "README.md").read_text()
DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_patches_is_the_records() -> None:
    assert document.readme(README) == README, "run: python -m drafttools.patches.document"


def test_every_link_leads_somewhere() -> None:
    pages = [Path(__file__).parents[2] / "README.md", *DOCS.glob("*.md")]
    broken = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#]+)", page.read_text())
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken
