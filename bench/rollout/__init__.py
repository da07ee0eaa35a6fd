"""Decoding under every speculation policy, and what is left to gain."""
