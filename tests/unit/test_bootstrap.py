"""The ways in: sitecustomize and what it chains to, the launcher's environment, and the vLLM plugin."""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafttools import settings
from drafttools.bootstrap import launcher
from drafttools.errors import DraftToolsError
from tests.processes import ROOT, environment, printed, python

INJECT = settings.inject_dir()
WHO = """
import json, os, sys
finder = any(type(f).__name__ == "_VllmFinder" for f in sys.meta_path)
print(json.dumps({
    "active": finder,
    "path": sys.path,
    "sitecustomize": getattr(sys.modules.get("sitecustomize"), "__file__", None),
    "seen": os.environ.get("SEEN", ""),
    "way_in": os.environ.get("DRAFTTOOLS_WAY_IN"),
    "hook": sys.modules["drafttools.activation"].reached_by() if "drafttools.activation" in sys.modules else None,
    "heavy": sorted({"torch", "vllm", "wrapt", "typer", "dataclasses"} & set(sys.modules)),
}))
"""
APPEND = "import os\nos.environ['SEEN'] = os.environ.get('SEEN', '') + {!r}\n"


def who(*paths: Path | str, flags: tuple[str, ...] = (), **environ: str) -> dict[str, Any]:
    """What a process with these entries on PYTHONPATH is like."""
    found: dict[str, Any] = printed(WHO, flags=flags, PYTHONPATH=os.pathsep.join(map(str, paths)), **environ)
    return found


def site(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "sitecustomize.py").write_text(text)
    return directory


# --- sitecustomize ---


def test_the_injection_directory_activates() -> None:
    found = who(INJECT)
    assert found["active"]
    assert (found["way_in"], found["hook"]) == ("inject", "sitecustomize")
    assert found["heavy"] == []


def test_off_is_off() -> None:
    assert not who(INJECT, DRAFTTOOLS="off")["active"]


@pytest.mark.parametrize("others", [[], [ROOT], [ROOT, "/nowhere"], ["/nowhere", ROOT]])
def test_the_path_stays_as_it_was(others: list[Any]) -> None:
    without = who(*others)["path"]
    assert [p for p in who(INJECT, *others)["path"] if p != INJECT] == [p for p in without if p != INJECT]


def test_the_next_one_runs(tmp_path: Path) -> None:
    first, second = site(tmp_path / "1", APPEND.format("1")), site(tmp_path / "2", APPEND.format("2"))
    found = who(INJECT, first, second)
    assert found["active"]
    assert found["seen"] == who(first, second)["seen"] == "1"
    assert found["sitecustomize"] == str(first / "sitecustomize.py")


def test_one_before_us_wins(tmp_path: Path) -> None:
    first = site(tmp_path / "1", APPEND.format("1"))
    found = who(first, INJECT)
    assert not found["active"]
    assert found["seen"] == "1"


@pytest.mark.parametrize(
    "text",
    ["raise ValueError('mine')", "import nowhere_to_be_found", "1 +", "raise SystemExit(3)", "raise KeyboardInterrupt"],
)
def test_a_next_one_that_fails_fails_as_without_us(tmp_path: Path, text: str) -> None:
    directory = site(tmp_path / "1", text)
    without, with_us = (
        python("print('ran')", PYTHONPATH=os.pathsep.join(map(str, paths)))
        for paths in ([directory], [INJECT, directory])
    )
    assert with_us.returncode == without.returncode
    assert with_us.stdout == without.stdout
    assert with_us.stderr.splitlines()[-1:] == without.stderr.splitlines()[-1:]


@pytest.mark.parametrize("order", ["copy first", "copy second"])
def test_two_installations_do_not_call_each_other_for_ever(tmp_path: Path, order: str) -> None:
    copy, last = tmp_path / "link", site(tmp_path / "last", APPEND.format("last"))
    copy.symlink_to(INJECT)
    paths = [copy, INJECT, last] if order == "copy first" else [INJECT, copy, last]
    found = who(*paths)
    assert found["active"]
    assert found["seen"] == "last"


def test_another_that_chains_to_us_does_not_come_round_again(tmp_path: Path) -> None:
    chaining = (Path(INJECT) / "sitecustomize.py").read_text().replace("_activate()\n_run", APPEND.format("x") + "_run")
    assert "SEEN" in chaining
    found = who(site(tmp_path / "1", chaining), INJECT)
    assert found["active"]
    assert found["seen"] == "x"


@pytest.mark.parametrize("flags", [("-S",), ("-I",), ("-E",)])
def test_flags_that_skip_it_are_warned_of(flags: tuple[str, ...]) -> None:
    done = python(WHO, flags=flags, PYTHONPATH=INJECT)
    assert done.returncode == 0, done.stderr
    assert not json.loads(done.stdout)["active"]
    assert any("skip sitecustomize" in sentence for sentence in launcher.warnings(["python3", *flags, "x.py"], {}))


