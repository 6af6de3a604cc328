"""Sizes of the GPU checkpoints, and the rule their targets compute. Standard library only."""

VOCAB, WIDTH, HEADS, HEAD_DIM = 256, 256, 4, 64
LAYERS = 2
WRONG_EVERY = 4
EXPERTS, EXPERTS_HIDDEN = 64, 1024  # of the checkpoints that memory is measured on


def successor(token: int) -> int:
    """The token the target puts after `token`."""
    return (5 * token + 3) % VOCAB
