"""`mtp_expert_quantization` in vLLM's SpeculativeConfig: every way in, every copy, and the compile-cache key."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm")

import cloudpickle  # noqa: E402
from vllm.config import SpeculativeConfig  # noqa: E402
from vllm.config.utils import replace  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

from drafttools.patches import expert_option  # noqa: E402
from drafttools.patching import Applied, State  # noqa: E402
from drafttools.source import Tree  # noqa: E402

pytestmark = pytest.mark.vllm
OPTION = "mtp_expert_quantization"
MTP = {"method": "mtp", "num_speculative_tokens": 1}
NGRAM = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}
VALUES = [{}, {OPTION: None}, {OPTION: "fp8"}]
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek")
    (path / "config.json").write_text(json.dumps(DEEPSEEK))
    return str(path)


@pytest.fixture(scope="module")
def arguments(model):
    """What EngineArgs adds to --speculative-config."""
    config = EngineArgs(model=model, skip_tokenizer_init=True).create_engine_config()
    return {"target_model_config": config.model_config, "target_parallel_config": config.parallel_config}


@pytest.fixture
def patched():
    applied = Applied(expert_option.PATCH)
    applied.try_apply(Tree(Path(vllm.__file__).parent))
    assert applied.state is State.APPLIED, applied.reason
    yield
    assert applied.undo() == []


@pytest.mark.parametrize("value", VALUES)
def test_engine_arguments(patched, model, value):
    args = EngineArgs(model=model, skip_tokenizer_init=True, speculative_config=MTP | value)
    config = args.create_engine_config().speculative_config
    assert config.method == "mtp"
    assert getattr(config, OPTION) == value.get(OPTION)


def test_json_on_the_command_line(patched, model):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    text = json.dumps(MTP | {OPTION: "fp8"})
    args = EngineArgs.from_cli_args(
        parser.parse_args(["--model", model, "--skip-tokenizer-init", "--speculative-config", text])
    )
    assert getattr(args.create_engine_config().speculative_config, OPTION) == "fp8"


@pytest.mark.parametrize("value", ["FP8", "fp4", "", "null", 8, True, ["fp8"]])
def test_other_values_are_refused(patched, arguments, value):
    with pytest.raises(ValueError, match=r'must be null or "fp8"'):
        SpeculativeConfig(**MTP, **{OPTION: value}, **arguments)


def test_other_methods_are_refused(patched, arguments):
    with pytest.raises(ValueError, match='needs "method": "mtp"'):
        SpeculativeConfig(**NGRAM, **{OPTION: "fp8"}, **arguments)
    assert getattr(SpeculativeConfig(**NGRAM, **{OPTION: None}, **arguments), OPTION) is None


def test_other_unknown_keys_are_still_refused(patched, arguments):
    with pytest.raises(ValueError, match="mtp_expert_quantisation"):
        SpeculativeConfig(**MTP, mtp_expert_quantisation="fp8", **arguments)


# stock sets these two to 0 for MTP, which its own validation refuses on the way back in
LOOKUP = {"prompt_lookup_max": None, "prompt_lookup_min": None}
COPIES = {
    "pickle": lambda config: pickle.loads(pickle.dumps(config)),
    "cloudpickle": lambda config: cloudpickle.loads(cloudpickle.dumps(config)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "replace": lambda config: replace(config, **LOOKUP),
    "dataclasses.replace": lambda config: dataclasses.replace(config, **LOOKUP),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=list(COPIES))
@pytest.mark.parametrize("value", VALUES)
def test_copies_keep_it(patched, arguments, make, value):
    config = SpeculativeConfig(**MTP, **value, **arguments)
    made = make(config)
    assert made is not config
    assert getattr(made, OPTION) == value.get(OPTION)
    assert made.compute_hash() == config.compute_hash()


def test_replace_can_change_it(patched, arguments):
    config = SpeculativeConfig(**MTP, **arguments)
    assert getattr(replace(config, **LOOKUP, **{OPTION: "fp8"}), OPTION) == "fp8"
    with pytest.raises(ValueError, match=r'must be null or "fp8"'):
        replace(config, **LOOKUP, **{OPTION: "int8"})


def test_a_configuration_from_before_the_patch_reads_unset(arguments):
    saved = pickle.dumps(SpeculativeConfig(**MTP, **arguments))
    applied = Applied(expert_option.PATCH)
    applied.try_apply(Tree(Path(vllm.__file__).parent))
    try:
        assert getattr(pickle.loads(saved), OPTION) is None
    finally:
        applied.undo()


def keys(arguments, method, values):
    return [SpeculativeConfig(**method, **value, **arguments).compute_hash() for value in values]


def test_it_joins_the_key_of_mtp_set_and_unset_and_no_other(arguments, request):
    stock_mtp, stock_ngram = keys(arguments, MTP, [{}])[0], keys(arguments, NGRAM, [{}])[0]
    request.getfixturevalue("patched")
    unset, null, fp8 = keys(arguments, MTP, VALUES)
    assert unset == null
    assert len({stock_mtp, unset, fp8}) == 3
    assert keys(arguments, NGRAM, [{}]) == [stock_ngram]


def test_the_whole_configuration_has_a_key_for_each(patched, model):
    def key(value):
        args = EngineArgs(model=model, skip_tokenizer_init=True, speculative_config=MTP | value)
        return args.create_engine_config().compute_hash()

    assert key({}) == key({OPTION: None}) != key({OPTION: "fp8"})


def test_undone_without_a_trace(arguments):
    before = dict(vars(SpeculativeConfig))
    applied = Applied(expert_option.PATCH)
    applied.try_apply(Tree(Path(vllm.__file__).parent))
    assert vars(SpeculativeConfig) != before
    assert applied.undo() == []
    assert dict(vars(SpeculativeConfig)) == before
    with pytest.raises(ValueError, match=OPTION):
        SpeculativeConfig(**MTP, **{OPTION: "fp8"}, **arguments)
