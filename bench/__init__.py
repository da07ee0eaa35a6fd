"""Benchmarks of the product: they may be deleted without breaking it."""
