"""Attention of packed sequences, KV slots and drafters, and moves inside the KV cache."""
