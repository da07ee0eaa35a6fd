"""Whole training steps of ours beside those of another framework's trainer."""
