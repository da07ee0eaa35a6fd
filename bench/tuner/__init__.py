"""The tuner's choices where the right answer is known."""
