"""What each patch is for, as a function that looks at real vLLM code and says whether it holds in this process.

`EFFECTS` has one entry for every record in `drafttools.patches.ALL`, under its name. An entry needs its own patch and
no other one, so that switching a patch off shows in exactly one of them. Entries run in a fork that has vLLM imported
and drafttools activated in enforce mode (`tests.processes.VllmProcess`); a patch that the vLLM at hand does not need is
not asked. To add a patch, add a function here with `@effect("its_name")`; a gate is rather one more `Gate`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from drafttools.scope import draft_model_scope, in_draft_model

EFFECTS: dict[str, Callable[[], bool]] = {}
Ask = Callable[[], Any]


def effect(name: str) -> Callable[[Callable[[], bool]], Callable[[], bool]]:
    def register(function: Callable[[], bool]) -> Callable[[], bool]:
        EFFECTS[name] = function
        return function

    return register


def in_scope(function: Callable[[], Any]) -> Any:
    with draft_model_scope():
        return function()


def needed() -> list[str]:
    """The patches that this vLLM needs, in this process."""
    from drafttools import engine, patches
    from drafttools.patching import check

    tree = engine._vllm_tree()
    assert tree is not None
    return [patch.name for patch in patches.ALL if check(patch, tree).state != "not_needed"]


def holding() -> dict[str, Any]:
    """Whether each effect holds: True, False, or the error it met; only those that this vLLM needs."""
    return {name: _outcome(EFFECTS.get(name)) for name in needed()}


def _outcome(function: Callable[[], bool] | None) -> Any:
    if function is None:
        return f"no effect in {__name__}"
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# --- models and configurations as small as vLLM's own code accepts them ---


def configs(**changes: Any) -> SimpleNamespace:
    """A VllmConfig's worth of attributes with a target and a draft model config, told apart by identity."""
    from vllm.config import CompilationConfig

    target, draft = (SimpleNamespace(model=name, hf_config=SimpleNamespace()) for name in ("target", "draft"))
    speculative = SimpleNamespace(target_model_config=target, draft_model_config=draft)
    return SimpleNamespace(
        model_config=target,
        speculative_config=speculative,
        quant_config=None,
        compilation_config=CompilationConfig(),
        **changes,
    )


def real_config() -> Any:
    """A real VllmConfig with a speculative configuration whose two model configs are told apart by identity."""
    import torch
    from vllm.config import VllmConfig

    config = VllmConfig()
    hf_config = SimpleNamespace(architectures=["Toy"], to_dict=dict)
    target, draft = (
        SimpleNamespace(
            model=name,
            revision=None,
            dtype=torch.float32,
            hf_config=hf_config,
            quantization_config=None,
            quantization=None,
            word_embeddings_untied_by_checkpoint=False,
        )
        for name in ("target", "draft")
    )
    config.model_config = target
    config.speculative_config = SimpleNamespace(
        target_model_config=target,
        draft_model_config=draft,
        method="draft_model",
        kv_cache_dtype=None,
        moe_backend=None,
    )
    return config


def toy_model() -> type:
    """A model class that records the scope in its constructor and in what a runner calls."""
    import torch

    class Toy(torch.nn.Module):
        def __init__(self, vllm_config: Any = None, prefix: str = "") -> None:
            super().__init__()
            self.seen: dict[str, bool] = {"__init__": in_draft_model()}
            self.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))

        def forward(self, x: Any = None) -> Any:
            self.seen["forward"] = in_draft_model()
            return x

        def compute_logits(self, x: Any = None) -> Any:
            self.seen["compute_logits"] = in_draft_model()
            return x

        def embed_input_ids(self, x: Any = None) -> Any:
            self.seen["embed_input_ids"] = in_draft_model()
            return x

        @property
        def a_property(self) -> bool:
            return in_draft_model()

    return Toy


