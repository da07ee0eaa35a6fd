"""vLLM as rollout engine: new weights reach the running engine, its probabilities are the update's, a run trains.

Our plain greedy float32 decoding is the reference: it is what the same weights say without vLLM.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch

from conf.rollout import RolloutConfig, SpeculationConfig
from conf.system import ClusterConfig
from conf.update import AlgorithmConfig, UpdateConfig
from tests.vllm.builtin_engine import DEPTH, chain_counters, decode
from tests.vllm.counters import SpecCounters
from tests.vllm.servers import MAX_TOKENS
from tlt_core.cluster.group import WorkerGroup
from tlt_core.cluster.messages import TrainerSpec, WorkerSpec
from tlt_core.grpo.batch import join_logprobs, make_forward_batches, make_train_batches
from tlt_core.grpo.policy import FrozenPolicy
from tlt_core.items.types import GenerationRequest, NoiseKey, Rollout, RolloutBatch, SamplingParams, ScoredBatch
from tlt_core.model.config import DecoderConfig
from tlt_core.model.load import load_decoder, random_decoder, save_hf
from tlt_core.rollout.vllm.client import VllmError, VllmRollout
from tlt_core.rollout.vllm.replica import VllmSpec, start_vllm

pytestmark = pytest.mark.vllm

OFF = SpeculationConfig(policy="off")
# Mean difference of a token's probabilities in float32; rounding alone.  A wrong temperature gives 0.1.
ROUNDING = 1e-4
TINY_PROMPTS = [[1, 5 + i, 9, 30 - i] for i in range(4)]
GREEDY, SAMPLED = SamplingParams(temperature=0.0, max_new_tokens=24), SamplingParams(max_new_tokens=24)


def requests(prompts, samples=1, step=0):
    return [
        [GenerationRequest(NoiseKey(0, step, i, s), torch.tensor(list(p)).int()) for s in range(samples)]
        for i, p in enumerate(prompts)
    ]


def run(engine: VllmRollout, prompts, params: SamplingParams, samples: int = 1) -> list[Rollout]:
    """In the order of prompts and samples."""
    waiting = [r for group in requests(prompts, samples) for r in group]
    finished: list[Rollout] = []
    told: list[int] = []

    def pull(wanted):
        taken, waiting[:] = waiting[:wanted], waiting[wanted:]
        return taken

    engine.decode(pull, finished.append, params, on_tokens=told.append)
    assert sum(told) == sum(len(r.completion) for r in finished)
    return sorted(finished, key=lambda r: (r.key.prompt_id, r.key.sample))


def mean_difference(decoder, rollouts: list[Rollout], *, temperature: float) -> float:
    """Of the probabilities of sampled tokens, vLLM's and those that the update computes."""
    batch = RolloutBatch.pack(rollouts)
    shares = make_forward_batches(batch, num_workers=1)
    policy = FrozenPolicy(decoder, temperature=temperature, token_budget=4096, device=torch.device("cpu"))
    ours_T = join_logprobs(shares, [policy.logprobs(shares[0])], batch)
    return float((ours_T.exp() - batch.logprobs_T.exp()).abs().sum() / batch.response_lens_R.sum())


def chains_of(engine: VllmRollout) -> SpecCounters:
    told = engine.counters()
    return SpecCounters(told["drafts"], told["draft_tokens"], told["accepted"], tuple(told["accepted_per_pos"]))


def completions(rollouts) -> list[list[int]]:
    return [r.completion.tolist() for r in rollouts]


# ---------------------------------------------------------------------------------------------- SmolLM2, one engine


class Seen(NamedTuple):
    """What one engine said, one after the other."""

    greedy: list[list[int]]  # with a trained drafter
    counters: SpecCounters
    sampled: list[Rollout]
    sampled_counters: SpecCounters
    other: list[list[int]]  # greedy, other policy weights swapped in
    other_sampled: list[Rollout]
    error: str  # after the process was killed


