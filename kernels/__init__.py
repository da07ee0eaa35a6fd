"""Ops, one a file: the mathematics, the torch reference, the Triton kernel; C for CPUs in `native`."""