def toy_loader() -> Any:
    """A real model loader whose model is a `toy_model()`; its `load_weights` records the scope in the model."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class ToyLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None: ...

        def create_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            return toy_model()()

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.seen["load_weights"] = in_draft_model()

    return ToyLoader(LoadConfig())


def load(vllm_config: Any, model_config: Any) -> Any:
    """vLLM's own `BaseModelLoader.load_model` of a `toy_model()`."""
    import torch

    with mock.patch.object(torch.accelerator, "empty_cache"):  # needs a device
        return toy_loader().load_model(vllm_config=vllm_config, model_config=model_config)


# --- the scope ---


@effect("publish_scope")
def published() -> bool:
    import vllm.config

    scope, flag = (getattr(vllm.config, name, None) for name in ("draft_model_scope", "in_draft_model"))
    if scope is None or flag is None:
        return False
    with scope():
        return bool(flag()) and in_draft_model()


@effect("load_scope")
def loads_in_scope() -> bool:
    config = real_config()
    speculative = config.speculative_config
    draft, target = (load(config, mc) for mc in (speculative.draft_model_config, speculative.target_model_config))
    for model in (draft, target):
        model()
        model.compute_logits()
    names = ("__init__", "load_weights", "forward", "compute_logits")
    return all(draft.seen[name] for name in names) and not any(target.seen.values()) and not in_draft_model()


@effect("initialize_scope")
def initializes_in_scope() -> bool:
    import torch
    from vllm.model_executor.model_loader import base_loader, utils

    config, Toy = configs(), toy_model()
    draft = config.speculative_config.draft_model_config
    assert base_loader.initialize_model is utils.initialize_model
    model = utils.initialize_model(vllm_config=config, model_config=draft, model_class=Toy)
    target = utils.initialize_model(vllm_config=config, model_class=Toy)
    assert isinstance(target, torch.nn.Module)
    return bool(model.seen["__init__"]) and not target.seen["__init__"]


class Stop(Exception):
    """Ends a stock method as soon as it has told what was asked."""


def entered_in_scope(cls: type, name: str) -> bool | None:
    """Whether the body of a stock method runs in scope; None when it touches nothing of its object (a no-op).

    The object is made without `__init__`: the first attribute that the method misses tells.
    """
    import inspect

    seen: list[bool] = []

    def missing(self: Any, attribute: str) -> Any:
        seen.append(in_draft_model())
        raise Stop

    probe = type("Probe", (cls,), {"__getattr__": missing})
    probe.__abstractmethods__ = frozenset()
    method = getattr(object.__new__(probe), name)
    required = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty and p.kind < 2]
    with contextlib.suppress(Stop):
        method(*[mock.MagicMock() for _ in required])
    return seen[0] if seen else None


def entry_points(base: type) -> dict[str, bool]:
    """For every class of a family and every entry point of it that does something: whether it runs in scope."""
    from drafttools.patches import _entry_points

    def family(cls: type) -> Iterator[type]:
        yield cls
        for subclass in cls.__subclasses__():
            yield from family(subclass)

    found = {}
    for cls in list(dict.fromkeys(family(base))):
        for name in _entry_points.NAMES:
            if callable(getattr(cls, name, None)):
                seen = entered_in_scope(cls, name)
                if seen is not None:
                    found[f"{cls.__name__}.{name}"] = seen
    return found


def _whole_family_in_scope(base: type) -> bool:
    found = entry_points(base)
    return bool(found) and all(found.values())


@effect("proposer_scope")
def proposers_in_scope() -> bool:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    return _whole_family_in_scope(SpecDecodeBaseProposer)


@effect("extract_proposer_scope")
def extractor_in_scope() -> bool:
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

    return _whole_family_in_scope(ExtractHiddenStatesProposer)


@effect("medusa_scope")
def medusa_in_scope() -> bool:
    from vllm.v1.spec_decode.medusa import MedusaProposer

    return _whole_family_in_scope(MedusaProposer)


@effect("speculator_scope")
def speculators_in_scope() -> bool:
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

    return _whole_family_in_scope(DraftModelSpeculator)


class CustomProposer:
    """What a user names as `model` with the method `custom_class`."""

    def __init__(self, vllm_config: Any) -> None:
        self.seen: dict[str, bool] = {}

    def load_model(self, target_model: Any) -> None:
        self.seen["load_model"] = in_draft_model()

    def propose(self, *_: Any) -> list[list[int]]:
        self.seen["propose"] = in_draft_model()
        return [[]]


