"""The patching core on a small package: what is changed, what is refused, and that undoing leaves no trace."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import wrapt

from drafttools.patching import Applied, Patch, Seam, State, Transaction, check
from drafttools.source import Tree

SOURCE = """
import functools

def decide(prefix=None):
    return "stock"

class Base:
    def load(self):
        return "base"

    @classmethod
    def make(cls, x):
        return (cls.__name__, x)

    @staticmethod
    def helper(x):
        return x

class Child(Base):
    pass

class Own(Base):
    def load(self):
        return "own " + super().load()
"""
ALIAS = "from vllmtoy.seam import decide\nfrom vllmtoy.seam import decide as another\n"
Files = Callable[..., Tree]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """Writes the package `vllmtoy`; its modules are forgotten afterwards."""
    root = tmp_path / "vllmtoy"
    root.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(**files: str) -> Tree:
        for name, text in {"__init__": "", "seam": SOURCE, "alias": ALIAS, **files}.items():
            (root / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return Tree(root)

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "vllmtoy"]:
        del sys.modules[name]


def imported(name: str = "seam") -> Any:
    return importlib.import_module(f"vllmtoy.{name}")


def patch(apply: Callable[[Transaction, ModuleType], None], *seams: Seam, **changes: Any) -> Patch:
    texts = dict.fromkeys(("what", "why", "upstream", "retire"), "")
    fields = {"name": "toy", "module": "vllmtoy.seam", "seams": seams or (Seam("decide"),), "apply": apply, **texts}
    return Patch(**fields | changes)


def ours(prefix: Any = None) -> str:
    return "ours"


def replace_decide(transaction: Transaction, module: ModuleType) -> None:
    transaction.replace_function(module, "decide", ours)


def wrap(name: str) -> Callable[[Transaction, ModuleType], None]:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return ("wrapped", wrapped(*args, **kwargs))

    def apply(transaction: Transaction, module: ModuleType) -> None:
        owner, _, attribute = name.rpartition(".")
        transaction.wrap(getattr(module, owner), attribute, wrapper)

    return apply


def snapshot() -> dict[str, dict[str, Any]]:
    """Every attribute of every module and class of the package, raw."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "vllmtoy":
            found[name] = {k: v for k, v in vars(module).items() if k != "__builtins__"}
            for key, value in list(vars(module).items()):
                if isinstance(value, type):
                    found[f"{name}.{key}"] = {
                        k: v for k, v in vars(value).items() if k not in ("__weakref__", "__dict__")
                    }
    return found


