"""The whole measurement on a tiny shape, and what it rests on."""

import pytest
import torch

from bench.sizes import measure as bench_sizes
from bench.sizes import planted
from bench.sizes.measure import Bench, Sizes
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import SamplingParams
from tlt_core.model.shapes import shape

CPU = torch.device("cpu")
SIZES = Sizes((1, 2, 3), 6, 30, 64)


@pytest.mark.slow
def test_all_rows_and_verdicts() -> None:
    (setting, *rows), verdicts = bench_sizes.run("tiny", CPU, acceptance=3, repeats=2, sizes=SIZES)
    assert setting["planted_acceptance"] == 3
    assert "planted" in setting["weights"]
    assert {(r["configuration"], r.get("live")) for r in rows} == {
        ("graphs", None),
        *((name, live) for name in ("plain", "adaptive") for live in (1, 2, 3)),
    }
    for row in rows[2:]:
        assert 0 < row["tokens_per_s"]["min"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["max"]
        assert row["floor_s"] > 0
    same = [v for v in verdicts if "tokens are plain decoding's" in v["claim"]]
    assert [v["value"] for v in same] == [1.0, 1.0, 1.0]
    assert {v["bound"] for v in verdicts} == {0.5, 1.0, 2.0, 0.97}


@pytest.mark.parametrize("tied", [False, True])
def test_the_target_says_what_is_planted_at_any_temperature(tied: bool) -> None:
    config = shape("llama", 512, 64, 96, 2, 4, 2, tied=tied)
    bench = Bench("tiny", CPU, acceptance=4.0, sizes=SIZES)
    bench.config, bench.decoder = config, planted.planted_target(config, dtype=torch.float32, device=CPU)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=20)
        for rollout in bench.decode(bench.plain(), 3, params, turn=1).rollouts.values():
            tokens = rollout.tokens.long()
            expected = planted.successor(tokens[:-1], config)[rollout.prompt_len - 1 :]
            assert tokens[rollout.prompt_len :].tolist() == expected.tolist()


def test_chains_are_accepted_to_the_length_that_was_planted() -> None:
    """Of some 300 chains of 8: the mean's own spread is 0.16."""
    length, sizes = 4.0, Sizes((8,), 6, 160, 64)
    bench = Bench("tiny", CPU, acceptance=length, sizes=sizes)
    arm = bench_sizes.CHAINS[-1]
    drafter = planted.PlantedDrafter(
        bench._network, bench.decoder, chance=bench.chance, max_live=8, max_len=bench.max_len, room=room_for([arm])
    )
    engine = bench._engine(drafter, [arm])
    engine.speculation = engine.speculation._replace(tuner=bench_sizes.make_tuner("fixed", [arm]))
    decoded = bench.decode(engine, 8, SamplingParams(max_new_tokens=160), turn=0)
    assert decoded.figures["accept_length"] == pytest.approx(length, abs=0.5)
    assert decoded.figures["drafted"] == pytest.approx(8, abs=0.3)


def test_chance_by_hand() -> None:
    assert planted.chance_for(1.5, depth=1) == pytest.approx(0.5)
    assert planted.chance_for(1.75, depth=2) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="chains of 2 cannot be accepted to 4"):
        planted.chance_for(4, depth=2)


def test_trees_cannot_be_planted() -> None:
    bench = Bench("tiny", CPU, acceptance=4.0, sizes=SIZES)
    tree = [Strategy("eagle3", 3, 2, 6)]
    drafter = planted.PlantedDrafter(
        bench._network, bench.decoder, chance=0.5, max_live=3, max_len=bench.max_len, room=room_for(tree)
    )
    with pytest.raises(ValueError, match="acceptance is planted in chains"):
        bench._engine(drafter, tree)


def test_bytes_that_a_pass_reads() -> None:
    """All of the tiny target but its embedding: an untied head is a matrix of its own."""
    bench = Bench("tiny", CPU, acceptance=4.0, sizes=SIZES)
    every = sum(p.numel() for p in bench.decoder.parameters())
    assert bench_sizes.read_bytes(bench.decoder) == 4 * (every - 512 * 64)


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(ValueError, match="shape 'gpt-2' is not known: choose qwen2"):
        bench_sizes.run("gpt-2", CPU, acceptance=4.0, repeats=1)