@effect("custom_proposer_scope")
def custom_proposer_in_scope() -> bool:
    from vllm.v1.spec_decode import custom_class_proposer

    speculative = SimpleNamespace(model=f"{__name__}.CustomProposer", num_speculative_tokens=1)
    make = custom_class_proposer.create_custom_proposer
    proposers = [make(SimpleNamespace(speculative_config=speculative)) for _ in range(2)]
    for proposer in proposers:
        proposer.load_model(None)
        assert proposer.propose() == [[]]
    return all(all(proposer.seen.values()) for proposer in proposers)


# --- CUDA graphs: the real wrappers, with a graph that only remembers what was captured ---


class FakeGraph:
    """A CUDA graph for machines without CUDA; replaying it records whether it was in scope."""

    replayed: list[bool]

    def __init__(self) -> None:
        self.replayed = []

    def replay(self) -> None:
        self.replayed.append(in_draft_model())


@contextmanager
def captures(module: ModuleType, mode: Any) -> Iterator[None]:
    """A forward context in `mode`, and CUDA replaced as far as the wrapper in `module` touches it."""
    import torch
    from vllm import forward_context
    from vllm.forward_context import BatchDescriptor

    context = SimpleNamespace(batch_descriptor=BatchDescriptor(num_tokens=4), cudagraph_runtime_mode=mode)
    nothing = lambda *args, **kwargs: contextlib.nullcontext()  # noqa: E731
    with ExitStack() as stack:
        stack.enter_context(forward_context.override_forward_context(context))
        stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", FakeGraph))
        stack.enter_context(mock.patch.object(torch.cuda, "graph", nothing))
        stack.enter_context(mock.patch.object(torch.accelerator, "empty_cache"))
        for name, value in {
            "capture_pool": nothing,
            "current_stream": lambda: None,
            "validate_cudagraph_capturing_enabled": lambda: None,
            "weak_ref_tensors": lambda tensors: tensors,
            "BreakableCUDAGraphCapture": lambda pool=None: contextlib.nullcontext(FakeGraph()),
            "get_offloader": mock.MagicMock,
        }.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))
        yield


def wrapper_runs(module: ModuleType, cls: type, entries: str, graph: str, draft: bool) -> dict[str, list[bool]]:
    """Make a graph wrapper, in scope or not, then capture and replay outside it: what each saw."""
    from vllm.config import CUDAGraphMode, VllmConfig

    seen: list[bool] = []
    runnable = lambda: seen.append(in_draft_model())  # noqa: E731
    make = lambda: cls(runnable, VllmConfig(), CUDAGraphMode.PIECEWISE)  # noqa: E731
    with mock.patch.object(module, "current_platform"):
        wrapper = in_scope(make) if draft else make()
    with captures(module, CUDAGraphMode.PIECEWISE):
        wrapper()
        wrapper()
    held = getattr(next(iter(getattr(wrapper, entries).values())), graph)
    wrapper()  # no forward context: runs eagerly
    return {"captured": seen[:1], "replayed": held.replayed, "eager": seen[1:]}


def graph_wrapper_runs(draft: bool) -> dict[str, list[bool]]:
    from vllm.compilation import cuda_graph

    return wrapper_runs(cuda_graph, cuda_graph.CUDAGraphWrapper, "concrete_cudagraph_entries", "cudagraph", draft)


def breakable_wrapper_runs(draft: bool) -> dict[str, list[bool]]:
    from vllm.compilation import breakable_cudagraph

    return wrapper_runs(breakable_cudagraph, breakable_cudagraph.BreakableCUDAGraphWrapper, "entries", "capture", draft)


def _runs_in_scope(runs: Callable[[bool], dict[str, list[bool]]]) -> bool:
    expected = [{key: [draft] for key in ("captured", "replayed", "eager")} for draft in (True, False)]
    return [runs(True), runs(False)] == expected


@effect("graph_scope")
def graphs_in_scope() -> bool:
    return _runs_in_scope(graph_wrapper_runs)


