"""For any layout: names resolve to one place, the place resolves to itself, and no target layer is a draft's."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from drafttools.formats import Checkpoint, Tensor
from drafttools.names import Layout, Resolver

ROOTS = ("model.layers", "layers", "language_model.model.layers", "model.language_model.layers")
MTP_ROOTS = ("mtp", "mtp.layers", "model.mtp", "model.mtp.layers")
TAILS = st.sampled_from(["mlp.experts", "e_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "shared_head.head"])
LAYOUTS = st.integers(1, 120).flatmap(lambda hidden: st.builds(Layout, st.just(hidden), st.integers(0, min(4, hidden))))
INNER = st.sampled_from(["", "mtp_block."])


@given(LAYOUTS, st.integers(0, 300), st.sampled_from(ROOTS), INNER, TAILS)
@settings(max_examples=300, deadline=None)
def test_absolute_numbers(layout: Layout, number: int, root: str, inner: str, tail: str) -> None:
    place = layout.place(f"{root}.{number}.{inner}{tail}")
    assert place.draft is (number >= layout.hidden)  # from the number itself, whatever else the name says
    assert layout.place(place.name) == place
    in_range = number < layout.hidden + layout.drafts
    assert (place.index, bool(place.problem)) == ((number, False) if in_range else (None, True))


@given(LAYOUTS, st.integers(0, 300), st.sampled_from(MTP_ROOTS), INNER, TAILS)
@settings(max_examples=300, deadline=None)
def test_mtp_numbers(layout: Layout, number: int, root: str, inner: str, tail: str) -> None:
    place = layout.place(f"{root}.{number}.{inner}{tail}")
    assert place.draft
    assert layout.place(place.name) == place
    if number < layout.drafts:
        assert place == layout.place(f"model.layers.{layout.hidden + number}.{tail}")
        assert place == layout.place(f"mtp.layers.{layout.hidden + number}.{tail}")  # vLLM's own number, counted once


NAMES = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"], "o_proj": ["o_proj"]}


@given(
    LAYOUTS.filter(lambda layout: layout.drafts > 0),
    st.sampled_from(ROOTS),
    st.sampled_from(MTP_ROOTS + ROOTS),
    st.lists(st.sampled_from(sorted(NAMES)), min_size=1, unique=True),
    st.sampled_from(["mtp", "dspark"]),
)
@settings(max_examples=100, deadline=None)
def test_prefixes_and_modules_round_trip(
    layout: Layout, trunk_root: str, draft_root: str, fused: list[str], method: str
) -> None:
    """Every draft module is behind exactly one runtime prefix, and every prefix finds modules of its own layer."""
    numbered = layout.hidden if draft_root in ROOTS else 0
    modules = [
        f"{draft_root}.{numbered + d}.a.{shard}" for d in range(layout.drafts) for f in fused for shard in NAMES[f]
    ]
    trunk = [f"{trunk_root}.{t}.a.{shard}" for t in range(min(3, layout.hidden)) for f in fused for shard in NAMES[f]]
    tensors = {f"{name}.weight": Tensor("BF16", (2, 2), "f") for name in modules + trunk}
    resolver = Resolver(Checkpoint("memory", {}, tensors), layout)
    prefixes = resolver.draft_prefixes(method)
    found = [resolver.find(prefix) for prefix in prefixes]
    assert sorted(m for f in found for m in f.modules) == sorted(modules)
    assert all(f.place.draft and not f.missing for f in found)
    assert len(prefixes) == layout.drafts * len(fused)
    assert resolver.layers() == list(range(layout.hidden, layout.hidden + layout.drafts))
