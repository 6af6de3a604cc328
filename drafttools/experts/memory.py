"""What FP8 experts weigh, and what loading them takes, measured on real tensors.

    python -m drafttools.experts.memory [--experts 512 --hidden 2560 --intermediate 640 --tp 4] [--load] [--json]

Prints the resident bytes of one rank for each layout; with --load also the peak memory of loading on this machine's
CPU, each route in a process of its own. Defaults are the shape of Qwen4Exp's MTP layer.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from drafttools.experts.layout import BLOCK, Layout
from drafttools.experts.loading import SHARDS, ExpertLoader

MIB = 2**20
PADDED_MULTIPLE = 256  # the local width the SM70 kernel of the public Qwen4Exp work needs


def resident(layout: Layout) -> dict[str, int]:
    """Bytes of one rank's tensors: FP16, FP8 with row scales, FP8 with block scales (of its widest rank), padded FP8.

    The padded layout is that of the public SM70 work: the local width rounded up to 256 and FP16 scales for each row
    and 128 inputs.
    """
    ranks = range(layout.tp_size)
    return {
        "fp16": _bytes(fp16_tensors(layout)),
        "fp8_rows": _bytes(_of(layout, blocks=False).allocate("cpu")),
        "fp8_blocks": max(_bytes(_of(layout, blocks=True, rank=rank).allocate("cpu")) for rank in ranks),
        "fp8_padded": _bytes(_padded_tensors(layout)),
    }


def fp16_tensors(layout: Layout) -> dict[str, torch.Tensor]:
    """The experts as vLLM's unquantized method keeps them."""
    shapes = layout.shapes()
    return {name: torch.empty(shapes[name][0], dtype=torch.float16) for name in ("w13", "w2")}


def _padded_tensors(layout: Layout) -> dict[str, torch.Tensor]:
    experts, hidden = layout.experts, layout.hidden
    width = -(-layout.local // PADDED_MULTIPLE) * PADDED_MULTIPLE
    return {
        "w13": torch.empty(experts, 2 * width, hidden, dtype=torch.float8_e4m3fn),
        "w13_scale": torch.empty(experts, 2 * width, -(-hidden // BLOCK), dtype=torch.float16),
        "w2": torch.empty(experts, hidden, width, dtype=torch.float8_e4m3fn),
        "w2_scale": torch.empty(experts, hidden, width // BLOCK, dtype=torch.float16),
    }


def _of(layout: Layout, *, blocks: bool, rank: int = 0) -> Layout:
    return Layout(layout.experts, layout.hidden, layout.intermediate, layout.tp_size, rank, blocks)


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def peak(layout: Layout, route: str) -> int:
    """Peak memory in bytes above the start of loading one rank's experts, in a fresh process on the CPU.

    Args:
        layout: the shape; experts come as whole FP16 tensors, one projection of one expert at a time.
        route: "fp16" (the unquantized method's copy), "fp16_then_fp8" (quantized once all are there) or "online".
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(send, layout, route))
    process.start()
    send.close()
    try:
        return int(receive.recv())
    finally:
        process.join()


def _measure(send: Any, layout: Layout, route: str) -> None:
    torch.set_num_threads(1)
    stream = _stream(layout)
    shards = [next(stream) for _ in SHARDS]  # generated before the start, as a checkpoint's mapped pages would be
    warm_up = Layout(1, layout.hidden, layout.intermediate, layout.tp_size)
    _ROUTES[route](warm_up, shards)
    start = _status("VmRSS")
    _ROUTES[route](layout, shards)
    send.send(_status("VmHWM") - start)


def _stream(layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for shard in SHARDS:
        shape = (layout.hidden, layout.intermediate) if shard == "w2" else (layout.intermediate, layout.hidden)
        yield shard, torch.randn(shape, generator=generator).half()


def _load_fp16(layout: Layout, shards: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tensors = fp16_tensors(layout)
    local = layout.local
    for expert in range(layout.experts):
        for shard, whole in shards:
            part = whole.narrow(1 if shard == "w2" else 0, layout.tp_rank * local, local)
            rows = {"w1": slice(0, local), "w3": slice(local, None), "w2": slice(None)}[shard]
            tensors["w2" if shard == "w2" else "w13"][expert, rows].copy_(part)
    return tensors


def _load_fp16_then_quantize(layout: Layout, shards: list[tuple[str, torch.Tensor]]) -> None:
    from drafttools.experts.storage import quantize_rows

    dense = _load_fp16(layout, shards)
    tensors = layout.allocate("cpu")
    for name, weight in dense.items():
        for expert in range(layout.experts):
            quantized, scale = quantize_rows(weight[expert])
            tensors[name][expert].copy_(quantized)
            tensors[f"{name}_scale"][expert].copy_(scale)


def _load_online(layout: Layout, shards: list[tuple[str, torch.Tensor]]) -> None:
    tensors = layout.allocate("cpu")
    loader = ExpertLoader("experts", layout, tensors.__getitem__, {shard: shard for shard in SHARDS})
    for expert in range(layout.experts):
        for shard, whole in shards:
            loader.load("weight", whole, shard, expert)
    loader.finish()


_ROUTES: dict[str, Callable[[Layout, list[tuple[str, torch.Tensor]]], Any]] = {
    "fp16": _load_fp16,
    "fp16_then_fp8": _load_fp16_then_quantize,
    "online": _load_online,
}


def _status(key: str) -> int:
    """A line of /proc/self/status in bytes; VmHWM starts anew at exec, unlike getrusage's maximum."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m drafttools.experts.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--intermediate", type=int, default=640, help="expert width of the whole layer")
    parser.add_argument("--tp", type=int, default=4, help="tensor-parallel ranks")
    parser.add_argument("--load", action="store_true", help="measure the peak of loading too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    layout = Layout(options.experts, options.hidden, options.intermediate, options.tp)
    figures = {"resident": resident(layout)}
    if options.load:
        figures["peak"] = {route: peak(layout, route) for route in _ROUTES}
    if options.json:
        print(json.dumps({"experts": layout.experts, "hidden": layout.hidden, "local": layout.local, **figures}))
        return
    print(f"one rank of {layout.tp_size}: {layout.experts} experts, hidden {layout.hidden}, width {layout.local}")
    for title, numbers in figures.items():
        for name, value in numbers.items():
            print(f"{title:9}{name:14}{value / MIB:9.1f} MiB  {value / numbers['fp16']:.3f} of fp16")


if __name__ == "__main__":
    main()
