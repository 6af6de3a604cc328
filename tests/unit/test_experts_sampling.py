"""The contract FP8 drafts rest on: whatever a draft proposes, vLLM's rejection sampler returns the target's tokens."""

import functools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.sample import rejection_sampler  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TRIALS, VOCABULARY = 200_000, 8
TARGET = torch.tensor(
    [
        [0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.015, 0.005],
        [0.02, 0.02, 0.02, 0.02, 0.02, 0.30, 0.30, 0.30],
        [0.125] * 8,
        [0.005, 0.015, 0.03, 0.05, 0.10, 0.15, 0.25, 0.40],
    ]
)
DRAFTS = {
    "the target itself": lambda p: p,
    "reversed": lambda p: p.flip(-1),
    "uniform": lambda p: torch.full_like(p, 1 / VOCABULARY),
    "always the least likely": lambda p: one_hot(p.argmin(-1)),
    "never the most likely": lambda p: normalised(p * (1 - one_hot(p.argmax(-1)))),
    "sharpened": lambda p: normalised(p**4),
}


def one_hot(tokens):
    return torch.nn.functional.one_hot(tokens, VOCABULARY).float()


def normalised(weights):
    return weights / weights.sum(-1, keepdim=True)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The kernels of this machine, and one thread: the tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if current_platform.is_cpu():  # as the CPU worker does: its kernels stand in for Triton's
            current_platform.import_kernels()
            current_platform.register_triton_kernel_overrides()
        if not torch.equal(rejection_sampler.expand_batch_to_tokens(torch.ones(2), *SPANS), torch.ones(4)):
            patch.setattr(rejection_sampler, "expand_batch_to_tokens", repeated)
        yield
    torch.set_num_threads(threads)


SPANS = torch.tensor([1, 4], dtype=torch.int32), 4


def repeated(values, ends, tokens, replace_from=0, replace_to=0):
    """`expand_batch_to_tokens`, for vLLM 0.32 and 0.33 on the CPU, whose stand-in drops float results: it writes into
    an int64 copy of the output (utils/cpu_triton_utils.py, _expand_kernel_impl)."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    expanded = values.repeat_interleave(counts)
    assert len(expanded) == tokens
    return torch.where(expanded == replace_from, replace_to, expanded)


@functools.cache
def sampler():
    return rejection_sampler.RejectionSampler(Sampler())


@functools.cache
def layout(batch, k):
    """Indices of a batch in which every request has k draft tokens and k + 1 rows of logits."""
    index = torch.arange(batch * (k + 1), dtype=torch.int32).reshape(batch, k + 1)
    ends = torch.arange(1, batch + 1, dtype=torch.int32)
    return {
        "num_draft_tokens": [k] * batch,
        "cu_num_draft_tokens": ends * k,
        "cu_num_sampled_tokens": ends * (k + 1),
        "target_logits_indices": index[:, :k].reshape(-1),
        "bonus_logits_indices": index[:, k],
        "logits_indices": index.reshape(-1),
    }


def sampling(batch, greedy):
    nothing = torch.empty(0)
    return SamplingMetadata(
        temperature=None if greedy else torch.ones(batch),
        all_greedy=greedy,
        all_random=not greedy,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def run(logits, drafted, draft_probs, greedy=False):
    """One verification step; logits [batch, k + 1, V], drafted [batch, k], draft_probs [batch, k, V] or None."""
    batch, k = drafted.shape
    metadata = SpecDecodeMetadata(draft_token_ids=drafted.reshape(-1).to(torch.int32), **layout(batch, k))
    probabilities = None if draft_probs is None else draft_probs.reshape(-1, VOCABULARY).contiguous()
    out = sampler()(metadata, probabilities, logits.reshape(-1, VOCABULARY), sampling(batch, greedy))
    return out.sampled_token_ids


def p_value(tokens, distribution):
    counts = torch.bincount(tokens.long(), minlength=VOCABULARY).double()
    expected = distribution.double() * len(tokens)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((VOCABULARY - 1) / 2).double(), statistic / 2))


CASES = [(name, True) for name in DRAFTS] + [("the target itself", False), ("always the least likely", False)]


@pytest.mark.parametrize(
    ("name", "known"), CASES, ids=lambda value: {True: "probabilities", False: "tokens"}.get(value)
)
@pytest.mark.parametrize("k", [1, 3])
def test_the_target_distribution_survives_any_draft(k, name, known):
    torch.manual_seed(k)
    batch = TRIALS // 10
    proposal = DRAFTS[name](TARGET[:k])
    logits = TARGET[: k + 1].log().expand(batch, -1, -1)
    rows = []
    for _ in range(10):
        drafted = torch.stack([torch.multinomial(q, batch, replacement=True) for q in proposal], dim=1)
        if not known:  # without probabilities the sampler takes each draft token as certain
            drafted = proposal.argmax(-1).expand(batch, -1).contiguous()
        rows.append(run(logits.clone(), drafted, proposal.expand(batch, -1, -1) if known else None))
    tokens = torch.cat(rows)
    assert tokens.shape == (TRIALS, k + 1)
    for position in range(k + 1):
        # a position is reached when every draft before it was accepted; the target's choice there must not show it
        reached = tokens[:, position][tokens[:, position] != PLACEHOLDER_TOKEN_ID]
        assert position > 0 or len(reached) == TRIALS
        if len(reached) >= 2000:
            assert p_value(reached, TARGET[position]) > 1e-6, position


def test_the_measure_sees_a_bias_of_five_percent():
    torch.manual_seed(0)
    biased = normalised(TARGET[0] * torch.tensor([1.05, 1, 1, 1, 1, 1, 1, 1]))
    assert p_value(torch.multinomial(biased, TRIALS, replacement=True), TARGET[0]) < 1e-6


@pytest.mark.parametrize("k", [1, 3])
def test_greedy_is_exact(k):
    torch.manual_seed(k)
    logits = torch.randn(5000, k + 1, VOCABULARY)
    best = logits.argmax(-1)
    drafted = torch.where(torch.rand(5000, k) < 0.7, best[:, :k], torch.randint(0, VOCABULARY, (5000, k)))
    tokens = run(logits.clone(), drafted, None, greedy=True)
    agreed = (drafted == best[:, :k]).long().cumprod(-1).sum(-1)
    wanted = torch.where(torch.arange(k + 1) <= agreed[:, None], best, PLACEHOLDER_TOKEN_ID)
    assert torch.equal(tokens.long(), wanted)
    assert set(agreed.tolist()) == set(range(k + 1))
