"""Sampling with keyed noise, verification of guesses, log-probabilities of tokens."""
