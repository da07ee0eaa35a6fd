"""A turn that goes on where another ended: its keys, values and hidden states are still there, and change nothing."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from conf.rollout import SpeculationConfig, StrategyConfig
from tests.decoders import lively
from tests.tlt_core.rollout.playing import PARAMS, requests
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.items.types import GenerationRequest, Rollout
from tlt_core.model.decoder import Decoder
from tlt_core.rollout import build
from tlt_core.rollout.engine import RolloutEngine

MESSAGE = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int32)


@pytest.fixture(scope="module")
def decoder(tiny_config) -> Decoder:
    return lively(dataclasses.replace(tiny_config, num_layers=8))


@pytest.fixture(scope="module")
def drafter(decoder, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("turns") / "d-eagle3"
    save_eagle3(
        eagle3_from_target(decoder, torch.arange(64), scales=(1.0, 1.0, 1.0), seed=0), folder, dtype=torch.float32
    )
    return str(folder)


def engine_of(decoder: Decoder, drafter: str, **speculation) -> RolloutEngine:
    cfg = SpeculationConfig(drafter_path=drafter, **speculation)
    return build.make_engine(decoder, cfg, max_live=6, max_len=120, seed=0, capture=True)


def talk(engine: RolloutEngine, *, may_continue: bool, turns: int = 3) -> tuple[list[list[Rollout]], dict, list[int]]:
    """Every turn's rollouts, the hidden states of all, and how many tokens each turn's requests gave to read."""
    read: list[int] = []
    handle = engine.decoder.register_forward_pre_hook(lambda _, given: read.append(len(given[0])))
    asked: Sequence[GenerationRequest] = requests(6, lengths=(3, 9))
    every, seen, counts = [], {}, []
    for turn in range(turns):
        asked = [dataclasses.replace(request, may_continue=may_continue, max_new_tokens=9) for request in asked]
        read.clear()
        waiting, finished = list(asked), []
        engine.decode(
            lambda wanted, waiting=waiting: [waiting.pop(0) for _ in range(min(wanted, len(waiting)))],
            finished.append,
            PARAMS["T=1"],
            on_captured=lambda item, turn=turn: seen.__setitem__((turn, item.key), item),
        )
        counts.append(sum(read))
        finished.sort(key=lambda rollout: rollout.key)
        every.append(finished)
        asked = [GenerationRequest(r.key, torch.cat([r.tokens, MESSAGE])) for r in finished]
    handle.remove()
    return every, seen, counts


WAYS = {
    "plain": {"policy": "off"},
    "n-grams": {"policy": "fixed", "strategies": (StrategyConfig(drafter="ngram", depth=3, tokens=3),)},
    "EAGLE-3": {"policy": "fixed", "strategies": (StrategyConfig(drafter="eagle3", depth=3, tokens=3),)},
}


@pytest.mark.parametrize("way", WAYS)
def test_turns_that_go_on_are_those_of_a_conversation_read_anew(decoder, drafter, way) -> None:
    plain, _, all_tokens = talk(engine_of(decoder, drafter, **WAYS["plain"]), may_continue=False)
    _, anew_states, _ = talk(engine_of(decoder, drafter, **WAYS[way]), may_continue=False)
    going_on, states, new_tokens = talk(engine_of(decoder, drafter, **WAYS[way]), may_continue=True)
    for before, after in zip(plain, going_on, strict=True):
        assert [r.tokens.tolist() for r in after] == [r.tokens.tolist() for r in before]
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(other.logprobs, one.logprobs, atol=1e-4, rtol=0)
    assert bool(states) == (way == "EAGLE-3")
    assert states.keys() == anew_states.keys()
    # Passes of other sizes: float32 rounds differently, over eight layers.
    for key, state in states.items():
        torch.testing.assert_close(state.taps_LE, anew_states[key].taps_LE, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(state.last_PD, anew_states[key].last_PD, atol=1e-3, rtol=1e-3)
    if way == "plain":  # six conversations of 20 to 40 tokens are not read again
        assert all(all_tokens[turn] - new_tokens[turn] > 60 for turn in (1, 2))


def test_turns_are_forgotten_when_the_weights_change(decoder, drafter) -> None:
    engine = engine_of(decoder, drafter, policy="off")
    first, _, _ = talk(engine, may_continue=True, turns=1)
    engine.load_weights((name, weight * 1.01) for name, weight in list(decoder.named_parameters()))
    ((one, *_),) = first
    asked = [GenerationRequest(one.key, torch.cat([one.tokens, MESSAGE]), may_continue=True)]
    read: list[int] = []
    handle = engine.decoder.register_forward_pre_hook(lambda _, given: read.append(len(given[0])))
    engine.decode_all(asked, PARAMS["greedy"])
    handle.remove()
    assert read[0] == len(one.tokens) + len(MESSAGE) - 1
