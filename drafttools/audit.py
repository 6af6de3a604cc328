"""What a checkpoint's draft holds, what stock vLLM would do with it, and what drafttools will do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafttools import stock
from drafttools.formats import Checkpoint, Format, read_checkpoint, read_config
from drafttools.names import text_config
from drafttools.routing import Action, Decision, Lookup, Source, decide, read_class, reads, source_of

Ask = Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]

# EAGLE heads that have a checkpoint of their own and are built with the target's quantization config all the same
# (vLLM 0.33.0: model_executor/models/minicpm_eagle.py and deepseek_eagle.py); vLLM puts "Eagle" before the name.
BUILT_WITH_TARGET_CONFIG = frozenset({"EagleMiniCPMForCausalLM", "EagleDeepSeekMTPModel"})


@dataclass
class Audit:
    """The result; `as_json` gives the published form."""

    checkpoint: str
    kind: str
    layers: list[int]
    modules: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    vllm: str | None = None
    conflict: bool = False
    incomplete: bool = False

    @property
    def verdict(self) -> str:
        """`conflict` before `incomplete` before `fixed` before `ok`; `absent` without a draft."""
        if self.conflict:
            return "conflict"
        if self.kind == "absent":
            return "absent"
        if self.incomplete or self.missing:
            return "incomplete"
        fixed = any(row["draft"] and row["agree"] is False for row in self.modules)
        return "fixed" if fixed else "ok"

    def as_json(self) -> dict[str, Any]:
        """The published form."""
        return {
            "checkpoint": self.checkpoint,
            "vllm": self.vllm,
            "draft": {"kind": self.kind, "layers": self.layers},
            "modules": self.modules,
            "missing": self.missing,
            "problems": self.problems,
            "verdict": self.verdict,
        }


def audit(
    checkpoint: str,
    *,
    draft: str | None = None,
    method: str | None = None,
    target_config: str | None = None,
    asked: Sequence[str] = (),
    ask_stock: Ask | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:
    """Audit a checkpoint's draft.

    Args:
        checkpoint: directory or hub id; the draft's own when `target_config` is given, else the target's.
        draft: the draft's checkpoint when it is not in `checkpoint`.
        method: the speculative method that will be asked for.
        target_config: directory or hub id whose config.json is the target's, when `checkpoint` is a draft alone.
        asked: runtime prefixes to answer for besides the draft's own modules.
        ask_stock: where stock's answers come from; a vLLM process of its own by default.
        progress: called with files done and files in all.

    Raises HeaderError or NoHeadersError for checkpoints that cannot be read.
    """
    of_target = read_config(target_config or checkpoint) if target_config or draft else None
    source = open_for_audit(checkpoint, draft, target_config, progress)
    prefixes = [p for p in source.resolver.draft_prefixes(method) if _kind_of(p, source.lookup(p))]
    kind = "separate" if of_target is not None else "embedded" if prefixes else "absent"
    result = Audit(draft or checkpoint, kind, source.resolver.layers())
    _check_layers(result, source)
    _check_method(result, source.checkpoint, method)
    used = _config_used(source.checkpoint.config, of_target, method)
    lookups = {prefix: source.lookup(prefix) for prefix in dict.fromkeys([*prefixes, *asked])}
    replies = _ask(result, lookups, used, of_target, source.checkpoint, ask_stock or stock.ask)
    for prefix, lookup in lookups.items():
        result.modules.append(_row(result, source, prefix, lookup, replies.get(prefix), _family(used)))
    result.missing = list(dict.fromkeys(result.missing))
    return result


def open_for_audit(
    checkpoint: str,
    draft: str | None = None,
    target_config: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Source:
    """Read the checkpoint that holds the draft; arguments as for `audit`."""
    of_target = read_config(target_config or checkpoint) if target_config or draft else None
    return source_of(read_checkpoint(draft or checkpoint, progress=progress), of_target)


def _kind_of(prefix: str, lookup: Lookup) -> str | None:
    """What stock is to be asked about: None for norms and bare parameters, which have no quantization method."""
    if not lookup.modules:
        return "experts" if prefix.endswith("experts") else "linear"
    if not lookup.roles.keys() & {"weight", "qweight", "weight_packed", "blocks"}:
        return None
    if all(len(tensor.shape) < 2 for tensor in lookup.roles.values()):
        return None
    last = prefix.rpartition(".")[2]
    named = {"experts": "experts", "lm_head": "head", "head": "head", "embed_tokens": "embedding", "embed": "embedding"}
    return named.get(last, "linear")


def _check_layers(result: Audit, source: Source) -> None:
    layout = source.layout
    if result.kind == "absent":
        if layout.drafts:
            result.problems.append(f"the config declares {layout.drafts} draft layers and the checkpoint holds none")
        return
    expected = range(layout.hidden, layout.hidden + layout.drafts)
    absent = [index for index in expected if index not in result.layers]
    if absent and result.layers:
        result.missing += [f"layers.{index}" for index in absent]
        result.problems.append(f"draft layers {absent} are declared in the config and not in the checkpoint")
    for problem in source.resolver.problems():
        result.problems.append(problem)
        result.incomplete = True


def _check_method(result: Audit, checkpoint: Checkpoint, method: str | None) -> None:
    """A DSpark draft and an MTP draft need each other's method never: their tensors tell them apart."""
    dspark = any(".markov_head." in f".{name}" for name in checkpoint.tensors)
    mtp = any(f".{part}." in name for name in checkpoint.modules for part in ("enorm", "hnorm")) or any(
        name.endswith((".enorm", ".hnorm")) for name in checkpoint.modules
    )
    if dspark and not mtp and method == "mtp":
        result.conflict = True
        result.problems.append(
            "the checkpoint holds a DSpark draft (markov_head, no enorm/hnorm) and the method asked for is mtp"
        )
    if mtp and not dspark and method == "dspark":
        result.conflict = True
        result.problems.append("the checkpoint holds an MTP draft (enorm/hnorm, no markov_head), not a DSpark one")


