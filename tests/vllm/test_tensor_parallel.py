"""One vLLM engine for several workers: the same tokens and hidden states, checked weights, and a run that trains."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from conf.rollout import RolloutConfig, SpeculationConfig
from tests.vllm.builtin_engine import decode as decode_own
from tests.vllm.test_rollout_engine import ROUNDING, requests
from tlt_core.drafter.eagle3.files import export_weights, save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Model, eagle3_from_target
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import Rollout, SamplingParams
from tlt_core.model.config import DecoderConfig
from tlt_core.model.decoder import Decoder
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.model.load import load_decoder, random_decoder, save_hf
from tlt_core.rollout.vllm import client
from tlt_core.rollout.vllm.client import VllmError, VllmRollout
from tlt_core.rollout.vllm.drafts import VllmDrafts
from tlt_core.rollout.vllm.replica import VllmSpec, start_vllm

pytestmark = pytest.mark.vllm

OFF = SpeculationConfig(policy="off")
PROMPTS = [[1, 5 + i, 9, 30 - i] for i in range(6)]
TOKENS = 32
STATES = 2e-5  # relative difference of hidden states in float32, whose sums are added up in two parts


class Small(NamedTuple):
    """A model that two workers can share, and a drafter."""

    folder: Path
    decoder: Decoder
    drafter: Path
    model: Eagle3Model


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    config = DecoderConfig(
        family="llama",
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("small") / "model"
    decoder = random_decoder(config, seed=0, dtype=torch.float32)
    # Weights of this size make distributions that differ from token to token.
    weights = [(name, w.detach() * (6 if w.ndim == 2 else 1)) for name, w in decoder.named_parameters()]
    save_hf(weights, config, folder, tokenizer_from=folder, dtype=torch.float32)
    decoder = load_decoder(folder, dtype=torch.float32)
    drafter = folder.parent / "drafter-eagle3"
    model = eagle3_from_target(decoder, torch.arange(256), scales=(1.0, 1.0, 1.0), seed=0)
    save_eagle3(model, drafter, dtype=torch.float32)
    return Small(folder, decoder, drafter, model)


def start(python: Path, small: Small, folder: Path, *, parts: int) -> tuple[VllmRollout, VllmDrafts]:
    """parts: processes that share the model."""
    speculation = SpeculationConfig(
        policy="fixed",  # so that counts do not depend on time
        strategies=[{"drafter": "eagle3", "depth": 3, "tokens": 3}],
        drafter_path=str(small.drafter),
    )
    cfg = RolloutConfig(
        engine="vllm",
        dtype="float32",
        max_live_requests=6,
        vllm={"tensor_parallel": parts, "kv_cache_mb": 64},
        speculation=speculation,
    )
    edge_weights = EdgeWeights.load(small.folder, dtype=torch.float32)
    engine = start_vllm(
        VllmSpec(python, folder),
        cfg,
        model_dir=small.folder,
        max_len=64,
        threads=1,
        rank=0,
        seed=0,
        policy_version=0,
        edge_weights=edge_weights,
    )
    return engine, VllmDrafts(engine.ask, speculation, edge_weights, folder=engine.folder)


class Said(NamedTuple):
    """By an engine, one after the other."""

    sampled: list[list[int]]
    greedy: list[list[int]]  # other policy
    states: list[TrainSequence]  # of those
    accepted: list[int]  # before and after another drafter came
    dropped: int


def say(engine: VllmRollout, drafts: VllmDrafts, small: Small) -> Said:
    def decode(params: SamplingParams, states: list[TrainSequence] | None = None) -> list[list[int]]:
        waiting = [r for group in requests(PROMPTS) for r in group]
        finished: list[Rollout] = []

        def pull(wanted: int) -> list[Any]:
            taken, waiting[:] = waiting[:wanted], waiting[wanted:]
            return taken

        engine.decode(pull, finished.append, params, on_captured=None if states is None else states.append)
        return [r.completion.tolist() for r in sorted(finished, key=lambda r: r.key.prompt_id)]

    sampled = decode(SamplingParams(max_new_tokens=TOKENS))
    engine.load_weights(moved(small), policy_version=1)
    states: list[TrainSequence] = []
    greedy = decode(SamplingParams(temperature=0.0, max_new_tokens=TOKENS), states)
    before = engine.counters()
    other = eagle3_from_target(small.decoder, torch.arange(256), scales=(0.1, 0.1, 0.1), seed=1)
    drafts.load_drafter(export_weights(other))
    assert decode(SamplingParams(temperature=0.0, max_new_tokens=TOKENS)) == greedy, "a drafter changes no token"
    after = engine.counters()
    return Said(
        sampled,
        greedy,
        sorted(states, key=lambda s: s.key.prompt_id),
        [before["accepted"], after["accepted"] - before["accepted"]],
        after["dropped"],
    )


def moved(small: Small) -> Iterator[tuple[str, Tensor]]:
    """Other weights of the policy."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in small.decoder.named_parameters():
        w = weight.detach()
        yield name, w + 0.1 * w.std() * torch.randn(w.shape, generator=generator) if w.ndim == 2 else w


