"""Rounds of fixed shape can be captured: recorded once and repeated without Python, they decode the same.

A tape stands for the graph (`tape.py`); what a GPU alone can show (that CUDA allows the capture) is in the tests that
are marked `gpu`.
"""

import pytest
import torch

from kernels import native
from tests.decoders import lively
from tests.tlt_core.rollout.playing import Cycle, Oracle, assert_same, play, requests
from tests.tlt_core.rollout.tape import TapePool
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.files import export_weights
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.items.speculation import OFF, Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.rollout import static_rounds
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.rollout.graphs import EagerPool, GraphPool

MAX_LEN, MAX_LIVE = 96, 3
CHAIN, TREE, HOST = Strategy("eagle3", 4, 1, 4), Strategy("eagle3", 3, 2, 6), Strategy("d", 3, 2, 5)
ARMS = [CHAIN, OFF, TREE, HOST]
JOINING = ((0, 1), (2, 3), (4, 6))
PARAMS = {
    "T=1": SamplingParams(max_new_tokens=40, stop_token_ids=(2, 3)),
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=40),
    "top-p, top-k": SamplingParams(temperature=0.7, top_p=0.8, top_k=9, max_new_tokens=30),
}


POOLS = ["tape", pytest.param("graph", marks=pytest.mark.gpu), pytest.param("eager", marks=pytest.mark.gpu)]


@pytest.fixture(params=POOLS)
def device(request, monkeypatch):
    """Where an engine runs; on a GPU with its graphs, and with the functions that were captured, called as they are."""
    if request.param == "tape":
        monkeypatch.setattr(native, "library", lambda: None)  # torch sees nothing of what C does
        monkeypatch.setattr(static_rounds, "make_pool", lambda device: TapePool())
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param == "eager":
        monkeypatch.setattr(static_rounds, "make_pool", lambda device: EagerPool())
    return "cuda"


def drafter_of(decoder, ids):
    return eagle3_from_target(decoder.cpu(), ids, scales=(1.0, 1.0, 1.0), seed=0)


def plain(decoder, params):
    """On the CPU, in shapes that fit."""
    return play(RolloutEngine(decoder.cpu(), max_live=MAX_LIVE, max_len=MAX_LEN), requests(6), params, JOINING)[0]


def captured_engine(decoder, device, plain_responses, network, *, static=True):
    decoder.to(device)
    room = room_for([CHAIN, TREE])
    drafters = {
        "eagle3": Eagle3Drafter(network, decoder, max_live=MAX_LIVE, max_len=MAX_LEN, room=room),
        "d": Oracle(plain_responses, wrong_every=3),
    }
    speculation = Speculation(drafters, Cycle(ARMS), strategies=ARMS)
    return RolloutEngine(decoder, max_live=MAX_LIVE, max_len=MAX_LEN, speculation=speculation, static=static)


@pytest.mark.parametrize("params", PARAMS.values(), ids=list(PARAMS))
def test_replayed_rounds_decode_the_same(device, params):
    decoder = lively(seed=1)
    expected = plain(decoder, params)
    network = drafter_of(decoder, torch.arange(0, 64, 2))
    engine = captured_engine(decoder, device, expected, network)
    found, traces = play(engine, requests(6), params, JOINING)
    assert_same(expected, found)
    assert {t.report.live for t in traces} >= {1, 2, 3}
    for arm in (CHAIN, TREE, HOST):
        own = [t.report for t in traces if t.report.strategy == arm]
        assert sum(sum(r.drafted) for r in own) > 0, f"{arm} drafted nothing"
        assert sum(sum(r.accepted) for r in own) > 0, f"nothing of {arm} was accepted"


def test_replayed_rounds_use_new_weights(device):
    """Of the policy and of the drafter; the graphs stay."""
    params = PARAMS["T=1"]
    decoder, other = (lively(seed=seed) for seed in (1, 2))
    before, after = plain(decoder, params), plain(other, params)
    assert any(before[key].tokens.tolist() != rollout.tokens.tolist() for key, rollout in after.items())
    networks = [drafter_of(decoder, torch.arange(0, 64, 2)), drafter_of(other, torch.arange(1, 64, 2))]
    engine = captured_engine(decoder, device, before, networks[0])
    assert_same(before, play(engine, requests(6), params, JOINING)[0])
    count = len(engine.graphs)
    engine.load_weights(other.named_parameters())
    engine.speculation.drafters["eagle3"].load_weights(export_weights(networks[1]))
    engine.speculation = engine.speculation._replace(tuner=Cycle(ARMS))
    found, traces = play(engine, requests(6), params, JOINING)
    assert_same(after, found)
    assert len(engine.graphs) == count
    fresh = captured_engine(decoder.cpu(), "cpu", before, networks[1], static=False)
    expected = play(fresh, requests(6), params, JOINING)[1]
    told = [[(t.report.strategy, t.report.drafted, t.report.accepted) for t in run] for run in (traces, expected)]
    assert told[0] == told[1]
    assert any(sum(accepted) for strategy, _, accepted in told[0] if strategy == CHAIN)


def test_parameters_of_another_kind_add_graphs_and_old_ones_stay(device):
    decoder = lively(seed=1)
    network = drafter_of(decoder, torch.arange(0, 64, 2))
    expected = {name: plain(decoder, params) for name, params in PARAMS.items()}
    engine = captured_engine(decoder, device, expected["T=1"], network)
    counts = []
    for name in ("T=1", "greedy", "T=1", "greedy"):
        assert_same(expected[name], play(engine, requests(6), PARAMS[name], JOINING)[0])
        counts.append(len(engine.graphs))
    assert counts[0] < counts[1] == counts[2] == counts[3]
    engine.release_graphs()
    assert len(engine.graphs) == 0
    assert_same(expected["T=1"], play(engine, requests(6), PARAMS["T=1"], JOINING)[0])
    assert len(engine.graphs) == counts[0]


def test_a_cache_that_was_given_back_is_captured_anew(device):
    """Colocated training takes the rollout's memory between two steps; graphs hold addresses in it."""
    decoder, params = lively(seed=1), PARAMS["T=1"]
    expected = plain(decoder, params)
    engine = captured_engine(decoder, device, expected, drafter_of(decoder, torch.arange(0, 64, 2)))
    assert_same(expected, play(engine, requests(6), params, JOINING)[0])
    held, count = engine.memory_bytes, len(engine.graphs)
    engine.release_memory()
    assert engine.memory_bytes == len(engine.graphs) == 0
    assert_same(expected, play(engine, requests(6), params, JOINING)[0])
    assert (engine.memory_bytes, len(engine.graphs)) == (held, count)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_shapes_that_fit_decode_the_same_on_a_gpu():
    """Rounds without graphs, as on a CPU."""
    decoder = lively(seed=1)
    expected = plain(decoder, PARAMS["T=1"])
    engine = RolloutEngine(decoder.cuda(), max_live=MAX_LIVE, max_len=MAX_LEN, static=False)
    assert_same(expected, play(engine, requests(6), PARAMS["T=1"], JOINING)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bytes_and_seconds_of_captured_graphs():
    decoder = lively(seed=1)
    expected = plain(decoder, PARAMS["T=1"])
    engine = captured_engine(decoder, "cuda", expected, drafter_of(decoder, torch.arange(0, 64, 2)))
    engine.prepare(PARAMS["T=1"])
    assert isinstance(engine.graphs, GraphPool)
    assert engine.graphs.bytes > 0
    assert engine.graphs.capture_s > 0
    engine.release_graphs()
    assert engine.graphs.bytes == 0
