"""Activation: inert until vLLM runs, one clear error when it cannot be honoured, and undone without a trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import VllmProcess, printed, python
from tests.unit import effects

# As much of a vLLM as activation looks at, so that a process takes milliseconds.
VLLM = {
    "__init__.py": "__version__ = '0.0'\nfrom vllm import version\n",
    "version.py": "",
    "envs.py": "environment_variables = {'A': 1}\ndef compile_factors():\n    return dict(environment_variables)\n",
    "config/__init__.py": "class VllmConfig: pass\n",
    "compilation/__init__.py": "",
    "compilation/counter.py": "class Counter: num_models_seen = 0\ncompilation_counter = Counter()\n",
}
STATES = "{name: [str(item.state), item.reason] for name, item in engine.applied().items()}"


@pytest.fixture
def small_vllm(tmp_path: Path) -> str:
    """PYTHONPATH of a small package called vllm."""
    for name, text in VLLM.items():
        path = tmp_path / "small" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return f"{tmp_path / 'small'}:{Path(__file__).parents[2]}"


def states(code: str, path: str, **environ: str) -> dict[str, list[str]]:
    script = f"import json, drafttools\n{code}\nfrom drafttools import engine\nprint(json.dumps({STATES}))"
    found: dict[str, list[str]] = printed(script, PYTHONPATH=path, **environ)
    return found


def error_of(code: str, path: str, **environ: str) -> str:
    """The message of the DraftToolsError that ends a snippet."""
    done = python(f"import drafttools\n{code}", PYTHONPATH=path, **environ)
    assert done.returncode == 1, done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("drafttools.errors.DraftToolsError: ")
    return last


def test_importing_it_loads_nothing_heavy() -> None:
    code = "import json, sys; before = set(sys.modules); import drafttools; print(json.dumps(sorted(set(sys.modules) - before)))"
    loaded = set(printed(code))
    assert (
        not {"torch", "vllm", "typer", "wrapt", "dataclasses", "typing", "inspect", "pathlib", "importlib.metadata"}
        & loaded
    )
    assert {name for name in loaded if name.startswith("drafttools")} == {
        "drafttools",
        "drafttools.activation",
        "drafttools.errors",
        "drafttools.scope",
        "drafttools.settings",
    }


def test_vllm_is_patched_as_it_arrives(small_vllm: str) -> None:
    before = states("import vllm", small_vllm)
    assert {state for state, _ in before.values()} == {"registered"}
    after = states("import vllm.config, vllm.envs", small_vllm)
    assert {name for name, (state, _) in after.items() if state == "applied"} == {"publish_scope", "compile_cache"}


def test_vllm_that_is_there_already_is_patched_at_once(small_vllm: str) -> None:
    found = states("", small_vllm, DRAFTTOOLS="enforce")
    assert found == {}
    script = "import json, vllm.config, vllm.envs, drafttools\nfrom drafttools import engine\n"
    found = printed(f"{script}print(json.dumps({STATES}))", PYTHONPATH=small_vllm)
    assert found["publish_scope"][0] == found["compile_cache"][0] == "applied"


@pytest.mark.parametrize("mode", ["off", " OFF "])
def test_off(small_vllm: str, mode: str) -> None:
    assert states("import vllm.config", small_vllm, DRAFTTOOLS=mode) == {}
    code = "import json, os, sys; before = [dict(os.environ), list(sys.meta_path)]; import drafttools; "
    code += "print(json.dumps([dict(os.environ), list(sys.meta_path)] == before))"
    assert printed(code, DRAFTTOOLS=mode)


# --- bad values ---

BAD = [({"DRAFTTOOLS": "on"}, "'on'"), ({"DRAFTTOOLS_DISABLE": "quick_reduce,no_such"}, "no_such")]
HARMLESS = [
    "print('fine')",
    "import importlib.util; importlib.util.find_spec('vllm')",
    "import json",
]


@pytest.mark.parametrize(("environ", "words"), BAD)
def test_a_bad_value_stops_vllm_in_one_line(small_vllm: str, environ: dict[str, str], words: str) -> None:
    for code in ("import vllm", "import vllm.config", "from vllm import envs"):
        message = error_of(code, small_vllm, **environ)
        assert words in message


@pytest.mark.parametrize(("environ", "words"), BAD)
@pytest.mark.parametrize("code", HARMLESS)
def test_a_bad_value_does_not_reach_other_processes(
    small_vllm: str, environ: dict[str, str], words: str, code: str
) -> None:
    done = python(f"import drafttools\n{code}", PYTHONPATH=small_vllm, **environ)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("environ", "words"), BAD)
def test_without_vllm_the_import_fails_as_ever(environ: dict[str, str], words: str, tmp_path: Path) -> None:
    """An optional `import vllm` in a process that has none."""
    code = "import sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\nimport drafttools\n"
    code += "try:\n    import vllm\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    done = python(code, **environ)
    assert (done.returncode, done.stdout, done.stderr) == (0, "vllm\n", "")


def test_wrapt_that_is_missing_is_named(small_vllm: str) -> None:
    block = "import sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\nimport vllm"
    assert "wrapt is not installed" in error_of(block, small_vllm)


@pytest.mark.parametrize("directory", ["{file}", "{file}/below", "/proc/nothing/here"])
def test_a_report_that_cannot_be_written_is_said_once(small_vllm: str, tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").write_text("")
    place = directory.format(file=tmp_path / "file")
    code = "import drafttools, vllm.config, vllm.envs\nfrom drafttools import attest\nattest.write(); attest.write()\nprint('up')"
    done = python(code, PYTHONPATH=small_vllm, DRAFTTOOLS_REPORT_DIR=place)
    assert (done.returncode, done.stdout) == (0, "up\n")
    assert len(done.stderr.splitlines()) == 1
    assert "cannot write the report" in done.stderr
    assert place in done.stderr


# --- order of events ---


def test_an_import_that_another_hook_broke_is_patched_when_retried(small_vllm: str) -> None:
    code = """
