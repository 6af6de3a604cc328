"""Asks the installed vLLM which quantization method it would give to runtime prefixes, without loading a model.

Run as `python -m drafttools.stock` in a process of its own: a JSON request on standard input, a JSON reply as the
last line of standard output. The configuration, the registry and `get_quant_method` are vLLM's own; only the layers
are bare instances, so nothing is allocated and no device is needed.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from drafttools.routing import chosen_before, read_by

TIMEOUT_S = 300


def request(
    config: Mapping[str, Any],
    prefixes: Iterable[tuple[str, str]],
    target_config: Mapping[str, Any] | None = None,
    checkpoint: str | None = None,
) -> dict[str, Any]:
    """Make a request.

    `config` is the config.json that the quantization comes from and `checkpoint` the directory or hub id it lies in,
    `prefixes` pairs of runtime prefix and kind (`linear`, `experts`, `head` or `embedding`), `target_config` the
    target's config.json when the draft is a checkpoint of its own.
    """
    return {"config": config, "prefixes": list(prefixes), "target_config": target_config, "checkpoint": checkpoint}


def ask(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ask a fresh Python process for stock's answers, one reply a request.

    A reply is `{"vllm": version or None, "config": class name, "error": sentence or None, "answers": {prefix:
    {"method", "format", "error"}}}`; `format` is None where the method is unknown or vLLM raised.
    """
    environ = {**os.environ, "DRAFTTOOLS": "off", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-m", "drafttools.stock"],
        input=json.dumps(list(requests)), capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, check=False,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        failed: dict[str, Any] = {
            "vllm": None,
            "config": None,
            "error": f"the vLLM process failed: {last}",
            "answers": {},
        }
        return [dict(failed) for _ in requests]
    replies: list[dict[str, Any]] = json.loads(lines[-1])
    return replies


def answers(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Answer requests in this process (the child's side of `ask`)."""
    return [answer(item) for item in requests]


def answer(item: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request in this process."""
    reply: dict[str, Any] = {"vllm": None, "config": None, "error": None, "answers": {}}
    try:
        import vllm
    except ImportError as error:
        return {**reply, "error": f"vLLM cannot be imported: {error}"}
    reply["vllm"] = vllm.__version__
    try:
        quant_config, current = _quant_config(item)
    except Exception as error:
        return {**reply, "error": f"stock cannot read the quantization config: {_sentence(error)}"}
    reply["config"] = type(quant_config).__name__ if quant_config is not None else None
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(current):
        for prefix, kind in item["prefixes"]:
            reply["answers"][prefix] = _answer_one(quant_config, prefix, kind)
    return reply


def _answer_one(quant_config: Any, prefix: str, kind: str) -> dict[str, Any]:
    layer = _bare_layer(prefix, kind)
    error = None
    try:
        method = quant_config.get_quant_method(layer, prefix) if quant_config is not None else None
    except Exception as raised:
        method = chosen_before(raised)
        error = _sentence(raised)
        if method is None:
            return {"method": None, "format": None, "error": error}
    name = type(method).__name__ if method is not None else None
    return {"method": name, "format": read_by(method, getattr(layer, "scheme", None)), "error": error}


def _quant_config(item: Mapping[str, Any]) -> tuple[Any, Any]:
    """Build the quantization config as vLLM does, and a current VllmConfig for the code that asks for one."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig

    hf_config = _hf_config(item["config"])
    target = _hf_config(item["target_config"]) if item["target_config"] else hf_config
    current = VllmConfig(device_config=DeviceConfig(device="cpu"))
    object.__setattr__(current, "model_config", _model_config(target, torch.bfloat16))
    model_config = _model_config(hf_config, torch.bfloat16)
    if model_config.model_arch_config.quantization_config is None:
        return None, current
    with contextlib.redirect_stdout(sys.stderr):
        name = _quantization_name(model_config)
        from vllm.config.load import LoadConfig
        from vllm.model_executor.model_loader.utils import configure_quant_config
        from vllm.model_executor.model_loader.weight_utils import get_quant_config

        model_config.quantization = name
        quant_config = get_quant_config(model_config, LoadConfig())
        if item["checkpoint"]:  # AWQ and GPTQ look which tensors are floats
            quant_config.maybe_update_config(item["checkpoint"], hf_config=hf_config)
        for model_class in _model_classes(hf_config):
            configure_quant_config(quant_config, model_class)
    if not quant_config.packed_modules_mapping:  # the model class does not import here
        quant_config.packed_modules_mapping = _default_packing(item["config"])
    return quant_config, current


def _hf_config(config: Mapping[str, Any]) -> Any:
    from transformers import PretrainedConfig

    values = copy.deepcopy(dict(config))
    nested = values.pop("text_config", None)
    hf_config = PretrainedConfig.from_dict(values)
    if nested is not None:
        hf_config.text_config = PretrainedConfig.from_dict(nested)
    return hf_config


def _model_config(hf_config: Any, dtype: Any) -> SimpleNamespace:
    text = getattr(hf_config, "text_config", hf_config)
    quantization = getattr(hf_config, "quantization_config", None) or getattr(text, "quantization_config", None)
    heads = {"total_num_attention_heads": 1, "total_num_kv_heads": 1}
    return SimpleNamespace(
        hf_config=hf_config, hf_text_config=text, dtype=dtype, quantization=None, quantization_config=None,
        hf_overrides={}, model_arch_config=SimpleNamespace(quantization_config=quantization, **heads),
    )  # fmt: skip


def _quantization_name(model_config: SimpleNamespace) -> str:
    """Which of vLLM's quantization methods claims the checkpoint (ModelConfig._verify_quantization)."""
    from vllm.config import ModelConfig
    from vllm.platforms import current_platform

    # Whether this machine can run it is another question: the answer is wanted for the serving one.
    current_platform.verify_quantization = lambda *_: None
    ModelConfig._verify_quantization(model_config)
    return str(model_config.quantization)


def _model_classes(hf_config: Any) -> Iterator[Any]:
    """The target's and the draft's model classes, as far as they import on this machine."""
    from vllm.config.speculative import SpeculativeConfig
    from vllm.model_executor.models.registry import ModelRegistry

    architectures = list(getattr(hf_config, "architectures", None) or [])
    with contextlib.suppress(Exception):
        draft = SpeculativeConfig.hf_config_override(copy.deepcopy(hf_config))
        architectures += [name for name in draft.architectures if name not in architectures]
    for name in architectures:
        with contextlib.suppress(Exception):
            model_class = ModelRegistry._try_load_model_cls(name)
            if model_class is not None:
                yield model_class


def _default_packing(config: Mapping[str, Any]) -> dict[str, list[str]]:
    deepseek = str(config.get("model_type", "")).startswith("deepseek_v4")
    packing = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return {"gate_up_proj": ["w1", "w3"], "fused_wqa_wkv": ["wq_a", "wkv"]} if deepseek else packing


def _bare_layer(prefix: str, kind: str) -> Any:
    """An instance of the layer class vLLM would use, without its constructor: get_quant_method looks at the type."""
    import torch
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    last = prefix.rpartition(".")[2]
    cls = {"experts": RoutedExperts, "head": ParallelLMHead, "embedding": VocabParallelEmbedding}.get(kind)
    if cls is None:
        fused = {"qkv_proj": linear.QKVParallelLinear, "gate_up_proj": linear.MergedColumnParallelLinear}
        cls = fused.get(last, linear.ReplicatedLinear)
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    if kind == "experts":
        _describe_experts(layer, prefix)
    return layer


def _describe_experts(layer: Any, prefix: str) -> None:
    """Give bare routed experts the attributes that configs and methods look at; sizes that every format divides."""
    import torch
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig

    fields = {
        "num_experts": 8, "experts_per_token": 2, "hidden_dim": 512, "intermediate_size": 512,
        "intermediate_size_per_partition": 512, "num_local_experts": 8, "num_logical_experts": 8,
        "activation": _enum("MoEActivation", "SILU"), "device": "cpu",
        "routing_method": _enum("RoutingMethodType", "Default"), "in_dtype": torch.bfloat16,
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(), "max_num_tokens": 512,
    }  # fmt: skip
    known = set(FusedMoEConfig.__dataclass_fields__)
    moe_config = FusedMoEConfig(**{k: v for k, v in fields.items() if k in known})
    described = {
        "moe_config": moe_config, "layer_name": prefix, "hidden_size": 512, "intermediate_size_per_partition": 512,
        "local_num_experts": 8, "global_num_experts": 8, "top_k": 2, "activation": fields["activation"],
        "ckpt_gate_proj_name": "gate_proj", "ckpt_up_proj_name": "up_proj", "ckpt_down_proj_name": "down_proj",
        "apply_router_weight_on_input": False,
    }  # fmt: skip
    for name, value in described.items():
        with contextlib.suppress(AttributeError):  # some are read-only properties
            setattr(layer, name, value)


def _enum(name: str, member: str) -> Any:
    from vllm.model_executor.layers.fused_moe import activation, config

    cls = getattr(config, name, None) or getattr(activation, name)
    return getattr(cls, member)


def _sentence(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


if __name__ == "__main__":
    print(json.dumps(answers(json.load(sys.stdin))))