@effect("breakable_graph_scope")
def breakable_graphs_in_scope() -> bool:
    return _runs_in_scope(breakable_wrapper_runs)


@effect("speculator_graphs")
def counts_full_graphs() -> bool:
    """Two FULL graphs captured in scope are counted for the draft, one outside is not."""
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    from drafttools import attest

    attest.add_draft(attest.Draft("Toy", "", "", "", {}, {}, "auto"))
    nothing = lambda *args, **kwargs: contextlib.nullcontext()  # noqa: E731

    def capture(graphs: int) -> None:
        manager: Any = object.__new__(cudagraph_utils.CudaGraphManager)
        manager.device, manager.ubatch_runner, manager.pool, manager.graphs = "cpu", None, None, {}
        manager._max_full_descs_to_capture = manager._capture_mem_samples = None
        manager.use_breakable_cg, manager.vllm_config = False, None
        full = [SimpleNamespace(cg_mode=CUDAGraphMode.FULL, num_ubatches=1) for _ in range(graphs)]
        manager._capture_descs = {CUDAGraphMode.FULL: [HashableDescriptor(**vars(desc)) for desc in full]}
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.cuda, "CUDAGraph", FakeGraph))
            stack.enter_context(mock.patch.object(torch.cuda, "graph", nothing))
            stack.enter_context(mock.patch.object(cudagraph_utils, "graph_capture", nothing))
            stack.enter_context(mock.patch.object(cudagraph_utils, "is_global_first_rank", return_value=False))
            stack.enter_context(mock.patch.object(cudagraph_utils, "get_offloader", mock.MagicMock))
            for name in ("current_stream", "capture_pool"):
                if hasattr(cudagraph_utils, name):
                    stack.enter_context(mock.patch.object(cudagraph_utils, name, nothing))
            manager.capture(lambda desc, warmup: lambda mode: None)
        assert len(manager.graphs) == graphs

    in_scope(lambda: capture(2))
    capture(1)
    return attest.drafts()[-1].captures["full"] == 2


@dataclass(frozen=True)
class HashableDescriptor:
    """What `capture` reads of vLLM's descriptor of one batch shape."""

    cg_mode: Any
    num_ubatches: int
    number: Any = None

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@effect("compile_cache")
def joins_compile_key() -> bool:
    from vllm import envs

    from drafttools.patches import compile_cache

    return envs.compile_factors().get(compile_cache.VARIABLE) == compile_cache.fingerprint()


# --- the gates ---


@dataclass(frozen=True)
class Gate:
    """A precision switch of vLLM's, and the function that a draft is kept from.

    `switched(on)` sets the switch for the time of the block and yields a function that asks vLLM.
    """

    switched: Callable[[bool], AbstractContextManager[Ask]]
    lowered: Any  # vLLM's answer with the switch on
    safe: Any  # with the switch off, and for drafts


GATES: dict[str, Gate] = {}


def gate(name: str, lowered: Any, safe: Any) -> Callable[[Callable[[bool], Iterator[Ask]]], Gate]:
    def register(function: Callable[[bool], Iterator[Ask]]) -> Gate:
        GATES[name] = Gate(contextmanager(function), lowered, safe)
        EFFECTS[name] = lambda: keeps_draft_out(GATES[name])
        return GATES[name]

    return register


def keeps_draft_out(asked: Gate) -> bool:
    with asked.switched(True) as ask:
        return bool(ask() == asked.lowered and in_scope(ask) == asked.safe and ask() == asked.lowered)


def quick_all_reduce(on: bool = True) -> Any:
    """A real QuickAllReduce, made without the ROCm set-up of its constructor."""
    from vllm.distributed.device_communicators.quick_all_reduce import QuickAllReduce

    communicator = object.__new__(QuickAllReduce)
    communicator.disabled, communicator.use_fp16_kernels = not on, False
    communicator.qr_min_size, communicator.qr_max_size, communicator.world_size = 0, 1 << 30, 2
    communicator.qr_quantization_min_size = 0
    communicator.qr_quant_level = SimpleNamespace(value=3)  # INT4 of vLLM's QuickReduceRegime
    communicator._flydsl_int4 = None
    return communicator


