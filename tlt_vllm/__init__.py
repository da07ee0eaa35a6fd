"""TLT inside vLLM: a plug-in that any vLLM process loads, without our workers or flows.  See docs/vllm.md.

Only this package imports vLLM.  It needs torch, `tlt_core.tuner`, `tlt_core.items` and `tlt_core.model.sampling`.
"""
