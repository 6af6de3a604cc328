"""The one exception type a user of drafttools sees."""


class DraftToolsError(RuntimeError):
    """A request that cannot be honoured; the message is one line that names the thing and the remedy."""