def _config_used(
    config: Mapping[str, Any], of_target: Mapping[str, Any] | None, method: str | None
) -> Mapping[str, Any]:
    """The config.json whose quantization stock builds the draft with."""
    names = {f"Eagle{name.removeprefix('Eagle')}" for name in config.get("architectures") or ()}
    if of_target is None or method == "draft_model" or not BUILT_WITH_TARGET_CONFIG & names:
        return config
    return of_target


def _family(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config") or text_config(config).get("quantization_config") or {}
    return str(quantization.get("quant_method", "")).replace("compressed_tensors", "compressed-tensors")


def _ask(
    result: Audit,
    lookups: Mapping[str, Lookup],
    config: Mapping[str, Any],
    of_target: Mapping[str, Any] | None,
    checkpoint: Checkpoint,
    ask_stock: Ask,
) -> dict[str, dict[str, Any]]:
    pairs = [(prefix, kind) for prefix, lookup in lookups.items() if (kind := _kind_of(prefix, lookup))]
    place = checkpoint.source if config is checkpoint.config else None
    (reply,) = ask_stock([stock.request(config, pairs, of_target, place)])
    result.vllm = reply["vllm"]
    if reply["error"]:
        result.problems.append(reply["error"])
        result.conflict = result.conflict or reply["vllm"] is not None
    answers: dict[str, dict[str, Any]] = reply["answers"]
    return answers


def _row(
    result: Audit, source: Source, prefix: str, lookup: Lookup, reply: dict[str, Any] | None, family: str
) -> dict[str, Any]:
    stored = lookup.stored
    known = Format(reply["format"]) if reply and reply["format"] else None
    failed = bool(reply and reply["error"] and known is None)
    decision = _decide(source, prefix, lookup, known, family, failed)
    if lookup.place.problem:
        result.problems.append(f"{prefix}: {lookup.place.problem}")
        result.incomplete = True
    if lookup.place.draft:
        result.missing += lookup.missing
        if decision.action is Action.STOP:
            result.conflict = True
            result.problems.append(f"{prefix}: {decision.reason}")
        elif stored.format is Format.UNKNOWN:
            result.problems.append(f"{prefix}: stored in a way drafttools does not know ({stored.note})")
    names = source.checkpoint.tensor_names
    return {
        "prefix": prefix,
        "draft": lookup.place.draft,
        "layer_index": lookup.place.index,
        "stored": str(stored.format),
        "dtype": stored.dtype,
        "stock": str(known) if known else None,
        "answer": str(decision.answer) if decision.answer else None,
        "agree": reads(known, stored) if known and stored.format.loadable else None,
        "tensors": [tensor for module in lookup.modules for tensor in names[module]],
    }


def _decide(source: Source, prefix: str, lookup: Lookup, known: Format | None, family: str, failed: bool) -> Decision:
    if not lookup.place.draft:
        return Decision(Action.KEEP, known or (lookup.stored.format if lookup.stored.format.loadable else None))
    return decide(
        lookup,
        known,
        routed_experts=prefix.endswith("experts"),
        trunk_nvfp4=source.trunk_nvfp4,
        family=family,
        stock_failed=failed,
    )


def compare_reports(source: Source, reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Hold what running workers report for their drafts against the headers; one sentence a contradiction.

    `reports` are drafttools' per-process reports. A layer whose format was recorded when it was built is judged by
    that, any other by its method's class where the class alone tells the format. Modules shared with the target keep
    the target's precision and are left out.
    """
    drafts = [(report, draft) for report in reports for draft in report.get("drafts", [])]
    if not drafts:
        return ["the reports name no draft model: nothing was loaded as one"]
    problems: list[str] = []
    for report, draft in drafts:
        where = f"worker rank {report.get('rank')} (pid {report.get('pid')})"
        for prefix, effective, method in _effective(draft):
            stored = source.lookup(prefix).stored
            if stored.format.loadable and not reads(effective, stored):
                problems.append(f"{where}: {prefix} runs {method}, the checkpoint holds {stored.format}")
        stored_dtypes, running = _float_dtypes(source), set(draft.get("dtypes", {})) & _SIXTEEN_BITS
        if len(stored_dtypes) == 1 and running and not stored_dtypes & running:
            problems.append(f"{where}: runs in {', '.join(running)}, the checkpoint holds {', '.join(stored_dtypes)}")
    return problems


_SIXTEEN_BITS = frozenset({"float16", "bfloat16"})
_TORCH_DTYPES = {"F16": "float16", "BF16": "bfloat16"}


def _float_dtypes(source: Source) -> set[str]:
    """16-bit float dtypes of the draft's unquantized modules."""
    stored = (source.lookup(prefix).stored for prefix in source.resolver.draft_prefixes())
    return {_TORCH_DTYPES[s.dtype] for s in stored if s.format is Format.UNQUANTIZED and s.dtype in _TORCH_DTYPES}


def _effective(draft: Mapping[str, Any]) -> Iterator[tuple[str, Format, str]]:
    """Runtime prefix, format read and method class of each layer a worker reports."""
    recorded = draft.get("details", {}).get("quantization", {})
    for prefix, layer in recorded.items():
        if layer["effective"]:
            yield prefix, Format(layer["effective"]), layer["method"]
    if recorded:
        return
    shared = draft.get("shared_with_target", [])
    for name, method in draft.get("quant_methods", {}).items():
        effective = read_class(method)
        if effective and not any(name == s or name.startswith(f"{s}.") for s in shared):
            yield _joined(draft.get("prefix", ""), name), effective, method


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
