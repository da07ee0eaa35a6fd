"""A user module that cannot be imported."""

raise FileNotFoundError("weights of the judge are missing")
