"""A BF16 MTP layer beside INT4 targets through vLLM's real loader: what stock cannot load loads as it is stored."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.processes import VllmProcess

pytestmark = pytest.mark.vllm


def load_draft(directory: str) -> dict[str, Any]:
    """Load a checkpoint's MTP draft as a worker does; its methods, and whether its weights are the stored ones."""
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    from drafttools import attest

    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU runner does
    config = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        max_model_len=256,
        enforce_eager=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()
    target_before = repr(sorted(vars(config.quant_config).items(), key=lambda item: item[0]))
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as rendezvous:
        init_distributed_environment(1, 0, f"file://{rendezvous.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
        try:
            model = get_model_loader(config.load_config).load_model(
                vllm_config=config, model_config=config.speculative_config.draft_model_config
            )
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"[:300]}
    stored = load_file(str(Path(directory) / "model.safetensors"))
    block = model.model.mtp_layers["2"].mtp_block
    gate_up = [stored[f"model.mtp_layers.0.mlp.{name}.weight"] for name in ("gate_proj", "up_proj")]
    return {
        "methods": [
            type(block.mlp.gate_up_proj.quant_method).__name__,
            type(block.mlp.down_proj.quant_method).__name__,
        ],
        "equal": bool(torch.equal(block.mlp.gate_up_proj.weight, torch.cat(gate_up)))
        and bool(torch.equal(block.mlp.down_proj.weight, stored["model.mtp_layers.0.mlp.down_proj.weight"])),
        "target_config_unchanged": repr(sorted(vars(config.quant_config).items(), key=lambda item: item[0]))
        == target_before,
        "recorded": [draft.details["quantization"] for draft in attest.drafts()],
    }


@pytest.mark.parametrize(("quantization", "stock_loads"), [("awq", False), ("gptq", True)])
def test_bf16_layer_beside_int4(
    quantization: str, stock_loads: bool, tmp_path: Path, installed_vllm: VllmProcess
) -> None:
    """AWQ lists float modules by their checkpoint names, which a MiMo draft's prefixes are not; GPTQ the others."""
    from tests.engine import quantized_mtp

    directory = str(quantized_mtp.write(tmp_path / "model", quantization))
    ours = installed_vllm.call(load_draft, directory)
    assert "failed" not in ours, ours
    assert ours["methods"] == ["UnquantizedLinearMethod"] * 2
    assert ours["equal"]
    assert ours["target_config_unchanged"]
    (layers,) = ours["recorded"]
    assert {layer["stored"] for layer in layers.values()} == {"unquantized"}
    stock = installed_vllm.call(load_draft, directory, mode="off")
    if stock_loads:
        assert stock["equal"]
    else:
        assert "no module or parameter named 'model.mtp_layers.2.mtp_block" in stock["failed"]