import wrapt, vllm
def broken(module): raise RuntimeError("theirs")
wrapt.register_post_import_hook(broken, "vllm.config")
try:
    import vllm.config
except RuntimeError as error:
    print(error)
import vllm.config, vllm.version
import vllm.envs
assert vllm.config.in_draft_model() is False
with vllm.config.draft_model_scope(): assert vllm.config.in_draft_model()
"""
    found = states(code, small_vllm)
    assert found["publish_scope"][0] == "applied"


def test_a_reload_is_patched_again(small_vllm: str) -> None:
    code = """
import importlib, vllm.envs, vllm.config
importlib.reload(vllm.envs)
importlib.reload(vllm.config)
from drafttools.patches.compile_cache import VARIABLE
assert VARIABLE in vllm.envs.compile_factors()
assert drafttools.deactivate() == []
assert vllm.envs.compile_factors() == {"A": 1}
assert not hasattr(vllm.config, "in_draft_model")
drafttools.activate()
"""
    found = states(code, small_vllm)
    assert found["compile_cache"][0] == found["publish_scope"][0] == "applied"


def test_too_late_is_refused_and_said(small_vllm: str) -> None:
    script = """
import json, vllm.config, vllm.envs, vllm.compilation.counter as counter
counter.compilation_counter.num_models_seen = 1
import drafttools
from drafttools import attest, engine
print(json.dumps([sorted({str(item.state) for item in engine.applied().values()}), attest.report()["notes"],
                  hasattr(vllm.config, "in_draft_model")]))
"""
    found, notes, published = printed(script, PYTHONPATH=small_vllm)
    assert not {"applied", "in_effect", "registered"} & set(found)
    assert "too late" in notes[0]
    assert not published


def test_deactivate_and_activate_again(small_vllm: str) -> None:
    code = """
import vllm.config
assert drafttools.deactivate() == []
assert not hasattr(vllm.config, "draft_model_scope")
import vllm.envs
assert vllm.envs.compile_factors() == {"A": 1}
drafttools.activate()
"""
    found = states(code, small_vllm)
    assert found["compile_cache"][0] == found["publish_scope"][0] == "applied"


def test_evidence_does_not_outlive_the_patch(small_vllm: str) -> None:
    """Activated again, a patch is applied; what it did before it was undone is no evidence for it now."""
    code = """
import json, drafttools, vllm.config
from drafttools import attest, engine
attest.evidence("publish_scope").asked = 1
before = str(engine.state("publish_scope"))
drafttools.deactivate()
drafttools.activate()
print(json.dumps([before, str(engine.state("publish_scope"))]))
"""
    assert printed(code, PYTHONPATH=small_vllm) == ["in_effect", "applied"]


def test_a_foreign_wrapper_on_top_is_named_by_deactivate(small_vllm: str) -> None:
    code = """
import json, drafttools, vllm.config
stock = vllm.config.in_draft_model
vllm.config.in_draft_model = lambda: stock()
print(json.dumps([drafttools.deactivate(), hasattr(vllm.config, "in_draft_model")]))
"""
    sentences, kept = printed(code, PYTHONPATH=small_vllm)
    assert len(sentences) == 1
    assert "in_draft_model" in sentences[0]
    assert kept


def test_a_threaded_import_is_complete(small_vllm: str) -> None:
    code = """
import threading, importlib
names = ["vllm.config", "vllm.envs", "vllm.version", "vllm.compilation.counter"]
threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names for _ in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
engine = importlib.import_module("drafttools.engine"); engine.refresh()
import vllm.config
assert vllm.config.in_draft_model() is False
"""
    found = states(code, small_vllm)
    assert found["publish_scope"][0] == found["compile_cache"][0] == "applied"


def test_every_way_of_finding_vllm_still_works(small_vllm: str) -> None:
    """Tools look at a package's loader and data through its spec."""
    code = """
import importlib.resources, importlib.util, json, pkgutil, drafttools
found = importlib.util.find_spec("vllm")
import inspect, vllm
print(json.dumps([
    found.origin == vllm.__file__, found.submodule_search_locations == vllm.__path__,
    type(vllm.__loader__).__name__, vllm.__spec__.loader is vllm.__loader__,
    inspect.getsource(vllm) == open(vllm.__file__).read(),
    (importlib.resources.files("vllm") / "version.py").is_file(), pkgutil.get_data("vllm", "version.py") is not None,
]))
"""
    assert printed(code, PYTHONPATH=small_vllm) == [True, True, "SourceFileLoader", True, True, True, True]


