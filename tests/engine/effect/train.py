"""Train the two checkpoints of the acceptance experiment: a target and a smaller, separately trained draft.

    python -m tests.engine.effect.train OUT_DIR

Both learn the same synthetic language from different samples and different initial weights, so their errors differ: a
draft copied from the target would make the target's own mistakes and hide the effect of a lossy switch. Takes about
two minutes on one CPU core and writes ``target/`` and ``draft/``, bfloat16 checkpoints in the Qwen3-MoE layout.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import dataclass

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.engine.effect.language import VOCAB_SIZE, Language

LEARNING_RATE = 4e-3
BATCH, LENGTH = 48, 64


@dataclass(frozen=True)
class Shape:
    """Size and training length of one checkpoint."""

    hidden_size: int
    attention_heads: int
    steps: int
    seed: int


SHAPES = {
    "target": Shape(hidden_size=128, attention_heads=4, steps=500, seed=1),
    "draft": Shape(hidden_size=64, attention_heads=2, steps=300, seed=2),
}


def config(shape: Shape) -> Qwen3MoeConfig:
    """Two layers, each with four experts of which two are used."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=shape.attention_heads,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        moe_intermediate_size=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def train(shape: Shape, language: Language) -> Qwen3MoeForCausalLM:
    """Returns the model in bfloat16."""
    torch.manual_seed(shape.seed)
    generator = torch.Generator().manual_seed(1000 + shape.seed)
    model = Qwen3MoeForCausalLM(config(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=shape.steps, pct_start=0.1)
    for step in range(1, shape.steps + 1):
        tokens = language.sample(BATCH, LENGTH, generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    return model.to(torch.bfloat16)


def save(model: Qwen3MoeForCausalLM, directory: pathlib.Path) -> None:
    """Write weights and config the way published checkpoints are laid out: one tensor an expert and projection."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors.update(_experts(name, tensor) if ".experts." in name else {name: tensor})
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})
    described = {**model.config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(described, indent=1) + "\n")


def _experts(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split transformers' stacked tensor ``(experts, out, in)`` into one per expert and projection."""
    stem, kind = name.rsplit(".", 1)
    named: dict[str, torch.Tensor] = {}
    for i, weight in enumerate(stacked):
        parts = {"gate_proj": weight.chunk(2)[0], "up_proj": weight.chunk(2)[1]}
        if kind == "down_proj":
            parts = {"down_proj": weight}
        named.update({f"{stem}.{i}.{projection}.weight": part for projection, part in parts.items()})
    return named


def main() -> None:
    """Train and save both."""
    parser = argparse.ArgumentParser(description="Train the target and the draft of the acceptance experiment.")
    parser.add_argument("out", type=pathlib.Path)
    out = parser.parse_args().out
    language = Language()
    for name, shape in SHAPES.items():
        print(name)
        save(train(shape, language), out / name)


if __name__ == "__main__":
    main()
