"""The engines to run on a GPU, and what their outcomes must show."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.bootstrap import median_interval
from tests.engine.effect.acceptance import acceptance_length as acceptance_interval
from tests.engine.effect.acceptance import difference
from tests.engine.effect.arms import CHECKPOINTS
from tests.gpu.engines import Engine, Outcome
from tests.gpu.shapes import EXPERTS, EXPERTS_HIDDEN, WIDTH, WRONG_EVERY, successor

PROMPTS = [[(7 * i + 3 * j) % 250 + 1 for j in range(5 + i)] for i in range(4)]
QUESTION = {"prompts": PROMPTS, "max_tokens": 32, "one_by_one": True}
TURN = {"prompts": [*PROMPTS, *PROMPTS], "max_tokens": 128}  # short, so that both turns of a pair meet the same machine
TURNS = 150
WARM_UP = 5  # turns left out of the figures
LEAST_RATIO = 0.995
WIDEST = 0.02  # of the median's 95 % interval; wider than that it tells nothing about LEAST_RATIO

EAGLE = {"method": "eagle", "model": "llama_eagle", "num_speculative_tokens": 2}
LARGE_EAGLE = {**EAGLE, "model": "large_eagle"}
DRAFT_MODEL = {"method": "draft_model", "model": "qwen3_draft", "num_speculative_tokens": 2}
DSPARK = {"method": "dspark", "model": "qwen3_dspark", "num_speculative_tokens": 2}
MTP = {"method": "mtp", "num_speculative_tokens": 2}
FP8_MTP = {**MTP, "mtp_expert_quantization": "fp8"}

RUNNERS = {"v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "v2": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}
GRAPHS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "graphs": ({"compilation_config": {"max_cudagraph_capture_size": 32}}, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}),
    "breakable": ({"compilation_config": {"max_cudagraph_capture_size": 32}}, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
    "eager": ({"enforce_eager": True}, {}),
}

# method, target, speculative_config, runner, graphs, kinds of graph that must have been captured for the draft
SCOPE: list[tuple[str, str, dict[str, Any], str, str, tuple[str, ...]]] = [
    ("eagle", "llama", EAGLE, "v2", "graphs", ("full",)),
    ("eagle", "llama", EAGLE, "v2", "breakable", ("breakable",)),
    ("eagle", "llama", EAGLE, "v2", "eager", ()),
    ("eagle", "llama", EAGLE, "v1", "graphs", ("piecewise",)),
    ("eagle", "llama", EAGLE, "v1", "breakable", ("breakable",)),
    ("mtp", "deepseek", MTP, "v2", "graphs", ("full",)),
    ("mtp", "deepseek", MTP, "v2", "breakable", ("breakable",)),
    ("mtp", "deepseek", MTP, "v2", "eager", ()),
    ("mtp", "deepseek", MTP, "v1", "graphs", ("piecewise",)),
    ("mtp", "deepseek", MTP, "v1", "breakable", ("breakable",)),
    ("draft_model", "qwen3", DRAFT_MODEL, "v2", "graphs", ()),
    ("draft_model", "qwen3", DRAFT_MODEL, "v1", "graphs", ("piecewise",)),
    ("dspark", "qwen3", DSPARK, "v2", "graphs", ("full",)),
    ("dspark", "qwen3", DSPARK, "v2", "eager", ()),
]
DRAFT_CLASSES = {
    "eagle": "EagleLlamaForCausalLM",
    "mtp": "DeepSeekMTP",
    "draft_model": "Qwen3ForCausalLM",
    "dspark": "Qwen3DSparkForCausalLM",
}


COST_PAIRS = ("cost-a", "cost-b")


def scope_name(method: str, runner: str, graphs: str, arm: str) -> str:
    """The name of a scope engine."""
    return f"{method}-{runner}-{graphs}-{arm}"


def _scope_engines() -> list[Engine]:
    found = []
    for method, model, speculative, runner, graphs, _ in SCOPE:
        options, environ = GRAPHS[graphs]
        for shim in (False, True) if graphs != "eager" else (True,):
            found.append(
                Engine(
                    scope_name(method, runner, graphs, "shim" if shim else "stock"),
                    model,
                    speculative,
                    shim=shim,
                    probe=True,
                    options=options,
                    environ={**RUNNERS[runner], **environ},
                )
            )
    return found


def _routing_engines() -> list[Engine]:
    """4-bit experts, read by vLLM's DeepSeek-V4 quantization config; Marlin is the Hopper kernel for both formats."""
    options = {**GRAPHS["graphs"][0], "quantization": "deepseek_v4_fp8", "moe_backend": "marlin"}
    environ = {**RUNNERS["v2"], "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}
    return [
        Engine(f"routing-{model}-{arm}", model, MTP, shim=arm == "shim", options=options, environ=environ)
        for model in ("mxfp4", "mixed")
        for arm in ("stock", "shim")
    ]


def _expert_engines() -> list[Engine]:
    """FP16 against FP8 draft experts, breakable graphs on: GLM-4's MTP class is not compiled."""
    options = {**GRAPHS["graphs"][0], "dtype": "float16"}
    environ = {**RUNNERS["v2"], "VLLM_USE_BREAKABLE_CUDAGRAPH": "1", "DRAFTTOOLS_FP8_EXPERTS_UNSUPPORTED": "1"}
    arms = [
        ("experts-fp16-stock", "experts_fp16", MTP, False),
        ("experts-fp16-shim", "experts_fp16", MTP, True),
        ("experts-fp8-online", "experts_fp16", FP8_MTP, True),
        ("experts-fp8-native", "experts_fp8", FP8_MTP, True),
        ("experts-native-stock", "experts_fp8", MTP, False),
    ]
    return [
        Engine(name, model, spec, shim=shim, options=options, environ=environ, takes_turns="experts")
        for name, model, spec, shim in arms
    ]


def _cost_engines() -> list[Engine]:
    """The default runner and process layout, without the probe; pairs, since two processes differ by chance.

    The weights are random and as many as keep the GPU busy: an engine that waits for its host varies by a tenth.
    """
    options = {**GRAPHS["graphs"][0], "load_format": "dummy", "gpu_memory_utilization": 0.2}
    return [
        Engine(name, "large", LARGE_EAGLE, shim="shim" in name, options=options, takes_turns=pair, in_process=False)
        for pair in COST_PAIRS
        for name in (f"{pair}-stock", f"{pair}-shim")
    ]


LOSSY = {"VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}
TWO_GPUS = {
    **GRAPHS["graphs"][0],
    "tensor_parallel_size": 2,
    "worker_extension_cls": "tests.gpu.all_reduces.AllReduces",
}
LANGUAGE = {"prompts": "language", "max_tokens": 48}


def _two_gpu_engines() -> list[Engine]:
    """Lossy all-reduces at TP2 on both runners, and what they cost a draft that was trained apart from its target."""
    found = []
    for runner, environ in RUNNERS.items():
        for arm in ("stock", "shim"):
            name, settings = f"tp2-{runner}-{arm}", {**environ, **LOSSY}
            found.append(
                Engine(name, "llama", EAGLE, shim=arm == "shim", options=TWO_GPUS, environ=settings, in_process=False)
            )
    draft = {
        "method": "draft_model",
        "model": str(CHECKPOINTS / "draft"),
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 2,
    }
    options = {**TWO_GPUS, "max_model_len": 112, "per_request_spec_decode_metrics": "summary"}
    for name, environ in (("tp2-exact", {}), ("tp2-lossy", LOSSY), ("tp2-lossy-shim", LOSSY)):
        found.append(
            Engine(
                name,
                str(CHECKPOINTS / "target"),
                draft,
                shim=name.endswith("shim"),
                options=options,
                environ=environ,
                in_process=False,
                question=LANGUAGE,
            )
        )
    return found


ENGINES: list[Engine] = [
    *_cost_engines(),
    *_expert_engines(),
    *_routing_engines(),
    *_scope_engines(),
    *_two_gpu_engines(),
]

NOT_COVERED = [
    "A whole DeepSeek-V4 model: its residual kernels on NVIDIA (vllm/model_executor/kernels/mhc/tilelang.py) are "
    "TileLang ones. The routing cases put GLM-4's layers around the rest: vLLM's DeepSeek-V4 quantization config, its "
    "expert loader and its 4-bit expert kernels. What DeepSeek-V4's own classes rename while loading is not run.",
    "FlashInfer, DeepGEMM and FlashAttention 2: not on the machine, so VLLM_USE_FLASHINFER_SAMPLER=0 and "
    "VLLM_USE_DEEP_GEMM=0 in every engine. Attention ran FlashAttention 3, 4-bit experts ran Marlin.",
    "Qwen4Exp: the FP8 expert cases use GLM-4's MTP class, let in by DRAFTTOOLS_FP8_EXPERTS_UNSUPPORTED=1.",
]


# --- figures ---


def acceptance_length(answers: list[dict[str, Any]]) -> float:
    """Tokens a verification step yields: 1 + accepted / drafts, over all answers."""
    drafts = sum(answer["metrics"].get("vllm:spec_decode_num_drafts", 0) for answer in answers)
    accepted = sum(answer["metrics"].get("vllm:spec_decode_num_accepted_tokens", 0) for answer in answers)
    return 1 + accepted / drafts if drafts else 0.0


def expected_tokens(prompts: list[list[int]], count: int) -> list[list[int]]:
    """What the constructed target says after each prompt."""
    outputs = []
    for prompt in prompts:
        token, output = prompt[-1], []
        for _ in range(count):
            token = successor(token)
            output.append(token)
        outputs.append(output)
    return outputs


def rates(outcome: Outcome) -> list[float]:
    """Output tokens a second in each turn after the warm-up."""
    turns = outcome.answers[1 + WARM_UP :]
    return [turn["count"] / turn["seconds"] for turn in turns]


def paired_ratios(numerator: Outcome, denominator: Outcome) -> list[float]:
    """Quotients of the rates of the same turn."""
    return [a / b for a, b in zip(rates(numerator), rates(denominator), strict=False)]


def spread(values: list[float]) -> str:
    """Median, its 95 % bootstrap interval and number, as text."""
    if len(values) < 4:
        return "too few turns"
    low, high = median_interval(values)
    return f"median {statistics.median(values):.4f} [{low:.4f}, {high:.4f}], {len(values)} turns"


# --- checks ---

Outcomes = dict[str, Outcome]
Verdict = tuple[bool, str]


@dataclass(frozen=True)
class Check:
    """A statement about outcomes. `engines` are the ones it needs; without an answer of theirs it was not run."""

    name: str
    engines: tuple[str, ...]
    judge: Callable[..., Verdict]

    def verdict(self, outcomes: Outcomes) -> tuple[str, str]:
        """`holds`, `fails` or `not run`, and what was seen."""
        for name in self.engines:
            outcome = outcomes.get(name)
            if outcome is None or outcome.error or not outcome.answers:
                return "not run", f"{name}: {outcome.error if outcome else 'not among the engines'}"
        good, detail = self.judge(*(outcomes[name] for name in self.engines))
        return "holds" if good else "fails", detail


def in_scope(outcome: Outcome) -> Verdict:
    """At run time, at capture and on the device: every draft call in scope, no target call."""
    counts = outcome.answers[0]["probe"]
    parts, good = [], bool(counts)
    for kind, seen in counts.items():
        wrong = seen["draft_out"] or seen["target_in"]
        missing = kind != "captured" and not (seen["draft_in"] and seen["target_out"])
        good = good and not wrong and not missing
        parts.append(f"{kind}: {', '.join(f'{name} {number}' for name, number in seen.items())}")
    return good, "; ".join(parts) or "the probe counted nothing"


def out_of_scope(outcome: Outcome) -> Verdict:
    """The probe can tell: without the shim no call is in scope."""
    counts = outcome.answers[0]["probe"]
    good = bool(counts) and all(not seen["draft_in"] and not seen["target_in"] for seen in counts.values())
    return good and counts["host"]["draft_out"] > 0, f"host {counts.get('host')}, device {counts.get('device')}"


def replayed_in_scope(outcome: Outcome) -> Verdict:
    """While serving, the device ran draft kernels that the host did not call: replays, with the scope frozen in."""
    before, after = outcome.answers[0]["probe_before"], outcome.answers[0]["probe"]
    grown = {k: {n: after[k][n] - before[k][n] for n in after[k]} for k in ("host", "device")}
    draft, target = (grown["device"][n] - grown["host"][n] for n in ("draft_in", "target_out"))
    good = draft > 0 and target > 0 and not grown["device"]["draft_out"] and not grown["device"]["target_in"]
    return good, f"replayed while serving: draft in scope {draft}, target out of scope {target}"


def captured(kinds: tuple[str, ...]) -> Callable[[Outcome], Verdict]:
    """The report counts graphs of these kinds captured for the draft."""

    def judge(outcome: Outcome) -> Verdict:
        (draft,) = (draft for report in outcome.reports for draft in report["drafts"])
        return all(draft["captures"][kind] > 0 for kind in kinds), f"captures {draft['captures']}"

    return judge


def reported(draft_class: str, workers: int = 1) -> Callable[[Outcome], Verdict]:
    """`status` exits 0 and every worker has a draft of the class expected."""

    def judge(outcome: Outcome) -> Verdict:
        classes = [draft["class"] for report in outcome.reports for draft in report["drafts"]]
        lines = outcome.status_text.strip().splitlines() or [""]
        return outcome.status == 0 and classes == [
            draft_class
        ] * workers, f"exit {outcome.status}, {classes}; {lines[-1]}"

    return judge


def right_tokens(*outcomes: Outcome) -> Verdict:
    """All engines say what the construction makes the target say."""
    want = expected_tokens(PROMPTS, QUESTION["max_tokens"])
    wrong = [sum(a != b for a, b in zip(o.answers[0]["tokens"], want, strict=True)) for o in outcomes]
    return not any(wrong), f"outputs that differ: {wrong} of {len(want)}"


def same_acceptance(*outcomes: Outcome) -> Verdict:
    """The same acceptance length, and one that a draft wrong after each fourth token can have."""
    lengths = [acceptance_length(outcome.answers[:1]) for outcome in outcomes]
    good = max(lengths) - min(lengths) < 0.02 and 1.5 < lengths[0] < 3 - 1 / WRONG_EVERY
    return good, "acceptance length " + ", ".join(f"{length:.3f}" for length in lengths)


def nothing_accepted(outcome: Outcome) -> Verdict:
    """Stock misreads the draft's experts."""
    length = acceptance_length(outcome.answers[:1])
    return length < 1.05, f"acceptance length {length:.3f}"


def rerouted(outcome: Outcome) -> Verdict:
    """The report names the experts' format in the checkpoint and the method that was put in."""
    layers = {
        prefix: layer
        for report in outcome.reports
        for draft in report["drafts"]
        for prefix, layer in draft["details"].get("quantization", {}).items()
        if prefix.endswith("experts")
    }
    good = bool(layers) and all(x["action"] == "replace" and x["effective"] == "mxfp4" for x in layers.values())
    return good, "; ".join(f"{p}: stored {x['stored']}, stock {x['stock']}, {x['method']}" for p, x in layers.items())


def less_memory(fp16: Outcome, fp8: Outcome) -> Verdict:
    """FP8 experts of one draft layer save about half of FP16's, on idle engines with the same KV cache."""
    before, after = fp16.ready["memory"], fp8.ready["memory"]
    experts = EXPERTS * 3 * EXPERTS_HIDDEN * WIDTH * 2
    saved = before - after
    detail = (
        f"idle {before / 2**20:.1f} MiB -> {after / 2**20:.1f} MiB, saved {saved / 2**20:.1f} of {experts / 2**20:.0f}"
    )
    return 0.45 * experts < saved < 0.55 * experts, detail


def same_memory(stock: Outcome, shim: Outcome) -> Verdict:
    """Experts that are FP8 in the checkpoint take no more than stock's FP8 experts."""
    before, after = stock.ready["memory"], shim.ready["memory"]
    return after <= 1.02 * before, f"idle {before / 2**20:.1f} MiB stock, {after / 2**20:.1f} MiB with the shim"


def draft_is_lossy(outcome: Outcome) -> Verdict:
    """Without the shim every all-reduce takes the lossy path, the draft's too; on the device, replays counted."""
    counts = outcome.answers[0]["all_reduces"]
    good = len(counts) == 2 and all(
        _only(rank["device"][place], "quick") for rank in counts for place in rank["device"]
    )
    return good, f"rank 0: {_by_path(counts[0])}" if counts else "no counts"


def draft_is_exact(outcome: Outcome) -> Verdict:
    """With the shim no all-reduce of the draft takes the lossy path, every one of the target still does."""
    counts = outcome.answers[0]["all_reduces"]
    good = len(counts) == 2
    for rank in counts:
        draft = rank["device"]["draft"]
        good = good and _only(rank["device"]["target"], "quick") and draft["quick"] == 0 and sum(draft.values()) > 0
    return good, f"rank 0: {_by_path(counts[0])}" if counts else "no counts"


def replayed(outcome: Outcome) -> Verdict:
    """While serving, the device did all-reduces of draft and target that the host did not ask for: replays."""
    parts, good = [], True
    for place in ("draft", "target"):
        grown = {}
        for side in ("host", "device"):
            before, after = (x["all_reduces"][0][side][place] for x in (outcome.ready, outcome.answers[0]))
            grown[side] = sum(after.values()) - sum(before.values())
        good = good and grown["device"] > grown["host"]
        parts.append(f"{place}: device {grown['device']}, host {grown['host']}")
    return good, "; ".join(parts)


def ranks_alike(*outcomes: Outcome) -> Verdict:
    """Both ranks took the same path for the same tensor in the same order, and replayed as often."""
    good = True
    for outcome in outcomes:
        first, second = outcome.answers[0]["all_reduces"]
        good = good and first == second and sum(sum(paths.values()) for paths in first["host"].values()) > 0
    return good, f"{len(outcomes)} engines of two ranks"


def same_tokens(first: Outcome, second: Outcome) -> Verdict:
    """The target, lossy in both, says the same."""
    a, b = (outcome.answers[0]["tokens"] for outcome in (first, second))
    return a == b, f"outputs that differ: {sum(x != y for x, y in zip(a, b, strict=True))} of {len(a)}"


def given_back(exact: Outcome, lossy: Outcome, shim: Outcome) -> Verdict:
    """The lossy draft loses acceptance, and gets some of it back under the shim; the target stays lossy."""
    requests = [outcome.answers[0]["requests"] for outcome in (exact, lossy, shim)]
    lengths = [acceptance_interval(each) for each in requests]
    lost, back = difference(requests[0], requests[1]), difference(requests[1], requests[2])
    detail = (
        "acceptance length exact {:.3f}, lossy {:.3f}, lossy with the shim {:.3f}; ".format(
            *(x.estimate for x in lengths)
        )
        + f"lost {lost.estimate:+.3f} [{lost.low:+.3f}, {lost.high:+.3f}], "
        + f"given back {back.estimate:+.3f} [{back.low:+.3f}, {back.high:+.3f}]"
    )
    return lost.high < 0 < back.low, detail


def _only(paths: dict[str, int], path: str) -> bool:
    return paths[path] > 0 and sum(paths.values()) == paths[path]


def _by_path(rank: dict[str, Any]) -> str:
    return "; ".join(
        f"{place}: " + ", ".join(f"{path} {count}" for path, count in paths.items() if count)
        for place, paths in rank["device"].items()
    )


def not_slower(*outcomes: Outcome) -> Verdict:
    """The median of paired ratios of tokens/s, stock then shim of each pair, is at least LEAST_RATIO, and certain."""
    pairs = zip(outcomes[::2], outcomes[1::2], strict=True)
    ratios = [ratio for stock, shim in pairs for ratio in paired_ratios(shim, stock)]
    detail = f"shim / stock: {spread(ratios)}"
    if len(ratios) < 4:
        return False, detail
    low, high = median_interval(ratios)
    if high - low > WIDEST:
        return False, f"too noisy to tell: {detail}"
    return statistics.median(ratios) >= LEAST_RATIO, detail


def _scope_checks() -> list[Check]:
    found = []
    for method, _, _, runner, graphs, kinds in SCOPE:
        name = f"{method}-{runner}-{graphs}"
        stock, shim = (scope_name(method, runner, graphs, arm) for arm in ("stock", "shim"))
        found += [
            Check(f"{name}: every draft call in scope, no target call", (shim,), in_scope),
            Check(f"{name}: status exits 0", (shim,), reported(DRAFT_CLASSES[method])),
        ]
        if graphs == "eager":
            with_graphs = scope_name(method, runner, "graphs", "shim")
            found += [
                Check(f"{name}: outputs as with graphs", (shim, with_graphs), right_tokens),
                Check(f"{name}: acceptance as with graphs", (shim, with_graphs), same_acceptance),
            ]
        else:
            found += [
                Check(f"{name}: without the shim nothing is in scope", (stock,), out_of_scope),
                Check(f"{name}: outputs right with and without the shim", (stock, shim), right_tokens),
                Check(f"{name}: acceptance the same with and without the shim", (stock, shim), same_acceptance),
            ]
        if kinds:
            found.append(Check(f"{name}: graphs captured", (shim,), captured(kinds)))
            found.append(Check(f"{name}: replays in scope", (shim,), replayed_in_scope))
    return found


def _two_gpu_checks() -> list[Check]:
    found = []
    for runner in RUNNERS:
        stock, shim = f"tp2-{runner}-stock", f"tp2-{runner}-shim"
        found += [
            Check(f"tp2-{runner}: without the shim the draft's all-reduces are lossy", (stock,), draft_is_lossy),
            Check(f"tp2-{runner}: with the shim the draft's are exact, the target's lossy", (shim,), draft_is_exact),
            Check(f"tp2-{runner}: under graphs", (shim,), replayed),
            Check(f"tp2-{runner}: all ranks decide alike", (stock, shim), ranks_alike),
            Check(f"tp2-{runner}: outputs the same with and without the shim", (stock, shim), same_tokens),
            Check(f"tp2-{runner}: status exits 0", (shim,), reported(DRAFT_CLASSES["eagle"], workers=2)),
        ]
    return [
        *found,
        Check("tp2: acceptance lost and given back", ("tp2-exact", "tp2-lossy", "tp2-lossy-shim"), given_back),
        Check("tp2: the trained draft's all-reduces are exact under the shim", ("tp2-lossy-shim",), draft_is_exact),
        Check("tp2: all ranks decide alike, trained draft", ("tp2-lossy", "tp2-lossy-shim"), ranks_alike),
    ]


CHECKS: list[Check] = [
    *_scope_checks(),
    *_two_gpu_checks(),
    Check(
        "routing: native MXFP4 accepted, shim changes nothing",
        ("routing-mxfp4-stock", "routing-mxfp4-shim"),
        same_acceptance,
    ),
    Check("routing: stock accepts nothing beside an NVFP4 trunk", ("routing-mixed-stock",), nothing_accepted),
    Check(
        "routing: with the shim accepted as natively", ("routing-mxfp4-stock", "routing-mixed-shim"), same_acceptance
    ),
    Check("routing: the report says what was replaced", ("routing-mixed-shim",), rerouted),
    Check("routing: status exits 0", ("routing-mixed-shim",), reported("Glm4MoeMTP")),
    Check(
        "routing: outputs right in every arm",
        ("routing-mxfp4-stock", "routing-mxfp4-shim", "routing-mixed-stock", "routing-mixed-shim"),
        right_tokens,
    ),
    Check(
        "experts: outputs right in every arm",
        ("experts-fp16-stock", "experts-fp16-shim", "experts-fp8-online", "experts-fp8-native", "experts-native-stock"),
        right_tokens,
    ),
    Check("experts: online FP8 accepted as FP16", ("experts-fp16-stock", "experts-fp8-online"), same_acceptance),
    Check("experts: native FP8 accepted as stock's", ("experts-native-stock", "experts-fp8-native"), same_acceptance),
    Check("experts: memory, online", ("experts-fp16-shim", "experts-fp8-online"), less_memory),
    Check("experts: memory, native beside stock's FP8", ("experts-native-stock", "experts-fp8-native"), same_memory),
    Check("experts: status exits 0, online", ("experts-fp8-online",), reported("Glm4MoeMTP")),
    Check("experts: status exits 0, native", ("experts-fp8-native",), reported("Glm4MoeMTP")),
    Check(
        "cost: EAGLE, V2 runner, CUDA graphs",
        tuple(f"{pair}-{arm}" for pair in COST_PAIRS for arm in ("stock", "shim")),
        not_slower,
    ),
]
