"""The patching core: what a patch is, how it is applied, read back, and undone.

A patch is a `Patch` record. `check` judges a source tree without importing it; `Applied` holds what was changed in
this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Any

from drafttools.fingerprints import SEEN
from drafttools.source import Function, Tree

_ABSENT = object()


class State(StrEnum):
    """What became of a patch in this process; never merged."""

    REGISTERED = "registered"  # the import hook is set
    APPLIED = "applied"  # the attribute is ours, read back after the module finished importing
    IN_EFFECT = "in_effect"  # observed doing its job for a draft in this process
    REFUSED = "refused"  # the signature or source is not one we know, or applying failed; nothing was changed
    NOT_NEEDED = "not_needed"  # the installed vLLM does it already, or has nothing to gate
    DISABLED = "disabled"  # switched off by DRAFTTOOLS_DISABLE


@dataclass(frozen=True)
class Seam:
    """A function that a patch replaces.

    `parameters` are the leading parameters the patch relies on; parameters beyond them must have defaults, unless the
    last one is "..." (the patch passes them through).
    `features` are names, attributes or strings that the body must contain for the patch to mean what it says.
    """

    qualname: str
    parameters: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to one vLLM module.

    Attributes:
        name: switch for DRAFTTOOLS_DISABLE and key in reports.
        module: the vLLM module that is changed.
        seams: the functions that are replaced, checked before anything is touched.
        relies_on: further functions of the module that the patch needs as they are, checked likewise.
        what, why: one or two sentences each, for `drafttools explain` and the docs.
        upstream: where vLLM's side of the matter can be followed.
        retire: when this patch can be deleted.
        roles: the processes that it matters in.
        opt_in: the switch that brings the hazard, as a user would write it; empty for patches that always apply.
        hazard: reads (vllm_config, vllm.envs) and returns what is switched on in one phrase, or None. A patch without
            one (None) always matters.
        apply: does the change through a `Transaction`.
        absent: the sentence for a vLLM that has no such seam; empty when a missing seam is a refusal.
        signs: (module or package, text) pairs; the sentence holds only for a tree in which none of them is found.
        native: words in a seam's body that show that this vLLM already does what the patch does.
        provides: names the patch adds to the module; a vLLM that defines them all does not need it.
        stand_down: called instead of `apply` when the patch is not needed, to use what vLLM has.
    """

    name: str
    module: str
    seams: tuple[Seam, ...]
    what: str
    why: str
    upstream: str
    retire: str
    apply: Callable[[Transaction, ModuleType], None]
    relies_on: tuple[Seam, ...] = ()
    roles: tuple[str, ...] = ("worker",)
    opt_in: str = ""
    hazard: Callable[[Any, Any], str | None] | None = None
    absent: str = ""
    signs: tuple[tuple[str, str], ...] = ()
    native: tuple[str, ...] = ("in_draft_model", "draft_model_scope")
    provides: tuple[str, ...] = ()
    stand_down: Callable[[ModuleType], None] | None = None


@dataclass(frozen=True)
class Verdict:
    """What a patch would do on a source tree: `applies`, `not_needed` or `refused`, with one sentence."""

    state: str
    reason: str


