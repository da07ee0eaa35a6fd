"""A worker's training in idle time: it learns from what rollout left behind, measures itself, and survives restarts."""

from itertools import islice

import pytest
import torch

from conf.drafter import IdleTrainingConfig
from tests.tlt_core.drafter.eagle3.training_texts import lively_decoder
from tlt_core.drafter.eagle3.acceptance import measure_acceptance
from tlt_core.drafter.eagle3.drafter import Eagle3Drafter
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.idle_training.comparison import Comparison, Group
from tlt_core.idle_training.training import IdleTraining, IdleTrainingResult
from tlt_core.items.speculation import Strategy
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.rollout.engine import RolloutEngine, Speculation
from tlt_core.run.drafter_release import decide
from tlt_core.tuner.policies import make_tuner

DEPTH, MAX_LEN = 3, 64
STRATEGIES = [Strategy("eagle3", DEPTH, 1, DEPTH)]
# Micro-steps of a fixed size: their number follows the clock otherwise.  Few and large optimizer steps.
CFG = IdleTrainingConfig(
    micro_step_s=1e6,
    rows_per_step=128,
    window_rows=64,
    learning_rate=5e-3,
    canary_tokens=1500,
    average_decay=0.9,
    loss="soft_ce",
)


@pytest.fixture(scope="module")
def decoder(tiny_config):
    return lively_decoder(tiny_config)


