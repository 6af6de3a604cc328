"""Fetch a vLLM wheel and keep its Python sources only: enough to check and import patches against, without an engine.

python tests/vllm_tree.py vllm==0.33.0 DIRECTORY
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

KEPT = (".py", ".json", ".txt", "/METADATA", "/RECORD", "/WHEEL")


def fetch(requirement: str, directory: Path) -> None:
    """Unpack the sources of `requirement` into `directory` (so that `directory/vllm` exists), unless they are there."""
    if (directory / "vllm" / "__init__.py").exists():
        return
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, requirement],
            check=True,
        )
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            wheel.extractall(directory, [name for name in wheel.namelist() if name.endswith(KEPT)])


if __name__ == "__main__":
    fetch(sys.argv[1], Path(sys.argv[2]))