def check(patch: Patch, tree: Tree) -> Verdict:
    """Judge `patch` on a source tree, by signature and features.

    A source that no release read so far has, but whose signature and features match, applies and is said to be new.
    """
    if tree.path(patch.module) is None:
        return _missing(patch, tree, f"{patch.module} does not exist")
    if tree.module(patch.module) is None:
        return Verdict("refused", f"{patch.module} is not Python that this interpreter can parse")
    if patch.provides and all(tree.defines(patch.module, name) for name in patch.provides):
        return Verdict("not_needed", f"{patch.module} defines {', '.join(patch.provides)} itself")
    found: list[tuple[Seam, Function]] = []
    for seam in (*patch.seams, *patch.relies_on):
        function = tree.function(patch.module, seam.qualname)
        if function is not None:
            found.append((seam, function))
        elif not seam.optional:
            return _missing(patch, tree, f"{patch.module}.{seam.qualname} does not exist")
    replaced = [function for seam, function in found if seam in patch.seams]
    if replaced and all(set(patch.native) & function.words for function in replaced):
        return Verdict("not_needed", f"{patch.seams[0].qualname} already does this")
    for seam, function in found:
        if not _signature_fits(function, seam.parameters):
            takes, expected = ", ".join(function.parameters), ", ".join(seam.parameters)
            return Verdict("refused", f"{patch.module}.{seam.qualname} takes ({takes}), expected ({expected})")
        lacking = [word for word in seam.features if word not in function.words]
        if lacking:
            return _missing(patch, tree, f"{patch.module}.{seam.qualname} does not use {lacking[-1]}")
    known = SEEN.get(patch.name, {})
    unseen = [seam.qualname for seam, function in found if function.fingerprint not in known]
    if unseen:
        return Verdict(
            "applies", f"signature and features match; the source of {', '.join(unseen)} is new to this drafttools"
        )
    return Verdict("applies", "")


def _missing(patch: Patch, tree: Tree, what: str) -> Verdict:
    """Not needed only if the tree shows no sign of what the patch is for; otherwise it moved, and we cannot follow."""
    if not patch.absent:
        return Verdict("refused", f"{what} in this vLLM")
    for place, text in patch.signs:
        file = tree.mention(place, text)
        if file is not None:
            return Verdict("refused", f"{what}, yet {file} has {text}: it moved or was renamed")
    return Verdict("not_needed", f"{what}: {patch.absent}")


def _signature_fits(function: Function, expected: tuple[str, ...]) -> bool:
    """Leading parameters as expected; further ones need defaults, unless `...` says that they are passed through."""
    if not expected:
        return True
    passed_through = expected[-1] == "..."
    names = expected[:-1] if passed_through else expected
    if function.parameters[: len(names)] != names:
        return False
    return passed_through or not set(function.parameters[len(names) :]) & function.required


@dataclass
class Change:
    """One attribute that was replaced, with what is needed to put it back exactly."""

    owner: Any
    name: str
    original: Any  # the raw value in vars(owner), or _ABSENT when it was inherited
    replacement: Any
    superseded: bool = False  # a reload has put something else there, or replaced the owner

    def in_place(self) -> bool:
        """Whether the attribute still is the one we set."""
        return vars(self.owner).get(self.name, _ABSENT) is self.replacement

    def reaches_ours(self) -> bool:
        """Whether calling the attribute still runs ours, directly or under wrappers that expose `__wrapped__`."""
        value = vars(self.owner).get(self.name, _ABSENT)
        while value is not self.replacement:
            value = getattr(value, "__wrapped__", _ABSENT)
            if value is _ABSENT:
                return False
        return True

    def outdated(self, module: ModuleType) -> bool:
        """Whether a reload of `module` has replaced the owner, or put the module's own function back."""
        if self.owner is module:
            if self.reaches_ours():
                return False
            code = getattr(vars(module).get(self.name, _ABSENT), "__code__", None)
            return code is not None and code.co_filename == module.__file__
        belongs = isinstance(self.owner, type) and self.owner.__module__ == module.__name__
        return belongs and vars(module).get(self.owner.__qualname__, self.owner) is not self.owner

    def undo(self) -> str | None:
        """Restore the attribute; returns a sentence when somebody has wrapped or replaced it since."""
        if not self.in_place():
            if self.superseded:
                return None
            return f"{_label(self.owner)}.{self.name} was replaced or wrapped by other code after drafttools"
        if self.original is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)
        return None


@dataclass
class FunctionChange(Change):
    """A module's function, which other modules have bound by name, before it was replaced or after."""

    def rebind(self, old: Any, new: Any) -> None:
        """Bind `new` under every name that other vLLM modules have for `old`."""
        for module, name in _aliases(old, self.owner):
            setattr(module, name, new)

    def undo(self) -> str | None:
        self.rebind(self.replacement, self.original)
        return super().undo()


