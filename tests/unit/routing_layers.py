"""What tests of the quantization routing run inside a process that has vLLM: real configs, layers and loaders."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from drafttools import attest, quantization, stock
from drafttools.errors import DraftToolsError
from drafttools.routing import chosen_before, read_by
from drafttools.scope import draft_model_scope

HIDDEN, WIDTH, EXPERTS = 256, 128, 2


@contextlib.contextmanager
def building_draft(draft: str, target: str | None = None, scope: bool = True) -> Iterator[Any]:
    """A current VllmConfig with this draft and target, and the draft scope, as while vLLM builds a draft."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    models = [SimpleNamespace(model=m, revision=None, hf_config=hf_config(m)) for m in (draft, target or draft)]
    object.__setattr__(config, "model_config", stock._model_config(models[1].hf_config, torch.bfloat16))
    config.speculative_config = SimpleNamespace(
        method="mtp", mtp_expert_quantization=None, draft_model_config=models[0], target_model_config=models[1]
    )
    with set_current_vllm_config(config), draft_model_scope() if scope else contextlib.nullcontext():
        yield config


def hf_config(directory: str) -> Any:
    path = Path(directory) / "config.json"
    return stock._hf_config(json.loads(path.read_text()) if path.is_file() else {})


def config_of(directory: str, cls: str | None = None) -> Any:
    """The quantization config of a checkpoint, as vLLM makes it; `cls` picks DeepSeek-V4.1's class by hand."""
    values = json.loads((Path(directory) / "config.json").read_text())
    if cls == "v41":
        from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

        made = DeepseekV4FP8Config.from_config(values["quantization_config"])
        made.packed_modules_mapping = stock._default_packing(values)
        return made
    made, _ = stock._quant_config(stock.request(values, [], None, directory))
    return made


def ask(config: Any, prefix: str) -> dict[str, Any]:
    """One get_quant_method; a method that finds no kernel on this machine still tells what was chosen."""
    layer = stock._bare_layer(prefix, "experts" if prefix.endswith("experts") else "linear")
    error, method = "", None
    try:
        method = config.get_quant_method(layer, prefix)
    except DraftToolsError as refused:
        return {"method": None, "format": None, "refused": str(refused)}
    except Exception as raised:
        method, error = chosen_before(raised), str(raised)
        assert method is not None, error
    key = getattr(method, "activation_key", None)
    found = read_by(method, getattr(layer, "scheme", None))
    name = type(method).__name__ if method is not None else None
    return {"method": name, "format": found and str(found), "refused": "", "activation": key and str(key)}


def ask_all(
    directory: str, prefixes: Sequence[str], scope: bool = True, cls: str | None = None
) -> list[dict[str, Any]]:
    """Real answers of a checkpoint's own config for these prefixes, and that asking leaves the config as it was."""
    with building_draft(directory, scope=scope) as current:
        config = config_of(directory, cls)
        before = copy.deepcopy(vars(config))
        object.__setattr__(current, "quant_config", config)
        with quantization.session(current):
            answers = [ask(config, prefix) for prefix in prefixes]
        assert comparable(vars(config)) == comparable(before), "the config object changed"
    return answers


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Attributes that compare by value; configs inside the config by their type."""
    return {k: v if quantization._is_state(v) else type(v).__name__ for k, v in state.items()}


def ask_configured(values: dict[str, Any], draft: str, prefix: str, target: str | None = None) -> dict[str, Any]:
    """An Fp8Config of these settings, asked for a layer of a draft."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    with building_draft(draft, target):
        answer = ask(Fp8Config(**values), prefix)
    return {**answer, "notes": list(attest._notes)}


def mxfp4_mirror(directory: str, prefixes: Sequence[str]) -> list[bool]:
    """`is_mxfp4_quant` of a config class that is defined after activation, as vLLM 0.26's DeepSeek-V4 answers."""
    from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

    class OldConfig(DeepseekV4FP8Config):
        def is_mxfp4_quant(self, prefix: str, layer: torch.nn.Module) -> bool:
            return self.expert_dtype == "fp4" and self.moe_quant_algo != "NVFP4"

    values = json.loads((Path(directory) / "config.json").read_text())
    with building_draft(directory):
        config = OldConfig.from_config(values["quantization_config"])
        return [config.is_mxfp4_quant(prefix, stock._bare_layer(prefix, "experts")) for prefix in prefixes]


def shared_state(directory: str) -> dict[str, Any]:
    """What a draft's classes do to a shared config while they load, and what is left of it afterwards."""
    config = config_of(directory)
    mapping = config.packed_modules_mapping
    with building_draft(directory) as current:
        object.__setattr__(current, "quant_config", config)
        config._resolved_expert_dtype, config._resolved_moe_quant_algo = "fp8", "TARGET"
        config.ignored_layers = ["a"]
        kept = config.ignored_layers
        with quantization.session(current):
            inside = [config._resolved_expert_dtype, config.expert_dtype, config.moe_quant_algo]
            config.packed_modules_mapping["added"] = ["by", "draft"]
            config.packed_modules_mapping = {"other": ["mapping"]}
            config.ignored_layers.append("b")
            config.left_behind = 1
    return {
        "inside": inside,
        "after": [config._resolved_expert_dtype, config._resolved_moe_quant_algo, config.ignored_layers],
        "same_objects": config.packed_modules_mapping is mapping and config.ignored_layers is kept,
        "mapping": config.packed_modules_mapping,
        "left_behind": hasattr(config, "left_behind"),
    }


# --- routed experts, built and loaded ---


