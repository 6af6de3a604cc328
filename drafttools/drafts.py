"""Draft modules: enter the scope while they load, and whenever a runner calls them afterwards.

A loaded draft gets a subclass of its own class whose `__call__` and public methods enter the scope. An instance-level
`forward` or a hook would never run on a class that is itself `@support_torch_compile`; the class-level `__call__` does
(vllm/compilation/decorators.py, 0.33.0), and a subclass for one instance leaves a target of the same class alone.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType
from typing import Any

from drafttools import attest, engine, hazards, quantization, settings
from drafttools.errors import DraftToolsError
from drafttools.patching import State
from drafttools.scope import call_in_scope, draft_model_scope, innermost

_marked: weakref.WeakKeyDictionary[Any, attest.Draft] = weakref.WeakKeyDictionary()
_loading: ContextVar[bool] = ContextVar("drafttools_loading", default=False)
_target_model: weakref.ref[Any] | None = None
_target_quant_config: Any = None

# A compiled class binds and hashes `self.forward` itself; wrapping it would change what is compiled.
_NEVER_WRAPPED = frozenset({"forward"})
_MARK = "_drafttools_marked"  # in the class that a marked draft has
_FOREIGN = ("torch.", "vllm.compilation.")  # modules whose methods are no model's own


def is_marked(module: Any) -> bool:
    """Whether `module` is a draft whose calls enter the scope."""
    return record_of(module) is not None


def record_of(module: Any) -> attest.Draft | None:
    """The report entry of a marked draft, also when it stands inside graph wrappers."""
    while module is not None:
        try:
            if module in _marked:
                return _marked[module]
        except TypeError:
            return None
        module = vars(module).get("runnable") if hasattr(module, "__dict__") else None
    return None


def before_load(vllm_config: Any) -> None:
    """Check that what a draft needs is in place, and report the switches that reach it ungated.

    Raises DraftToolsError in enforce mode when a hazard is present and its patch does not stand.
    """
    engine.refresh()
    import vllm.envs as envs

    ungated = hazards.ungated(vllm_config, envs)
    failures: list[str] = []
    for name, item in engine.applied().items():
        hazard = item.patch.hazard
        phrase = hazard(vllm_config, envs) if hazard is not None else "speculation"
        if phrase is None:
            continue
        if item.state is State.DISABLED:
            if hazard is not None:
                ungated.append(f"{name}: {phrase} reaches the draft ({item.reason})")
        elif refusal := engine.refusal(item):
            failures.append(f"patch {name} was refused ({refusal}) while {phrase} is on")
    if failures and settings.mode() == "enforce" and not settings.allow_unverified():
        raise DraftToolsError(_refusal(failures))
    attest.reaches_draft(ungated, failures)


def no_loader_checks() -> bool:
    """Whether the patches of both functions that load models, and would call `before_load`, were refused."""
    engine.refresh()
    return all(engine.refusal(engine.applied()[name]) for name in ("load_scope", "initialize_scope"))


def loading() -> bool:
    """Whether a draft is being loaded right now: a loader that delegates to another must not mark it twice."""
    return _loading.get()


def load(vllm_config: Any, model_config: Any, prefix: str, build: Callable[[], Any]) -> Any:
    """Load a draft in scope with `build`, record what it became, and mark it. Returns the model."""
    before_load(vllm_config)
    token = _loading.set(True)
    try:
        with draft_model_scope(), quantization.session(vllm_config) as layers:
            model = build()
    finally:
        _loading.reset(token)
    record = describe(model, vllm_config, model_config, prefix)
    record.details["quantization"] = layers
    record.details["fp8_experts"] = {
        name: module.drafttools_fp8_experts
        for name, module in model.named_modules()
        if hasattr(module, "drafttools_fp8_experts")
    }
    mark(model, record)
    attest.evidence("load_scope").asked += 1
    attest.add_draft(record)
    return model


def target_loaded(model: Any, vllm_config: Any) -> None:
    """Remember the target and its quantization config, to tell later what a draft shares with it."""
    global _target_model, _target_quant_config
    _target_model = weakref.ref(model)
    _target_quant_config = getattr(vllm_config, "quant_config", None)


def inherited_from_target(quant_config: Any) -> bool:
    """Whether a quantization config is the target's own object, or the online part of it."""
    target = _target_quant_config
    return target is not None and (
        quant_config is target or quant_config is getattr(target, "online_quantization_config", None)
    )


