"""A vLLM plugin that records, from inside the model, whether each call ran in the draft scope.

Every RowParallelLinear passes its output through a custom op that is told whether the layer belongs to the draft (by its
own account of the prefix, not drafttools') and reads `vllm.config.in_draft_model`. The op stays in compiled and captured
graphs; on CUDA it also counts on the device, so a replayed graph is counted with the scope that was frozen into it.
Active only when SCOPE_PROBE names a directory; each process writes one JSON file there.
"""

import atexit
import json
import os
import pathlib
import time


def activate() -> None:
    directory = os.environ.get("SCOPE_PROBE")
    if directory:
        _install(pathlib.Path(directory), int(os.environ["SCOPE_PROBE_TARGET_LAYERS"]))


def _install(directory: pathlib.Path, target_layers: int) -> None:
    import torch
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.models.utils import extract_layer_index

    counts = {"draft_in": 0, "draft_out": 0, "target_in": 0, "target_out": 0}
    captured = dict(counts)
    device: dict[str, torch.Tensor] = {}
    written = [0.0]

    def in_draft() -> bool:
        import vllm.config

        return getattr(vllm.config, "in_draft_model", lambda: False)()

    def write() -> None:
        written[0] = time.monotonic()
        result = {"host": counts, "captured": captured}
        if device:
            result["device"] = dict(zip(counts, device["counts"].tolist(), strict=True))
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"probe-{os.getpid()}.json"
        path.with_suffix(".tmp").write_text(json.dumps(result))
        os.replace(path.with_suffix(".tmp"), path)

    def record(x: torch.Tensor, draft: bool) -> torch.Tensor:
        key = ("draft" if draft else "target") + ("_in" if in_draft() else "_out")
        counts[key] += 1
        if x.is_cuda:
            if not device:
                device["counts"] = torch.zeros(4, dtype=torch.int64, device=x.device)
                device["units"] = torch.eye(4, dtype=torch.int64, device=x.device)
            device["counts"] += device["units"][list(counts).index(key)]
            if torch.cuda.is_current_stream_capturing():
                captured[key] += 1
                return x.clone()
        if time.monotonic() - written[0] > 1:
            write()
        return x.clone()

    library = torch.library.Library("scope_probe", "DEF")
    library.define("record(Tensor x, bool draft) -> Tensor")
    library.impl("record", record, "CPU")
    library.impl("record", record, "CUDA")
    library.impl("record", lambda x, draft: torch.empty_like(x), "Meta")
    activate.library = library  # type: ignore[attr-defined] # keeps the registration alive

    constructor, forward = RowParallelLinear.__init__, RowParallelLinear.forward

    def __init__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        constructor(self, *args, **kwargs)
        prefix = kwargs.get("prefix", "")
        try:
            index = extract_layer_index(prefix)
        except (AssertionError, ValueError):
            index = 0
        self.probe_draft = prefix.startswith("draft_model") or "mtp" in prefix or index >= target_layers

    def probed(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = forward(self, *args, **kwargs)
        if isinstance(result, tuple):
            return (torch.ops.scope_probe.record(result[0], self.probe_draft), *result[1:])
        return torch.ops.scope_probe.record(result, self.probe_draft)

    RowParallelLinear.__init__, RowParallelLinear.forward = __init__, probed
    activate.write = write  # type: ignore[attr-defined]
    atexit.register(write)
