"""A quantized target with a BF16 MTP layer beside it, served by the real engine with and without drafttools."""

from __future__ import annotations

import pytest

from drafttools import attest
from drafttools.audit import compare_reports, open_for_audit
from drafttools.formats import Format
from drafttools.routing import Action
from tests.engine import harness, quantized_mtp

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT_ENDS = [quantized_mtp.successor((7 * i + 3 * (4 + i)) % 250 + 1) for i in range(4)]  # as tests.engine.serve asks
DRAFTS, ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, harness.Served]:
    """The same int8 checkpoint served by stock and under drafttools."""
    directory = tmp_path_factory.mktemp("routing")
    model = str(quantized_mtp.write(directory / "model", "compressed-tensors"))
    options = {
        "model": model,
        "enforce_eager": True,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    arms = {"stock": ("off", ()), "drafttools": ("enforce", ("--import-drafttools",))}
    return {
        arm: harness.engine(directory / arm, options, target_layers=2, flags=flags, DRAFTTOOLS=mode)
        for arm, (mode, flags) in arms.items()
    } | {"model": model}  # type: ignore[return-value]


def test_outputs_are_the_target_s_own(served: dict[str, harness.Served]) -> None:
    assert served["stock"].tokens == served["drafttools"].tokens
    for first, tokens in zip(PROMPT_ENDS, served["stock"].tokens, strict=True):
        assert tokens[0] == first
        assert tokens[1:] == [quantized_mtp.successor(token) for token in tokens[:-1]]


def test_draft_is_accepted_only_as_shipped(served: dict[str, harness.Served]) -> None:
    """Stock reads BF16 as int8 without a word; as shipped this draft is always right.

    Stock's int8 scales are never loaded and hold whatever memory did, so a chance hit is not excluded.
    """
    stock, ours = served["stock"].metrics, served["drafttools"].metrics
    assert stock[DRAFTS] > 40
    assert stock[ACCEPTED] < 0.05 * stock[DRAFTS]
    assert ours[ACCEPTED] == ours[DRAFTS] > 40


def test_report_and_audit_agree(served: dict[str, harness.Served]) -> None:
    """Each of the four linears was replaced in the worker, and its report holds against the headers."""
    reports = attest.read(served["drafttools"].reports)
    (draft,) = [draft for report in reports for draft in report["drafts"]]
    layers = draft["details"]["quantization"]
    assert sorted(prefix.removeprefix("model.layers.2.") for prefix in layers) == [
        "mlp.down_proj",
        "mlp.gate_up_proj",
        "self_attn.o_proj",
        "self_attn.qkv_proj",
    ]
    assert {(layer["stock"], layer["effective"], layer["action"]) for layer in layers.values()} == {
        ("int8_channel", "unquantized", Action.REPLACE)
    }
    source = open_for_audit(str(served["model"]))
    assert {source.lookup(prefix).stored.format for prefix in layers} == {Format.UNQUANTIZED}
    assert compare_reports(source, reports) == []
