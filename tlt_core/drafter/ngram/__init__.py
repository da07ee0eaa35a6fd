"""The n-gram drafter: an index over the responses to the same prompt."""
