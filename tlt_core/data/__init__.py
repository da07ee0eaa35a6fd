"""Data sets of prompts, and the order in which steps take them."""
