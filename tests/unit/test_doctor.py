"""`drafttools doctor` and `explain`: true verdicts on real and on altered vLLM trees, and what hinders activation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drafttools import doctor, patches, settings
from drafttools.errors import DraftToolsError
from drafttools.patches import document
from drafttools.patching import Verdict
from drafttools.source import Tree
from tests import releases
from tests.processes import ROOT, environment, python, vllm_tree

QUICK_REDUCE = "distributed/device_communicators/quick_all_reduce.py"
MOE_CONFIG = "model_executor/layers/fused_moe/config.py"
AITER = "_aiter_ops.py"
A4W4 = "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4"
QUICK_REDUCE_SWITCH = "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"


class Fork:
    """A copy of the modules that patches touch, to be altered."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def edit(self, file: str, pattern: str, replacement: str, count: int = 0) -> Fork:
        """Replace a regular expression in a file; a pattern that is not there fails the test."""
        path = self.root / file
        text, changed = re.subn(pattern, replacement, path.read_text(), count=count)
        assert changed, f"{pattern} is not in {file}"
        path.write_text(text)
        return self

    def verdict(self, patch: str) -> Verdict:
        return {p.name: verdict for p, verdict in doctor.verdicts(Tree(self.root))}[patch]

    def states(self) -> dict[str, str]:
        return {p.name: verdict.state for p, verdict in doctor.verdicts(Tree(self.root))}


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    """The installed vLLM's files that patches look at, under tmp_path/vllm."""
    source = Tree(doctor.installed())
    names = {patch.module for patch in patches.ALL} | {"vllm", "vllm.envs", "vllm._version", "vllm.config.speculative"}
    for path in filter(None, map(source.path, names)):
        target = tmp_path / "vllm" / path.relative_to(source.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return Fork(tmp_path / "vllm")


def cli(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "drafttools.cli", *arguments],
        env=environment(**environ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


# --- published releases ---------------------------------------------------------------------------------------------


def page_column(version: str) -> dict[str, str]:
    """The states that docs/releases.md gives for a release."""
    rows = [line.strip("| ").split(" | ") for line in releases.PAGE.read_text().splitlines() if line.startswith("| ")]
    states = {symbol: state for state, symbol in releases.SYMBOLS.items()}
    column = rows[0].index(version)
    return {row[0]: states[row[column]] for row in rows[1:]}


def known_trees() -> list[Path]:
    roots = [tree / "vllm"] if (tree := vllm_tree()) is not None else []
    try:
        return [doctor.installed(), *roots]
    except DraftToolsError:  # said by the other tests; this one runs while pytest collects
        return roots


@pytest.mark.vllm
@pytest.mark.parametrize("root", known_trees(), ids=lambda root: doctor.version(Tree(root)))
def test_releases_page_is_what_the_check_says(root: Path) -> None:
    tree = Tree(root)
    version = doctor.version(tree)
    assert version in releases.RELEASES
    verdicts = doctor.verdicts(tree)
    assert page_column(version) == {patch.name: verdict.state for patch, verdict in verdicts}
    assert not [(p.name, v.reason) for p, v in verdicts if v.state == "refused"]
    new = [(p.name, v.reason) for p, v in verdicts if v.state == "applies" and v.reason]
    assert not new, "its sources are not in fingerprints.py"


def test_releases_page_covers_the_releases_and_their_reasons() -> None:
    page = releases.PAGE.read_text()
    for version in releases.RELEASES:
        states = page_column(version)
        assert set(states) == {patch.name for patch in patches.ALL}
        for name, state in states.items():
            assert state == "applies" or f"- **{name}**, " in page


def test_a_missing_seam_counts_as_harmless_only_with_a_sign_to_look_for() -> None:
    for patch in patches.ALL:
        assert bool(patch.absent) == bool(patch.signs), patch.name


# --- forks: features, not versions ----------------------------------------------------------------------------------


@pytest.mark.vllm
def test_the_version_string_decides_nothing(fork: Fork) -> None:
    before = fork.states()
    fork.edit("_version.py", r"'0\.32\.0'", "'0.7.0+sm70'")
    assert fork.states() == before
    done = cli("doctor", "--vllm-path", str(fork.root.parent), "--json")
    assert json.loads(done.stdout)["version"] == "0.7.0+sm70"
    assert done.returncode == 0


@pytest.mark.vllm
def test_moved_lines_comments_and_docstrings_are_the_same_source(fork: Fork) -> None:
    fork.edit(QUICK_REDUCE, "Check if quickreduce is available", "Whether it may be used")
    fork.edit(QUICK_REDUCE, r"\A", "# moved\n\n" * 40)
    fork.edit(QUICK_REDUCE, r"(def should_quick_allreduce\(self, inp: torch.Tensor\)):", r"\1 -> bool:  # moved")
    assert fork.verdict("quick_reduce") == Verdict("applies", "")


@pytest.mark.vllm
def test_a_changed_body_applies_and_is_said_to_be_new(fork: Fork) -> None:
    fork.edit(QUICK_REDUCE, r"(def should_quick_allreduce\(.*\n)", r"\1        inp = inp.contiguous()\n")
    verdict = fork.verdict("quick_reduce")
    assert verdict.state == "applies"
    assert "the source of QuickAllReduce.should_quick_allreduce is new to this drafttools" in verdict.reason


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("parameters", "state"),
    [("self, inp, group", "refused"), ("self, tensor", "refused"), ("self, inp, group=None", "applies")],
)
def test_a_changed_signature_is_refused_unless_our_calls_still_fit(fork: Fork, parameters: str, state: str) -> None:
    fork.edit(QUICK_REDUCE, r"def should_quick_allreduce\(.*\):", f"def should_quick_allreduce({parameters}):")
    verdict = fork.verdict("quick_reduce")
    assert verdict.state == state
    if state == "refused":
        assert f"should_quick_allreduce takes ({parameters}), expected (self, inp)" in verdict.reason


@pytest.mark.vllm
def test_a_feature_that_left_the_function_is_refused_while_the_switch_exists(fork: Fork) -> None:
    fork.edit(MOE_CONFIG, A4W4, "VLLM_OTHER")
    verdict = fork.verdict("a4w4")
    assert verdict.state == "refused"
    assert f"yet envs.py has {A4W4}: it moved or was renamed" in verdict.reason
    fork.edit("envs.py", A4W4, "VLLM_OTHER")
    assert fork.verdict("a4w4").state == "not_needed"


@pytest.mark.vllm
def test_a_function_that_a_patch_only_relies_on_is_checked_too(fork: Fork) -> None:
    fork.edit(
        "model_executor/layers/fused_moe/routed_experts.py", r"self\.is_fused_checkpoint_transposed and", "False and"
    )
    verdict = fork.verdict("fp8_experts")
    assert verdict.state == "refused"
    assert "RoutedExperts.load_weights does not use is_fused_checkpoint_transposed" in verdict.reason


@pytest.mark.vllm
def test_a_module_that_is_gone_is_refused_while_the_switch_exists(fork: Fork) -> None:
    (fork.root / QUICK_REDUCE).unlink()
    assert fork.verdict("quick_reduce").state == "refused"
    fork.edit("envs.py", QUICK_REDUCE_SWITCH, "VLLM_OTHER")
    assert fork.verdict("quick_reduce").state == "not_needed"


@pytest.mark.vllm
def test_a_scope_seam_that_is_gone_without_an_excuse_is_refused(fork: Fork) -> None:
    fork.edit("model_executor/model_loader/base_loader.py", "def load_model", "def load_it")
    verdict = fork.verdict("load_scope")
    assert verdict == Verdict(
        "refused",
        "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model does not exist in this vLLM",
    )


@pytest.mark.vllm
def test_a_file_that_does_not_parse_is_refused_and_never_not_needed(fork: Fork) -> None:
    fork.edit(QUICK_REDUCE, r"\A", "def (:\n")
    fork.edit("envs.py", QUICK_REDUCE_SWITCH, "VLLM_OTHER")
    assert fork.verdict("quick_reduce").state == "refused"


@pytest.mark.vllm
def test_an_upstreamed_gate_and_scope_are_not_needed(fork: Fork) -> None:
    fork.edit(QUICK_REDUCE, r"(def should_quick_allreduce\(.*\n)", r"\1        if in_draft_model(): return False\n")
    fork.edit("config/__init__.py", r"\Z", "\nfrom vllm.config.scope import draft_model_scope, in_draft_model\n")
    assert fork.verdict("quick_reduce").state == "not_needed"
    assert fork.verdict("publish_scope").state == "not_needed"
    assert fork.verdict("load_scope").state == "applies"


@pytest.mark.vllm
def test_half_an_upstreamed_gate_still_applies(fork: Fork) -> None:
    body = r"(def is_fp8bmm_enabled\(cls\) -> bool:\n)"
    fork.edit(AITER, body, r"\1        if in_draft_model(): return False\n")
    fork.edit("config/__init__.py", r"\Z", "\nfrom vllm.config.scope import in_draft_model\n")
    assert fork.verdict("aiter_bmm").state == "applies"
    assert fork.verdict("publish_scope").state == "applies"


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.vllm
def test_doctor_exits_1_for_a_refusal_and_never_imports_the_tree(fork: Fork) -> None:
    fork.edit("__init__.py", r"\A", "raise SystemExit('imported')\n")
    assert cli("doctor", "--vllm-path", str(fork.root)).returncode == 0
    fork.edit(QUICK_REDUCE, r"def should_quick_allreduce\(", "def should_quick_allreduce(self, ")
    done = cli("doctor", "--vllm-path", str(fork.root))
    assert done.returncode == 1
    assert "refused" in done.stdout


@pytest.mark.vllm
def test_doctor_finds_the_installed_vllm_without_importing_it() -> None:
    code = """
import json, sys
from drafttools import doctor
root = doctor.installed()
doctor.verdicts(doctor.tree_at(root))
heavy = {"vllm", "torch", "wrapt"} & {name.split(".")[0] for name in sys.modules}
print(json.dumps([str(root), sorted(heavy)]))
"""
    done = python(code, DRAFTTOOLS="enforce")
    assert json.loads(done.stdout) == [str(doctor.installed()), []], done.stderr


@pytest.mark.vllm
def test_doctor_json_holds_what_the_table_holds() -> None:
    printed = json.loads(cli("doctor", "--json").stdout)
    assert printed["vllm"] == str(doctor.installed())
    assert [patch["name"] for patch in printed["patches"]] == [patch.name for patch in patches.ALL]
    table = cli("doctor").stdout
    for patch in printed["patches"]:
        assert re.search(rf"{patch['name']}\s*│ {patch['state'].replace('_', ' ')}", table)


@pytest.mark.parametrize("path", ["/nowhere", "."])
def test_doctor_refuses_a_path_without_vllm(path: str) -> None:
    line = one_line_error(cli("doctor", "--vllm-path", path))
    assert f"{path} holds no vLLM package" in line


def test_doctor_says_when_no_vllm_is_installed() -> None:
    done = python(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from drafttools import doctor; doctor.installed()",
        flags=("-S",),
    )
    assert f"vLLM is not installed for {sys.executable}; pass --vllm-path DIR" in done.stderr


# --- what keeps drafttools out ---------------------------------------------------------------------------------------


def obstacles(flags: tuple[str, ...] = (), cwd: Path = ROOT, **environ: str) -> list[str]:
    done = python(
        "import json; from drafttools import doctor; print(json.dumps(doctor.obstacles()))",
        flags=flags,
        cwd=cwd,
        **environ,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def any_with(sentences: list[str], *words: str) -> bool:
    return any(all(word in sentence for word in words) for sentence in sentences)


def test_a_plain_environment_has_no_obstacle_on_the_path() -> None:
    found = obstacles()
    assert not any_with(found, "wrapt")
    assert not any_with(found, "hides")
    assert not any_with(found, "VLLM_PLUGINS")


def test_without_site_packages_neither_the_plugin_nor_wrapt_is_there(tmp_path: Path) -> None:
    # Away from the checkout, where an editable install leaves its metadata.
    (tmp_path / "drafttools").symlink_to(ROOT / "drafttools")
    found = obstacles(flags=("-S",), cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert any_with(found, "vllm.general_plugins entry point is not installed")
    assert any_with(found, "wrapt is not installed")


def test_an_old_wrapt_is_named(tmp_path: Path) -> None:
    for version, old in (("1.16.0", True), ("1.17rc1", False)):
        folder = tmp_path / version
        (folder / f"wrapt-{version}.dist-info").mkdir(parents=True)
        (folder / f"wrapt-{version}.dist-info" / "METADATA").write_text(f"Name: wrapt\nVersion: {version}\n")
        found = obstacles(PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))
        assert any_with(found, f"wrapt {version} is too old") == old


def test_vllm_plugins_without_our_name_is_named() -> None:
    assert any_with(obstacles(VLLM_PLUGINS="other"), "VLLM_PLUGINS='other'")
    assert not any_with(obstacles(VLLM_PLUGINS="other,drafttools"), "VLLM_PLUGINS")


def test_a_sitecustomize_before_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").touch()
    ours = settings.inject_dir()
    hidden = os.pathsep.join([str(tmp_path), ours, str(ROOT)])
    first = os.pathsep.join([ours, str(tmp_path), str(ROOT)])
    assert any_with(obstacles(PYTHONPATH=hidden), str(tmp_path / "sitecustomize.py"), "hides it")
    assert not any_with(obstacles(PYTHONPATH=first), "sitecustomize")


@pytest.mark.vllm
def test_two_vllms_on_the_path_are_named(fork: Fork) -> None:
    path = os.pathsep.join([str(fork.root.parent), str(ROOT)])
    assert any_with(obstacles(PYTHONPATH=path), f"{fork.root} hides {doctor.installed()}")


@pytest.mark.vllm
def test_a_vllm_checkout_in_the_current_directory_is_named(fork: Fork) -> None:
    code = """
import json, sys
sys.path.remove("")
from drafttools import doctor
print(json.dumps(doctor.obstacles()))
"""
    done = python(code, cwd=fork.root.parent)
    assert any_with(json.loads(done.stdout), f"{fork.root} is what `python -m` and `python -c` would import")


@pytest.fixture
def vllm_command(tmp_path: Path) -> Callable[[str], str]:
    """A PATH whose `vllm` command starts with the given interpreter line."""

    def make(shebang: str) -> str:
        script = tmp_path / "vllm"
        script.write_text(f"#!{shebang}\n")
        script.chmod(0o755)
        return f"{tmp_path}:/usr/bin:/bin"

    return make


def test_a_vllm_command_of_another_interpreter_is_named(vllm_command: Callable[[str], str]) -> None:
    assert any_with(obstacles(PATH=vllm_command("/elsewhere/bin/python3")), "/elsewhere/bin/python3", sys.executable)
    assert not any_with(obstacles(PATH=vllm_command(sys.executable)), "the command")


def test_a_vllm_command_that_skips_sitecustomize_is_named(vllm_command: Callable[[str], str]) -> None:
    assert any_with(obstacles(PATH=vllm_command(f"{sys.executable} -I")), "skip sitecustomize")


def test_a_missing_expert_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from drafttools.experts import extension

    monkeypatch.setattr(extension.unavailable, "__defaults__", (Path("/nowhere/fp8_experts.so"),))
    assert any_with(doctor._expert_kernel(), "/nowhere/fp8_experts.so is missing", "mtp_expert_quantization")


# --- explain and the page of patches ---------------------------------------------------------------------------------


def test_explain_lists_every_patch() -> None:
    done = cli("explain")
    assert done.returncode == 0
    assert [patch.name for patch in patches.ALL if patch.name not in done.stdout] == []


def test_explain_prints_a_whole_record() -> None:
    words = " ".join(cli("explain", "quick_reduce").stdout.split())
    [patch] = [patch for patch in patches.ALL if patch.name == "quick_reduce"]
    for text in (patch.what, patch.why, patch.opt_in, patch.upstream, patch.retire, patch.absent):
        assert text in words


def test_explain_refuses_an_unknown_patch() -> None:
    assert "there is no patch 'quickreduce'; known: publish_scope," in one_line_error(cli("explain", "quickreduce"))


def test_the_page_of_patches_is_what_explain_prints() -> None:
    page = (ROOT / "docs" / "patches.md").read_text()
    assert page == document.markdown(), "run: drafttools explain --markdown > docs/patches.md"
    assert cli("explain", "--markdown").stdout == page