# --- the real vLLM ---


def attributes() -> dict[tuple[int, str], Any]:
    """Every attribute of every vLLM module and of every class defined in one, and every key of vLLM's registries."""
    found: dict[tuple[int, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm") or not hasattr(module, "__dict__"):
            continue
        owners = [module, *(v for v in list(vars(module).values()) if isinstance(v, type) and v.__module__ == name)]
        for owner in owners:
            for key, value in list(vars(owner).items()):
                found[id(owner), key] = value
    import vllm.envs

    for key, value in vllm.envs.environment_variables.items():
        found[id(vllm.envs.environment_variables), key] = value
    return found


def differing(before: dict[tuple[int, str], Any], after: dict[tuple[int, str], Any]) -> set[tuple[int, str]]:
    absent = object()
    return {key for key in before.keys() | after.keys() if before.get(key, absent) is not after.get(key, absent)}


def activated_and_back() -> dict[str, Any]:
    """Activate, compare with what the patches say they changed, deactivate, compare with before."""
    import os

    import drafttools
    from drafttools import engine

    before = attributes()
    os.environ["DRAFTTOOLS"] = "enforce"
    drafttools.activate()
    after = attributes()
    during = differing(before, after)
    engine_items = [list(item.transaction.changes) for item in engine.applied().values()]
    declared = {
        (id(change.owner), change.name): f"{name}: {getattr(change.owner, '__name__', 'dict')}.{change.name}"
        for name, item in engine.applied().items()
        for change in item.transaction.changes
    }
    failed = drafttools.deactivate()
    aliases = {  # other modules' names for a function that a patch has replaced
        key
        for key in during
        for item in engine_items
        for change in item
        if before.get(key) is change.original and after.get(key) is change.replacement
    }
    return {
        "undeclared": [name for _, name in during - declared.keys() - aliases],
        "unused": sorted(declared[key] for key in declared.keys() - during),
        "declared": sorted(declared.values()),
        "failed": failed,
        "left": [name for _, name in differing(before, attributes())],
    }


@pytest.mark.vllm
def test_what_is_changed_is_declared_and_undone(vllm_process: VllmProcess) -> None:
    found = vllm_process.call(activated_and_back, mode="off")
    assert found["undeclared"] == []
    assert found["unused"] == []
    assert found["failed"] == []
    assert found["left"] == []
    owners = {entry.split(": ")[0] for entry in found["declared"]}
    assert {"load_scope", "quick_reduce", "publish_scope"} <= owners


def of_ours() -> list[str]:
    """Attributes of vLLM's modules and classes whose code is drafttools'."""
    import types

    import wrapt

    import drafttools

    home = str(Path(drafttools.__file__).parent)

    def is_ours(value: Any) -> bool:
        if not issubclass(type(value), (types.FunctionType, classmethod, wrapt.FunctionWrapper)):
            return False
        function = getattr(value, "_self_wrapper", getattr(value, "__func__", value))
        return getattr(getattr(function, "__code__", None), "co_filename", "").startswith(home)

    return sorted({name for (_, name), value in attributes().items() if is_ours(value)})


def undone_after_use() -> dict[str, Any]:
    """Everything used once, then undone; also under names that were bound while the patches stood."""
    import os
    import types

    import drafttools

    os.environ["DRAFTTOOLS"] = "enforce"
    drafttools.activate()
    config = effects.real_config()
    draft = effects.load(config, config.speculative_config.draft_model_config)
    marked = type(draft)
    effects.holding()
    late = sys.modules["vllm.late"] = types.ModuleType("vllm.late")
    exec("from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_input_dtype", vars(late))
    exec("from vllm.model_executor.model_loader.utils import initialize_model", vars(late))
    during = of_ours()
    failed = drafttools.deactivate()
    draft()
    return {"during": during, "failed": failed, "left": of_ours(), "class": type(draft) is marked, "seen": draft.seen}


@pytest.mark.vllm
def test_nothing_is_left_after_use(installed_vllm: VllmProcess) -> None:
    found = installed_vllm.call(undone_after_use, mode="off")
    assert {"load_model", "propose", "__call__", "__init_subclass__", "initialize_model"} <= set(found["during"])
    assert found["failed"] == []
    assert found["left"] == []
    assert not found["class"]
    assert not found["seen"]["forward"]


@pytest.mark.vllm
def test_the_real_import_order() -> None:
    """A spawned worker's order: drafttools first, vLLM's modules as they come; every patch is in place by then."""
    pytest.importorskip("vllm")
    code = """
import drafttools, json
from tests import vllm_process
vllm_process.import_vllm()
from tests.unit import effects
print(json.dumps(effects.holding()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=_vllm_environment(),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    import json

    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(found, True)
    assert len(found) > 15


def _vllm_environment() -> dict[str, str]:
    from tests.processes import environment

    return environment(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
