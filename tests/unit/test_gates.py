"""The precision switches: stock's answer outside the draft scope, the safe one inside it, and nothing in observe mode."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.processes import VllmProcess
from tests.unit import effects
from tests.unit.effects import GATES, in_scope

pytestmark = pytest.mark.vllm


def answers(on: bool) -> dict[str, dict[str, Any]]:
    """Every gate that this vLLM needs: its answers outside and inside the scope, and what was counted."""
    from drafttools import attest

    found = {}
    for name in set(effects.needed()) & set(GATES):
        with GATES[name].switched(on) as ask:
            outside, inside, after = ask(), in_scope(ask), ask()
        seen = attest.evidence(name)
        found[name] = {
            "outside": outside,
            "inside": inside,
            "after": after,
            "asked": seen.asked,
            "declined": seen.declined,
            "state": _state(name),
        }
    return found


def _state(name: str) -> str:
    from drafttools import engine

    return str(engine.state(name)) if name in engine.applied() else "off"


def test_enforce_keeps_drafts_out(vllm_process: VllmProcess) -> None:
    for name, found in vllm_process.call(answers, True).items():
        gate = GATES[name]
        assert (found["outside"], found["inside"], found["after"]) == (gate.lowered, gate.safe, gate.lowered), name
        assert found["asked"] == found["declined"] > 0, name
        assert found["state"] == "in_effect", name


def test_observe_changes_nothing_and_counts(vllm_process: VllmProcess) -> None:
    for name, found in vllm_process.call(answers, True, mode="observe").items():
        assert found["outside"] == found["inside"] == found["after"] == GATES[name].lowered, name
        assert found["asked"] > 0, name
        assert found["declined"] == 0, name
        assert found["state"] == "applied", name


@pytest.mark.parametrize("mode", ["enforce", "observe"])
def test_switched_off_there_is_nothing_to_do(vllm_process: VllmProcess, mode: str) -> None:
    """With no switch on, every gate gives stock's answer, is not counted, and is not said to be in effect."""
    stock = vllm_process.call(answers, False, mode="off")
    for name, found in vllm_process.call(answers, False, mode=mode).items():
        assert found["outside"] == found["inside"] == found["after"] == stock[name]["outside"] == GATES[name].safe, name
        assert found["asked"] == found["declined"] == 0, name
        assert found["state"] == "applied", name


def test_stock_lowers_drafts(vllm_process: VllmProcess) -> None:
    """The switches are real: without drafttools a draft gets the lowered answer."""
    for name, found in vllm_process.call(answers, True, mode="off").items():
        assert found["inside"] == GATES[name].lowered, name


# --- a4w4: neither set nor raised for a draft ---


def a4w4_of_another_model() -> list[str]:
    """A draft whose model type the switch rejects, like Qwen3-MoE under the draft_model method."""
    with effects.aiter_moe(True, "qwen3_moe") as ask:
        return [_answer_or_error(ask), _answer_or_error(lambda: in_scope(ask)), _answer_or_error(ask)]


def _answer_or_error(ask: effects.Ask) -> str:
    try:
        return str(ask())
    except ValueError as error:
        return str(error)


def test_a4w4_does_not_stop_a_draft_of_another_model(vllm_process: VllmProcess) -> None:
    outside, inside, after = vllm_process.call(a4w4_of_another_model)
    assert "only supports" in outside
    assert inside == "False"
    assert "only supports" in after


def test_stock_a4w4_stops_a_draft_of_another_model(vllm_process: VllmProcess) -> None:
    assert "only supports" in vllm_process.call(a4w4_of_another_model, mode="off")[1]


def other_fields_in_scope() -> list[bool]:
    """A draft's FusedMoEConfig differs from the target's in the one flag only."""
    import dataclasses

    with effects.aiter_moe(True, next(iter(effects.validated_model_types()))):
        outside, inside = effects.moe_config(), in_scope(effects.moe_config)
    fields = [field.name for field in dataclasses.fields(outside)]
    return [name for name in fields if getattr(outside, name) != getattr(inside, name)]  # type: ignore[misc]


