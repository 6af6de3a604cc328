"""Import, activate, deactivate, reload and other people's patches in any order: states stay legal, undo is exact."""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafttools.patching import Applied, Patch, Seam, State, Transaction
from drafttools.source import Tree

LEGAL = {
    State.REGISTERED: {State.APPLIED, State.REFUSED},
    State.APPLIED: {State.REGISTERED, State.REFUSED},
    State.REFUSED: {State.APPLIED, State.REGISTERED},  # after a reload has put a whole module back; when undone
}
FILES = {
    "__init__": "",
    "seam": "def decide():\n    return 'stock'\n\nclass Base:\n    def load(self):\n        return 'base'\n",
    "alias": "from vllmstate.seam import decide\nfrom vllmstate.seam import Base\n\nclass Child(Base):\n"
    "    def load(self):\n        return 'child ' + super().load()\n",
}
MODULES = ["seam", "alias"]


def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return f"<{wrapped(*args, **kwargs)}>"


def function(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_function(module, "decide", wrapper)


def family(transaction: Transaction, module: ModuleType) -> None:
    transaction.wrap_family(module.Base, ("load",), wrapper)


def record(name: str, seam: str, apply: Any) -> Patch:
    texts = dict.fromkeys(("what", "why", "upstream", "retire"), "")
    return Patch(name=name, module="vllmstate.seam", seams=(Seam(seam),), apply=apply, **texts)


PATCHES = [record("function", "decide", function), record("family", "Base.load", family)]


class Machine(RuleBasedStateMachine):
    """One process: the package, the patches in it, and what everything was before."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.root = Path(self.directory.name) / "vllmstate"
        self.root.mkdir()
        for name, text in FILES.items():
            (self.root / f"{name}.py").write_text(text)
        sys.path.insert(0, self.directory.name)
        importlib.invalidate_caches()
        self.tree = Tree(self.root)
        self.items: list[Applied] = []
        self.states: dict[str, State] = {}
        self.foreign = False
        self.keep: list[Any] = []  # classes from before reloads, which must be served and undone, too

    def teardown(self) -> None:
        sys.path.remove(self.directory.name)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllmstate"]:
            del sys.modules[name]
        self.directory.cleanup()

    def module(self, name: str) -> Any:
        return sys.modules.get(f"vllmstate.{name}")

    def refresh(self) -> None:
        for item in self.items:
            item.try_apply(self.tree)

    def owners(self) -> list[Any]:
        loaded = [self.module(name) for name in MODULES if self.module(name)]
        classes = [value for module in loaded for value in vars(module).values() if isinstance(value, type)]
        self.keep += [owner for owner in [*loaded, *classes] if not any(owner is kept for kept in self.keep)]
        return self.keep

    @rule(name=st.sampled_from(MODULES))
    def bring_in(self, name: str) -> None:
        importlib.import_module(f"vllmstate.{name}")
        self.refresh()

    @precondition(lambda self: self.module("seam"))
    @rule(name=st.sampled_from(MODULES))
    def reload(self, name: str) -> None:
        if self.module(name):
            importlib.reload(self.module(name))
            self.refresh()

    @precondition(lambda self: self.module("seam") and self.module("alias"))
    @rule()
    def import_again(self) -> None:
        """As after an import that failed: the modules are new objects."""
        for name in MODULES:
            self.owners()
            del sys.modules[f"vllmstate.{name}"]
        for name in MODULES:
            importlib.import_module(f"vllmstate.{name}")
        self.refresh()

    @precondition(lambda self: not self.items)
    @rule()
    def activate(self) -> None:
        self.items = [Applied(patch) for patch in PATCHES]
        self.refresh()

    @precondition(lambda self: self.items and not self.foreign)
    @rule()
    def deactivate(self) -> None:
        assert [sentence for item in reversed(self.items) for sentence in item.undo()] == []
        self.follow()
        self.items, self.states = [], {}
        for module in (self.module(name) for name in MODULES):
            if module is not None:
                assert module.decide() == "stock"
        self.nothing_of_ours()

    def nothing_of_ours(self) -> None:
        """No attribute anywhere is a wrapper of ours, also not on what reloads have replaced."""
        loaded = [owner for owner in self.owners() if isinstance(owner, type) or owner in sys.modules.values()]
        for owner in loaded:
            for name, value in vars(owner).items():
                assert not hasattr(value, "_self_wrapper"), f"{owner}.{name}"
            assert isinstance(owner, ModuleType) or "__init_subclass__" not in vars(owner)

    @precondition(lambda self: self.items and self.module("seam") and not self.foreign)
    @rule(on_top=st.booleans())
    def somebody_else(self, on_top: bool) -> None:
        """Other code wraps our function, or replaces it; the process is then stuck with that."""
        seam = self.module("seam")
        ours = seam.decide
        if not hasattr(ours, "_self_wrapper"):
            return

        def theirs() -> str:
            return f"({ours()})" if on_top else "theirs"

        if on_top:
            theirs.__wrapped__ = ours  # type: ignore[attr-defined]
        seam.decide = theirs
        self.foreign = True
        self.refresh()
        assert self.items[0].state is (State.APPLIED if on_top else State.REFUSED)
        assert self.items[0].undo() != []
        assert seam.decide is theirs
        seam.decide = ours
        self.foreign = False
        self.items[0].undo()
        self.follow()
        self.states.pop("function", None)
        self.items[0] = Applied(PATCHES[0])
        self.refresh()

    @rule()
    def look(self) -> None:
        self.refresh()

    @invariant()
    def follow(self) -> None:
        """States move along legal edges only, and say what is so."""
        for item in self.items:
            before = self.states.get(item.patch.name, State.REGISTERED)
            assert item.state is before or item.state in LEGAL[before]
            assert item.state is not State.IN_EFFECT
            self.states[item.patch.name] = item.state
        seam, alias = self.module("seam"), self.module("alias")
        if self.items and seam is not None and self.items[0].state is State.APPLIED and not self.foreign:
            assert seam.decide() == "<stock>"
            assert seam.Base().load() == "<base>"
            if alias is not None and alias.Base is seam.Base:
                assert alias.Child().load() == "<child <base>>"


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestStateMachine = Machine.TestCase
