"""What the driver does in one run: steps, cold start, first drafter, generation, metrics."""
