"""Runtime module prefixes and checkpoint module names, resolved to each other.

vLLM builds the draft layers of a checkpoint at index `num_hidden_layers + i`, or under `mtp.layers.i`, while
checkpoints call the same layer `mtp.i`, `model.layers.{num_hidden_layers + i}`, ... (vLLM 0.33.0:
models/deepseek_v4/nvidia/mtp.py, models/qwen4_exp/nvidia/mtp.py, model_executor/models/qwen3_5_mtp.py,
model_executor/models/deepseek_mtp.py). A `Place` is the one name both sides map to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from drafttools.formats import Checkpoint

# Where configs declare the number of draft layers (vLLM 0.33.0, config/speculative.py, hf_config_override).
DRAFT_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "n_mtp_layers",
    "num_mtp_modules",
)
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")

# vLLM's fused linears and the checkpoint modules that fill them, in the spellings its models use.
FUSED: dict[str, tuple[tuple[str, ...], ...]] = {
    "qkv_proj": (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("wq", "wk", "wv")),
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("w2",),),
    "fused_wqa_wkv": (("wq_a", "wkv"),),
    "fused_wkv_wgate": (("wkv", "wgate"),),
    "fused_qkv_a_proj": (("q_a_proj", "kv_a_proj_with_mqa"),),
    "in_proj_qkvz": (("in_proj_qkv", "in_proj_z"),),
    "in_proj_ba": (("in_proj_b", "in_proj_a"),),
    "lm_head": (("head",), ("shared_head.head",)),
    "head": (("shared_head.head",), ("shared_head.output",)),  # of an MTP layer
    "embed_tokens": (("embed",),),
}

_LAYER = re.compile(
    r"(?:(?:draft_model|model|language_model)\.)*"
    r"(?P<kind>mtp\.layers|mtp_layers|mtp|layers)\.(?P<index>\d+)(?:\.(?P<tail>.+))?"
)
_MIDLAYER = re.compile(r"(?:(?:draft_model|model)\.)*midlayer\.(?P<tail>.+)")  # EAGLE-3's name for its one layer
_ROOT = re.compile(r"(?:(?:draft_model|model|language_model)\.)+")
_WRAPPER = re.compile(r"(?:mtp_block|transformer_layer)\.")  # the decoder layer inside an MTP layer
_EXPERTS = re.compile(r"(?P<stem>(?:.*\.)?experts)\.(?:routed_experts\.)?(?P<rest>.+)")


@dataclass(frozen=True)
class Place:
    """A module, whatever it is called: draft or not, runtime layer index (None outside layers), the rest."""

    draft: bool
    index: int | None
    tail: str
    problem: str = ""

    @property
    def name(self) -> str:
        """The canonical name; `Layout.place` maps it to this place again."""
        if self.index is not None:
            return f"layers.{self.index}.{self.tail}" if self.tail else f"layers.{self.index}"
        return f"mtp.{self.tail}" if self.draft else self.tail


@dataclass(frozen=True)
class Layout:
    """Where draft layers lie: `hidden` target layers, `drafts` draft layers after them.

    `separate` means that the checkpoint holds only the draft; its own layers are numbered from `first`.
    """

    hidden: int
    drafts: int
    separate: bool = False
    first: int = 0

    def place(self, prefix: str) -> Place:
        """Place a runtime prefix. Decides by the layer number itself, never by a substring or a pattern."""
        if prefix.startswith("draft_model."):  # vLLM's draft_model method: the draft's own numbering
            return self.place_stored(prefix)
        return self._place(prefix, absolute=True)

    def place_stored(self, module: str) -> Place:
        """Place a checkpoint module; a separate draft's numbering starts at `first`."""
        return self._place(module, absolute=not self.separate)

    def _place(self, name: str, absolute: bool) -> Place:
        if self.separate and (mid := _MIDLAYER.fullmatch(name)):
            return self._draft(0, mid["tail"])
        layer = _LAYER.fullmatch(name)
        if layer is None:
            outside = _ROOT.sub("", name, count=1) if _ROOT.match(name) else name
            mtp = outside.startswith("mtp.")
            return Place(mtp or self.separate, None, outside.removeprefix("mtp."))
        index, tail = int(layer["index"]), _WRAPPER.sub("", layer["tail"] or "", count=1)
        if layer["kind"] != "layers":
            # The checkpoint's number where it is one, else vLLM's, which counts on from the target's layers.
            return self._draft(index if index < self.drafts else index - self.hidden, tail, index)
        if not absolute:
            return self._draft(index - self.first, tail, index)
        if index < self.hidden:
            return Place(False, index, tail)
        return self._draft(index - self.hidden, tail, index)

    def _draft(self, number: int, tail: str, shown: int = 0) -> Place:
        if 0 <= number < self.drafts:
            return Place(True, self.hidden + number, tail)
        return Place(True, None, f"{shown}.{tail}", f"layer {shown} is outside the {self.drafts} draft layers declared")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model."""
    for key in TEXT_CONFIGS:
        nested = config.get(key)
        if isinstance(nested, dict) and "num_hidden_layers" in nested:
            return nested
    return config


def _integers(config: Mapping[str, Any], keys: Iterable[str]) -> list[int]:
    parts = (config, text_config(config))
    return [part[key] for part in parts for key in keys if type(part.get(key)) is int]


def layout_of(checkpoint: Checkpoint, target_config: Mapping[str, Any] | None = None) -> Layout:
    """Work out a checkpoint's layout; `target_config` is the target's config.json when the draft is separate.

    Without a declared number of draft layers the layers that are there count.
    """
    own_layers = max(_integers(checkpoint.config, ["num_hidden_layers"]), default=0)
    if target_config is not None:
        hidden = max(_integers(target_config, ["num_hidden_layers"]), default=0)
        numbers = [int(m["index"]) for name in checkpoint.modules if (m := _LAYER.fullmatch(name))]
        # A draft split off an MTP checkpoint keeps the numbers it had there.
        first = hidden if numbers and hidden and min(numbers) >= hidden else 0
        return Layout(hidden, max([1, own_layers, *(n - first + 1 for n in numbers)]), separate=True, first=first)
    declared = max(_integers(checkpoint.config, DRAFT_COUNTS), default=0)
    return Layout(own_layers, declared or _stored_drafts(checkpoint.modules, own_layers))


def _stored_drafts(modules: Iterable[str], hidden: int) -> int:
    found = 0
    for name in modules:
        if layer := _LAYER.fullmatch(name):
            index = int(layer["index"])
            found = max(found, index + 1 - (hidden if layer["kind"] == "layers" else 0))
    return found


@dataclass(frozen=True)
class Found:
    """What a runtime prefix is made of: its place, its checkpoint modules, and those that should be there."""

    place: Place
    modules: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass
class Resolver:
    """Finds the checkpoint modules behind runtime prefixes."""

    checkpoint: Checkpoint
    layout: Layout
    _by_place: dict[tuple[bool, int | None, str], str] = field(default_factory=dict, init=False)
    _experts: dict[tuple[bool, int | None, str], list[str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for module in self.checkpoint.modules:
            place = self.layout.place_stored(module)
            self._by_place.setdefault((place.draft, place.index, place.tail), module)
            if expert := _EXPERTS.fullmatch(place.tail):
                self._experts.setdefault((place.draft, place.index, expert["stem"]), []).append(module)

    def find(self, prefix: str, fused: Mapping[str, Iterable[str]] | None = None) -> Found:
        """Resolve a runtime prefix; `fused` is a config's packed_modules_mapping, asked before our own."""
        place = self.layout.place(prefix)
        if place.problem:
            return Found(place)
        key = (place.draft, place.index, place.tail.removesuffix(".routed_experts"))
        if experts := self._experts.get(key):
            return Found(place, tuple(experts), tuple(self._missing_experts(experts)))
        if module := self._by_place.get(key):
            return Found(place, (module,))
        stem, _, last = place.tail.rpartition(".")
        stem = f"{stem}." if stem else ""
        alternatives = [tuple(fused[last])] if fused and last in fused else []
        for shards in [*alternatives, *FUSED.get(last, ())]:
            names = {shard: self._by_place.get((place.draft, place.index, stem + shard)) for shard in shards}
            present = {shard: name for shard, name in names.items() if name}
            for shard, name in present.items():
                parent = name.removesuffix(shard)
                return Found(place, tuple(present.values()), tuple(parent + s for s in shards if s not in present))
        return Found(place)

    def _missing_experts(self, modules: list[str]) -> list[str]:
        """Expert weights that the other experts, or the config, say should be there."""
        shards: dict[str, set[int]] = {}
        stem = ""
        for module in modules:
            head, _, rest = module.rpartition("experts.")
            number, _, shard = rest.partition(".")
            if number.isdecimal():
                stem = f"{head}experts."
                shards.setdefault(shard, set()).add(int(number))
        if not shards:
            return []
        declared = max(_integers(self.checkpoint.config, EXPERT_COUNTS), default=0)
        count = max([declared, *(max(numbers) + 1 for numbers in shards.values())])
        return [
            f"{stem}{number}.{shard}"
            for shard, numbers in shards.items()
            for number in range(count)
            if number not in numbers
        ]

    def problems(self) -> list[str]:
        """One sentence for each draft layer in the checkpoint that the config does not declare."""
        return sorted({place.problem for place in map(self.layout.place_stored, self.checkpoint.modules)} - {""})

    def layers(self) -> list[int]:
        """Runtime indices of the draft layers that the checkpoint holds."""
        return sorted({index for draft, index, _ in self._by_place if draft and index is not None})

    def draft_prefixes(self, method: str | None = None) -> list[str]:
        """vLLM's prefix for each draft module: shards as one fused module, routed experts as one.

        `method` is the speculative method, which decides how vLLM numbers and roots the layers.
        """
        found: dict[str, None] = {}
        for (draft, index, tail), module in self._by_place.items():
            if draft:
                expert = _EXPERTS.fullmatch(tail)
                runtime_tail = expert["stem"] if expert else self._fused_name(tail)
                found[self._runtime_root(index, module, method) + runtime_tail] = None
        return list(found)

    def _runtime_root(self, index: int | None, module: str, method: str | None) -> str:
        """What vLLM's draft classes put before a module's own name (0.33.0; the files named above)."""
        draft_model = method == "draft_model" and self.layout.separate
        root = "draft_model.model." if draft_model else "model."
        if index is None:
            return root if self.layout.separate else "mtp."
        number = index - self.layout.hidden
        if self.layout.separate:
            return f"{root}layers.{number if draft_model else index}."
        if _LAYER.fullmatch(module)["kind"] == "mtp.layers":  # type: ignore[index]
            counts_on = str(text_config(self.checkpoint.config).get("model_type", "")).startswith("qwen4_exp")
            return f"mtp.layers.{index if counts_on else number}."
        return f"layers.{index}." if method == "dspark" else f"model.layers.{index}."

    def _fused_name(self, tail: str) -> str:
        """The module that a draft shard is fused into at runtime."""
        stem, _, last = tail.rpartition(".")
        stem = f"{stem}." if stem else ""
        if stem.endswith("shared_experts.") and last == "w2":  # DeepSeek-V4's mapper renames this one
            return stem + "down_proj"
        for name, alternatives in FUSED.items():
            for shards in alternatives:
                if len(shards) > 1 and last in shards and (stem, shards) in self._complete:
                    return stem + name
        return tail

    @cached_property
    def _complete(self) -> set[tuple[str, tuple[str, ...]]]:
        """Shards (with the stem before them) that stand side by side in some layer: they are fused in every layer."""
        by_layer: dict[tuple[bool, int | None, str], set[str]] = {}
        for draft, index, tail in self._by_place:
            stem, _, last = tail.rpartition(".")
            by_layer.setdefault((draft, index, f"{stem}." if stem else ""), set()).add(last)
        return {
            (stem, shards)
            for (_, _, stem), present in by_layer.items()
            for alternatives in FUSED.values()
            for shards in alternatives
            if present.issuperset(shards)
        }
