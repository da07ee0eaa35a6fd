"""What cannot be planned."""


class PlanError(ValueError):
    """A run, a file or a machine that cannot be planned from.  The text says what is missing."""