@dataclass
class ItemChange(Change):
    """One key of a dictionary that was added or replaced."""

    def in_place(self) -> bool:
        return self.owner.get(self.name, _ABSENT) is self.replacement

    def reaches_ours(self) -> bool:
        return self.in_place()

    def outdated(self, module: ModuleType) -> bool:
        return not any(value is self.owner for value in vars(module).values())

    def undo(self) -> str | None:
        if not self.in_place():
            return f"the key {self.name} was replaced by other code after drafttools"
        if self.original is _ABSENT:
            del self.owner[self.name]
        else:
            self.owner[self.name] = self.original
        return None


@dataclass
class Transaction:
    """Collects the changes of one patch; all are kept or none is."""

    tree: Tree | None = None
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Set `owner.name`, remembering the raw value it had and whether it had one of its own."""
        self.changes.append(Change(owner, name, vars(owner).get(name, _ABSENT), replacement))
        setattr(owner, name, replacement)

    def add_item(self, mapping: dict[str, Any], key: str, value: Any) -> None:
        """Add a key to a dictionary that vLLM reads."""
        self.changes.append(ItemChange(mapping, key, mapping.get(key, _ABSENT), value))
        mapping[key] = value

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Wrap a method or function that runs outside compiled graphs with a wrapt wrapper.

        `wrapper(wrapped, instance, args, kwargs)`, as in wrapt.
        """
        import wrapt

        original = vars(owner).get(name, None) or getattr(owner, name)
        self._note_foreign(owner, name, original)
        self.replace(owner, name, wrapt.FunctionWrapper(original, wrapper))

    def replace_function(self, module: ModuleType, name: str, replacement: Any) -> None:
        """Replace a module function and every alias of it that other vLLM modules already bound by name."""
        original = getattr(module, name)
        self._note_foreign(module, name, original)
        change = FunctionChange(module, name, original, replacement)
        self.changes.append(change)
        setattr(module, name, replacement)
        change.rebind(original, replacement)

    def wrap_function(self, module: ModuleType, name: str, wrapper: Callable[..., Any]) -> None:
        """`replace_function` with a wrapt wrapper."""
        import wrapt

        self.replace_function(module, name, wrapt.FunctionWrapper(getattr(module, name), wrapper))

    def wrap_family(self, base: type, names: tuple[str, ...], wrapper: Callable[..., Any]) -> None:
        """Wrap methods of a class, of every subclass, and of subclasses that are defined later."""
        for cls in dict.fromkeys(_with_subclasses(base)):  # a class with two ways to the base comes twice
            self._wrap_own(cls, names, wrapper)
        # Kept as a classmethod on the base, so that a subclass's own __init_subclass__ still reaches it by super().
        own = vars(base).get("__init_subclass__")

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            if own is not None:
                own.__func__(cls, **kwargs)
            else:
                super(base, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
            self._wrap_own(cls, names, wrapper)

        self.replace(base, "__init_subclass__", classmethod(init_subclass))

    def _wrap_own(self, cls: type, names: tuple[str, ...], wrapper: Callable[..., Any]) -> None:
        for name in names:
            method = vars(cls).get(name)
            if callable(method) and not getattr(method, "__isabstractmethod__", False):
                self.wrap(cls, name, wrapper)

    def _note_foreign(self, owner: Any, name: str, original: Any) -> None:
        """Say so when what we wrap carries more wrappers than vLLM's source puts on it."""
        module = owner.__name__ if isinstance(owner, ModuleType) else owner.__module__
        qualname = name if isinstance(owner, ModuleType) else f"{owner.__qualname__}.{name}"
        function = self.tree.function(module, qualname) if self.tree is not None else None
        expected = len(function.node.decorator_list) if function is not None else 0
        wrappers = 0
        while hasattr(original, "__wrapped__"):
            original, wrappers = original.__wrapped__, wrappers + 1
        if wrappers > expected:
            self.notes.append(f"{_label(owner)}.{name} was already wrapped by other code")

    def roll_back(self) -> list[str]:
        """Undo every change, last first; returns what could not be undone and keeps those changes."""
        failed: list[str] = []
        kept: list[Change] = []
        for change in reversed(self.changes):
            sentence = change.undo()
            if sentence is not None:
                failed.append(sentence)
                kept.insert(0, change)
        self.changes = kept
        return failed


@dataclass
class Applied:
    """A patch in this process: its state, the reason for it, and the changes made."""

    patch: Patch
    state: State = State.REGISTERED
    reason: str = ""
    transaction: Transaction = field(default_factory=Transaction)
    module: ModuleType | None = None
    earlier: list[Transaction] = field(default_factory=list)  # from before reloads

    def try_apply(self, tree: Tree, *, finished: bool = False) -> None:
        """Apply once the module has finished importing; apply again if it was reloaded or re-imported.

        `finished` says that the caller knows the module body to have run. Never raises: a failure is rolled back
        and recorded as refused.
        """
        module = sys.modules.get(self.patch.module)
        if self.state is State.DISABLED or not isinstance(module, ModuleType):
            return
        if not finished and getattr(module.__spec__, "_initializing", False):
            return
        if self.module is module and not any(c.outdated(module) for c in self.transaction.changes):
            self._look_again()
            return
        self.module = module
        verdict = check(self.patch, tree)
        if verdict.state != "applies":
            self.state, self.reason = State(verdict.state), verdict.reason
            if self.state is State.NOT_NEEDED and self.patch.stand_down is not None:
                self._stand_down(self.patch.stand_down, module)
            return
        self._apply(module, verdict, tree)

    def _stand_down(self, use: Callable[[ModuleType], None], module: ModuleType) -> None:
        try:
            use(module)
        except Exception as error:
            self.state, self.reason = State.REFUSED, f"vLLM's own could not be used: {type(error).__name__}: {error}"

    def _apply(self, module: ModuleType, verdict: Verdict, tree: Tree) -> None:
        # What stands on classes from before a reload, or under other modules' names, is kept to be undone, too.
        before = self.transaction
        self.transaction = Transaction(tree, [c for c in before.changes if not c.outdated(module)])
        before.changes = [c for c in before.changes if c.outdated(module)]
        for change in before.changes:
            change.superseded = True
        self.earlier.append(before)
        try:
            self.patch.apply(self.transaction, module)
            if not self.in_place():
                raise RuntimeError("an attribute did not read back as set")
        except Exception as error:
            self.transaction.roll_back()
            self.state, self.reason = State.REFUSED, f"{type(error).__name__}: {error}"
            return
        self.state = State.APPLIED
        self.reason = "; ".join(filter(None, [verdict.reason, *self.transaction.notes]))

    def _look_again(self) -> None:
        """Notice code that replaced ours after it was applied."""
        lost = [c for c in self.transaction.changes if not c.reaches_ours()]
        if self.state in (State.APPLIED, State.IN_EFFECT) and lost:
            self.state = State.REFUSED
            self.reason = f"{_label(lost[0].owner)}.{lost[0].name} was replaced by other code after drafttools"

    def in_place(self) -> bool:
        """Whether every attribute is still ours."""
        return bool(self.transaction.changes) and all(c.in_place() for c in self.transaction.changes)

    def undo(self) -> list[str]:
        """Put back what was changed; a foreign wrapper on top of ours is left alone and named."""
        failed = [sentence for made in (self.transaction, *reversed(self.earlier)) for sentence in made.roll_back()]
        if failed:
            self.reason = "; ".join(failed)
        elif self.state in (State.APPLIED, State.IN_EFFECT):
            self.state, self.reason, self.module = State.REGISTERED, "", None
        return failed


def _with_subclasses(base: type[Any]) -> Iterator[type[Any]]:
    yield base
    cls: type[Any]
    for cls in base.__subclasses__():
        yield from _with_subclasses(cls)


def _aliases(original: Any, home: ModuleType) -> list[tuple[ModuleType, str]]:
    """Names in other loaded modules that are bound to the same object."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and module is not home and module.__name__.startswith("vllm")
        for name, value in list(vars(module).items())
        if value is original
    ]


def _label(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner))
