"""pytest's own process never activates drafttools: tests that need it active use a process of their own."""

import os

for _name in [name for name in os.environ if name.startswith("DRAFTTOOLS") and not name.endswith("VLLM_TREE")]:
    del os.environ[_name]
os.environ["DRAFTTOOLS"] = "off"

from collections.abc import Iterator  # noqa: E402
from contextlib import ExitStack  # noqa: E402

import pytest  # noqa: E402

from tests.processes import VllmProcess, vllm_tree  # noqa: E402

INSTALLED, TREE, OLD = "installed", "tree", "old"


@pytest.fixture(scope="session")
def vllm_processes() -> Iterator[dict[str, VllmProcess]]:
    """A process for each vLLM at hand, importing it at the same time; drafttools is not active in them."""
    pytest.importorskip("vllm")
    tree = vllm_tree()
    with ExitStack() as stack:
        processes = {INSTALLED: stack.enter_context(VllmProcess())}
        if tree is not None:
            processes[TREE] = stack.enter_context(VllmProcess(tree))
        yield processes


@pytest.fixture(scope="session")
def installed_vllm(vllm_processes: dict[str, VllmProcess]) -> VllmProcess:
    """A process in which the installed vLLM is imported; tests run in forks of it."""
    return vllm_processes[INSTALLED]


@pytest.fixture(scope="session")
def tree_vllm(vllm_processes: dict[str, VllmProcess]) -> VllmProcess:
    """The same with the unpacked wheel that DRAFTTOOLS_VLLM_TREE names (vLLM 0.33.0 in CI)."""
    if TREE not in vllm_processes:
        pytest.skip("DRAFTTOOLS_VLLM_TREE is not set")
    return vllm_processes[TREE]


@pytest.fixture(params=[INSTALLED, TREE])
def vllm_process(request: pytest.FixtureRequest) -> VllmProcess:
    """Each vLLM at hand in turn."""
    return request.getfixturevalue(f"{request.param}_vllm")


@pytest.fixture(scope="session")
def old_vllm() -> Iterator[VllmProcess]:
    """The same with the unpacked wheel that DRAFTTOOLS_OLD_VLLM_TREE names (vLLM 0.29.0 in CI)."""
    tree = vllm_tree("DRAFTTOOLS_OLD_VLLM_TREE")
    if tree is None:
        pytest.skip("DRAFTTOOLS_OLD_VLLM_TREE is not set")
    with VllmProcess(tree) as process:
        yield process


@pytest.fixture(params=[INSTALLED, TREE, OLD])
def any_vllm(request: pytest.FixtureRequest) -> VllmProcess:
    """Each vLLM at hand in turn, a release from before 0.30 included."""
    return request.getfixturevalue(f"{request.param}_vllm")
