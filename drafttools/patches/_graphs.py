"""What the graph wrappers' patches share: a wrapper made for a draft captures and replays in scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drafttools import attest, drafts
from drafttools.patching import Transaction
from drafttools.scope import draft_model_scope, in_draft_model

_TAG = "_drafttools_draft"


def scope_wrapper(
    transaction: Transaction, cls: type[Any], patch_name: str, entries: str, kind: Callable[[Any], str]
) -> None:
    """Tag instances made for a draft, and run their calls in scope.

    `entries` names the attribute that holds one entry per captured graph; `kind` tells what an instance captures.
    Plain functions: graph wrappers are called from compiled code's own driver for every piece of the target, too.
    """
    init, call = cls.__init__, cls.__call__
    seen = attest.evidence(patch_name)

    def __init__(self: Any, runnable: Any, *args: Any, **kwargs: Any) -> None:
        init(self, runnable, *args, **kwargs)
        self.__dict__[_TAG] = in_draft_model() or drafts.is_marked(runnable)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__.get(_TAG, False):
            return call(self, *args, **kwargs)
        before = len(getattr(self, entries))
        seen.asked += 1
        with draft_model_scope():
            result = call(self, *args, **kwargs)
        attest.count_captures(kind(self), len(getattr(self, entries)) - before)
        return result

    transaction.replace(cls, "__init__", __init__)
    transaction.replace(cls, "__call__", __call__)
