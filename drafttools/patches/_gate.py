"""What the gates share: inside the draft scope a switch that lowers precision gets the safe answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttools import attest, settings
from drafttools.scope import in_draft_model


def gated(
    name: str,
    original: Callable[..., Any],
    safe: Any,
    applies: Callable[..., bool] = lambda *args, **kwargs: True,
) -> Callable[..., Any]:
    """`original`, except that a lowering answer for a draft becomes `safe`.

    Stock is asked first: a falsy answer lowers nothing. In observe mode the answer stands, and only the asking counts.
    A plain function, since Dynamo would trace a wrapt wrapper as the original.
    """
    seen = attest.evidence(name)
    enforcing = settings.mode() == "enforce"

    def gate(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        if not answer or not in_draft_model() or not applies(*args, **kwargs):
            return answer
        seen.asked += 1
        if not enforcing:
            return answer
        seen.declined += 1
        return safe

    return gate
