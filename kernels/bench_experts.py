"""Time the FP8 expert kernel beside vLLM's own kernels and the memory floor, in one run on one GPU.

    python kernels/bench_experts.py [--json FILE] [--tokens 1 2 4 ...] [--block]
    python kernels/bench_experts.py --render FILE    # that file as Markdown, no GPU needed

Times are medians of captured CUDA graphs, the L2 cache flushed before each replay, microseconds on the device.
The peers, `fused_experts` on FP16 weights and Marlin on FP8, are timed where vLLM is importable. `floor_us` is the
bytes of the experts in use over the copy bandwidth of the same run; `error` is the relative L2 error against FP64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from drafttools.experts import extension
from drafttools.experts.op import dequantize_w2, dequantize_w13, fp8_experts
from drafttools.experts.reference import fp8_experts_reference
from drafttools.experts.storage import quantize_rows

TOKENS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
BLOCK = 128


@dataclass(frozen=True)
class Experts:
    """One layer's weights in the operator's terms."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    block: int

    @property
    def bytes_per_expert(self) -> int:
        """Weight bytes a token of this expert needs."""
        return self.w13[0].numel() + self.w2[0].numel()

    def arguments(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[object, ...]:
        """The operator's arguments for these tokens."""
        return x, self.w13, self.w13_scale, self.w2, self.w2_scale, weights, ids, self.block, self.block, 0, 0


def make_experts(experts: int, hidden: int, local: int, block: bool, device: str = "cuda") -> Experts:
    """Random experts: rows quantized from normal values, or random bytes under random block scales."""
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for _ in range(experts):
        for i, shape in enumerate(((2 * local, hidden), (hidden, local))):
            if block:
                weight = (torch.randn(shape, device=device) * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
                rows = 2 * -(-local // BLOCK) if i == 0 else -(-hidden // BLOCK)
                scale = torch.rand(rows, -(-shape[1] // BLOCK), device=device) * 4e-4 + 1e-4
            else:
                weight, scale = quantize_rows((torch.randn(shape, device=device) * 0.03).half())
            parts[2 * i].append(weight.view(torch.uint8))
            parts[2 * i + 1].append(scale)
    w13, w13_scale, w2, w2_scale = (torch.stack(part) for part in parts)
    fp8 = torch.float8_e4m3fn
    return Experts(w13.view(fp8), w13_scale, w2.view(fp8), w2_scale, BLOCK if block else 0)


def make_tokens(tokens: int, experts: Experts, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normal activations and uniform top-k routing: x [M, H] FP16, weights [M, k] FP32, ids [M, k] int32."""
    device = experts.w13.device
    x = torch.randn(tokens, experts.w13.shape[2], device=device).half()
    logits = torch.randn(tokens, experts.w13.shape[0], device=device)
    weights, ids = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return x, weights / weights.sum(dim=-1, keepdim=True), ids.int()


class GraphTimer:
    """Median device time of a captured graph, the L2 cache flushed before each replay."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.scrub = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")

    def __call__(self, function: Callable[[], object], flush: bool = True) -> float:
        """Microseconds of `function`, captured once and replayed."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = function()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for begin, end in pairs:
            if flush:
                self.scrub.add_(1)
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        del kept
        return statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs)


def copy_bandwidth(timer: GraphTimer) -> float:
    """Bytes read plus bytes written a second of a 2 GiB device copy."""
    source = torch.ones(512 << 20, device="cuda")
    target = torch.empty_like(source)
    # A kernel, not copy_: inside a graph that is a copy-engine node, which is slower than the memory.
    return 2 * source.nbytes / (timer(lambda: torch.mul(source, 1.0, out=target)) * 1e-6)


Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def vllm_peers(experts: Experts) -> dict[str, Peer]:
    """vLLM 0.33's kernels on the same weights: FP16 `fused_experts`, and Marlin FP8 where scales are per row."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
        prepare_fp8_moe_layer_for_marlin,
    )
    from vllm.scalar_type import scalar_types

    block = experts.block
    slots = range(experts.w13.shape[0])
    fp16 = torch.float16
    w13 = torch.stack([dequantize_w13(experts.w13[e], experts.w13_scale[e], block, block, 0, fp16) for e in slots])
    w2 = torch.stack([dequantize_w2(experts.w2[e], experts.w2_scale[e], block, block, 0, fp16) for e in slots])
    peers: dict[str, Peer] = {"fused_experts_fp16": lambda x, weights, ids: fused_experts(x, w13, w2, weights, ids)}
    if block:
        return peers
    layer = types.SimpleNamespace(
        num_experts=len(slots),
        hidden_size=experts.w2.shape[1],
        intermediate_size_per_partition=experts.w2.shape[2],
        orig_dtype=fp16,
    )
    with set_current_vllm_config(VllmConfig()):
        packed = prepare_fp8_moe_layer_for_marlin(
            layer, experts.w13, experts.w2, experts.w13_scale.unsqueeze(-1), experts.w2_scale.unsqueeze(-1)
        )
    kind = scalar_types.float8_e4m3fn.id

    def marlin(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(x, packed[0], packed[1], None, None, packed[2], packed[3], weights, ids, kind)

    peers["marlin_fp8"] = marlin
    return peers


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """L2 norm of the difference over that of `want`; NaN if any value is NaN."""
    return float((got.double() - want).norm() / want.norm())


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Run everything; returns the record that `--json` writes."""
    extension.load()
    torch.manual_seed(arguments.seed)
    timer = GraphTimer(arguments.repeats)
    experts = make_experts(arguments.experts, arguments.hidden, arguments.local, arguments.block)
    bandwidth = copy_bandwidth(timer)
    cell = torch.zeros(1, device="cuda")
    record: dict[str, object] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": {"E": arguments.experts, "H": arguments.hidden, "I": arguments.local, "top_k": arguments.top_k},
        "scales": "128 x 128 blocks" if arguments.block else "rows",
        "copy_gb_per_s": bandwidth / 1e9,
        "one_element_graph_us": timer(lambda: cell.add_(1)),
    }
    peers: dict[str, Peer] = {}
    try:
        import vllm

        record["vllm"] = vllm.__version__
        peers = vllm_peers(experts)
    except ImportError as error:
        record["vllm"] = f"not importable: {error}"
    rows = []
    for tokens in arguments.tokens:
        x, weights, ids = make_tokens(tokens, experts, arguments.top_k)
        call = experts.arguments(x, weights, ids)
        want = fp8_experts_reference(*call)
        touched = int(ids.unique().numel())
        row: dict[str, object] = {
            "M": tokens,
            "touched": touched,
            "floor_us": touched * experts.bytes_per_expert / bandwidth * 1e6,
            "fp8_experts_us": timer(lambda call=call: fp8_experts(*call)),
            "error": relative_error(fp8_experts(*call), want),
        }
        best = None
        for name, peer in peers.items():
            row[f"{name}_us"] = timer(lambda peer=peer, x=x, weights=weights, ids=ids: peer(x, weights, ids))
            row[f"{name}_error"] = relative_error(peer(x, weights, ids), want)
            best = min(best or row[f"{name}_us"], row[f"{name}_us"])
        if best:
            row["ratio_to_better_peer"] = row["fp8_experts_us"] / best
        rows.append(row)
        print(" ".join(f"{key}={value:.4g}" for key, value in row.items()), flush=True)
    record["rows"] = rows
    return record


COLUMNS = {
    "M": ("M", "{}"),
    "touched": ("experts in use", "{}"),
    "floor_us": ("floor us", "{:.1f}"),
    "fp8_experts_us": ("fp8_experts us", "{:.1f}"),
    "fused_experts_fp16_us": ("FP16 fused_experts us", "{:.1f}"),
    "marlin_fp8_us": ("Marlin FP8 us", "{:.1f}"),
    "ratio_to_better_peer": ("of the better peer", "{:.3f}"),
    "error": ("relative error", "{:.1e}"),
}


def render(record: dict[str, object]) -> str:
    """A record as a Markdown table under the run's circumstances."""
    rows = record["rows"]
    used = [key for key in COLUMNS if key in rows[0]]
    lines = [f"- {key}: {value}" for key, value in record.items() if key != "rows"]
    lines += ["", "| " + " | ".join(COLUMNS[key][0] for key in used) + " |", "|---" * len(used) + "|"]
    lines += ["| " + " | ".join(COLUMNS[key][1].format(row[key]) for key in used) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--render", type=Path, help="print this record as Markdown instead of measuring")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--local", type=int, default=160, help="I, a rank's slice of the intermediate size")
    parser.add_argument("--top-k", type=int, default=10)
    parser.add_argument("--block", action="store_true", help="128 x 128 block scales instead of one a row")
    parser.add_argument("--repeats", type=int, default=101)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.render:
        print(render(json.loads(arguments.render.read_text())))
        return
    record = measure(arguments)
    print({key: value for key, value in record.items() if key != "rows"})
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
