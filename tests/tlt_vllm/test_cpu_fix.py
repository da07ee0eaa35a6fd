"""A handle that Python collects while a model is traced: nothing of torch is called, and it is released later."""

import gc
import types

from tlt_vllm.cpu_fix import calls_torch_when_collected, release_with_next


def operators() -> tuple[types.SimpleNamespace, list[int]]:
    """As vLLM's `_custom_ops`: handles that release themselves; and what was released."""
    released: list[int] = []

    class Pointer:
        def item(self) -> int:
            return 7

    class Handler:
        def __init__(self) -> None:
            self.handler_tensor = Pointer()
            self.dtor = released.append

        def __del__(self) -> None:
            self.dtor(self.handler_tensor.item())

    made = types.SimpleNamespace(CPUDNNLGEMMHandler=Handler)
    made.create_onednn_mm = made.create_onednn_scaled_mm = lambda weight: Handler()
    return made, released


def test_a_collected_handle_waits_for_the_next_one() -> None:
    ops, released = operators()
    assert calls_torch_when_collected(ops.CPUDNNLGEMMHandler)
    release_with_next(ops)
    assert not calls_torch_when_collected(ops.CPUDNNLGEMMHandler), "a build is repaired once"
    handler = ops.create_onednn_mm("weight")
    del handler
    gc.collect()
    assert released == []
    ops.create_onednn_scaled_mm("weight")
    assert released == [7]