@pytest.fixture
def training(decoder):
    """Makes trainings, and closes them."""
    made = []

    def make(folder, *, resume=False, cfg=CFG, peers=()):
        model = eagle3_from_target(decoder, torch.arange(64), scales=(1.0,) * 3, seed=1)
        options = {"depth": DEPTH, "temperature": 1.0, "compute_dtype": torch.float32}
        made.append(
            IdleTraining(cfg, model=model, target=decoder, folder=folder, resume=resume, peers=peers, **options)
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def roll_out(decoder, idle_training, *, step, prompts=16):
    """One rollout phase with capture; returns the engine's drafter."""
    drafter = Eagle3Drafter(idle_training.candidate.used, decoder, max_live=4, max_len=MAX_LEN)
    tuner = make_tuner("fixed", STRATEGIES)
    speculation = Speculation({"eagle3": drafter}, tuner, STRATEGIES)
    engine = RolloutEngine(decoder, max_live=4, max_len=MAX_LEN, speculation=speculation, capture_taps=drafter.taps)
    generator = torch.Generator().manual_seed(3)
    requests = [
        GenerationRequest(NoiseKey(0, step, p, s), torch.randint(3, 64, (1 + p % 7,), generator=generator).int())
        for p in range(prompts)
        for s in range(2)
    ]
    idle_training.begin(step, policy_version=step)
    come, params = iter(requests), SamplingParams(max_new_tokens=40)

    def pull(wanted):
        return list(islice(come, wanted))

    engine.decode(pull, lambda _: None, params, on_captured=idle_training.collect, policy_version=step)
    return drafter


def train(idle_training, *, until):
    for _ in range(2000):
        if until(idle_training.result()):
            return idle_training.result()
        idle_training.micro_step()
    raise AssertionError(f"it never came to that: {idle_training.result()}")


def due(idle_training):
    """The next candidate is due, whatever the clock says."""
    idle_training.candidate.trained(1e9)


def no_trial(idle_training):
    """None is due for as long as a test lasts: pieces of a trial are not training."""
    idle_training.candidate.load_state_dict(idle_training.candidate.state_dict() | {"trial_s": 1e12})


def tried(idle_training):
    """The trainer's steps when the latest candidate was taken whose trial is done."""
    return -1 if idle_training.candidate.in_trial else idle_training.candidate.state_dict()["tried_steps"]


def parameters(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_training_in_idle_time_raises_acceptance_and_says_by_how_much(decoder, training, tmp_path):
    idle_training = training(tmp_path, cfg=CFG.model_copy(update={"learning_rate": 1.5e-3}))
    roll_out(decoder, idle_training, step=1, prompts=64)
    before = parameters(idle_training.candidate.used).clone()
    train(idle_training, until=lambda r: r.steps >= 20)
    held = idle_training._buffer.held()
    assert not {s.id for s in held} & set(idle_training._curriculum.sequences())
    due(idle_training)
    result = train(idle_training, until=lambda _: tried(idle_training) >= 20)
    assert result.trial.gain > max(0.1, 2 * result.trial.error)
    assert torch.equal(parameters(idle_training.candidate.used), before), "what is in use changes by a publish alone"
    # The trial's figures are those of an independent measurement on the responses that were held back.
    assert sum(s.rows for s in held) < CFG.canary_tokens, "whole, each in one window"
    measured = measure_acceptance(
        idle_training.candidate.used, decoder.embed_tokens.weight, held, depth=DEPTH, temperature=1.0
    )
    assert result.trial.used_length == pytest.approx(measured.accept_length)
    assert result.trial.groups == len({(item.step, item.key.prompt_id) for item in held}) > 2
    # Publish: what the engine's drafter then proposes is the candidate's.
    candidate = idle_training.candidate.contribution(1.0)
    adopted = idle_training.adopt(candidate, is_mine=True)
    assert torch.equal(parameters(adopted), candidate)
    assert not torch.equal(candidate, before)


def test_a_worker_learns_from_what_another_has_decoded(decoder, training, tmp_path):
    cfg = CFG.model_copy(update={"learning_rate": 1.5e-3})
    other = training(tmp_path / "worker_0", cfg=cfg)
    roll_out(decoder, other, step=1, prompts=64)
    other.end()
    idle_training = training(tmp_path / "worker_1", cfg=cfg, peers=[tmp_path / "worker_0", tmp_path / "worker_2"])
    idle_training.begin(1, policy_version=1)
    other.close()
    assert not idle_training.has_data  # of this step it has none, and of others' only what is finished
    idle_training.end()
    idle_training.begin(2, policy_version=2)
    assert idle_training.has_data
    seen = idle_training._curriculum.sequences()
    assert seen.keys() == {item.id for item in other._buffer.trainable()}
    first = train(idle_training, until=lambda r: r.steps >= 1)
    result = train(idle_training, until=lambda r: r.steps >= 20)
    assert result.overlap > 1.2 * first.overlap


@pytest.mark.parametrize("micro_steps", [4, 9])
def test_a_restart_goes_on_bit_by_bit(decoder, training, tmp_path, micro_steps):
    """fp32 on CPU.  Saved in the middle of a phase, between any two micro-steps of training."""
    whole = training(tmp_path / "whole")
    first = training(tmp_path / "first")
    for idle_training in (whole, first):
        roll_out(decoder, idle_training, step=1)
        idle_training.end()
        roll_out(decoder, idle_training, step=2)
        idle_training.end()
        no_trial(idle_training)
    for _ in range(micro_steps):
        first.micro_step()
    first.save()
    first.close()
    second = training(tmp_path / "first", resume=True)
    second.begin(2, policy_version=2)
    no_trial(second)
    for _ in range(12 - micro_steps):
        second.micro_step()
    for _ in range(12):
        whole.micro_step()
    states = [idle_training._trainer.state_dict() for idle_training in (whole, second)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["steps"] > 0
    assert torch.equal(parameters(whole._average), parameters(second._average))
    assert not torch.equal(parameters(whole._average), parameters(whole._trainer.model))


def test_a_restart_does_not_bring_a_trial_forward(decoder, training, tmp_path):
    idle_training = training(tmp_path)
    roll_out(decoder, idle_training, step=1)
    idle_training.end()
    train(idle_training, until=lambda r: r.steps >= 4)
    no_trial(idle_training)
    steps = idle_training.result().steps_total
    assert not idle_training.candidate.is_due(steps)
    idle_training.save()
    idle_training.close()
    again = training(tmp_path, resume=True)
    again.begin(2, policy_version=2)
    assert again.result().steps_total == steps > tried(again)
    assert not again.candidate.is_due(steps)
    again.candidate.trained(1e15)
    assert again.candidate.is_due(steps)


def test_candidates_that_are_refused_again_and_again_are_dropped(decoder, training, tmp_path):
    idle_training = training(tmp_path, cfg=CFG.model_copy(update={"max_rejections": 2}))
    roll_out(decoder, idle_training, step=1)
    train(idle_training, until=lambda r: r.steps >= 3)
    assert not idle_training.reject()
    trained = parameters(idle_training._trainer.model).clone()
    assert not torch.equal(trained, parameters(idle_training.candidate.used))
    assert idle_training.reject()
    assert torch.equal(parameters(idle_training._trainer.model), parameters(idle_training.candidate.used))
    idle_training.micro_step()  # and goes on


def test_two_workers_publish_their_average_after_measuring_it(decoder, training, tmp_path):
    trainings = [training(tmp_path / str(worker)) for worker in range(2)]
    for worker, idle_training in enumerate(trainings):
        roll_out(decoder, idle_training, step=1 + worker)
        train(idle_training, until=lambda r: r.rows >= 10 * 128)
        due(idle_training)  # which one is tried would follow the clock
        steps = idle_training.result().steps_total
        train(idle_training, until=lambda _, idle_training=idle_training, least=steps: tried(idle_training) >= least)
    decision = decide([idle_training.result() for idle_training in trainings], errors=1.0)
    assert decision.measured is None
    assert sum(decision.shares) == pytest.approx(1.0)
    averaged = sum(
        idle_training.candidate.contribution(share)
        for idle_training, share in zip(trainings, decision.shares, strict=True)
    )
    for idle_training in trainings:
        assert idle_training.candidate.compare(averaged).starts == idle_training.result().trial.starts > 0
        assert idle_training.candidate.compare(averaged).gain > 0
        idle_training.adopt(averaged, is_mine=False)
    assert trainings[0].candidate.checksum == trainings[1].candidate.checksum
    assert torch.equal(parameters(trainings[0]._trainer.model), parameters(trainings[1]._trainer.model))


def measured(*gains):
    """A trial on two prompts, whose chains got so many drafts more accepted than those of the drafter in use."""
    return Comparison.of(Group(50, 100, 100 + gain) for gain in gains)


TRAINED = IdleTrainingResult(rows=100, steps=2, trial=measured(20, 30))
WORSE = TRAINED._replace(trial=measured(-20, -30))


@pytest.mark.parametrize(
    ("results", "shares", "refused"),
    [
        ([IdleTrainingResult(rows=9, steps=1), IdleTrainingResult()], (0, 0), False),  # no time to measure
        ([TRAINED, IdleTrainingResult()], (1, 0), False),
        ([WORSE, IdleTrainingResult()], (0, 0), True),
        ([TRAINED, TRAINED._replace(rows=300)], (0.25, 0.75), False),
        ([TRAINED, WORSE], (1, 0), False),
        ([TRAINED._replace(trial=measured(-20, 18))], (1,), False),  # by chance, for all one can tell
        ([TRAINED._replace(rows=0), IdleTrainingResult()], (1, 0), False),  # trained in the phase before
    ],
)
def test_what_is_published(results, shares, refused):
    decision = decide(results, errors=1.0)
    assert (decision.shares, decision.refused) == (tuple(map(float, shares)), refused)
    alone = [r.trial for r, share in zip(results, shares, strict=True) if share == 1]
    assert decision.measured == (alone[0] if alone else None), "a sum is nobody's own, so nobody has measured it"


def test_the_candidate_is_the_average_over_the_steps(decoder, training, tmp_path):
    """average_decay d: (1 - d) sum_k d^k w_(n - k) + d^n w_0."""
    idle_training = training(tmp_path)
    roll_out(decoder, idle_training, step=1)
    no_trial(idle_training)
    expected = parameters(idle_training.candidate.used).double()
    for step in range(1, 7):
        train(idle_training, until=lambda r, step=step: r.steps >= step)
        expected = 0.9 * expected + 0.1 * parameters(idle_training._trainer.model).double()
    idle_training.candidate.trained(1e15)
    train(idle_training, until=lambda r: r.trial is not None)
    # float32 against float64: some 1e-7 a step
    torch.testing.assert_close(idle_training.candidate.contribution(1.0).double(), expected, atol=1e-6, rtol=0)
    assert (expected - parameters(idle_training._trainer.model)).abs().max() > 1e-3


def test_a_trial_goes_on_where_the_phase_before_has_left_it(decoder, training, tmp_path):
    """Phases of one piece of work each would else never publish anything."""
    trainings = [training(tmp_path / name) for name in "ab"]
    for idle_training in trainings:
        idle_training.candidate._settings = idle_training.candidate._settings._replace(pass_rows=16)
        roll_out(decoder, idle_training, step=1)
        train(idle_training, until=lambda r: r.steps >= 2)
        due(idle_training)
        idle_training.micro_step()  # the candidate is taken
        assert idle_training.candidate.in_trial
        idle_training.begin(2, policy_version=2)
    whole, pieces = trainings
    expected = train(whole, until=lambda r: r.trial is not None).trial
    for phase in range(100):
        pieces.micro_step()
        if pieces.result().trial is not None:
            break
        pieces.begin(3 + phase, policy_version=3 + phase)
    assert phase >= 3, "several phases were needed"
    assert pieces.result().trial == expected
    taken = pieces.candidate.contribution(1.0).clone()
    assert torch.equal(taken, whole.candidate.contribution(1.0))
    pieces.adopt(taken, is_mine=True)
    assert not pieces.candidate.in_trial


def test_a_trial_beside_a_drafter_that_is_replaced_is_dropped(decoder, training, tmp_path):
    idle_training = training(tmp_path)
    roll_out(decoder, idle_training, step=1)
    train(idle_training, until=lambda r: r.steps >= 2)
    due(idle_training)
    idle_training.micro_step()
    assert idle_training.candidate.in_trial
    others = parameters(idle_training.candidate.used) * 1.01
    idle_training.adopt(others, is_mine=False)
    assert not idle_training.candidate.in_trial
    assert idle_training.candidate.compare(others).starts == 0, "nothing was measured beside this one"
