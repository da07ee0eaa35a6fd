"""Decoding at the shapes of large models, with random weights and planted acceptance."""
