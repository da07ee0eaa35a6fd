"""One file for each engine: a process in its own environment that decodes the prompts of its requests."""