def test_a_failure_of_ours_is_one_line_and_nothing_else(tmp_path: Path) -> None:
    """An installation that cannot be imported: the process runs, the next sitecustomize too."""
    broken = tmp_path / "drafttools" / "bootstrap" / "inject"
    site(broken, (Path(INJECT) / "sitecustomize.py").read_text())
    (tmp_path / "drafttools" / "__init__.py").write_text("raise OSError('broken')\n")
    following = site(tmp_path / "next", APPEND.format("next"))
    done = python(WHO, PYTHONPATH=f"{broken}:{following}")
    assert done.returncode == 0
    assert done.stderr == "drafttools: not active in this process: OSError: broken\n"
    assert json.loads(done.stdout)["seen"] == "next"


# --- children ---


def test_children_of_an_activated_process_follow() -> None:
    code = f"import drafttools, subprocess, sys\nprint(subprocess.check_output([sys.executable, '-c', {WHO!r}], text=True))"
    done = python(code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["active"]
    assert (found["way_in"], found["hook"]) == ("import", "sitecustomize")


def test_spawned_processes_follow(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import multiprocessing as mp, sys\n"
        "def child(q): q.put(any(type(f).__name__ == '_VllmFinder' for f in sys.meta_path))\n"
        "if __name__ == '__main__':\n    import drafttools\n    context = mp.get_context('spawn')\n    q = context.Queue()\n"
        "    p = context.Process(target=child, args=(q,))\n    p.start()\n    print(q.get(timeout=30))\n    p.join()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


# --- the launcher ---


def test_the_launchers_environment(tmp_path: Path) -> None:
    base = {"PATH": "/bin", "DRAFTTOOLS": "off", "DRAFTTOOLS_WAY_IN": "import", "DRAFTTOOLS_RUN_ID": "old"}
    environ = launcher.environment("observe", tmp_path / "new" / "reports", base)
    assert environ[settings.MODE] == "observe"
    assert environ[settings.WAY_IN] == "run"
    assert environ[settings.RUN_ID] != "old"
    assert environ[settings.REPORT_DIR] == str(tmp_path / "new" / "reports")
    assert environ["PATH"] == "/bin"
    assert list((tmp_path / "new" / "reports").iterdir()) == []


def test_the_launchers_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for mode, report, words in [
        ("on", None, "'on' is not a mode"),
        ("enforce", tmp_path / "file" / "x", "cannot write"),
    ]:
        with pytest.raises(DraftToolsError) as error:
            launcher.environment(mode, report, {})
        assert words in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(DraftToolsError, match="command not found"):
        launcher.run(["nowhere-to-be-found"], "enforce", None)


@pytest.mark.parametrize(
    ("command", "environ", "warned"),
    [
        (["vllm", "serve", "m"], {}, False),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "-tp", "2"], {}, False),
        (["python3.11", "-I", "x.py"], {}, True),
        (["/usr/bin/python3", "-sE", "x.py"], {}, True),
        (["vllm", "serve", "m"], {"VLLM_PLUGINS": "other"}, True),
        (["vllm", "serve", "m"], {"VLLM_PLUGINS": "other,drafttools"}, False),
        (["vllm", "serve", "m"], {"VLLM_PLUGINS": ""}, True),
        (["python3", "serve.py", "-S"], {}, False),  # the script's own flag
        (["python3", "-m", "serve", "-S"], {}, False),
        (["python3", "-X", "dev", "-I", "serve.py"], {}, True),
        (["python3", "-c", "print(1)", "-E"], {}, False),
    ],
)
def test_what_the_launcher_warns_of(command: list[str], environ: dict[str, str], warned: bool) -> None:
    assert bool(launcher.warnings(command, environ)) is warned


def test_the_launched_command_is_active(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "drafttools.cli",
        "run",
        "--report",
        str(tmp_path / "r"),
        "--",
        sys.executable,
        "-c",
        WHO,
    ]
    done = subprocess.run(
        command, env=environment(DRAFTTOOLS="off"), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["active"], found["way_in"], found["hook"]) == (True, "run", "sitecustomize")


# --- the plugin ---

LOAD = """
import importlib.metadata, json, os, sys
plugin = importlib.metadata.EntryPoint("drafttools", sys.argv[1], "vllm.general_plugins").load()
plugin()
active = any(type(f).__name__ == "_VllmFinder" for f in sys.meta_path)
print(json.dumps([active, os.environ.get("DRAFTTOOLS"), os.environ.get("DRAFTTOOLS_WAY_IN")]))
"""


def entry_point() -> str:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    name, _, value = config["options.entry_points"]["vllm.general_plugins"].strip().partition("=")
    assert name.strip() == "drafttools"
    return value.strip()


@pytest.mark.parametrize("environ", [{}, {"DRAFTTOOLS": ""}])
def test_the_plugin_is_inert_unless_asked(environ: dict[str, str]) -> None:
    assert printed(LOAD, entry_point(), **environ) == [False, environ.get("DRAFTTOOLS"), None]


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_the_plugin_activates_when_asked(mode: str) -> None:
    assert printed(LOAD, entry_point(), DRAFTTOOLS=mode) == [True, mode, "plugin"]


def test_the_plugin_module_is_light() -> None:
    code = "import importlib, json, sys; importlib.import_module(sys.argv[1]); "
    code += "print(json.dumps(sorted({'torch', 'vllm', 'wrapt', 'typer', 'dataclasses'} & set(sys.modules))))"
    assert printed(code, entry_point().split(":")[0], DRAFTTOOLS="enforce") == []
