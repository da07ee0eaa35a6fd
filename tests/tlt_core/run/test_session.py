"""The order of the steps: advantages, dynamic sampling and resuming, with stubs for workers and scoring processes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.load import load
from tlt_core.cluster.dispatcher import Drained, OfferedPass
from tlt_core.cluster.group import Generated
from tlt_core.cluster.messages import GenerateReport, UpdateReport
from tlt_core.data.prompt_order import PromptOrder
from tlt_core.grpo.batch import TrainBatch
from tlt_core.grpo.reward import Score
from tlt_core.idle_training.coordinator import PhaseReport
from tlt_core.items.checkpoint import CheckpointError
from tlt_core.items.types import FinishReason, GenerationRequest, Prompt, Rollout, ScoredBatch, ScoreStatus
from tlt_core.run import resumable
from tlt_core.run import session as module
from tlt_core.run.prompts import Prompts
from tlt_core.run.session import Session

Scores = Mapping[int, Sequence[float]]  # by prompt: of each sample

PROMPTS = [Prompt(i, torch.tensor([1, i], dtype=torch.int32), f"question {i}", "7", "sums") for i in range(8)]
VALIDATION = [Prompt(8, torch.tensor([1], dtype=torch.int32), "held out", "7", "sums")]


class _Tokenizer:
    bos_token_id = eos_token_id = pad_token_id = None

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, tokens))


class _Group(AbstractContextManager["_Group"]):
    """Every response is two tokens: the sample's number, and 2, which ends it."""

    num_workers = 1

    def __init__(self, *_: Any, **__: Any) -> None:
        self.loaded: tuple[Path | None, int] | None = None
        self.updates: list[Any] = []
        self.offered: list[OfferedPass] = []
        self.computes = 0  # passes of each rollout, of those that were offered

    def load(self, folder: Path | None, policy_version: int) -> None:
        self.loaded = folder, policy_version

    def run_phase(
        self,
        groups: Sequence[Sequence[GenerationRequest]],
        _: Any,
        *,
        on_progress: Callable[[Drained], None],
        **__: Any,
    ) -> Generated:
        finished = tuple(_answer(request) for group in groups for request in group)
        on_progress(Drained(finished, (0,), len(finished)))
        computed = tuple(key for key, _ in self.offered[: self.computes])
        return Generated([GenerateReport((), {}, 0, streamed=computed)], PhaseReport((), 0.0, (), 0, {}))

    def offer(self, passes: Sequence[OfferedPass]) -> None:
        self.offered.extend(passes)

    def update(self, shares: Any) -> list[UpdateReport]:
        self.updates.append(shares)
        return [UpdateReport((), {"actor/pg_loss": 0.5})]

    def reference_logprobs(self, shares: Sequence[TrainBatch]) -> list[Tensor]:
        """A quarter of a nat above the sampling policy's."""
        return [share.rollout_logprobs_C + 0.25 for share in shares]

    def publish(self, policy_version: int) -> None:
        pass

    def save(self, folder: Path) -> None:
        (folder / "rank_0").mkdir()

    def __exit__(self, *_: object) -> None:
        pass


def _answer(request: GenerationRequest) -> Rollout:
    tokens = torch.cat([request.prompt_tokens, torch.tensor([request.key.sample, 2], dtype=torch.int32)])
    return Rollout(request.key, tokens, len(request.prompt_tokens), torch.zeros(2), FinishReason.STOP, 0)


