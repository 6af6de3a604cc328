"""Fill a layer's FP8 tensors from checkpoint tensors that arrive one at a time, in any order.

Every tensor is sliced for this rank and, on the online route, quantized before the next one is read, so FP16 experts
never exist whole. A tensor that is wrong, missing or there twice stops the load by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from drafttools.experts.layout import BLOCK, Layout
from drafttools.experts.storage import ExpertWeightError, checked_scale, has_nan, quantize_rows

SHARDS = ("w1", "w2", "w3")  # vLLM's names for gate, down and up
_NAMED_MISSING = 4


class ExpertLoader:
    """Loads one layer of experts and keeps account of what has come.

    Args:
        layer: the layer's name, for errors.
        layout: the shapes; `layout.blocks` tells the checkpoint-native route from the online one.
        tensor: gives w13, w13_scale, w2 and w2_scale by name; asked each time, since vLLM may move them.
        projections: checkpoint names of w1, w2 and w3.
        scale_suffix: the checkpoint's name for a scale, on the native route.
    """

    def __init__(
        self,
        layer: str,
        layout: Layout,
        tensor: Callable[[str], torch.Tensor],
        projections: Mapping[str, str],
        scale_suffix: str = "weight_scale_inv",
    ) -> None:
        self.layer, self.layout, self.tensor = layer, layout, tensor
        self.projections, self.scale_suffix = projections, scale_suffix
        self.complete = False
        self._loaded: set[tuple[int, str, str]] = set()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What each projection of an expert consists of in the checkpoint."""
        return ("weight", self.scale_suffix) if self.layout.blocks else ("weight",)

    def name(self, expert: int, shard: str, kind: str) -> str:
        """The checkpoint's name of a tensor, as far as the layer's own name tells it."""
        return f"{self.layer}.{expert}.{self.projections[shard]}.{kind}"

    def load(self, kind: str, loaded: torch.Tensor, shard: str, expert: int) -> None:
        """Take one whole (unsharded) checkpoint tensor: `kind` is "weight" or the scale suffix, shard w1, w2 or w3.

        Raises:
            ExpertWeightError: an expert or shard there is none of, a tensor that has come already, a wrong shape or
                dtype, a value that is not finite, a negative scale. The tensor is named.
        """
        if shard not in SHARDS or not 0 <= expert < self.layout.experts:
            raise ExpertWeightError(
                f"{self.layer} has no expert {expert} shard {shard}: it has {self.layout.experts} experts"
            )
        key, name = (expert, shard, kind), self.name(expert, shard, kind)
        if key in self._loaded:
            raise ExpertWeightError(f"{name} is in the checkpoint twice; remove one of the two")
        self.complete = False
        try:
            if kind != "weight":
                self._load_scale(loaded, shard, expert)
            elif self.layout.blocks:
                self._load_bytes(loaded, shard, expert)
            else:
                self._load_and_quantize(loaded, shard, expert)
        except ExpertWeightError as error:
            raise ExpertWeightError(f"{name}: {error}") from None
        self._loaded.add(key)

    def finish(self) -> None:
        """Declare the load over; ExpertWeightError when a tensor has not come, naming the first few."""
        if self.complete and not self._loaded:
            return  # processed again without a reload
        wanted = [
            (expert, shard, kind)
            for expert in range(self.layout.experts)
            for shard in SHARDS
            for kind in self.kinds
            if (expert, shard, kind) not in self._loaded
        ]
        if wanted:
            names = ", ".join(self.name(*key) for key in wanted[:_NAMED_MISSING])
            more = f" and {len(wanted) - _NAMED_MISSING} more" if len(wanted) > _NAMED_MISSING else ""
            raise ExpertWeightError(f"the checkpoint lacks {names}{more}; {self.layer} cannot serve half-loaded")
        self.complete = True
        self._loaded.clear()

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass on vLLM's stream of (name under the layer, tensor), stopping at an expert the layer has not.

        vLLM's own loader skips such names in silence (vllm 0.32.0, RoutedExperts.load_weights).
        """
        for name, tensor in weights:
            index = name.partition(".")[0]
            if index.isdecimal() and int(index) >= self.layout.experts:
                raise ExpertWeightError(
                    f"{self.layer}.{name} is an extra expert: the config declares {self.layout.experts}"
                )
            yield name, tensor

    def _load_and_quantize(self, loaded: torch.Tensor, shard: str, expert: int) -> None:
        weight = self._own_part(loaded, shard)
        quantized, scale = quantize_rows(weight.to(self.tensor("w13").device))
        self._rows("w2" if shard == "w2" else "w13", shard, expert).copy_(quantized)
        self._rows("w2_scale" if shard == "w2" else "w13_scale", shard, expert).copy_(scale)

    def _load_bytes(self, loaded: torch.Tensor, shard: str, expert: int) -> None:
        if loaded.dtype != torch.float8_e4m3fn:
            raise ExpertWeightError(f"expected E4M3, got {loaded.dtype}")
        weight = self._own_part(loaded, shard)
        if has_nan(weight):
            raise ExpertWeightError("holds NaN bytes")
        self._rows("w2" if shard == "w2" else "w13", shard, expert).copy_(weight)

    def _load_scale(self, loaded: torch.Tensor, shard: str, expert: int) -> None:
        first, count, _ = self.layout.touched
        along_i, along_h = -(-self.layout.intermediate // BLOCK), -(-self.layout.hidden // BLOCK)
        if loaded.ndim == 4:  # ModelOpt writes [N blocks, 1, K blocks, 1]
            loaded = loaded.squeeze(3).squeeze(1)
        expected = [along_h, along_i] if shard == "w2" else [along_i, along_h]
        if list(loaded.shape) != expected:
            raise ExpertWeightError(f"expected shape {expected}, got {list(loaded.shape)}")
        scale = checked_scale(loaded).narrow(1 if shard == "w2" else 0, first, count)
        self._rows("w2_scale" if shard == "w2" else "w13_scale", shard, expert).copy_(scale)

    def _own_part(self, loaded: torch.Tensor, shard: str) -> torch.Tensor:
        layout = self.layout
        expected = [layout.intermediate, layout.hidden]
        axis = 0
        if shard == "w2":
            expected, axis = expected[::-1], 1
        if list(loaded.shape) != expected:
            raise ExpertWeightError(f"expected shape {expected}, got {list(loaded.shape)}")
        return loaded.narrow(axis, layout.tp_rank * layout.local, layout.local)

    def _rows(self, name: str, shard: str, expert: int) -> torch.Tensor:
        """Where a shard goes: all of w2, the first half of w13 for the gate, the second for up."""
        whole = self.tensor(name)[expert]
        if shard == "w2":
            return whole
        half = whole.shape[0] // 2
        return whole[:half] if shard == "w1" else whole[half:]
