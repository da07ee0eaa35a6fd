"""Requests in, sampled responses out: the decoding engine, its rounds, and vLLM in its place."""