def test_a4w4_changes_one_flag(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(other_fields_in_scope) == ["use_mxfp4_w4a4_dsv4"]


def a4w4_over_other_code(wrapped: bool) -> list[str]:
    """Another plugin has its hands on `FusedMoEConfig.__post_init__` when drafttools is activated; the switch is off."""
    import os

    import wrapt
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    import drafttools
    from drafttools import engine

    stock = FusedMoEConfig.__post_init__
    names: dict[str, Any] = {"stock": stock}
    exec("def theirs(self): stock(self)", names)
    call = lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)  # noqa: E731
    FusedMoEConfig.__post_init__ = wrapt.FunctionWrapper(stock, call) if wrapped else names["theirs"]
    os.environ["DRAFTTOOLS"] = "enforce"
    drafttools.activate()
    with effects.aiter_moe(False, "qwen3_moe") as ask:
        answer = str(in_scope(ask))
    item = engine.applied()["a4w4"]
    return [str(item.state), item.reason, answer]


@pytest.mark.parametrize("wrapped", [True, False])
def test_a4w4_is_refused_over_other_code(vllm_process: VllmProcess, wrapped: bool) -> None:
    """It re-runs vLLM's own code, which must be there; a draft still loads."""
    state, reason, answer = vllm_process.call(a4w4_over_other_code, wrapped, mode="off")
    assert (state, answer) == ("refused", "False")
    assert "already wrapped or replaced" in reason


# --- quick reduce: every caller ---


def cuda_communicator() -> list[str]:
    """`CudaCommunicator.all_reduce` with a quick reduce that records, and a lossless path below it."""
    import torch
    from vllm.distributed.device_communicators import cuda_communicator as module

    taken: list[str] = []
    quick = effects.quick_all_reduce()
    quick.quick_all_reduce = lambda tensor: (taken.append("quick"), tensor)[1]
    communicator: Any = mock.MagicMock(spec=module.CudaCommunicator)
    communicator.qr_comm = quick
    communicator.fi_ar_comm = communicator.fi_pcie_ipc_ar_comm = communicator.aiter_ar_comm = None
    communicator.pynccl_comm = None
    communicator.ca_comm = mock.MagicMock(disabled=False)
    communicator.ca_comm.custom_all_reduce = lambda tensor: (taken.append("lossless"), tensor)[1]
    communicator.use_aiter_allreduce = False
    tensor = torch.zeros(1024, dtype=torch.bfloat16)
    reduce = lambda: module.CudaCommunicator.all_reduce(communicator, tensor)  # noqa: E731
    with mock.patch.object(module, "should_nccl_symm_mem_allreduce", return_value=False):
        reduce()
        in_scope(reduce)
        reduce()
    return taken


def test_the_communicator_takes_the_lossless_path(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(cuda_communicator) == ["quick", "lossless", "quick"]


def fused_all_reduce() -> list[str]:
    """AITER's fused all-reduce + RMSNorm, where it decides between quick reduce and its lossless kernel."""
    import torch
    from vllm import _aiter_ops
    from vllm.distributed import parallel_state

    taken: list[str] = []

    def kernel(name: str) -> Any:
        return lambda *args, **kwargs: (taken.append(name), (args[0], args[0]))[1]

    quick: Any = effects.quick_all_reduce()
    quick._ptr = 0
    group = SimpleNamespace(device_communicator=SimpleNamespace(qr_comm=quick))
    lossless = SimpleNamespace(custom_fused_ar_rms=kernel("lossless"), fused_ar_rms=kernel("lossless"))
    aiter = SimpleNamespace(aiter_ca=lossless, use_1stage_fused_ar_rms=lambda tensor: False)
    fake_aiter = SimpleNamespace(qr_all_reduce_rmsnorm=kernel("quick"))
    x = torch.zeros(4, 1024, dtype=torch.bfloat16)
    weight = torch.ones(1024, dtype=torch.bfloat16)
    run = lambda: _aiter_ops._rocm_aiter_fused_allreduce_rmsnorm_impl(x, x, weight, 1e-6)  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(parallel_state, "get_tp_group", return_value=group))
        stack.enter_context(mock.patch("vllm.distributed.get_tp_group", return_value=group))
        stack.enter_context(mock.patch.object(_aiter_ops.rocm_aiter_ops, "get_aiter_allreduce", return_value=aiter))
        stack.enter_context(mock.patch.dict(sys.modules, {"aiter": fake_aiter}))
        communicator = lambda group: (0, None, False)  # noqa: E731
        stack.enter_context(mock.patch.object(_aiter_ops, "_get_or_create_aiter_qr_rmsnorm_comm", communicator))
        run()
        in_scope(run)
        run()
    return taken