def identical(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> bool:
    """The same attributes bound to the same objects."""
    if before.keys() != after.keys():
        return False
    return all(
        before[name].keys() == after[name].keys() and all(before[name][k] is after[name][k] for k in before[name])
        for name in before
    )


# --- applying, aliases, undoing ---


def test_every_alias_is_rebound_and_restored(package: Files) -> None:
    tree, module, alias = package(), imported(), imported("alias")
    before = snapshot()
    item = Applied(patch(replace_decide))
    item.try_apply(tree)
    assert item.state is State.APPLIED
    assert [module.decide(), alias.decide(), alias.another()] == ["ours"] * 3
    assert item.undo() == []
    assert identical(before, snapshot())
    assert module.decide() == "stock"
    assert item.state is State.REGISTERED


def test_a_module_that_imports_the_name_later_gets_ours(package: Files) -> None:
    tree = package()
    imported()
    item = Applied(patch(replace_decide))
    item.try_apply(tree)
    assert imported("alias").decide() == "ours"


def test_failing_half_way_leaves_nothing(package: Files) -> None:
    tree, module = package(), imported()
    imported("alias")
    before = snapshot()

    def apply(transaction: Transaction, module: ModuleType) -> None:
        replace_decide(transaction, module)
        transaction.replace(module.Base, "load", lambda self: "ours")
        transaction.replace(module.Base, "missing", 1)
        raise AttributeError("no such thing")

    item = Applied(patch(apply))
    item.try_apply(tree)
    assert item.state is State.REFUSED
    assert item.reason == "AttributeError: no such thing"
    assert identical(before, snapshot())
    assert module.decide() == "stock"


def test_a_change_that_does_not_read_back_is_refused(package: Files) -> None:
    tree = package(seam=SOURCE + "\nclass Meta(type):\n    def __setattr__(cls, name, value): pass\n"
                                 "class Stubborn(metaclass=Meta):\n    def load(self): return 'stock'\n")  # fmt: skip
    module = imported()
    item = Applied(patch(lambda t, m: t.replace(m.Stubborn, "load", ours)))
    item.try_apply(tree)
    assert item.state is State.REFUSED
    assert "read back" in item.reason
    assert module.Stubborn().load() == "stock"


@pytest.mark.parametrize("name", ["Base.load", "Child.load", "Base.make", "Child.make", "Base.helper", "Own.load"])
def test_undo_leaves_no_trace(package: Files, name: str) -> None:
    """Also of methods that were inherited, and of class and static methods."""
    tree, module = package(), imported()
    before = snapshot()
    cls, _, method = name.partition(".")
    arguments = () if method == "load" else (3,)
    stock = getattr(getattr(module, cls)(), method)(*arguments)
    item = Applied(patch(wrap(name)))
    item.try_apply(tree)
    assert item.state is State.APPLIED
    assert getattr(getattr(module, cls)(), method)(*arguments) == ("wrapped", stock)
    assert item.undo() == []
    assert identical(before, snapshot())
    assert getattr(getattr(module, cls)(), method)(*arguments) == stock


def test_undo_of_a_dictionary_entry(package: Files) -> None:
    tree = package(seam=SOURCE + "table = {'old': 1}\n")
    module = imported()

    def apply(transaction: Transaction, module: ModuleType) -> None:
        transaction.add_item(module.table, "new", 2)  # type: ignore[attr-defined]
        transaction.add_item(module.table, "old", 3)  # type: ignore[attr-defined]

    item = Applied(patch(apply))
    item.try_apply(tree)
    assert module.table == {"old": 3, "new": 2}
    assert item.undo() == []
    assert module.table == {"old": 1}


# --- families ---


def family(transaction: Transaction, module: ModuleType) -> None:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return f"<{wrapped(*args, **kwargs)}>"

    transaction.wrap_family(module.Base, ("load",), wrapper)  # type: ignore[attr-defined]


def test_a_family_has_members_from_before_and_after(package: Files) -> None:
    tree, module = package(), imported()
    before = snapshot()

    class Before(module.Base):  # type: ignore[name-defined, misc]
        def load(self) -> str:
            return "before"

    item = Applied(patch(family))
    item.try_apply(tree)

    class After(module.Own):  # type: ignore[name-defined, misc]
        def load(self) -> str:
            return "after " + super().load()

    assert Before().load() == "<before>"
    assert After().load() == "<after <own <base>>>"
    assert module.Child().load() == "<base>"
    assert item.undo() == []
    assert identical(before, snapshot())
    assert After().load() == "after own base"

    class Later(module.Base):  # type: ignore[name-defined, misc]
        def load(self) -> str:
            return "later"

    assert Later().load() == "later"


def test_a_member_with_two_ways_to_the_base_is_wrapped_once(package: Files) -> None:
    tree, module = package(), imported()

    class Both(module.Child, module.Own):  # type: ignore[name-defined, misc]
        def load(self) -> str:
            return "both"

    Applied(patch(family)).try_apply(tree)
    assert Both().load() == "<both>"


def test_other_init_subclass_hooks_still_run(package: Files) -> None:
    hooks = """
class Root:
    seen = []
    def __init_subclass__(cls, tag=None, **kwargs):
        super().__init_subclass__(**kwargs)
        Root.seen.append((cls.__name__, tag))

class Mixin:
    mixed = []
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Mixin.mixed.append(cls.__name__)
"""
    tree = package(seam=hooks + SOURCE.replace("class Base:", "class Base(Root):"))
    module = imported()
    Applied(patch(family)).try_apply(tree)
    module.Root.seen.clear()

    class New(module.Base, module.Mixin, tag="x"):  # type: ignore[name-defined, misc, call-arg]
        def load(self) -> str:
            return "new"

    assert module.Root.seen == [("New", "x")]
    assert module.Mixin.mixed == ["New"]
    assert New().load() == "<new>"


# --- other people's wrappers ---


def test_a_foreign_wrapper_below_ours_is_kept_and_named(package: Files) -> None:
    tree, module = package(), imported()
    stock = module.Base.load
    module.Base.load = wrapt.FunctionWrapper(stock, lambda wrapped, i, a, k: "foreign " + wrapped(*a, **k))
    foreign = vars(module.Base)["load"]
    item = Applied(patch(wrap("Base.load")))
    item.try_apply(tree)
    assert item.state is State.APPLIED
    assert "already wrapped" in item.reason
    assert module.Base().load() == ("wrapped", "foreign base")
    assert item.undo() == []
    assert vars(module.Base)["load"] is foreign


def test_a_foreign_wrapper_on_top_of_ours_is_left_alone(package: Files) -> None:
    tree, module = package(), imported()
    item = Applied(patch(wrap("Base.load")))
    item.try_apply(tree)
    module.Base.load = wrapt.FunctionWrapper(vars(module.Base)["load"], lambda w, i, a, k: ("foreign", w(*a, **k)))
    item.try_apply(tree)
    assert item.state is State.APPLIED  # ours still runs, below it
    assert len(item.undo()) == 1
    assert "Base.load" in item.reason
    assert module.Base().load() == ("foreign", ("wrapped", "base"))


def test_a_foreign_replacement_is_noticed(package: Files) -> None:
    tree, module = package(), imported()
    item = Applied(patch(wrap("Base.load")))
    item.try_apply(tree)
    module.Base.load = lambda self: "theirs"
    item.try_apply(tree)
    assert item.state is State.REFUSED
    assert "Base.load was replaced" in item.reason
    assert item.undo() != []
    assert module.Base().load() == "theirs"


def test_vllms_own_decorators_are_no_foreign_wrappers(package: Files) -> None:
    decorated = SOURCE.replace("    def load(self):\n        return \"base\"",
                               "    @logged\n    def load(self):\n        return \"base\"")  # fmt: skip
    logged = "\nimport functools\ndef logged(f):\n    @functools.wraps(f)\n    def g(*a, **k): return f(*a, **k)\n    return g\n"
    tree = package(seam=logged + decorated)
    imported()
    item = Applied(patch(wrap("Base.load")))
    item.try_apply(tree)
    assert item.state is State.APPLIED
    assert "wrapped" not in item.reason


# --- imports ---


def test_nothing_happens_before_the_module_is_there(package: Files) -> None:
    item = Applied(patch(replace_decide))
    item.try_apply(package())
    assert item.state is State.REGISTERED


def test_a_half_initialised_module_is_waited_for(package: Files) -> None:
    """Asked while the module's body still runs, and again when it has finished."""
    observer = "import vllmtoy.observe\n"
    observe = "import sys\nasked = []\ndef ask():\n    for item, tree in asked: item.try_apply(tree)\n"
    tree = package(seam="import vllmtoy.observe as o\no.ask()\n" + SOURCE + "o.ask()\n", observe=observer + observe)
    item = Applied(patch(replace_decide))
    imported("observe").asked.append((item, tree))
    states: list[State] = []
    imported("observe").ask = lambda: (item.try_apply(tree), states.append(item.state))
    module = imported()
    assert states == [State.REGISTERED, State.REGISTERED]
    assert module.decide() == "stock"
    item.try_apply(tree)
    assert item.state is State.APPLIED
    assert module.decide() == "ours"


def test_a_reload_is_patched_again(package: Files) -> None:
    tree, module, alias = package(), imported(), imported("alias")
    item = Applied(patch(replace_decide))
    item.try_apply(tree)
    importlib.reload(module)
    assert module.decide() == "stock"
    item.try_apply(tree)
    assert item.state is State.APPLIED
    assert module.decide() == alias.decide() == "ours"
    reloaded = module.decide
    item.try_apply(tree)
    assert module.decide is reloaded  # once
    assert item.undo() == []
    assert module.decide() == alias.decide() == "stock"


def test_a_reload_of_classes_is_patched_again(package: Files) -> None:
    tree, module = package(), imported()
    old = module.Own
    item = Applied(patch(family))
    item.try_apply(tree)
    importlib.reload(module)
    item.try_apply(tree)
    assert module.Own().load() == "<own <base>>"
    assert old().load() == "<own <base>>"  # what was built on the old class is still served by it
    assert item.undo() == []
    assert module.Own().load() == "own base"
    assert old().load() == "own base"


def test_asking_again_changes_nothing(package: Files) -> None:
    """Also for wrapped functions, which show the code of what they wrap, and for classes that no module names."""
    tree, module = package(), imported()
    hidden = type("Hidden", (module.Base,), {"load": lambda self: "hidden", "__module__": "vllmtoy.seam"})

    def apply(transaction: Transaction, module: ModuleType) -> None:
        family(transaction, module)
        transaction.wrap_function(module, "decide", lambda wrapped, i, a, k: f"[{wrapped(*a, **k)}]")

    item = Applied(patch(apply))
    item.try_apply(tree)
    before = snapshot()
    for _ in range(3):
        item.try_apply(tree)
    assert identical(before, snapshot())
    assert [module.decide(), hidden().load()] == ["[stock]", "<hidden>"]


def test_a_second_import_of_the_module_is_patched(package: Files) -> None:
    """An import that failed after our hook ran: the module object is thrown away and a new one comes."""
    tree = package()
    imported()
    item = Applied(patch(replace_decide))
    item.try_apply(tree)
    del sys.modules["vllmtoy.seam"]
    module = imported()
    assert module.decide() == "stock"
    item.try_apply(tree)
    assert item.state is State.APPLIED
    assert module.decide() == "ours"


# --- judging a source ---


@pytest.mark.parametrize(
    ("seam", "state", "words"),
    [
        (Seam("decide", parameters=("prefix",)), "applies", ""),
        (Seam("decide", parameters=("prefix", "...")), "applies", ""),
        (Seam("decide", parameters=("layer",)), "refused", "takes (prefix), expected (layer)"),
        (Seam("decide", parameters=("prefix", "more")), "refused", "takes (prefix), expected (prefix, more)"),
        (Seam("decide", features=("something",)), "refused", "does not use something"),
        (Seam("decide", features=("stock",)), "applies", ""),
        (Seam("vanished"), "refused", "vllmtoy.seam.vanished does not exist"),
        (Seam("Base.load", parameters=("self",)), "applies", ""),
        (Seam("Base.vanished"), "refused", "does not exist"),
        (Seam("Base.vanished", optional=True), "applies", ""),
    ],
)
def test_signatures_and_features(package: Files, seam: Seam, state: str, words: str) -> None:
    tree, module = package(), imported()
    record = patch(replace_decide, seam)
    verdict = check(record, tree)
    assert verdict.state == state
    assert words in verdict.reason
    assert "\n" not in verdict.reason
    item = Applied(record)
    item.try_apply(tree)
    assert item.state is (State.APPLIED if state == "applies" else State.REFUSED)
    assert module.decide() == ("ours" if state == "applies" else "stock")


def test_parameters_beyond_ours_need_defaults(package: Files) -> None:
    seams = [Seam("decide", parameters=("prefix",)), Seam("decide", parameters=("prefix", "..."))]
    states = {}
    for text in ("prefix, extra=1", "prefix, extra", "prefix, *, extra", "prefix, *, extra=1", "prefix, *extra"):
        tree = package(seam=f"def decide({text}): ...\n")
        states[text] = [check(patch(replace_decide, seam), tree).state for seam in seams]
    assert states == {
        "prefix, extra=1": ["applies", "applies"],
        "prefix, extra": ["refused", "applies"],
        "prefix, *, extra": ["refused", "applies"],
        "prefix, *, extra=1": ["applies", "applies"],
        "prefix, *extra": ["applies", "applies"],
    }


def test_what_vllm_does_itself_is_not_needed(package: Files) -> None:
    tree = package(seam="def decide(prefix=None):\n    if in_draft_model(): return 'native'\n    return 'stock'\n")
    called: list[str] = []
    item = Applied(patch(replace_decide, stand_down=lambda module: called.append(module.__name__)))
    imported()
    item.try_apply(tree)
    assert item.state is State.NOT_NEEDED
    assert called == ["vllmtoy.seam"]
    assert check(patch(replace_decide, native=()), tree).state == "applies"


def test_what_this_vllm_lacks_is_not_needed_when_the_record_says_so(package: Files) -> None:
    tree = package()
    assert check(patch(replace_decide, Seam("vanished"), absent="there is none"), tree).state == "not_needed"
    assert check(patch(replace_decide, module="vllmtoy.vanished", absent="there is none"), tree).state == "not_needed"
    assert check(patch(replace_decide, module="vllmtoy.vanished"), tree).state == "refused"


@pytest.mark.parametrize("text", ["def decide(:\n", "\0", "x = 1\n", ""])
def test_a_source_that_cannot_be_read_is_refused(package: Files, text: str) -> None:
    assert check(patch(replace_decide), package(seam=text)).state == "refused"


def test_the_fingerprint_ignores_words_about_the_code_only(package: Files) -> None:
    def fingerprint(text: str) -> str:
        function = package(seam=text).function("vllmtoy.seam", "decide")
        assert function is not None
        return function.fingerprint

    plain = fingerprint("def decide(prefix=None):\n    return 1\n")
    assert plain == fingerprint('def decide(prefix: str = None) -> int:\n    """Say."""\n\n    return 1  # one\n')
    assert plain != fingerprint("def decide(prefix=None):\n    return 2\n")
    assert plain != fingerprint("def decide(layer=None):\n    return 1\n")


# --- states ---


def test_applied_is_not_in_effect(package: Files) -> None:
    from drafttools import attest

    tree, name = package(), "toy_of_this_test"
    imported()
    scope_patch, gate_patch = (
        Applied(patch(replace_decide, name=name)),
        Applied(patch(replace_decide, name=name, hazard=lambda config, envs: "on")),
    )
    scope_patch.try_apply(tree)
    gate_patch.state = State.APPLIED
    assert attest.observed_state(scope_patch) is State.APPLIED
    attest.evidence(name).asked = 1
    assert attest.observed_state(scope_patch) is State.IN_EFFECT
    assert attest.observed_state(gate_patch) is State.APPLIED  # asked, but vLLM's answer stood
    attest.evidence(name).declined = 1
    assert attest.observed_state(gate_patch) is State.IN_EFFECT
    for state in (State.REGISTERED, State.REFUSED, State.DISABLED, State.NOT_NEEDED):
        scope_patch.state = state
        assert attest.observed_state(scope_patch) is state


def test_a_disabled_patch_stays_so(package: Files) -> None:
    tree, module = package(), imported()
    item = Applied(patch(replace_decide), state=State.DISABLED)
    item.try_apply(tree)
    assert item.state is State.DISABLED
    assert item.undo() == []
    assert item.state is State.DISABLED
    assert module.decide() == "stock"


def test_records_are_complete() -> None:
    from drafttools import patches

    names = [record.name for record in patches.ALL]
    assert len(set(names)) == len(names)
    for record in patches.ALL:
        assert record.seams, record.name
        for text in (record.what, record.why, record.upstream, record.retire):
            assert text, record.name
        assert record.upstream.startswith("https://github.com/vllm-project/vllm"), record.name
        assert bool(record.opt_in) == (record.hazard is not None), record.name
        assert dataclasses.is_dataclass(record)