@gate("quick_reduce", lowered=True, safe=False)
def quick_reduce(on: bool) -> Iterator[Ask]:
    import torch

    communicator, tensor = quick_all_reduce(on), torch.zeros(1024, dtype=torch.bfloat16)
    yield lambda: communicator.should_quick_allreduce(tensor)


@contextmanager
def current_model(**attributes: Any) -> Iterator[None]:
    """A current VllmConfig whose model config has these attributes."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.model_config = SimpleNamespace(**attributes)
    with set_current_vllm_config(config):
        yield


def moe_config() -> Any:
    import torch
    from vllm.model_executor.layers.fused_moe import config as module

    return module.FusedMoEConfig(
        num_experts=2,
        experts_per_token=1,
        hidden_dim=16,
        intermediate_size=16,
        num_local_experts=2,
        num_logical_experts=2,
        activation=module.MoEActivation.SILU,
        device="cpu",
        routing_method=module.RoutingMethodType.Renormalize,
        moe_parallel_config=module.FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )


@contextmanager
def aiter_moe(on: bool, model_type: str) -> Iterator[Ask]:
    """ROCm's AITER experts as if they were there, the FP4-activation switch, and a target of this model type."""
    from vllm._aiter_ops import rocm_aiter_ops

    from drafttools.patches import a4w4

    answers = {"is_fused_moe_enabled": True, "is_fusion_moe_shared_experts_enabled": False}
    answers["fused_moe_supports_quant_dtype_a"] = True
    fakes = {name: classmethod(lambda cls, answer=answer: answer) for name, answer in answers.items()}
    switch = mock.patch.dict("os.environ", {a4w4.SWITCH: str(int(on))})
    model = current_model(hf_config=SimpleNamespace(model_type=model_type))
    with mock.patch.multiple(rocm_aiter_ops, **fakes), switch, model:
        yield lambda: moe_config().use_mxfp4_w4a4_dsv4


@gate("a4w4", lowered=True, safe=False)
def a4w4(on: bool) -> Iterator[Ask]:
    with aiter_moe(on, next(iter(validated_model_types()))) as ask:
        yield ask


def validated_model_types() -> Any:
    from vllm.model_executor.layers.fused_moe import config

    return config._AITER_MOE_A4W4_DSV4_VALIDATED_MODEL_TYPES


@gate("aiter_bmm", lowered=[True, True], safe=[False, False])
def aiter_bmm(on: bool) -> Iterator[Ask]:
    from vllm import _aiter_ops

    ops = _aiter_ops.rocm_aiter_ops
    rocm = mock.patch.dict(sys.modules, {"vllm.platforms.rocm": SimpleNamespace(get_cdna_version=lambda: 4)})
    found = mock.patch.object(_aiter_ops, "is_aiter_found_and_supported", return_value=True)
    flags = dict.fromkeys(("_AITER_ENABLED", "_FP8BMM_ENABLED", "_FP4BMM_ENABLED"), on)
    with rocm, found, mock.patch.multiple(ops, **flags):
        yield lambda: [ops.is_fp8bmm_enabled(), ops.is_fp4bmm_enabled()]


def marlin_aliases() -> list[str]:
    """vLLM modules loaded by now that bind the function by name."""
    return sorted(
        name for name, m in list(sys.modules.items()) if "get_marlin_input_dtype" in getattr(m, "__dict__", ())
    )


@gate("marlin_input", lowered=["torch.int8"], safe=["None"])
def marlin_input(on: bool) -> Iterator[Ask]:
    with mock.patch.dict("os.environ", {"VLLM_MARLIN_INPUT_DTYPE": "int8"} if on else {}):
        yield lambda: sorted({str(sys.modules[name].get_marlin_input_dtype("layer")) for name in marlin_aliases()})


@contextmanager
def activation_override(on: bool, kind: str, module: Any, function: str) -> Iterator[Ask]:
    from vllm.config.quantization import QuantizationConfigArgs, QuantSpec

    spec = QuantSpec(activation="mxfp8" if on else None)
    with current_model(quantization_config=QuantizationConfigArgs(**{kind: spec})):
        yield lambda: getattr(module, function)() is not None


