"""What is reached from compiled code has the same effect compiled as eager; vLLM's own decorator, and its custom ops."""

from __future__ import annotations

from typing import Any

import pytest

from drafttools.scope import in_draft_model
from tests.processes import VllmProcess
from tests.unit import effects
from tests.unit.effects import in_scope

pytestmark = pytest.mark.vllm


def define_probe() -> list[bool]:
    """A custom op that records the scope from inside the graph; returns what it recorded."""
    import torch

    seen: list[bool] = []

    def record(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_draft_model())
        return x.clone()

    library = torch.library.Library("scope_in_graph", "DEF")
    library.define("record(Tensor x) -> Tensor")
    library.impl("record", record, "CPU")
    library.impl("record", lambda x: torch.empty_like(x), "Meta")
    define_probe.library = library  # type: ignore[attr-defined] # keeps the registration alive
    return seen


def compiled_models(mode: str, backend: str, cache: str) -> dict[str, Any]:
    """A target and a draft of one class under vLLM's @support_torch_compile, called in turns."""
    import os

    import torch
    from vllm.compilation.counter import compilation_counter
    from vllm.compilation.decorators import support_torch_compile
    from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context

    from drafttools import attest, drafts

    os.environ["VLLM_CACHE_ROOT"] = cache
    seen = define_probe()
    config = VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode[mode], backend=backend))
    traced: list[int] = []

    @support_torch_compile(dynamic_arg_dims={"x": 0})
    class Toy(torch.nn.Module):
        def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                traced.append(1)
            return torch.ops.scope_in_graph.record(self.linear(x)) + 1

        def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.scope_in_graph.record(x)

    found: dict[str, Any] = {}
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    with set_current_vllm_config(config), torch.no_grad():
        models = {name: Toy(vllm_config=config).eval() for name in ("target", "draft")}
        models["draft"].load_state_dict(models["target"].state_dict())
        expected = models["target"].linear(x) + 1
        drafts.mark(models["draft"], attest.Draft("Toy", "", "", "", {}, {}, "auto"))
        for step in range(3):
            for name, model in models.items():
                seen.clear()
                with set_forward_context(None, config, num_tokens=4):
                    y = model(x)
                found[f"{name} {step}"] = list(seen)
                assert torch.allclose(y, expected, atol=1e-5)
        seen.clear()
        models["draft"].compute_logits(x)
        models["target"].compute_logits(x)
        found["logits"] = list(seen)
    record = drafts.record_of(models["draft"])
    assert record is not None
    found["calls"] = record.calls
    found["compiled"] = compilation_counter.num_models_seen
    found["left"] = in_draft_model()
    return found


@pytest.mark.parametrize(
    ("mode", "backend"), [("NONE", "eager"), ("VLLM_COMPILE", "eager"), ("VLLM_COMPILE", "inductor")]
)
def test_a_draft_whose_class_is_compiled(installed_vllm: VllmProcess, tmp_path: Any, mode: str, backend: str) -> None:
    """The same class serves the target, and only the draft is in scope, from inside the graph, first call and later."""
    found = installed_vllm.call(compiled_models, mode, backend, str(tmp_path))
    assert found["compiled"] == (0 if mode == "NONE" else 2)
    for step in range(3):
        assert found[f"target {step}"] == [False]
        assert found[f"draft {step}"] == [True]
    assert found["logits"] == [True, False]
    assert found["calls"] == {"__call__": 3, "compute_logits": 1}
    assert not found["left"]


