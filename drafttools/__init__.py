"""Speculative decoding whose draft model runs at the precision it shipped with.

Importing this package activates it (see `drafttools.activation`); set DRAFTTOOLS=off to import it without effect.
"""

from drafttools.activation import activate, deactivate
from drafttools.errors import DraftToolsError
from drafttools.scope import draft_model_scope, in_draft_model

__all__ = ["DraftToolsError", "activate", "deactivate", "draft_model_scope", "in_draft_model"]
__version__ = "0.1.0"

activate()
