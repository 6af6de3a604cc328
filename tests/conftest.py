"""pytest's own process never activates drafttools: tests that need it active use a process of their own."""

import os

for _name in [name for name in os.environ if name.startswith("DRAFTTOOLS") and name != "DRAFTTOOLS_VLLM_TREE"]:
    del os.environ[_name]
os.environ["DRAFTTOOLS"] = "off"

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

from tests.processes import VllmProcess, vllm_tree  # noqa: E402

INSTALLED, TREE = "installed", "tree"


@pytest.fixture(scope="session")
def installed_vllm() -> Iterator[VllmProcess]:
    """A process in which the installed vLLM is imported and drafttools is not active; tests run in forks of it."""
    pytest.importorskip("vllm")
    with VllmProcess() as process:
        yield process


@pytest.fixture(scope="session")
def tree_vllm() -> Iterator[VllmProcess]:
    """The same on the unpacked wheel that DRAFTTOOLS_VLLM_TREE names (vLLM 0.33.0 in CI)."""
    tree = vllm_tree()
    if tree is None:
        pytest.skip("DRAFTTOOLS_VLLM_TREE is not set")
    with VllmProcess(tree) as process:
        yield process


@pytest.fixture(params=[INSTALLED, TREE])
def vllm_process(request: pytest.FixtureRequest) -> VllmProcess:
    """Each vLLM at hand in turn."""
    return request.getfixturevalue(f"{request.param}_vllm")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An empty directory to start processes in."""
    path = tmp_path / "home"
    path.mkdir()
    return path