@pytest.fixture(scope="module")
def said(vllm_python: Path, small: Small, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Said]:
    """By the number of processes."""
    found = {}
    for parts in (1, 2):
        engine, drafts = start(vllm_python, small, tmp_path_factory.mktemp(f"parts{parts}"), parts=parts)
        try:
            found[parts] = say(engine, drafts, small)
        finally:
            engine.close()
    return found


def test_tokens_are_those_of_an_undivided_engine_and_of_ours(said: dict[int, Said], small: Small, tmp_path: Path):
    assert said[2].sampled == said[1].sampled
    assert said[2].greedy == said[1].greedy
    folder = tmp_path / "moved"
    save_hf(list(moved(small)), small.decoder.config, folder, tokenizer_from=small.folder, dtype=torch.float32)
    ours = decode_own(folder, PROMPTS, OFF, max_tokens=TOKENS)
    assert said[2].greedy == [r.completion.tolist() for r in ours.rollouts]
    assert said[2].greedy != said[2].sampled


def test_hidden_states_are_kept_once_and_are_the_same(said: dict[int, Said]):
    assert len(said[2].states) == len(PROMPTS)
    assert said[2].dropped == 0
    for one, two in zip(said[1].states, said[2].states, strict=True):
        assert torch.equal(one.tokens_L, two.tokens_L)
        for name in ("taps_LE", "last_PD", "lognorms_P"):
            a, b = getattr(one, name).float(), getattr(two, name).float()
            assert float((a - b).norm() / a.norm()) < STATES, name


def test_a_new_drafter_reaches_every_part(said: dict[int, Said]):
    """Half of it would draft differently from the undivided one."""
    assert said[1].accepted == said[2].accepted
    assert min(said[1].accepted) > 0
    assert said[1].accepted[0] != said[1].accepted[1], "the two drafters differ"


def test_the_weights_of_the_second_part_are_checked_too(vllm_python, small, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_SCRIPT", Path(__file__).with_name("crossed.py"))
    engine, _ = start(vllm_python, small, tmp_path, parts=2)
    try:
        with pytest.raises(VllmError, match="does not compute with the weights that came"):
            engine.load_weights(moved(small), policy_version=1)
    finally:
        engine.close()


def test_a_run_in_which_two_workers_share_each_engine(vllm_python, embedded_model, tmp_path):
    """Four workers, two engines: the drafter is trained by the hosts, the update by all, and the run resumes."""
    command = [
        *(sys.executable, "-m", "flows.cli", "train", "conf/smoke.yaml", f"output_dir={tmp_path}/runs"),
        *("model={kind: random, hidden_size: 128, num_layers: 6}", "coldstart.enabled=false", "num_steps=3"),
        *(f"tracking.uri=sqlite:///{tmp_path}/mlflow.db", "cluster.num_workers=4", "rollout.engine=vllm"),
        *("rollout.vllm={tensor_parallel: 2, kv_cache_mb: 64}", "rollout.num_prompts=4", "drafter.warmup=true"),
        "rollout.dispatch=static",
        'reward.functions=[{kind: python, path: "tests.flows.length_reward:length_reward"}]',
    ]
    environment = os.environ | {"VLLM_PYTHON": str(vllm_python)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = [json.loads(line) for line in (tmp_path / "runs/smoke/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["training/rollout_probs_diff_mean"] < ROUNDING for row in rows[1:])
    assert sum(row.get("drafter/optimizer_steps", 0) for row in rows) > 0
    engines = sorted(path.name for path in (tmp_path / "runs/smoke/vllm").iterdir())
    assert engines == ["worker_0", "worker_2"]
    longer = subprocess.run([*command, "num_steps=4"], env=environment, capture_output=True, text=True, check=False)
    assert longer.returncode == 0, (longer.stdout + longer.stderr)[-4000:]
    assert "resum" in longer.stdout + longer.stderr