@pytest.fixture(scope="module")
def other_policy(target, tmp_path_factory) -> Path:
    """SmolLM2 with every weight moved, by more than any step of training."""
    decoder = load_decoder(target.folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    moved = [
        (name, w + 0.02 * w.std() * torch.randn(w.shape, generator=generator)) if w.ndim == 2 else (name, w)
        for name, w in decoder.named_parameters()
    ]
    folder = tmp_path_factory.mktemp("other") / "policy"
    save_hf(
        [(name, w.detach()) for name, w in moved],
        decoder.config,
        folder,
        tokenizer_from=target.folder,
        dtype=torch.float32,
    )
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["uncompiled", "compiled"])
def seen(vllm_python, target, drafter, other_policy, tmp_path_factory, request) -> Seen:
    """Chains of one length."""
    cfg = RolloutConfig(
        engine="vllm",
        vllm={"eager": request.param},
        dtype="float32",
        max_live_requests=16,
        speculation=SpeculationConfig(
            policy="fixed",
            strategies=[{"drafter": "eagle3", "depth": DEPTH, "tokens": DEPTH}],
            drafter_path=str(drafter),
        ),
    )
    engine = start_vllm(
        VllmSpec(vllm_python, tmp_path_factory.mktemp("engine")),
        cfg,
        model_dir=target.folder,
        max_len=max(map(len, target.prompts)) + MAX_TOKENS,
        threads=1,
        rank=0,
        seed=0,
        policy_version=0,
    )
    greedy = SamplingParams(temperature=0.0, max_new_tokens=MAX_TOKENS)
    sampled = SamplingParams(temperature=0.7, max_new_tokens=16)
    with_decoder = load_decoder(other_policy, dtype=torch.float32)
    try:
        said, counters = completions(run(engine, target.prompts[:6], greedy)), chains_of(engine)
        tempered, sampled_counters = run(engine, target.prompts[:2], sampled, samples=3), chains_of(engine)
        engine.load_weights(with_decoder.named_parameters(), policy_version=1)
        other = completions(run(engine, target.prompts[:6], greedy))
        other_sampled = run(engine, target.prompts[:2], sampled, samples=3)
        os.killpg(engine._process.pid, signal.SIGKILL)
        with pytest.raises(VllmError) as error:
            run(engine, target.prompts[:1], greedy)
    finally:
        engine.close()
    return Seen(said, counters, tempered, sampled_counters, other, other_sampled, error=str(error.value))


def test_text_is_our_greedy_text(seen, target):
    ours = completions(decode(target.folder, target.prompts[:6], OFF, max_tokens=MAX_TOKENS).rollouts)
    assert seen.greedy == ours


def test_chains_are_accepted_as_in_our_engine(seen, target, drafter):
    """With the same drafter, position by position."""
    firsts = [tokens[0] for tokens in seen.greedy]
    expected = chain_counters(target.folder, target.prompts[:6], firsts, drafter, max_tokens=MAX_TOKENS)
    print("vLLM:", seen.counters, "ours:", expected)
    assert seen.counters == expected
    assert seen.counters.accepted > 0


def test_a_policy_is_swapped_in_the_running_engine(seen, other_policy, target):
    """Its head is tied to the embedding: a packed copy of the old one would show here."""
    ours = completions(decode(other_policy, target.prompts[:6], OFF, max_tokens=MAX_TOKENS).rollouts)
    assert ours != seen.greedy
    assert seen.other == ours


def test_log_probs_are_the_updates(seen, other_policy, target):
    """At another temperature than 1, with drafts, before and after new weights came."""
    assert seen.sampled_counters.accepted > seen.counters.accepted
    before = mean_difference(target.decoder, seen.sampled, temperature=0.7)
    after = mean_difference(load_decoder(other_policy, dtype=torch.float32), seen.other_sampled, temperature=0.7)
    wrong = mean_difference(target.decoder, seen.sampled, temperature=1.0)
    print(f"mean difference of probabilities: {before:.2g}, new weights {after:.2g}, wrong temperature {wrong:.2g}")
    assert max(before, after) < ROUNDING
    assert wrong > 100 * ROUNDING


def test_an_engine_that_died_says_so(seen):
    assert "vLLM has ended; the end of" in seen.error


