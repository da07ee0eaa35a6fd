"""TLT inside vLLM: a plug-in that any vLLM process loads, without our workers or flows.

    vllm serve MODEL --speculative-config '{"method": "eagle3", "model": DRAFTER, "num_speculative_tokens": 7}' \
        --generation-config vllm --additional-config '{"tlt": {}}'

    plugin      entry point: checks vLLM's version, reads the settings, puts the other parts in place
    scheduler   the tuner chooses the draft length of every engine step
    exact       sampling with noise keyed by position, so that drafts cannot change a token
    rows        which requests are sampled so, and with which noise
    tap         hidden states out of the engine, for training a drafter
    weights     policy and drafter into the running engine, checked
    worker      what may be asked of vLLM's workers
    cpu_fix     repairs sampled speculation in CPU builds

Only this package imports vLLM.  It needs torch, `tlt_core.tuner`, `tlt_core.items` and `tlt_core.model.sampling`.
"""
