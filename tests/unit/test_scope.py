"""The draft scope: which code is in it, and that nothing is left set afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from drafttools import scope
from drafttools.scope import draft_model_scope, in_draft_model, is_draft_config
from tests.processes import VllmProcess
from tests.unit import effects
from tests.unit.effects import in_scope

vllm_only = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    assert not in_draft_model()
    yield
    assert not in_draft_model()


def test_inside_and_after() -> None:
    with draft_model_scope():
        assert in_draft_model()
        with draft_model_scope():
            assert in_draft_model()
        assert in_draft_model()
    assert not in_draft_model()


def test_the_same_object_can_be_entered_again() -> None:
    again = draft_model_scope()
    with again, again:
        with again:
            assert in_draft_model()
        assert in_draft_model()


def test_exceptions_leave_nothing() -> None:
    with contextlib.suppress(KeyError), draft_model_scope():
        with contextlib.suppress(ValueError), draft_model_scope():
            raise ValueError
        assert in_draft_model()
        raise KeyError
    assert not in_draft_model()


def test_a_generator_closed_inside_leaves_the_scope_it_was_in() -> None:
    def steps() -> Any:
        with draft_model_scope():
            yield

    generator = steps()
    next(generator)
    assert in_draft_model()  # a generator shares its caller's context
    generator.close()
    assert not in_draft_model()


def test_threads_do_not_share_it() -> None:
    seen: dict[str, bool] = {}
    entered, checked = threading.Event(), threading.Event()

    def draft() -> None:
        with draft_model_scope():
            entered.set()
            checked.wait(5)
            seen["draft"] = in_draft_model()

    def target() -> None:
        seen["target"] = in_draft_model()

    worker = threading.Thread(target=draft)
    worker.start()
    assert entered.wait(5)
    with draft_model_scope():
        other = threading.Thread(target=target)
        other.start()
        other.join()
    checked.set()
    worker.join()
    assert seen == {"draft": True, "target": False}


def test_tasks_do_not_share_it() -> None:
    async def draft(step: asyncio.Barrier) -> list[bool]:
        with draft_model_scope():
            await step.wait()
            inside = in_draft_model()
        await step.wait()
        return [inside, in_draft_model()]

    async def target(step: asyncio.Barrier) -> list[bool]:
        await step.wait()
        seen = in_draft_model()
        await step.wait()
        return [seen]

    async def both() -> list[list[bool]]:
        step = asyncio.Barrier(2)
        return await asyncio.gather(draft(step), target(step))

    assert asyncio.run(both()) == [[True, False], [False]]


class Upstream:
    """vLLM's own scope functions, should it have them."""

    def __init__(self) -> None:
        self.depth = 0
        self.exits: list[Any] = []

    def __call__(self) -> Upstream:
        return self

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: Any, *_: object) -> None:
        self.depth -= 1
        self.exits.append(kind)


@pytest.fixture
def upstream() -> Any:
    fake = Upstream()
    scope.delegate_to(fake, lambda: fake.depth > 0)
    yield fake
    scope.stop_delegating()


def test_it_delegates_to_vllm(upstream: Upstream) -> None:
    with draft_model_scope():
        assert upstream.depth == 1
        assert in_draft_model()
    assert upstream.depth == 0
    with upstream:  # entered by vLLM itself
        assert in_draft_model()


def test_vllm_sees_the_exception(upstream: Upstream) -> None:
    with pytest.raises(ValueError), draft_model_scope():
        raise ValueError
    assert upstream.exits == [ValueError]


# --- the detection ---


def config(target: Any, draft: Any, current: Any = None) -> Any:
    speculative = SimpleNamespace(target_model_config=target, draft_model_config=draft)
    return SimpleNamespace(speculative_config=speculative, model_config=current if current is not None else target)


TARGET, DRAFT = SimpleNamespace(name="target"), SimpleNamespace(name="draft")


@pytest.mark.parametrize(
    ("vllm_config", "model_config", "expected"),
    [
        (config(TARGET, DRAFT), TARGET, False),
        (config(TARGET, DRAFT), DRAFT, True),
        (config(TARGET, DRAFT), None, False),
        (config(TARGET, DRAFT, current=DRAFT), None, True),  # the draft_model method
        (config(TARGET, TARGET), TARGET, False),  # ngram, ngram_gpu and custom_class alias the two
        (config(TARGET, TARGET), None, False),
        (config(TARGET, None), TARGET, False),  # suffix decoding
        (config(TARGET, DRAFT), copy.deepcopy(DRAFT), False),  # nested calls inside a model pass copies
        (SimpleNamespace(speculative_config=None, model_config=TARGET), TARGET, False),
        (SimpleNamespace(model_config=TARGET), TARGET, False),
    ],
)
def test_the_draft_is_known_by_identity(vllm_config: Any, model_config: Any, expected: bool) -> None:
    assert is_draft_config(vllm_config, model_config) is expected


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_identity_survives_copies_of_the_whole_configuration(copied: Any) -> None:
    whole = copied(config(TARGET, DRAFT))
    speculative = whole.speculative_config
    assert is_draft_config(whole, speculative.draft_model_config)
    assert not is_draft_config(whole, speculative.target_model_config)


