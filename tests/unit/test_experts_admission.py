"""Admission to FP8 experts: every condition alone and together, on simulated platforms."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from drafttools.errors import DraftToolsError
from drafttools.experts.admission import UNSUPPORTED, Facts, admit, facts_of, overridden, unmet

GOOD = Facts(
    platform="cuda",
    capability=(7, 0),
    dtype="float16",
    architecture="Qwen4ExpMTP",
    parallel=(),
    pipeline_parallel_size=1,
    rejection_sampling="standard",
    hidden_size=2560,
    local_intermediate=160,
    no_kernel="",
    route="online",
)
# condition -> (facts that break it, what the error says, lifted by the override)
TABLE = {
    "rocm": ({"platform": "rocm", "capability": None}, "must be CUDA, not rocm", True),
    "cpu": ({"platform": "cpu", "capability": None}, "must be CUDA, not cpu", True),
    "sm75": ({"capability": (7, 5)}, "capability must be 7.0, not 7.5", True),
    "sm60": ({"capability": (6, 0)}, "capability must be 7.0, not 6.0", True),
    "sm90": ({"capability": (9, 0)}, "capability must be 7.0, not 9.0", True),
    "no capability": ({"capability": None}, "capability must be 7.0, not unknown", True),
    "bf16": ({"dtype": "bfloat16"}, "dtype must be float16, not bfloat16", True),
    "architecture": ({"architecture": "DeepSeekMTPModel"}, "must be Qwen4ExpMTP, not DeepSeekMTPModel", True),
    "no architecture": ({"architecture": ""}, "must be Qwen4ExpMTP, not unknown", True),
    "kernel": ({"no_kernel": "the kernel is not built"}, "the kernel is not built", False),
    "ep": ({"parallel": ("enable_expert_parallel",)}, "not enable_expert_parallel", False),
    "dp": ({"parallel": ("data_parallel_size=2",)}, "not data_parallel_size=2", False),
    "pp": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 needs experts that are FP8", False),
    "synthetic": ({"rejection_sampling": "synthetic"}, "must be standard, not synthetic", False),
    "block": ({"rejection_sampling": "block"}, "must be standard, not block", False),
    "hidden": ({"hidden_size": 2624}, "hidden size 2624 is not a multiple of 128", False),
    "width": ({"local_intermediate": 24}, "width 24 of a rank is not a multiple of 16", False),
}

PAIRS = [(a, b) for a, b in itertools.combinations(TABLE, 2) if not TABLE[a][0].keys() & TABLE[b][0].keys()]


def test_the_supported_configuration():
    assert unmet(GOOD) == []
    admit(GOOD, "layer", override=False)


@pytest.mark.parametrize("name", TABLE)
def test_each_condition_alone(name):
    broken, words, lifted = TABLE[name]
    facts = replace(GOOD, **broken)
    assert [words in phrase for phrase in unmet(facts)] == [True]
    assert (unmet(facts, override=True) == []) is lifted
    with pytest.raises(DraftToolsError, match="cannot keep the experts of layer in FP8") as error:
        admit(facts, "layer", override=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_conditions_in_pairs(a, b):
    (first, first_words, _), (second, second_words, _) = TABLE[a], TABLE[b]
    phrases = unmet(replace(GOOD, **first, **second))
    assert len(phrases) == 2
    assert any(first_words in phrase for phrase in phrases)
    assert any(second_words in phrase for phrase in phrases)


def test_all_together_are_one_error():
    broken = {}
    names = ("rocm", "bf16", "architecture", "kernel", "ep", "pp", "synthetic", "hidden", "width")
    for name in names:
        broken |= TABLE[name][0]
    with pytest.raises(DraftToolsError) as error:
        admit(replace(GOOD, **broken), "layer", override=False)
    for name in names:
        assert TABLE[name][1] in str(error.value)


def test_pipeline_parallel_is_allowed_for_experts_stored_as_fp8():
    assert unmet(replace(GOOD, pipeline_parallel_size=4, route="native")) == []


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("", False), ("0", False), ("true", False)])
def test_override_variable(value, expected):
    assert overridden({UNSUPPORTED: value}) is expected
    assert overridden({}) is False


# What is read of vLLM


def vllm_config(**parallel):
    sizes = {
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    draft = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen4ExpMTP"]))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | parallel),
        speculative_config=SimpleNamespace(draft_model_config=draft, rejection_sample_method="standard"),
    )


def moe_config(use_ep=False, sequence_parallel=False):
    return SimpleNamespace(
        in_dtype="torch.float16",
        hidden_dim=2560,
        intermediate_size_per_partition=160,
        moe_parallel_config=SimpleNamespace(use_ep=use_ep, is_sequence_parallel=sequence_parallel),
    )


def platform(name, capability=None):
    answers = {f"is_{other}": mock.Mock(return_value=other == name) for other in ("cuda", "rocm", "cpu", "xpu", "tpu")}
    return SimpleNamespace(**answers, get_device_capability=mock.Mock(return_value=capability))


def read(simulated, config=None, moe=None):
    pytest.importorskip("vllm")
    with mock.patch("vllm.platforms._current_platform", simulated):
        return facts_of(config or vllm_config(), moe or moe_config(), "online", no_kernel="")


V100 = SimpleNamespace(major=7, minor=0)


@pytest.mark.vllm
def test_cuda_facts():
    assert read(platform("cuda", V100)) == GOOD


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["rocm", "cpu", "xpu"])
def test_a_capability_is_read_on_cuda_only(name):
    facts = read(platform(name, V100))
    assert (facts.platform, facts.capability) == (name, None)
    assert len(unmet(facts)) == 1


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("config", "moe", "said"),
    [
        (vllm_config(enable_expert_parallel=True), None, "enable_expert_parallel"),
        (None, moe_config(use_ep=True), "enable_expert_parallel"),
        (vllm_config(enable_eplb=True), None, "enable_eplb"),
        (vllm_config(data_parallel_size=2), None, "data_parallel_size=2"),
        (vllm_config(prefill_context_parallel_size=2), None, "prefill_context_parallel_size=2"),
        (None, moe_config(sequence_parallel=True), "sequence-parallel experts"),
    ],
)
def test_what_is_not_tensor_parallel(config, moe, said):
    assert read(platform("cuda", V100), config, moe).parallel == (said,)
