"""The tensors one rank keeps for a layer of experts: their shapes, and what they weigh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drafttools.experts.storage import touched_blocks

BLOCK = 128


@dataclass(frozen=True)
class Layout:
    """One rank's share of a layer of experts under tensor parallelism.

    Attributes:
        experts: E; every rank holds every expert.
        hidden: H.
        intermediate: I of the whole layer; a rank holds intermediate / tp_size.
        tp_size, tp_rank: the ranks, and which one this is.
        blocks: False for one scale per row, True for the checkpoint's 128x128 blocks.
    """

    experts: int
    hidden: int
    intermediate: int
    tp_size: int = 1
    tp_rank: int = 0
    blocks: bool = False

    @property
    def local(self) -> int:
        """I of this rank."""
        return self.intermediate // self.tp_size

    @property
    def touched(self) -> tuple[int, int, int]:
        """(first block, number of blocks, offset in the first) of this rank along I."""
        return touched_blocks(self.local, self.tp_rank, BLOCK)

    @property
    def offset(self) -> int:
        """The operator's w13_offset and w2_offset."""
        return self.touched[2] if self.blocks else 0

    @property
    def block(self) -> int:
        """The operator's block_n and block_k."""
        return BLOCK if self.blocks else 0

    def shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and dtype of w13, w13_scale, w2 and w2_scale, as the operator takes them; nothing is padded."""
        experts, hidden, local = self.experts, self.hidden, self.local
        w13_scale: tuple[int, ...] = (experts, 2 * local)
        w2_scale: tuple[int, ...] = (experts, hidden)
        if self.blocks:
            along_i, along_h = self.touched[1], -(-hidden // BLOCK)
            w13_scale, w2_scale = (experts, 2 * along_i, along_h), (experts, along_h, along_i)
        return {
            "w13": (torch.Size((experts, 2 * local, hidden)), torch.float8_e4m3fn),
            "w13_scale": (torch.Size(w13_scale), torch.float32),
            "w2": (torch.Size((experts, hidden, local)), torch.float8_e4m3fn),
            "w2_scale": (torch.Size(w2_scale), torch.float32),
        }

    def allocate(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """The four tensors, uninitialised, on `device` (torch's current default when None)."""
        return {name: torch.empty(size, dtype=dtype, device=device) for name, (size, dtype) in self.shapes().items()}

    def fp16_bytes(self) -> int:
        """Bytes of the same experts as FP16 or BF16."""
        return 2 * self.experts * 3 * self.local * self.hidden