def test_the_fused_all_reduce_takes_the_lossless_path(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(fused_all_reduce) == ["quick", "lossless", "quick"]


def flydsl() -> list[Any]:
    from vllm.distributed.device_communicators.quick_all_reduce import QuickAllReduce

    if not hasattr(QuickAllReduce, "uses_flydsl_int4"):
        return []
    import torch

    quick = effects.quick_all_reduce()
    quick._use_flydsl_int4 = lambda tensor: True
    ask = lambda: quick.uses_flydsl_int4(torch.zeros(1024, dtype=torch.bfloat16))  # noqa: E731
    return [ask(), in_scope(ask)]


def test_flydsl_is_not_used_for_a_draft(tree_vllm: VllmProcess) -> None:
    assert tree_vllm.call(flydsl) == [True, False]


# --- Marlin: every module that bound the function by name ---


def marlin_bindings() -> dict[str, list[str]]:
    """Each module that bound the function before drafttools was active, and one that does after."""
    from types import ModuleType

    late = ModuleType("vllm.late")
    sys.modules["vllm.late"] = late
    exec("from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_input_dtype", vars(late))
    found = {}
    with mock.patch.dict("os.environ", {"VLLM_MARLIN_INPUT_DTYPE": "int8"}):
        for name in effects.marlin_aliases():
            ask = sys.modules[name].get_marlin_input_dtype
            found[name] = [str(ask()), str(in_scope(ask))]
    return found


def test_marlin_is_gated_under_every_name(vllm_process: VllmProcess) -> None:
    found = vllm_process.call(marlin_bindings)
    assert len(found) >= 7
    assert "vllm.late" in found
    assert set(map(tuple, found.values())) == {("torch.int8", "None")}


# --- online quantization: the target's is kept away, the draft's own is honoured ---


def online_of_its_own() -> list[bool]:
    from drafttools import drafts

    target, own = effects.online_config(), effects.online_config()
    model = effects.Weak()
    drafts.target_loaded(model, SimpleNamespace(quant_config=target))
    quantized = [in_scope(lambda config=config: effects.is_quantized_online(config)) for config in (target, own)]
    return [effects.is_quantized_online(target), *quantized]


def test_online_quantization_of_the_draft_itself_is_honoured(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(online_of_its_own) == [True, False, True]


# --- MLA's AITER flags, where they are read ---


def aiter_flags_of_mla() -> list[str]:
    """The classes are asked through the class object itself, as vLLM's layers do."""
    from vllm import _aiter_ops

    with GATES["aiter_bmm"].switched(True):
        subclass = type("Sub", (_aiter_ops.rocm_aiter_ops,), {})
        return [
            str(in_scope(subclass.is_fp8bmm_enabled)),
            str(subclass.is_fp8bmm_enabled()),
            type(vars(_aiter_ops.rocm_aiter_ops)["is_fp8bmm_enabled"]).__name__,
        ]


def test_aiter_flags_stay_class_methods(vllm_process: VllmProcess) -> None:
    assert vllm_process.call(aiter_flags_of_mla) == ["False", "True", "classmethod"]


# --- what stops a load ---


def ending(load: Callable[[], object]) -> str:
    """The error that stops a load, or `loaded`."""
    from drafttools.errors import DraftToolsError

    try:
        load()
    except DraftToolsError as error:
        return str(error)
    return "loaded"


def load_a_draft() -> None:
    config = effects.real_config()
    effects.load(config, config.speculative_config.draft_model_config)


def load_without_the_gate() -> str:
    """A draft loads with quick reduce on, after some other code has thrown the gate out."""
    from vllm.distributed.device_communicators.quick_all_reduce import QuickAllReduce

    from drafttools.errors import DraftToolsError

    QuickAllReduce.should_quick_allreduce = lambda self, inp: True
    config = effects.real_config()
    try:
        with mock.patch.dict("os.environ", {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}):
            effects.load(config, config.speculative_config.draft_model_config)
    except DraftToolsError as error:
        return str(error)
    from drafttools import attest

    return "loaded: " + "; ".join(attest.report()["failures"])


def test_a_hazard_that_cannot_be_gated_stops_the_load(vllm_process: VllmProcess) -> None:
    message = vllm_process.call(load_without_the_gate)
    assert "quick_reduce was refused (QuickAllReduce.should_quick_allreduce was replaced by other code" in message
    assert "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=INT4" in message
    assert "\n" not in message


@pytest.mark.parametrize("environ", [{"mode": "observe"}, {"DRAFTTOOLS_ALLOW_UNVERIFIED": "1"}])
def test_it_is_only_reported_when_asked_so(vllm_process: VllmProcess, environ: dict[str, str]) -> None:
    message = vllm_process.call(load_without_the_gate, **environ)
    assert message.startswith("loaded: patch quick_reduce was refused")


def ungated_of_a_load() -> list[str]:
    from drafttools import attest

    config = effects.real_config()
    config.cache_config.cache_dtype = "fp8"
    switches = {"VLLM_ROCM_FP8_MFMA_PAGE_ATTN": "1", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}
    with mock.patch.dict("os.environ", switches):
        effects.load(config, config.speculative_config.draft_model_config)
    return [sentence.split(":")[0] for sentence in attest.report()["ungated"]]


def test_what_reaches_the_draft_is_named(vllm_process: VllmProcess) -> None:
    assert set(vllm_process.call(ungated_of_a_load)) == {"kv_cache_dtype", "rocm_fp8_page_attention"}


def test_a_gate_that_is_switched_off_is_named(vllm_process: VllmProcess) -> None:
    found = vllm_process.call(ungated_of_a_load, DRAFTTOOLS_DISABLE="quick_reduce")
    assert set(found) == {"kv_cache_dtype", "rocm_fp8_page_attention", "quick_reduce"}


def load_without_the_load_scope() -> str:
    """A draft loads after some other code has replaced vLLM's load_model, and with it what would have stopped it."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.utils import initialize_model

    def load_model(self: Any, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        return initialize_model(vllm_config=vllm_config, model_config=model_config, model_class=effects.toy_model())

    BaseModelLoader.load_model = load_model
    return ending(load_a_draft)


def test_a_load_scope_that_is_gone_stops_the_load(vllm_process: VllmProcess) -> None:
    assert "patch load_scope was refused" in vllm_process.call(load_without_the_load_scope)


def proposer_load(vllm_config: Any) -> str:
    """How a proposer's own `load_model` ends with this configuration."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    class Proposer(SpecDecodeBaseProposer):
        def __init__(self) -> None:
            self.vllm_config = vllm_config

        def load_model(self, target_model: Any) -> None:
            """Stands for a runner's own way to load."""

    return ending(lambda: Proposer().load_model(None))


def load_with_no_loader_patched() -> str:
    """A proposer loads its draft after other code has replaced both functions that would have checked."""
    from vllm.model_executor.model_loader import base_loader, utils

    base_loader.BaseModelLoader.load_model = lambda self, vllm_config, model_config, prefix="": None
    utils.initialize_model = lambda vllm_config, **_: None
    return proposer_load(effects.real_config())


def load_with_a_stand_in_for_the_config() -> str:
    return proposer_load(object())


def test_a_proposer_s_load_is_left_alone_where_loaders_check(vllm_process: VllmProcess) -> None:
    """vLLM's own tests load with configurations that have next to nothing in them."""
    assert vllm_process.call(load_with_a_stand_in_for_the_config) == "loaded"


def test_loaders_that_are_both_gone_stop_the_load(vllm_process: VllmProcess) -> None:
    message = vllm_process.call(load_with_no_loader_patched)
    assert "patch load_scope was refused" in message
    assert "patch initialize_scope was refused" in message


def load_where_the_gate_has_moved() -> str:
    """A draft loads with quick reduce on, in a vLLM that keeps QuickAllReduce in a module drafttools does not know."""
    import dataclasses

    from drafttools import engine
    from drafttools.patching import Applied

    patch = engine.applied()["quick_reduce"].patch
    moved = dataclasses.replace(patch, module="vllm.distributed.quick_all_reduce_elsewhere")
    engine.applied()["quick_reduce"] = Applied(moved)
    with mock.patch.dict("os.environ", {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}):
        return ending(load_a_draft)


def test_a_gate_whose_module_is_gone_stops_the_load(vllm_process: VllmProcess) -> None:
    assert "patch quick_reduce was refused" in vllm_process.call(load_where_the_gate_has_moved)