def all_reduce(compiled: bool, draft: bool) -> list[str]:
    """vLLM's own all-reduce op, from compiled code, down to a real communicator with a quick reduce that records."""
    import weakref
    from unittest import mock

    import torch
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators import cuda_communicator

    taken: list[str] = []
    quick = effects.quick_all_reduce()
    quick.quick_all_reduce = lambda tensor: (taken.append("quick"), tensor.clone())[1]
    communicator: Any = mock.MagicMock(spec=cuda_communicator.CudaCommunicator)
    communicator.qr_comm = quick
    communicator.fi_ar_comm = communicator.fi_pcie_ipc_ar_comm = communicator.aiter_ar_comm = None
    communicator.pynccl_comm, communicator.use_aiter_allreduce = None, False
    communicator.ca_comm = mock.MagicMock(disabled=False)
    communicator.ca_comm.custom_all_reduce = lambda tensor: (taken.append("lossless"), tensor.clone())[1]
    communicator.all_reduce = lambda tensor: cuda_communicator.CudaCommunicator.all_reduce(communicator, tensor)
    group: Any = object.__new__(parallel_state.GroupCoordinator)
    group.device_communicator, group.world_size, group.unique_name = communicator, 2, "quick_test"
    parallel_state._groups["quick_test"] = weakref.ref(group)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.vllm.all_reduce(x * 2, group_name="quick_test") + 1

    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.zeros(4, 256, dtype=torch.bfloat16)
    with mock.patch.object(cuda_communicator, "should_nccl_symm_mem_allreduce", return_value=False):
        for _ in range(2):
            in_scope(lambda: run(x)) if draft else run(x)
    return taken


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("draft", [False, True])
def test_all_reduce_from_a_graph(installed_vllm: VllmProcess, compiled: bool, draft: bool) -> None:
    assert installed_vllm.call(all_reduce, compiled, draft) == ["lossless" if draft else "quick"] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_stock_all_reduce_from_a_graph(installed_vllm: VllmProcess, compiled: bool) -> None:
    assert installed_vllm.call(all_reduce, compiled, True, mode="off") == ["quick"] * 2


def gate_in_graph(name: str, on: bool) -> list[Any]:
    """A gate that a traced forward happens to ask: with its switch off it is traced through like stock's code."""
    import torch

    with effects.GATES[name].switched(on) as ask:

        def layer(x: torch.Tensor) -> torch.Tensor:
            return x + 1 if ask() else x

        x = torch.zeros(2)
        return [torch.compile(layer, backend="eager", fullgraph=True)(x).tolist(), layer(x).tolist()]


@pytest.mark.parametrize("name", ["quick_reduce"])
def test_a_gate_traced_with_its_switch_off(installed_vllm: VllmProcess, name: str) -> None:
    compiled, eager = installed_vllm.call(gate_in_graph, name, False)
    assert compiled == eager == [0.0, 0.0]


def wrapper_in_graph() -> list[Any]:
    """A graph wrapper of a draft around a compiled piece, as piecewise graphs are."""
    from unittest import mock

    import torch
    from vllm.compilation import cuda_graph
    from vllm.config import CUDAGraphMode, VllmConfig

    seen = define_probe()
    piece = torch.compile(lambda x: torch.ops.scope_in_graph.record(x) + 1, backend="aot_eager", fullgraph=True)
    with mock.patch.object(cuda_graph, "current_platform"):
        wrappers = [
            make(lambda: cuda_graph.CUDAGraphWrapper(piece, VllmConfig(), CUDAGraphMode.PIECEWISE))
            for make in (in_scope, lambda make: make())
        ]
    with effects.captures(cuda_graph, CUDAGraphMode.PIECEWISE):
        for wrapper in wrappers:
            wrapper(torch.zeros(4))
    return seen


def test_a_compiled_piece_in_a_drafts_graph(installed_vllm: VllmProcess) -> None:
    assert installed_vllm.call(wrapper_in_graph) == [True, False]


def compile_keys() -> str:
    from vllm import envs

    return str(sorted(envs.compile_factors().items()))


def test_the_compile_key_tells_the_patches_apart(vllm_process: VllmProcess) -> None:
    keys = {
        name: vllm_process.call(compile_keys, mode=mode, **environ)
        for name, mode, environ in [
            ("off", "off", {}),
            ("on", "enforce", {}),
            ("again", "enforce", {}),
            ("observe", "observe", {}),
            ("without", "enforce", {"DRAFTTOOLS_DISABLE": "quick_reduce"}),
        ]
    }
    assert keys["on"] == keys["again"]
    assert len({keys[name] for name in ("off", "on", "observe", "without")}) == 4
