"""A round of fixed shape waits for the device once.  On a CPU, where nothing waits, operations are counted that would:
values that go to the host, and results whose shape depends on values.  On a GPU, torch itself raises."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tlt_core.rollout.playing import requests
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.model.load import random_decoder
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.tuner.policies import make_tuner

CHAIN, TREE = Strategy("eagle3", 5, 1, 5), Strategy("eagle3", 3, 3, 9)
PARAMS = {
    "plain": SamplingParams(max_new_tokens=40),
    "top-p, top-k": SamplingParams(temperature=0.7, top_p=0.8, top_k=9, max_new_tokens=40),
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40),
}
WAITS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select", "_unique2",
    "bincount",
}  # fmt: skip
READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")


class Waits(TorchDispatchMode):
    """Counts operations that a GPU would have to be waited for."""

    def __init__(self, wanted=WAITS) -> None:
        super().__init__()
        self._wanted = wanted
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put_", "index_put") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        if name in self._wanted or masked or (name == "repeat_interleave" and "Tensor" in func._overloadname):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def engine_with(decoder, strategy, *, static):
    speculation = None
    if not strategy.is_off:
        model = eagle3_from_target(decoder, torch.arange(0, 64, 2), scales=(1.0, 1.0, 1.0), seed=0)
        drafter = Eagle3Drafter(model, decoder, max_live=6, max_len=96, room=room_for([strategy]))
        speculation = Speculation({"eagle3": drafter}, make_tuner("fixed", [strategy]), [strategy])
    return RolloutEngine(decoder, max_live=6, max_len=96, speculation=speculation, static=static)


def start(engine, params):
    """Three requests, two rounds."""
    engine._rounds.prepare(params)
    engine._admit(requests(3), params)
    for _ in range(2):
        assert not engine._round(params, lambda trace: None), "no response ends: that takes a copy of its log-probs"


@pytest.mark.parametrize("params", PARAMS.values(), ids=list(PARAMS))
@pytest.mark.parametrize("strategy", [OFF, CHAIN, TREE], ids=str)
def test_one_transfer_a_round(tiny_decoder, monkeypatch, strategy, params):
    engine = engine_with(tiny_decoder, strategy, static=True)
    start(engine, params)
    reads = Counter()
    for name in READS:
        own = getattr(torch.Tensor, name)

        def counted(self, *args, own=own, name=name, **kwargs):
            reads[name, tuple(self.shape)] += 1
            return own(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    with Waits() as waits:
        assert not engine._round(params, lambda trace: None)
    monkeypatch.undo()
    assert reads == {("tolist", (3, engine._batch.report_BP.shape[1])): 1}
    assert not waits.seen


def test_the_count_would_see_them(tiny_decoder):
    engine = engine_with(tiny_decoder, TREE, static=False)
    start(engine, PARAMS["plain"])
    with Waits() as waits:
        engine._round(PARAMS["plain"], lambda trace: None)
    assert waits.seen["nonzero_numpy"] > 0
    assert waits.seen["item"] > 0


@pytest.mark.parametrize("params", PARAMS.values(), ids=list(PARAMS))
def test_what_is_captured_makes_no_tensor_from_a_list(tiny_decoder, params):
    """That would be a copy from memory that is gone when the graph is replayed."""
    for strategy in (OFF, CHAIN, TREE):
        engine = engine_with(tiny_decoder, strategy, static=True)
        start(engine, params)
        for work in engine.graphs._works.values():
            with Waits({*WAITS, "lift_fresh", "lift_fresh_copy"}) as waits:
                work()
            assert not waits.seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("strategy", [OFF, CHAIN, TREE], ids=str)
def test_torch_sees_no_wait_on_a_gpu(tiny_config, strategy):
    """The marked one is an event's, which torch does not count."""
    params = PARAMS["plain"]
    engine = engine_with(random_decoder(tiny_config, seed=0, dtype=torch.float32).cuda(), strategy, static=True)
    start(engine, params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine._round(params, lambda trace: None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
