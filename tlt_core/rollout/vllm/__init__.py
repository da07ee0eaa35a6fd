"""vLLM in the place of our engine, in processes and an environment of its own."""