@gate("moe_activation", lowered=True, safe=False)
def moe_activation(on: bool) -> Iterator[Ask]:
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4

    with activation_override(on, "moe", mxfp4, "_user_moe_activation_override") as ask:
        yield ask


@gate("linear_activation", lowered=True, safe=False)
def linear_activation(on: bool) -> Iterator[Ask]:
    from vllm.model_executor.kernels import linear

    with activation_override(on, "linear", linear, "_user_linear_activation_override") as ask:
        yield ask


def online_config() -> Any:
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    return OnlineQuantizationConfig(QuantizationConfigArgs(linear="fp8_per_tensor"))


def is_quantized_online(config: Any) -> bool:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    return config.resolve_quant_method_cls(ReplicatedLinear, "mtp.layers.0.eh_proj") is not None


class Weak:
    """Something that can be weakly referenced, in place of a target model."""


@gate("online_quantization", lowered=True, safe=False)
def online_quantization(on: bool) -> Iterator[Ask]:
    """The target's own online quantization; `on=False` leaves its linear layers to the checkpoint."""
    from drafttools import drafts

    config = online_config()
    if not on:
        config.ignored_layers = ["*"]
    model = Weak()
    drafts.target_loaded(model, SimpleNamespace(quant_config=config))
    yield lambda: is_quantized_online(config)


# --- quantization ---


@effect("draft_quantization")
def matches_draft_names() -> bool:
    """A module that the draft's own config leaves unquantized is left so, although vLLM builds it under a prefix."""
    import torch
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    config = Fp8Config(is_checkpoint_fp8_serialized=True, ignored_layers=["model.layers.0.mlp.down_proj"])
    layer = object.__new__(ReplicatedLinear)
    ask = lambda: type(config.get_quant_method(layer, "draft_model.model.layers.0.mlp.down_proj")).__name__  # noqa: E731
    with current_model(dtype=torch.bfloat16):
        return ask() == "Fp8LinearMethod" and in_scope(ask) == "UnquantizedLinearMethod"


@effect("expert_option")
def accepts_option() -> bool:
    from vllm.config import SpeculativeConfig

    from drafttools.patches import expert_option

    ngram = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}
    return getattr(SpeculativeConfig(**ngram, **{expert_option.NAME: None}), expert_option.NAME, "") is None


@effect("fp8_experts")
def keeps_experts_in_fp8() -> bool:
    """A draft's RoutedExperts on a simulated V100, whose checkpoint holds them in FP16."""
    import tempfile
    from pathlib import Path

    from drafttools.experts.method import Fp8ExpertsMethod
    from tests.unit import expert_layers

    with tempfile.TemporaryDirectory() as directory:
        checkpoint = expert_layers.write_checkpoint(Path(directory), expert_layers.fp16_stream(), None)
        speculative = expert_layers.speculative_config(checkpoint)
        with expert_layers.draft_load(speculative), expert_layers.volta():
            return isinstance(expert_layers.build().quant_method, Fp8ExpertsMethod)


@effect("draft_dtype")
def draft_keeps_its_dtype() -> bool:
    """A BF16 draft checkpoint of the draft_model method beside an FP16 target."""
    import torch
    from vllm.config import SpeculativeConfig

    def model(name: str, declared: str) -> Any:
        hf_config = SimpleNamespace(to_dict=lambda: {"torch_dtype": declared})
        return SimpleNamespace(model=name, dtype=torch.float16, hf_config=hf_config)

    config: Any = object.__new__(SpeculativeConfig)
    config.method = "draft_model"
    config.target_model_config, config.draft_model_config = model("target", "float16"), model("draft", "bfloat16")
    wrapper = vars(SpeculativeConfig)["__post_init__"]
    if not hasattr(wrapper, "__wrapped__"):
        return False
    stock, wrapper.__wrapped__ = wrapper.__wrapped__, lambda self: None  # vLLM's own body would read checkpoints
    try:
        config.__post_init__()
    finally:
        wrapper.__wrapped__ = stock
    return config.draft_model_config.dtype is torch.bfloat16