class _Scorer(AbstractContextManager["_Scorer"]):
    """Gives the planned scores, 0 where nothing is planned."""

    def __init__(self, plan: Scores) -> None:
        self._plan = plan
        self.submitted: dict[tuple[int, int], str] = {}
        self.is_slow = False  # no score arrives before `collect` waits for it

    def submit(self, key: tuple[int, int], prompt: Prompt, response: str, _: Any = None) -> None:
        assert key[0] == prompt.id
        self.submitted[key] = response

    def is_ready(self, keys: Sequence[tuple[int, int]], *, within_s: float = 0.0) -> bool:
        return all([self.submitted[key] for key in keys]) and not (keys and self.is_slow)

    def collect(self, keys: Sequence[tuple[int, int]]) -> list[Score]:
        for key in keys:
            del self.submitted[key]  # like the real one, which knows a response until it is collected
        values = [self._plan[prompt][sample] if prompt in self._plan else 0.0 for prompt, sample in keys]
        return [Score((value,), value, ScoreStatus.OK, 0.25) for value in values]

    def close(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()


SETTINGS = ("rollout.num_samples=2", "cluster.num_workers=1", "algorithm.advantage=dr_grpo")
DYNAMIC = "algorithm.dynamic_sampling=true"
Begin = Callable[..., Session]


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """`begin(*settings, scores=...)`: the session as a run starts it, or goes on with it."""
    prompts = Prompts(PROMPTS, VALIDATION, _Tokenizer(), (2,))
    monkeypatch.setattr(module.Prompts, "load", lambda *_, **__: prompts)
    monkeypatch.setattr(module, "WorkerGroup", _Group)

    def make(*changes: str, scores: Scores | None = None) -> Session:
        monkeypatch.setattr(module, "Scorer", lambda _: _Scorer(scores or {}))
        one = (f"output_dir={tmp_path}", "reward.functions=[{kind: exact}]")
        cfg = load("conf/smoke.yaml", [*one, *SETTINGS, *changes])
        cfg = cfg.with_dtypes(rollout="float32", update="float32", coldstart="float32")
        return Session.resume_or_init(cfg, data_dir=tmp_path, start_model=tmp_path, on_progress=lambda _: None)

    return make


def _next_ids(count: int, *, seed: int = 0) -> list[int]:
    return [p.id for p in PromptOrder(PROMPTS, seed=seed).take(count)]


def _step(session: Session, step: int) -> ScoredBatch:
    session.begin_step(step)
    scored = session.score(step, session.sample_step(step))
    session.update(step, scored)
    session.publish(step)
    return scored


def _scored(session: Session) -> ScoredBatch:
    session.begin_step(1)
    return session.score(1, session.sample_step(1))


def _by_prompt(scored: ScoredBatch) -> dict[int, list[float]]:
    ids = scored.rollouts.prompt_ids_R.tolist()
    return {i: [a for j, a in zip(ids, scored.advantages_R.tolist(), strict=True) if j == i] for i in ids}


def test_advantages_compare_the_responses_of_one_prompt(begin: Begin) -> None:
    first, second = _next_ids(2)
    session = begin(scores={first: (1.0, 0.0), second: (3.0, 5.0)})
    assert _by_prompt(_scored(session)) == {first: [0.5, -0.5], second: [-1.0, 1.0]}
    metrics = session.metrics.values()
    assert (metrics["critic/rewards/mean"], metrics["training/frac_reward_zero_std"]) == (2.25, 0.0)
    overlong = ("rollout.max_new_tokens=3", "algorithm.overlong_buffer_tokens=2", "algorithm.overlong_penalty=0.5")
    scored = _scored(begin(*overlong, scores={first: (1.0, 0.0)}))  # two tokens: halfway into the buffer of two
    assert torch.equal(scored.rewards_R, scored.scores_R - 0.25)
    assert _by_prompt(scored) == {first: [0.5, -0.5], second: [0.0, 0.0]}


def _trained(session: Session) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(prompt, sample) of the responses with an advantage: streamed, and left to the newest update."""
    group: Any = session.group

    def keys(shares: Sequence[Any]) -> list[tuple[int, int]]:
        return [
            (int(p), int(s))
            for share in shares
            for p, s, a in zip(share.prompt_ids_S, share.samples_S, share.advantages_S, strict=True)
            if a != 0
        ]

    return keys([share for _, share in group.offered[: group.computes]]), keys(group.updates[-1][0])


def test_what_was_streamed_is_left_out_of_the_update(begin: Begin) -> None:
    first, second = _next_ids(2)
    session = begin("update.groups_per_pack=1", scores={first: (1.0, 0.0), second: (3.0, 5.0)})
    group: Any = session.group
    group.computes = 1
    _step(session, 1)
    assert len(group.offered) == 2
    streamed, left = _trained(session)
    assert len(streamed) == len(left) == 2
    assert sorted(streamed + left) == sorted((p, s) for p in (first, second) for s in (0, 1))
    assert session.metrics.values()["idle/streamed_share"] == 0.5
    group.computes, group.offered = 0, []
    _step(session, 2)  # nothing of the last step remains
    assert session.metrics.values()["idle/streamed_share"] == 0.0


def test_dynamic_sampling_streams_the_groups_that_it_keeps_also_when_scores_come_late(begin: Begin) -> None:
    first, second, third = _next_ids(3)
    for slow, packs in ((True, 1), (False, 2)):
        session = begin(
            f"update.groups_per_pack={packs}",
            DYNAMIC,
            scores={first: (1.0, 0.0), second: (1.0, 1.0), third: (0.0, 1.0)},
        )
        scorer: Any = session._scorer
        group: Any = session.group
        scorer.is_slow, group.computes = slow, 1
        scored = _scored(session)
        assert [int(share.prompt_ids_S[0]) for _, share in group.offered] == ([] if slow else [first])
        scored = session.resample(1, scored)
        assert int(group.offered[0][1].prompt_ids_S[0]) == first
        session.update(1, scored)
        assert _trained(session) == ([(first, 0), (first, 1)], [(third, 0), (third, 1)])


SHAPED = (
    DYNAMIC,
    "algorithm.kl={coef: 0.5, place: reward, kind: k1}",
    "rollout.max_new_tokens=3",
    "algorithm.overlong_buffer_tokens=2",
)


def test_dynamic_sampling_looks_at_scores_not_at_shaped_rewards(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(_: _Group, shares: Sequence[TrainBatch]) -> list[Tensor]:
        """Responses differ in their distance from the reference."""
        return [(s.rollout_logprobs_C + 0.25) * torch.arange(len(s.rollout_logprobs_C)) for s in shares]

    monkeypatch.setattr(_Group, "reference_logprobs", uneven)
    first, _, third = _next_ids(3)
    session = begin(*SHAPED, scores={first: (1.0, 0.0), third: (0.0, 1.0)})
    scored = _scored(session)
    assert session.metrics.values()["training/frac_reward_zero_std"] == 0.5
    assert set(scored.rollouts.prompt_ids_R.tolist()) == {first}
    scored = session.resample(1, scored)
    assert set(scored.rollouts.prompt_ids_R.tolist()) == {first, third}
    values = session.metrics.values()
    assert values["critic/score/mean"] == pytest.approx(2 / 6)  # of all that were sampled
    assert values["perf/total_num_tokens"] == 6 * 4

    session = begin(*SHAPED)  # no group is informative
    scored = session.resample(1, _scored(session))
    assert scored.rewards_R.unique().numel() > 1
    assert not scored.advantages_R.any()


def test_a_deviation_of_the_batch_is_that_of_the_joined_batch(begin: Begin) -> None:
    first, second, third = _next_ids(3)
    scores = {first: (1.0, 0.0), second: (1.0, 1.0), third: (0.0, 4.0)}
    session = begin(DYNAMIC, "algorithm.advantage=reinforce_pp_baseline", scores=scores)
    scored = session.resample(1, _scored(session))
    deviation = torch.tensor([0.5, -0.5, -2.0, 2.0]).std()
    expected = {first: [0.5, -0.5], third: [-2.0, 2.0]}
    for prompt, advantages in _by_prompt(scored).items():
        assert advantages == pytest.approx([a / float(deviation) for a in expected[prompt]], rel=1e-4)


def test_where_streaming_is_impossible_nothing_is_offered(begin: Begin) -> None:
    impossible = ("algorithm.kl.coef=0.1", "algorithm.advantage=reinforce_pp_baseline", "update.num_minibatches=2")
    for setting in ("update.streamed=off", *impossible, "cluster.release_rollout_memory=true"):
        session = begin(setting, scores={p: (1.0, 0.0) for p in range(8)})
        session.begin_step(1)
        session.sample_step(1)
        group: Any = session.group
        assert group.offered == [], setting


def test_kl_is_taken_off_the_reward_or_goes_to_the_update(begin: Begin) -> None:
    kl = ("algorithm.kl.place=reward", "algorithm.kl.kind=k1")
    first, _ = _next_ids(2)
    session = begin(*kl, "algorithm.kl.coef=0.5", scores={first: (1.0, 0.0)})
    scored = _step(session, 1)  # two tokens, each a quarter of a nat less likely than under the reference
    assert torch.allclose(scored.rewards_R, scored.scores_R + 0.5 * 0.5)
    assert session.group.updates[0][0][0].ref_logprobs_C is None
    session = begin(*kl, "algorithm.kl.coef=0", scores={first: (1.0, 0.0)})
    session.group.reference_logprobs = None  # nobody asks for it
    scored = _step(session, 1)
    assert torch.equal(scored.rewards_R, scored.scores_R)
    session = begin("algorithm.kl.place=loss", "algorithm.kl.coef=0.5", scores={first: (1.0, 0.0)})
    scored = _step(session, 1)
    assert torch.equal(scored.rewards_R, scored.scores_R)
    (share,) = session.group.updates[0][0]
    assert torch.equal(share.ref_logprobs_C, share.rollout_logprobs_C + 0.25)


def test_dynamic_sampling_keeps_the_informative_groups(begin: Begin) -> None:
    first, second, third = _next_ids(3)
    scores = {first: (1.0, 0.0), second: (1.0, 1.0), third: (0.0, 1.0)}
    session = begin(DYNAMIC, "algorithm.max_resample_rounds=2", scores=scores)
    scored = _scored(session)
    assert session.needs_more_groups(scored)
    scored = session.resample(1, scored)
    assert _by_prompt(scored) == {first: [0.5, -0.5], third: [-0.5, 0.5]}
    assert not session.needs_more_groups(scored)
    assert session.order.cursor == 3  # as many prompts as were missing
    metrics = session.metrics.values()
    assert (metrics["training/resample_rounds"], metrics["training/informative_groups"]) == (1, 2)


def test_a_resumed_run_goes_on_with_the_next_prompts(begin: Begin) -> None:
    session = begin()
    _step(session, 1)
    session.tracker_run_id = "abc"
    folder = session.save_checkpoint(1)
    resumed = begin()
    assert (resumed.completed_steps, resumed.resume_attempt, resumed.tracker_run_id) == (1, 1, "abc")
    assert resumed.resumed_metrics.items() <= session.metrics.values().items()
    group: Any = resumed.group
    assert group.loaded == (folder, 1)
    scored = _step(resumed, 2)
    assert set(scored.rollouts.prompt_ids_R.tolist()) == set(_next_ids(4)[2:])


def test_what_may_change_on_resume_and_what_may_not(begin: Begin) -> None:
    session = begin()
    _step(session, 1)
    session.save_checkpoint(1)
    for change in ("algorithm.advantage=rloo", "seed=1", "rollout.temperature=0.5"):
        with pytest.raises(CheckpointError, match="belongs to a run with another model"):
            begin(change)
    changes = ["num_steps=9", "cluster={num_workers: 3, release_rollout_memory: true}"]
    changes += ["rollout.speculation.policy=off", "rollout.max_live_requests=3"]
    changes += ["update.tokens_per_micro_batch=99", "update.activation_checkpointing=true"]
    assert begin(*changes).completed_steps == 1


def test_a_decaying_learning_rate_that_jumps_is_told_before_a_longer_run_goes_on(begin: Begin) -> None:
    session = begin("update.optimizer={learning_rate: 1e-3, schedule: {kind: linear}}", "num_steps=2")
    _step(session, 1)
    session.save_checkpoint(2)
    said = resumable.rate_jumps(session.cfg.model_copy(update={"num_steps": 4}))
    assert "after step 2 it goes on at 0.0005, where it was to be 0." in said
    assert resumable.rate_jumps(session.cfg) == ""


def test_what_was_started_ends_when_a_later_part_fails(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(_Scorer, "close", lambda _: ended.append("scorer"))
    monkeypatch.setattr(_Group, "__exit__", lambda *_: ended.append("group"))
    begin()
    assert ended == []
    monkeypatch.setattr(_Group, "load", fail)
    with pytest.raises(RuntimeError, match="no room"):
        begin()
    assert ended == ["group", "scorer"]


def test_a_checkpoint_is_not_pruned_while_a_session_loads_it(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a training that goes on while `tlt evaluate` starts its workers."""
    training = begin("checkpoint.keep_last=1", "checkpoint.keep_best=0")
    _step(training, 1)
    folder = training.save_checkpoint(1)
    seen: list[bool] = []

    def load(self: _Group, found: Path, policy_version: int) -> None:
        training.save_checkpoint(2)
        seen.append(found.is_dir())

    monkeypatch.setattr(_Group, "load", load)
    assert begin().completed_steps == 1
    assert (seen, folder.is_dir()) == ([True], True)
    training.save_checkpoint(3)
    assert not folder.exists(), "the session has what it needs"


def test_old_step_folders_go_with_old_checkpoints(begin: Begin) -> None:
    session = begin("checkpoint.keep_step_files=2", "num_steps=9")
    root = session.step_dir(1).parent

    def steps() -> list[int]:
        return sorted(int(p.name) for p in root.iterdir())

    for step in (1, 2, 3, 4, 5, 5):  # the first attempt at step 5 is killed
        session.begin_step(step)
        session.step_dir(step).mkdir(parents=True)
    session.save_checkpoint(5)
    assert steps() == [1, 4, 5]
    session.step_dir(9).mkdir()  # a killed attempt's, before this one resumed
    session.begin_step(6)
    session.step_dir(6).mkdir()
    session.save_checkpoint(6)
    assert steps() == [1, 5, 6, 9]