# --- vLLM's own construction and load ---


def initialize(case: str) -> list[bool]:
    """`initialize_model` as vLLM's callers use it: the scope that the model's constructor saw, and the one after."""

    import torch
    from vllm.model_executor.model_loader.utils import initialize_model

    Toy, Failing = effects.toy_model(), type("Failing", (torch.nn.Module,), {})
    config = effects.configs()
    speculative = config.speculative_config
    aliased = effects.configs()
    aliased.speculative_config.draft_model_config = aliased.model_config
    nested = copy.deepcopy(speculative.draft_model_config)
    seen: list[bool] = []

    class Wrapper(Toy):  # type: ignore[misc, valid-type]
        """A model that builds a part of itself by a nested call with a copied configuration."""

        def __init__(self, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            inner = initialize_model(vllm_config=vllm_config, model_config=nested, model_class=Toy)
            seen.append(inner.seen["__init__"])

    def fail(self: Any, vllm_config: Any, prefix: str = "") -> None:
        seen.append(in_draft_model())
        raise ValueError("no such model")

    Failing.__init__ = fail  # type: ignore[method-assign]
    arguments: dict[str, tuple[Any, Any, Any]] = {
        "target": (config, None, Toy),
        "draft": (config, speculative.draft_model_config, Toy),
        "aliased": (aliased, aliased.speculative_config.draft_model_config, Toy),
        "nested": (config, speculative.draft_model_config, Wrapper),
        "nested in the target": (config, None, Wrapper),
        "failing": (config, speculative.draft_model_config, Failing),
    }
    vllm_config, model_config, model_class = arguments[case]
    with contextlib.suppress(ValueError):
        model = initialize_model(vllm_config=vllm_config, model_config=model_config, model_class=model_class)
        seen.append(model.seen["__init__"])
    return [*seen, in_draft_model()]


CASES = {
    "target": [False, False],
    "draft": [True, False],
    "aliased": [False, False],
    "nested": [True, True, False],
    "nested in the target": [False, False, False],
    "failing": [True, False],
}


@vllm_only
@pytest.mark.parametrize("case", CASES)
def test_initialize_model(vllm_process: VllmProcess, case: str) -> None:
    assert vllm_process.call(initialize, case) == CASES[case]


def initialize_in_a_thread() -> list[bool]:
    """A target built in a thread while a draft is being built in this one."""
    from vllm.model_executor.model_loader.utils import initialize_model

    config, seen = effects.configs(), []
    Toy = effects.toy_model()

    class Slow(Toy):  # type: ignore[misc, valid-type]
        def __init__(self, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            thread = threading.Thread(target=lambda: seen.append(Toy().seen["__init__"]))
            thread.start()
            thread.join()
            seen.append(self.seen["__init__"])

    initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config, model_class=Slow)
    return seen


@vllm_only
def test_a_target_in_another_thread_is_not_in_scope(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(initialize_in_a_thread) == [False, True]


def public_names() -> list[bool]:
    import vllm.config

    import drafttools

    with vllm.config.draft_model_scope():
        inside = [vllm.config.in_draft_model(), drafttools.in_draft_model()]
    with drafttools.draft_model_scope():
        inside += [vllm.config.in_draft_model()]
    return [*inside, vllm.config.in_draft_model()]


@vllm_only
def test_vllm_config_publishes_it(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(public_names) == [True, True, True, False]


def own_names_of_vllm() -> list[Any]:
    """A vLLM that has the names: they are used and left alone."""
    import sys
    import types

    import vllm.config

    from drafttools import engine
    from drafttools.patches import publish_scope
    from drafttools.patching import Applied
    from drafttools.source import Tree

    fake = Upstream()
    module = types.ModuleType("vllm.config")
    module.__spec__ = vllm.config.__spec__
    module.draft_model_scope, module.in_draft_model = fake, lambda: fake.depth > 0  # type: ignore[attr-defined]
    before = dict(vars(module))
    import ast

    tree = Tree(engine._vllm_tree().root)  # type: ignore[union-attr]
    tree._modules["vllm.config"] = ast.parse("def draft_model_scope(): ...\ndef in_draft_model(): ...\n")
    sys.modules["vllm.config"] = module
    item = Applied(publish_scope.PATCH)
    item.try_apply(tree)
    with draft_model_scope():
        inside = [fake.depth, in_draft_model()]
    unchanged = {name: vars(module)[name] for name in before} == before
    return [str(item.state), inside, in_draft_model(), unchanged]


@vllm_only
def test_it_stands_down_for_vllms_own(installed_vllm: VllmProcess) -> None:
    assert installed_vllm.call(own_names_of_vllm) == ["not_needed", [1, True], False, True]


def loaded(method: str, aliased: bool) -> dict[str, Any]:
    """A draft through vLLM's loader, called as runners call it, and the target beside it, of the same class."""
    config = effects.real_config()
    speculative = config.speculative_config
    if aliased:
        speculative.draft_model_config = speculative.target_model_config
    model = effects.load(config, speculative.draft_model_config)
    name = type(model).__name__
    getattr(model, method)()
    return {"seen": model.seen, "class": name, "after": in_draft_model(), "same": type(model) is not model.__class__}


@vllm_only
@pytest.mark.parametrize("method", ["__call__", "compute_logits", "embed_input_ids"])
def test_every_method_a_runner_calls_is_in_scope(vllm_process: VllmProcess, method: str) -> None:
    found = vllm_process.call(loaded, method, False)
    assert all(found["seen"].values())
    assert len(found["seen"]) == 3
    assert found["class"] == "Toy"
    assert not found["after"]


@vllm_only
@pytest.mark.parametrize("method", ["__call__", "compute_logits"])
def test_an_aliased_target_is_left_alone(vllm_process: VllmProcess, method: str) -> None:
    found = vllm_process.call(loaded, method, True)
    assert not any(found["seen"].values())


# --- the runners ---


def families() -> dict[str, dict[str, bool]]:
    """Every entry point of every proposer and speculator class, defined before drafttools or after it."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    later = {}
    for base in (SpecDecodeBaseProposer, DraftModelSpeculator):

        def propose(self: Any) -> Any:
            return self.missing

        middle = type("Middle", (base,), {"__init_subclass__": classmethod(lambda cls, **kwargs: None)})
        later[base.__name__] = [type("Later", (base,), {"propose": propose}), middle]
    return {
        "proposers": effects.entry_points(SpecDecodeBaseProposer),
        "speculators": effects.entry_points(DraftModelSpeculator),
    }


@vllm_only
def test_every_runner_entry_point_is_in_scope(vllm_process: VllmProcess) -> None:
    for name, found in vllm_process.call(families).items():
        assert all(found.values()), {entry for entry, inside in found.items() if not inside}
        assert "Later.propose" in found
        assert len({entry.split(".")[0] for entry in found}) >= 6, name


@vllm_only
def test_stock_runs_none_of_them_in_scope(vllm_process: VllmProcess) -> None:
    for found in vllm_process.call(families, mode="off").values():
        assert not any(found.values())


def ngram_speculator() -> list[str]:
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    return [
        name
        for name in ("propose", "capture", "load_model")
        if hasattr(vars(NgramGPUSpeculator).get(name), "_self_wrapper")
    ]


@vllm_only
def test_speculators_without_a_model_are_left_alone(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(ngram_speculator) == []


# --- graph wrappers ---


def graph_runs(kind: str, draft: bool, deactivated: bool) -> dict[str, list[bool]]:
    import drafttools

    if deactivated:
        drafttools.deactivate()
    return {"piecewise": effects.graph_wrapper_runs, "breakable": effects.breakable_wrapper_runs}[kind](draft)


@vllm_only
@pytest.mark.parametrize("kind", ["piecewise", "breakable"])
@pytest.mark.parametrize("draft", [True, False])
def test_graphs_capture_and_replay_in_scope(vllm_process: VllmProcess, kind: str, draft: bool) -> None:
    expected = {key: [draft] for key in ("captured", "replayed", "eager")}
    assert vllm_process.call(graph_runs, kind, draft, False) == expected


def graph_of_a_marked_draft(kind: str) -> dict[str, Any]:
    """A wrapper around a loaded draft, made outside the scope, as the runners make breakable ones."""
    from vllm.compilation import breakable_cudagraph, cuda_graph
    from vllm.config import CUDAGraphMode, VllmConfig

    from drafttools import attest, drafts

    module, cls, entries = {
        "piecewise": (cuda_graph, cuda_graph.CUDAGraphWrapper, "concrete_cudagraph_entries"),
        "breakable": (breakable_cudagraph, breakable_cudagraph.BreakableCUDAGraphWrapper, "entries"),
    }[kind]
    from unittest import mock

    config = effects.real_config()
    draft = effects.load(config, config.speculative_config.draft_model_config)
    with mock.patch.object(module, "current_platform"):
        wrapper: Any = cls(cls(draft, VllmConfig(), CUDAGraphMode.FULL), VllmConfig(), CUDAGraphMode.PIECEWISE)
    with effects.captures(module, CUDAGraphMode.PIECEWISE):
        wrapper(None)
        wrapper(None)
    held = next(iter(getattr(wrapper, entries).values()))
    graph = getattr(held, "cudagraph", None) or held.capture
    return {
        "seen": draft.seen["forward"],
        "replayed": graph.replayed,
        "captures": attest.drafts()[-1].captures,
        "marked": drafts.is_marked(wrapper),
        "attribute": wrapper.compute_logits is not None,
    }


@vllm_only
@pytest.mark.parametrize("kind", ["piecewise", "breakable"])
def test_a_wrapper_around_a_draft_is_counted(vllm_process: VllmProcess, kind: str) -> None:
    found = vllm_process.call(graph_of_a_marked_draft, kind)
    assert found["seen"]
    assert found["replayed"] == [True]
    assert found["captures"] == {"full": 0, "piecewise": 0, "breakable": 0} | {kind: 1}
    assert found["marked"]
    assert found["attribute"]


def test_in_scope_helper() -> None:
    assert in_scope(in_draft_model)