def experts_output(directory: str, prefix: str, scope: bool, cls: str | None = None) -> dict[str, Any]:
    """Build RoutedExperts, load the draft's tensors with vLLM's loader, run them; relative error to the reference.

    No MXFP4 or NVFP4 kernel runs on a CPU without AMX, so the selection of one is left out, and the products are
    taken with the weights that the loaded parameters stand for, decoded as the method declares them.
    """
    from safetensors import safe_open
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_oracle
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as nvfp4_oracle
    from vllm.model_executor.layers.quantization import modelopt, mxfp4

    mxfp4_backend = (mxfp4_oracle.Mxfp4MoeBackend.EMULATION, None)
    nvfp4_backend = (nvfp4_oracle.NvFp4MoeBackend.EMULATION, None)
    with (
        building_draft(directory, scope=scope),
        mock.patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1)),
        mock.patch.object(mxfp4, "select_deepseek_v4_mxfp4_moe_backend", return_value=mxfp4_backend),
        mock.patch.object(modelopt, "select_nvfp4_moe_backend", return_value=nvfp4_backend),
    ):
        layer = routed_experts(prefix, config_of(directory, cls))
    with safe_open(Path(directory) / "model.safetensors", framework="pt") as file:
        # As DeepSeek-V4's mapper names them (models/deepseek_v4/nvidia/model.py).
        stem = "mtp.0.ffn.experts."
        stored = {n.removeprefix(stem): file.get_tensor(n) for n in file.keys() if n.startswith(stem)}  # noqa: SIM118
    mapped = [(name.replace(".scale", ".weight_scale"), tensor) for name, tensor in stored.items()]
    try:
        list(layer.load_weights(mapped))
    except (RuntimeError, AssertionError, ValueError) as error:
        return {"method": type(layer.quant_method).__name__, "load": str(error)[:200], "error": None}
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    got = swiglu(x, *loaded_weights(layer))
    want = swiglu(x, *reference_weights(stored))
    error = float((got - want).norm() / want.norm())
    return {"method": type(layer.quant_method).__name__, "load": "", "error": error if error == error else 1e9}


def routed_experts(prefix: str, quant_config: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    parallel = FusedMoEParallelConfig.make_no_parallel()
    moe = FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=stock._enum("MoEActivation", "SILU"),
        device="cpu",
        routing_method=stock._enum("RoutingMethodType", "Renormalize"),
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )
    experts = ExpertMapManager(
        max_num_batched_tokens=16,
        top_k=2,
        global_num_experts=EXPERTS,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    names = {"ckpt_gate_proj_name": "w1", "ckpt_down_proj_name": "w2", "ckpt_up_proj_name": "w3"}
    return RoutedExperts(prefix, torch.bfloat16, moe, quant_config, expert_map_manager=experts, **names)


def loaded_weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E, 2 width, hidden] and w2 [E, hidden, width] that a layer's parameters stand for, by its own method."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import break_fp4_bytes, dequantize_to_dtype

    decoded = []
    for name in ("w13", "w2"):
        packed, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
        if type(layer.quant_method).__name__ == "Mxfp4MoEMethod":
            values = break_fp4_bytes(packed.reshape(-1, packed.shape[-1]), torch.float32)
            powers = 2.0 ** (scale.reshape(-1, scale.shape[-1]).float() - 127)
            decoded.append((values * powers.repeat_interleave(32, dim=1)).reshape(*packed.shape[:2], -1))
        else:
            overall = getattr(layer, f"{name}_weight_scale_2").data.reshape(EXPERTS, -1)[:, 0]
            decoded.append(dequantize_to_dtype(packed, scale, overall, torch.float32, swizzle=False))
    return decoded[0], decoded[1]


def reference_weights(stored: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the checkpoint's bytes: OCP Microscaling 1.0, E2M1 elements and one E8M0 scale for 32."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def decode(name: str) -> torch.Tensor:
        packed, scale = stored[f"{name}.weight"].view(torch.uint8), stored[f"{name}.scale"].view(torch.uint8)
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).reshape(packed.shape[0], -1).long()
        values = table[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        return values * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)

    w13 = torch.stack([torch.cat([decode(f"{e}.w1"), decode(f"{e}.w3")]) for e in range(EXPERTS)])
    return w13, torch.stack([decode(f"{e}.w2") for e in range(EXPERTS)])


def swiglu(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The experts' mean for tokens x [tokens, hidden]."""
    gate, up = torch.einsum("th,ewh->etw", x, w13).chunk(2, dim=-1)
    return torch.einsum("etw,ehw->th", torch.nn.functional.silu(gate) * up, w2) / EXPERTS


def write_mxfp4_draft(directory: str) -> None:
    """The tensors of a DeepSeek-V4 checkpoint with an NVFP4 trunk and MXFP4 routed experts in its draft layer."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(EXPERTS):
        for name, rows, columns in (("w1", WIDTH, HIDDEN), ("w3", WIDTH, HIDDEN), ("w2", HIDDEN, WIDTH)):
            stem = f"mtp.0.ffn.experts.{expert}.{name}"
            packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
            scale = torch.randint(117, 124, (rows, columns // 32), generator=generator, dtype=torch.uint8)
            tensors[f"{stem}.weight"] = packed.view(torch.int8)
            tensors[f"{stem}.scale"] = scale.view(torch.float8_e8m0fnu)
            trunk = f"layers.2.ffn.experts.{expert}.{name}"
            tensors[f"{trunk}.weight"] = packed.clone()
            tensors[f"{trunk}.weight_scale"] = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
            tensors[f"{trunk}.weight_scale_2"] = torch.ones(())
    Path(directory).mkdir(parents=True, exist_ok=True)
    save_file(tensors, Path(directory) / "model.safetensors", metadata={"format": "pt"})
