"""A file that cannot be read as what it should be."""

from megatron_lite.errors import UserError


class TraceError(UserError):
    """The file is no trace, or holds nothing to analyse. One line: the file, what it is, the remedy."""
