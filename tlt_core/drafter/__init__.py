"""Drafters: they guess the next tokens of live requests."""
