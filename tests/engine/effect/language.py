"""The synthetic language that target and draft are trained on and that prompts are drawn from."""

from __future__ import annotations

import torch

VOCAB_SIZE = 32


class Language:
    """Second-order Markov language: after ``a b`` comes ``best[a, b]``, less often ``second[a, b]``.

    ``best`` is a permutation of ``a`` for every ``b``, which makes ``(a, b) -> (b, best[a, b])`` one-to-one: a greedy
    walk visits hundreds of pairs before it repeats, so long outputs keep meeting new contexts. The share of
    ``best`` varies from pair to pair between 0.5 and 0.9, so some choices are clear and some are close.
    """

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shuffles = [torch.randperm(VOCAB_SIZE, generator=generator) for _ in range(2 * VOCAB_SIZE)]
        self.best = torch.stack(shuffles[:VOCAB_SIZE], dim=1)
        self.second = torch.stack(shuffles[VOCAB_SIZE:], dim=1)
        self.best_share = 0.5 + 0.4 * torch.rand(VOCAB_SIZE, VOCAB_SIZE, generator=generator)

    def sample(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """``count`` sequences of ``length`` tokens: int64, shape ``(count, length)``."""
        tokens = torch.randint(VOCAB_SIZE, (count, length), generator=generator)
        for i in range(2, length):
            a, b = tokens[:, i - 2], tokens[:, i - 1]
            draw = torch.rand(count, generator=generator)
            tokens[:, i] = torch.where(draw < self.best_share[a, b], self.best[a, b], self.second[a, b])
        return tokens