def describe(model: Any, vllm_config: Any, model_config: Any, prefix: str) -> attest.Draft:
    """What a freshly loaded draft holds: parameters per dtype, quant method per layer."""
    dtypes: Counter[str] = Counter()
    for _, parameter in model.named_parameters():
        dtypes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    methods = {
        name: type(module.quant_method).__name__
        for name, module in model.named_modules()
        if getattr(module, "quant_method", None) is not None
    }
    cache = getattr(vllm_config, "cache_config", None)
    override = getattr(getattr(vllm_config, "speculative_config", None), "kv_cache_dtype", None)
    architectures = getattr(getattr(model_config, "hf_config", None), "architectures", None) or [""]
    return attest.Draft(
        class_name=type(model).__name__,
        architecture=architectures[0],
        checkpoint=str(getattr(model_config, "model", "")),
        prefix=prefix,
        dtypes=dict(dtypes),
        quant_methods=methods,
        kv_cache_dtype=str(override or getattr(cache, "cache_dtype", "auto")),
    )


def mark(model: Any, record: attest.Draft) -> None:
    """Make every call of this one draft enter the scope and be counted."""
    cls = type(model)
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        _MARK: True,
    }
    body["__call__"] = _in_scope(cls.__call__, "__call__", record)
    for name, method in _public_methods(cls).items():
        body[name] = _in_scope(method, name, record)
    model.__class__ = type(cls.__name__, (cls,), body)
    _marked[model] = record


def unmark_all() -> list[str]:
    """Give every draft its own class back; names those whose class other code has changed since, and leaves them."""
    failed = []
    for model in list(_marked):
        if _MARK in vars(type(model)):
            model.__class__ = type(model).__mro__[1]
        else:
            failed.append(f"the class of the draft {type(model).__name__} was changed by other code after drafttools")
    _marked.clear()
    return failed


def note_shared_modules() -> None:
    """Record the draft modules that are the target's own since loading: they keep the target's precision."""
    target = _target_model() if _target_model is not None else None
    target_modules = {id(module) for module in target.modules()} if target is not None else set()
    for model, record in list(_marked.items()):
        record.shared_with_target = [
            name for name, module in model.named_modules() if name and id(module) in target_modules
        ]


def _public_methods(cls: type) -> dict[str, FunctionType]:
    """The functions a runner may call, nearest definition first; not those of nn.Module or of vLLM's compile wrapper."""
    methods: dict[str, FunctionType] = {}
    for base in cls.__mro__:
        if base.__module__.startswith(_FOREIGN):
            continue
        for name, value in vars(base).items():
            if not isinstance(value, FunctionType) or name.startswith("_") or name in _NEVER_WRAPPED:
                continue
            if not value.__module__.startswith(_FOREIGN):  # @support_torch_compile puts some on the model's class
                methods.setdefault(name, value)
    return methods


def _in_scope(method: Callable[..., Any], name: str, record: attest.Draft) -> Callable[..., Any]:
    """`method` entering the scope and counting, except while Dynamo traces it: the caller is in scope by then."""
    from torch.compiler import is_compiling

    calls = record.calls

    @functools.wraps(method)
    def scoped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return method(self, *args, **kwargs)
        calls[name] += 1
        if innermost() is not None:  # nearly always: the runner's entry point is in scope
            return method(self, *args, **kwargs)
        return call_in_scope(method, (self, *args), kwargs)

    return scoped


def _refusal(failures: list[str]) -> str:
    import vllm

    return (
        f"cannot keep the draft at its precision on vLLM {vllm.__version__}: {'; '.join(failures)}. "
        f"Turn the switch off, run `drafttools doctor`, name the patch in {settings.DISABLE}, "
        f"or set {settings.ALLOW_UNVERIFIED}=1 to serve anyway and have it reported"
    )
