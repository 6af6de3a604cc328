"""Train the two checkpoints of the acceptance experiment: a target and a smaller, separately trained draft.

    python -m tests.engine.effect.train OUT_DIR

Both learn the same synthetic language (``Language``) from different samples and different initial weights, so
their errors differ: a draft copied from the target would make the target's own mistakes and hide the effect of
a lossy reduction. Takes about a minute on two CPU cores and writes ``target/`` and ``draft/``, bfloat16
checkpoints in the Llama layout that vLLM loads.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from dataclasses import dataclass

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.effect.language import VOCAB_SIZE, Language


@dataclass(frozen=True)
class Shape:
    """Size and training length of one checkpoint."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    seed: int
    steps: int


SHAPES = {
    "target": Shape(128, 128, 2, 4, seed=1, steps=500),
    "draft": Shape(64, 64, 2, 2, seed=2, steps=500),
}


def config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def train(shape: Shape, language: Language) -> LlamaForCausalLM:
    torch.manual_seed(shape.seed)
    generator = torch.Generator().manual_seed(1000 + shape.seed)
    model = LlamaForCausalLM(config(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=shape.steps, pct_start=0.1)
    for step in range(shape.steps):
        tokens = language.sample(48, 64, generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return model.to(torch.bfloat16)


def save(model: LlamaForCausalLM, directory: pathlib.Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    described = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(described, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    out = parser.parse_args().out
    language = Language()
    for name, shape in SHAPES.items():
        print(name)
        save(train(shape, language), out / name)


if __name__ == "__main__":
    main()
