"""The patch records in words: one for `drafttools explain`, all of them for docs/patches.md."""

from __future__ import annotations

from drafttools import hazards, patches
from drafttools.fingerprints import SEEN
from drafttools.patching import Patch, Seam


def fields(patch: Patch) -> list[tuple[str, str]]:
    """The record as (label, text), in reading order; nothing that is empty."""
    rows = [
        ("What", patch.what),
        ("Why", patch.why),
        ("Switched on by", f"`{patch.opt_in}`" if patch.opt_in else "always on"),
        ("Changes", f"`{patch.module}`: " + ", ".join(map(_signature, patch.seams))),
        ("Relies on", ", ".join([*map(_signature, patch.relies_on), *_features(patch)])),
        ("Not needed", _not_needed(patch)),
        ("Sources read", ", ".join(f"`{seen}` ({where})" for seen, where in SEEN.get(patch.name, {}).items())),
        ("Matters in", ", ".join(patch.roles)),
        ("Upstream", patch.upstream),
        ("Retire", patch.retire),
        ("Switch off", f"`DRAFTTOOLS_DISABLE={patch.name}`"),
    ]
    return [(label, text) for label, text in rows if text]


def markdown() -> str:
    """docs/patches.md."""
    lines = [
        "# Patches",
        "",
        "Written by `drafttools explain --markdown` from the records. A patch applies, is not needed, or is refused:",
        "`drafttools doctor` says which on a given vLLM, and [releases.md](releases.md) on the published ones.",
        "",
    ]
    for patch in patches.ALL:
        lines += [f"## {patch.name}", ""]
        lines += [f"- **{label}**: {text}" for label, text in fields(patch)]
        lines.append("")
    lines += [
        "## Switches that reach a draft ungated",
        "",
        "When one of these is on, the report names it under `ungated`.",
        "",
        "| name | read in | why it is not gated | vLLM's own override |",
        "|---|---|---|---|",
    ]
    for hazard in hazards.UNGATED:
        native = f"`{hazard.native}`" if hazard.native else "none"
        lines.append(f"| {hazard.name} | {hazard.reads} | {hazard.why_not} | {native} |")
    return "\n".join([*lines, ""])


def _features(patch: Patch) -> list[str]:
    return [f"`{word}`" for seam in (*patch.seams, *patch.relies_on) for word in seam.features]


def readme(text: str) -> str:
    """README.md with the table of patches between its `patches` marks made anew."""
    rows = [f"| [{p.name}](docs/patches.md#{p.name}) | {p.what} | {_cell(p.opt_in) or 'always'} |" for p in patches.ALL]
    table = "\n".join(["| patch | what it does | matters with |", "|---|---|---|", *rows])
    before, rest = text.split("<!-- patches -->")
    return f"{before}<!-- patches -->\n{table}\n<!-- /patches -->{rest.split('<!-- /patches -->')[1]}"


def _cell(code: str) -> str:
    """Code in a table cell, where a bar would end it."""
    return f"`{code}`".replace("|", "\\|") if code else ""


def _signature(seam: Seam) -> str:
    return f"`{seam.qualname}({', '.join(seam.parameters)})`" if seam.parameters else f"`{seam.qualname}`"


def _not_needed(patch: Patch) -> str:
    reasons = []
    if patch.absent:
        reasons.append(patch.absent)
    if patch.provides:
        reasons.append(f"`{patch.module}` defines {', '.join(f'`{name}`' for name in patch.provides)}")
    if patch.native:
        reasons.append(f"the source already uses {' or '.join(f'`{word}`' for word in patch.native)}")
    return "when " + ", or when ".join(reasons) if reasons else ""


if __name__ == "__main__":
    from pathlib import Path

    root = Path(__file__).parents[2]
    (root / "docs" / "patches.md").write_text(markdown())
    (root / "README.md").write_text(readme((root / "README.md").read_text()))
