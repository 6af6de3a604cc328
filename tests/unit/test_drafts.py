"""A draft module: recorded as it was loaded, in scope whenever it is called, and given back its class."""

from __future__ import annotations

import copy
import pickle
from typing import Any, Protocol, runtime_checkable

import pytest

torch = pytest.importorskip("torch")

from drafttools import attest, drafts  # noqa: E402
from drafttools.scope import in_draft_model  # noqa: E402
from tests.processes import VllmProcess  # noqa: E402
from tests.unit import effects  # noqa: E402


def record() -> attest.Draft:
    return attest.Draft("Toy", "", "", "", {}, {}, "auto")


@runtime_checkable
class Supports(Protocol):
    """Like vLLM's model interfaces, which models derive from."""

    supports_this: bool = True

    def extra(self) -> bool: ...


class Base(torch.nn.Module):
    def shared(self) -> bool:
        return in_draft_model()


class Toy(Base, Supports):
    registry: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: Any = None) -> bool:
        return in_draft_model()

    def extra(self) -> bool:
        return in_draft_model()

    def nested(self) -> list[bool]:
        return [self.extra(), self(), self.shared()]

    @property
    def answer(self) -> bool:
        return in_draft_model()

    @staticmethod
    def static() -> bool:
        return in_draft_model()

    @classmethod
    def by_class(cls) -> str:
        return cls.__name__

    def fail(self) -> None:
        raise ValueError

    def _private(self) -> bool:
        return in_draft_model()


@pytest.fixture
def draft() -> Any:
    model = Toy()
    drafts.mark(model, record())
    yield model
    drafts.unmark_all()
    assert type(model) is Toy


def test_calls_are_in_scope_and_counted(draft: Any) -> None:
    seen = drafts.record_of(draft)
    assert seen is not None
    assert draft() is draft.extra() is draft.shared() is True
    assert draft.nested() == [True, True, True]
    assert seen.calls == {"__call__": 2, "extra": 2, "shared": 2, "nested": 1}
    assert not in_draft_model()


def test_an_error_leaves_nothing(draft: Any) -> None:
    with pytest.raises(ValueError):
        draft.fail()
    assert not in_draft_model()


def test_a_target_of_the_same_class_is_left_alone(draft: Any) -> None:
    target = Toy()
    assert type(target) is Toy
    assert target() is target.extra() is target.shared() is False
    assert not drafts.is_marked(target)


def test_it_still_is_what_it_was(draft: Any) -> None:
    assert isinstance(draft, Toy)
    assert isinstance(draft, Supports)
    assert type(draft).__name__ == type(draft).__qualname__ == "Toy"
    assert type(draft).__module__ == Toy.__module__
    assert draft.by_class() == "Toy"
    assert draft.static() is draft.answer is False
    assert repr(draft) == repr(Toy())
    assert [name for name, _ in draft.named_modules()] == ["", "inner"]
    assert type(draft).forward is Toy.forward


def test_hooks_and_state_still_work(draft: Any) -> None:
    called: list[bool] = []
    draft.register_forward_pre_hook(lambda module, arguments: called.append(in_draft_model()))
    draft()
    assert called == [True]
    draft.load_state_dict(Toy().state_dict())
    assert draft.eval().training is False


def test_a_copy_is_in_scope_too(draft: Any) -> None:
    assert copy.deepcopy(draft)() is True


def test_the_class_is_given_back() -> None:
    first, second = Toy(), Toy()
    drafts.mark(first, record())
    drafts.mark(second, record())
    drafts.unmark_all()
    assert type(first) is type(second) is Toy
    assert first() is False
    assert not drafts.is_marked(first)


def test_somebody_elses_subclass_is_left_and_named() -> None:
    """Code that changes the class after us: what it did is kept, and said."""
    model = Toy()
    drafts.mark(model, record())
    theirs = model.__class__ = type("Theirs", (type(model),), {})
    [sentence] = drafts.unmark_all()
    assert "Theirs" in sentence
    assert type(model) is theirs
    assert drafts.unmark_all() == []


def test_things_that_are_no_modules_are_not_marked() -> None:
    for thing in (None, 1, [], lambda: None, {}):
        assert not drafts.is_marked(thing)


def test_a_marked_draft_is_not_kept_alive() -> None:
    import gc
    import weakref

    model = Toy()
    drafts.mark(model, record())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_shared_modules_are_named() -> None:
    target, draft = Toy(), Toy()
    drafts.target_loaded(target, None)
    seen = record()
    drafts.mark(draft, seen)
    try:
        drafts.note_shared_modules()
        assert seen.shared_with_target == []
        draft.inner = target.inner
        drafts.note_shared_modules()
        assert seen.shared_with_target == ["inner"]
    finally:
        drafts.unmark_all()


def test_it_is_described_by_what_it_holds() -> None:
    from types import SimpleNamespace

    model = Toy()
    model.inner.bias.data = model.inner.bias.data.to(torch.float16)
    model.inner.quant_method = effects.Weak()
    config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="fp8"), speculative_config=None)
    model_config = SimpleNamespace(model="/toy", hf_config=SimpleNamespace(architectures=["ToyMTP"]))
    found = drafts.describe(model, config, model_config, "draft_model")
    assert found.dtypes == {"float32": 4, "float16": 2}
    assert found.quant_methods == {"inner": "Weak"}
    assert (found.architecture, found.checkpoint, found.prefix) == ("ToyMTP", "/toy", "draft_model")
    assert found.kv_cache_dtype == "fp8"


def test_a_draft_can_be_pickled_by_its_state(draft: Any) -> None:
    assert pickle.loads(pickle.dumps(draft.state_dict())).keys() == draft.state_dict().keys()


def load_twice() -> list[Any]:
    """A loader that delegates to another one marks the draft once."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    config = effects.real_config()
    inner = effects.toy_loader()

    class Delegating(BaseModelLoader):
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None: ...

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            from unittest import mock

            with mock.patch.object(torch.accelerator, "empty_cache"):
                return inner.load_model(vllm_config=vllm_config, model_config=model_config)

    model = Delegating(LoadConfig()).load_model(config, config.speculative_config.draft_model_config)
    model()
    return [len(attest.drafts()), attest.drafts()[0].calls, [cls.__name__ for cls in type(model).__mro__[:3]]]


@pytest.mark.vllm
def test_a_delegating_loader_marks_once(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(load_twice) == [1, {"__call__": 1}, ["Toy", "Toy", "Module"]]


def failing_load() -> list[Any]:
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader  # noqa: F401

    config = effects.real_config()
    loader = effects.toy_loader()

    def fail(*_: Any) -> None:
        raise OSError("no weights")

    loader.load_weights = fail
    try:
        loader.load_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    except OSError as error:
        return [str(error), in_draft_model(), drafts.loading(), len(attest.drafts())]
    return []


@pytest.mark.vllm
def test_a_load_that_fails_leaves_nothing(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(failing_load) == ["no weights", False, False, 0]
