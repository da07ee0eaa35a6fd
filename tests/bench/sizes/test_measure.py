"""What the measurement at real sizes rests on: planted tokens and acceptance."""

import pytest
import torch

from bench.sizes import measure as bench_sizes
from bench.sizes import planted
from bench.sizes.measure import Bench, Sizes
from tlt_core.drafter.eagle3.static import room_for
from tlt_core.items.types import SamplingParams
from tlt_core.model.shapes import shape

CPU = torch.device("cpu")
SIZES = Sizes((1, 2, 3), 6, 30, 64)


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
