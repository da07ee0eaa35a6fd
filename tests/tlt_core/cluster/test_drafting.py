"""A worker's drafting across restarts, and what a publish does to its engine."""

import pytest
import torch

from conf.drafter import DrafterConfig, IdleTrainingConfig
from conf.rollout import SpeculationConfig
from tests.tlt_core.drafter.eagle3.training_texts import lively_decoder
from tlt_core.cluster import drafting
from tlt_core.cluster.drafting import Drafting
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.idle_training.comparison import Comparison, Group
from tlt_core.items.types import GenerationRequest, NoiseKey, SamplingParams
from tlt_core.rollout import build
from tlt_core.rollout.drafts import BuiltinDrafts

MAX_LIVE, MAX_LEN = 3, 48
BETTER = Comparison.of([Group(100, 200, 202), Group(100, 210, 213), Group(100, 190, 192)])
WORSE = Comparison.of([Group(100, 200, 150), Group(100, 210, 160), Group(100, 190, 145)])


@pytest.fixture
def decoder(tiny_config):
    return lively_decoder(tiny_config)


@pytest.fixture
def folder(decoder, tmp_path):
    save_eagle3(
        eagle3_from_target(decoder, torch.arange(64), scales=(1.0,) * 3, seed=1),
        tmp_path / "first",
        dtype=torch.float32,
    )
    return tmp_path / "first"


def make(decoder, policy, *, drafter_path=None):
    cfg = SpeculationConfig(policy=policy, drafter_path=drafter_path and str(drafter_path))
    capture = drafter_path is not None
    engine = build.make_engine(decoder, cfg, max_live=MAX_LIVE, max_len=MAX_LEN, seed=0, capture=capture)
    drafts = None if engine.speculation is None else BuiltinDrafts(engine, engine.speculation)
    return engine, Drafting(drafts, rank=0, hosts=(0,))


def roll_out(engine, *, step=1, on_captured=None):
    waiting = [GenerationRequest(NoiseKey(0, step, p, 0), torch.arange(3, 7 + p % 3).int()) for p in range(12)]
    done = {}

    def pull(wanted):
        taken, waiting[:] = waiting[:wanted], waiting[wanted:]
        return taken

    more = {} if on_captured is None else {"on_captured": on_captured}
    params = SamplingParams(max_new_tokens=24)
    engine.decode(pull, lambda r: done.__setitem__(r.key, r.tokens.tolist()), params, **more)
    return done


@pytest.mark.parametrize(
    ("before", "after"),
    [("cost_model", "beg_mab"), ("fixed", "cost_model"), ("beg_mab", "off")],
)
def test_a_run_goes_on_under_any_other_policy(decoder, tmp_path, before, after):
    engine, own = make(decoder, before)
    own.prepare(None)
    responses = roll_out(engine)
    own.save(tmp_path, dtype=torch.float32)
    engine, own = make(decoder, after)
    own.prepare(tmp_path)
    assert roll_out(engine) == responses


def test_what_the_tuner_knows_outlives_a_restart_on_the_same_machine_alone(decoder, tmp_path, monkeypatch):
    engine, own = make(decoder, "cost_model")
    own.prepare(None)
    roll_out(engine)
    own.save(tmp_path, dtype=torch.float32)
    known = engine.speculation.tuner.state_dict()
    calibrated = []
    monkeypatch.setattr(build, "calibrate", calibrated.append)

    again, own = make(decoder, "cost_model")
    own.prepare(tmp_path)
    assert again.speculation.tuner.state_dict() == known
    assert not calibrated

    here = drafting.machine()
    monkeypatch.setattr(drafting, "machine", lambda: here | {"cpu": "another one"})
    moved, own = make(decoder, "cost_model")
    own.prepare(tmp_path)
    assert calibrated == [moved]
    assert moved.speculation.tuner.state_dict() != known


def test_a_drafter_that_had_collapsed_stays_suspended_when_costs_are_measured_anew(decoder, folder, tmp_path):
    engine, own = make(decoder, "beg_mab", drafter_path=folder)
    own._check.load_state_dict({"wrong": {}, "suspended": ["eagle3"]})
    own.prepare(None)
    own.save(tmp_path, dtype=torch.float32)
    engine, own = make(decoder, "cost_model", drafter_path=folder)
    own.prepare(tmp_path)
    assert own.suspended == ("eagle3",)
    assert engine.speculation.tuner.state_dict()["suspended"] == ["eagle3"]


@pytest.fixture
def trained(decoder, folder, tmp_path):
    """Engine and drafting that has trained in idle time, with a measured candidate."""
    idle_training = IdleTrainingConfig(
        micro_step_s=1e6, rows_per_step=64, window_rows=64, learning_rate=5e-3, canary_tokens=200, average_decay=0.9
    )
    engine, own = make(decoder, "fixed", drafter_path=folder)
    own.prepare(None)
    own.train_in_idle_time(
        DrafterConfig(idle_training=idle_training, depth=3),
        SpeculationConfig(policy="fixed", drafter_path=str(folder)),
        temperature=1.0,
        compute_dtype=torch.float32,
        folder=tmp_path / "idle_training",
        resume=False,
    )
    own.idle_training.begin(1, policy_version=0)
    roll_out(engine, on_captured=own.idle_training.collect)
    for _ in range(200):
        own.idle_training.micro_step()
        if own.idle_training.result().trial is not None:
            break
    assert own.idle_training.result().trial is not None
    yield engine, own
    own.close()


def weights_of(drafter):
    return torch.cat([w.float().flatten() for w in drafter._net.parameters()])


def test_a_published_candidate_is_what_the_engine_drafts_with(trained, monkeypatch):
    """And the tuner hears how far it was measured to differ.  The policy, whose tensors the drafter shares, stays."""
    engine, own = trained
    policy = [weight.clone() for weight in engine.decoder.parameters()]
    told = []
    monkeypatch.setattr(own._tuner, "notify_change", lambda name, *, change: told.append((name, change)))
    drafter, before = engine.speculation.drafters["eagle3"], own.idle_training.candidate.checksum
    old, candidate = weights_of(drafter), own.idle_training.candidate.contribution(1.0).clone()
    published = own.publish([1.0], measured=BETTER)
    assert published.accepted
    assert told == [("eagle3", BETTER.change)]
    assert 0 < BETTER.change < 0.05
    assert published.trial is None
    assert published.checksum == own.idle_training.candidate.checksum != before
    assert torch.equal(torch.cat([p.flatten() for p in own.idle_training.candidate.used.parameters()]), candidate)
    assert not torch.equal(weights_of(drafter), old)
    assert all(torch.equal(a, b) for a, b in zip(policy, engine.decoder.parameters(), strict=True))


def test_a_sum_that_drafts_worse_changes_nothing(trained, monkeypatch):
    engine, own = trained
    drafter, before = engine.speculation.drafters["eagle3"], own.idle_training.candidate.checksum
    old = weights_of(drafter)
    monkeypatch.setattr(own.idle_training.candidate, "compare", lambda _: WORSE)
    published = own.publish([1.0], measured=None)
    assert not published.accepted
    assert published.trial == WORSE
    assert published.checksum == before
    assert torch.equal(weights_of(drafter), old)