# ---------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A random model with heads of a size that vLLM's CPU attention takes."""
    config = DecoderConfig(
        family="llama",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("tiny") / "model"
    decoder = random_decoder(config, seed=0, dtype=torch.float32)
    # Weights of this size make distributions that differ from token to token.
    weights = [(name, w.detach() * (8 if w.ndim == 2 else 1)) for name, w in decoder.named_parameters()]
    save_hf(weights, config, folder, tokenizer_from=folder, dtype=torch.float32)
    return folder


def scored(batch: RolloutBatch) -> ScoredBatch:
    """Even tokens are good."""
    rewards = torch.tensor([float((batch.completion(i) % 2 == 0).float().mean()) for i in range(len(batch))])
    zeros = torch.zeros(len(batch))
    return ScoredBatch(batch, rewards, rewards, rewards[:, None], zeros.long(), zeros, rewards - rewards.mean())


def test_steps_of_training_reach_vllm(vllm_python, tiny, tmp_path):
    """Rollout, update, publish, three times: what vLLM says greedily is what the exported policy says."""
    update = UpdateConfig.model_validate(
        {"optimizer": {"learning_rate": 0.01}, "tokens_per_micro_batch": 512, "dtype": "float32"}
    )
    rollout = RolloutConfig(engine="vllm", dtype="float32", max_live_requests=8, num_prompts=4, speculation=OFF)
    spec = WorkerSpec(
        model_dir=tiny,
        rollout=rollout,
        max_len=64,
        trainer=TrainerSpec(update, AlgorithmConfig(), total_steps=3, max_new_tokens=24, temperature=1.0),
        threads=1,
        device="cpu",
        vllm=VllmSpec(vllm_python, tmp_path / "vllm"),
    )
    said, differences = [], []
    with WorkerGroup(ClusterConfig(num_workers=1), spec) as group:
        group.load(None, 0)

        def generate(params, samples, step):
            finished: list[Rollout] = []
            group.run_phase(
                requests(TINY_PROMPTS, samples, step),
                params,
                dispatch="pull",
                on_progress=lambda drained: finished.extend(drained.finished),
                step=step,
                is_training=True,
            )
            return RolloutBatch.pack(finished)

        for step in (1, 2, 3):
            batch = generate(SAMPLED, 4, step)
            assert batch.policy_version_R.tolist() == [step - 1] * 16
            shares = make_train_batches(scored(batch), update, AlgorithmConfig(), num_workers=1, seed=0, step=step)
            differences.append(group.update(shares)[0].metrics["training/rollout_probs_diff_mean"])
            group.publish(step)
            group.export(tmp_path / f"policy_{step}", tokenizer_from=tiny, dtype="float32")
            greedy = generate(GREEDY, 1, step)
            said.append([greedy.completion(i).tolist() for i in range(len(greedy))])
    ours = [
        completions(decode(tmp_path / f"policy_{step}", TINY_PROMPTS, OFF, max_tokens=24).rollouts)
        for step in (1, 2, 3)
    ]
    print("differences of probabilities:", differences)
    assert said == ours
    assert said[0] != said[2], "the policy has changed"
    assert max(differences) < ROUNDING


def train(vllm_python, tmp_path, *more: str) -> subprocess.Popen:
    """The command, with a reward that a random model can earn."""
    arguments = [
        *("model={kind: random, hidden_size: 128}", "coldstart.enabled=false", f"output_dir={tmp_path}/runs"),
        *(
            f"tracking.uri=sqlite:///{tmp_path}/mlflow.db",
            "cluster.num_workers=1",
            "drafter.idle_training.enabled=false",
        ),
        *("rollout.engine=vllm", "rollout.vllm.kv_cache_mb=64"),
        'reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]',
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", *arguments, *more],
        env=os.environ | {"VLLM_PYTHON": str(vllm_python)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def steps(tmp_path) -> list[dict]:
    file = tmp_path / "runs/smoke/metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def test_a_killed_engine_ends_the_run_and_the_same_command_resumes_it(vllm_python, embedded_model, tmp_path):
    """kill -9 of vLLM's process after the first step: a message, no traceback; then the remaining steps."""
    wanted = ("num_steps=6", "checkpoint.every_steps=1", "rollout.speculation.policy=cost_model")
    process = train(vllm_python, tmp_path, *wanted)
    while not any(row["step"] == 1 for row in steps(tmp_path)):
        assert process.poll() is None, "the run has ended before its first step"
        time.sleep(0.05)
    for engine in engines_of(process):
        engine.kill()
    require_resumed(vllm_python, tmp_path, process, wanted)


def test_an_engine_killed_while_weights_are_published(vllm_python, embedded_model, tmp_path):
    """kill -9 while a piece of the new weights lies in shared memory: it is deleted as soon as vLLM has it."""
    wanted = ("num_steps=6", "checkpoint.every_steps=1", "rollout.speculation.policy=off")
    process = train(vllm_python, tmp_path, *wanted)
    engines: list[psutil.Process] = []
    pieces: list[Path] = []
    while not any(piece.exists() for piece in pieces):
        assert process.poll() is None, "the run has ended before anything was published"
        if not engines and steps(tmp_path):
            engines = engines_of(process)
            run = psutil.Process(process.pid).children(recursive=True)
            pieces = [Path(f"/dev/shm/tlt-weights-{child.pid}.safetensors") for child in run]
    engines[0].kill()
    require_resumed(vllm_python, tmp_path, process, wanted)
    assert not any(piece.exists() for piece in pieces)


def engines_of(run: subprocess.Popen) -> list[psutil.Process]:
    """vLLM's processes."""
    found = []
    for child in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.cmdline()[-1:] and child.cmdline()[-1].endswith("rollout/vllm/process.py"):
                found.append(child)
    return found


def require_resumed(vllm_python, tmp_path, process: subprocess.Popen, wanted) -> None:
    """The run ends with a message; the same command does the remaining steps."""
    said, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "vLLM has ended; the end of" in said, said[-3000:]
    before = len(steps(tmp_path))
    assert before < 7
    again = train(vllm_python, tmp_path, *wanted)
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said[-3000:]
    done = [row["step"] for row in steps(tmp_path)]
    assert sorted(set(done)) == [0, 1, 2, 3, 4, 5, 6]
