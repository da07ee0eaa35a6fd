"""Averaging what workers learnt apart."""

import pytest
import torch

from tests.tlt_core.drafter.training_texts import IDS, lively_decoder, texts
from tlt_core.drafter.eagle3_average import weighted_average
from tlt_core.drafter.eagle3_model import eagle3_from_target
from tlt_core.drafter.eagle3_sequence import observe
from tlt_core.drafter.eagle3_train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3_windows import cut


@pytest.fixture(scope="module")
def workers(tiny_config):
    """Three trainers from a common start: of 1, 2 and no steps."""
    decoder = lively_decoder(tiny_config)
    settings = TrainSettings(warmup_steps=0, learning_rate=1e-2)
    trainers = []
    for steps in (1, 2, 0):
        model = eagle3_from_target(decoder, IDS, scales=(1.0, 0.5, 0.5), seed=1)
        trainers.append(Eagle3Trainer(model, decoder.embed_tokens.weight, settings))
        for step in range(steps):
            (sequence,) = observe(decoder, texts((12,), seed=step + steps), model, firsts=[3], dtype=torch.float32)
            trainers[-1].step([sequence])
    trainers[1].accumulate(cut(sequence, rows=4)[:1])
    return trainers


def test_weighted_by_rows(workers):
    states = [w.state_dict() for w in workers]
    average = weighted_average(states, [30, 10, 0])
    for name in ("model.fc.weight", "model.norm.weight", "exp_avg.lm_head.weight", "exp_avg_sq.fc.weight"):
        torch.testing.assert_close(average[name], 0.75 * states[0][name] + 0.25 * states[1][name])
        assert not torch.equal(states[0][name], states[1][name])
    assert (int(average["steps"]), int(average["rows"]), float(average["step.fc.weight"])) == (2, 0, 2.0)
    assert not [name for name in average if name.startswith("grad.")]
    assert torch.equal(average["model.draft_ids_J"], IDS)
    workers[2].load_state_dict(average)
    assert workers[2].model.tap_scales == (1.0, 0.5, 0.5)
    assert torch.equal(workers[2].model.fc.weight, average["model.fc.weight"])


def test_one_worker_is_itself(workers):
    state = workers[1].state_dict()
    average = weighted_average([state, workers[0].state_dict()], [7, 0])
    kept = {name: value for name, value in state.items() if not name.startswith("grad.")} | {"rows": torch.tensor(0)}
    assert average.keys() == kept.keys()
    assert all(torch.equal(average[name], kept[name]) for name in kept)


def test_what_cannot_be_averaged(workers):
    states = [w.state_dict() for w in workers[:2]]
    with pytest.raises(ValueError, match="none of 2 states"):
        weighted_average(states, [0, 0])
    with pytest.raises(ValueError, match=r"differ in model\.draft_ids_J"):
        weighted_average([states[0], states[1] | {"model.draft_ids_J": IDS + 1}], [1, 1])
    untrained = {name: value for name, value in states[1].items() if not name.startswith("exp_avg")}
    with pytest.raises(ValueError, match="same tensors"):
        weighted_average([states[0], untrained], [1, 1])
