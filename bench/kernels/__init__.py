"""Bytes and operations a second of every op."""
