"""A whole run in two small steps, without Prefect and MLflow: prompts in, trained policy out."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from conf.load import load
from tasks.stages import prepare_data
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import eagle3_from_target
from tlt_core.machine import precision
from tlt_core.model.load import load_config, random_decoder, save_hf
from tlt_core.run import inputs, preflight
from tlt_core.run.session import Session

SMALL = [
    "data={kind: file, train_path: ROWS, validation_fraction: 0.2}",
    "reward.functions=[{kind: python, path: 'tests.options.rewards:letters'}]",
    "coldstart.enabled=false",
    "rollout.num_prompts=4",
    "rollout.num_samples=3",
    "rollout.max_new_tokens=16",
    "rollout.max_live_requests=4",
    "drafter.idle_training.min_idle_s=0.0",
    "drafter.idle_training.after_rollout_s=0.3",
    "drafter.idle_training.rows_per_step=16",
    "evaluation.every_steps=2",
    "evaluation.num_samples=1",
]


class Parts(NamedTuple):
    root: Path
    model: Path
    drafter: Path
    rows: Path


def make_parts(root: Path) -> Parts:
    """A random model that ends a response with one of many tokens, so that some end early, and has heads that vLLM's
    attention on CPUs can take; a drafter for it; rows."""
    random_model = inputs.start_model(load("conf/smoke.yaml").model, seed=0)
    embedded = load_config(random_model)
    config = replace(embedded, head_dim=32, eos_token_ids=tuple(range(0, embedded.vocab_size, 12)))
    decoder = random_decoder(config, seed=0, dtype=torch.float32)
    parts = Parts(root, root / "model", root / "drafter-eagle3", root / "rows.jsonl")
    save_hf(decoder.named_parameters(), config, parts.model, tokenizer_from=random_model, dtype=torch.float32)
    (parts.model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(config.eos_token_ids)}))
    drafter = eagle3_from_target(decoder, torch.arange(0, config.vocab_size, 200), scales=(1.0, 1.0, 1.0), seed=1)
    save_eagle3(drafter, parts.drafter, dtype=torch.float32)
    rows = [{"prompt": f"{'easy' if n % 2 else 'hard'}: {n}", "answer": str(n)} for n in range(20)]
    parts.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return parts


def train(parts: Parts, name: str, settings: Sequence[str]) -> list[dict[str, float]]:
    """Metrics of both steps.  Leaves a checkpoint and the policy's folder."""
    own = [f"name={name}", f"output_dir={parts.root}", f"model={{kind: pretrained, path: {parts.model}}}", *SMALL]
    settings = [s.replace("ROWS", str(parts.rows)).replace("DRAFTER", str(parts.drafter)) for s in [*own, *settings]]
    cfg = precision.settle(load("conf/smoke.yaml", settings))
    preflight.check_model(cfg, parts.model)
    data_dir = Path(prepare_data.fn(cfg, parts.model).path)
    steps = []
    with Session.resume_or_init(
        cfg, data_dir=data_dir, start_model=parts.model, on_progress=lambda _: None, resume=False
    ) as session:
        for step in session.remaining_steps():
            steps.append(_step(session, step))
        session.save_checkpoint(cfg.num_steps)
        session.drafter.export(cfg.run_dir / "drafter-eagle3", steps=cfg.num_steps)
        session.export_policy(cfg.run_dir / "policy")
    return steps


def _step(session: Session, step: int) -> dict[str, float]:
    session.begin_step(step)
    scored = session.score(step, session.sample_step(step))
    session.drafter.publish(step)
    while session.needs_more_groups(scored):
        scored = session.resample(step, scored)
    session.update(step, scored)
    session.publish(step)
    if session.validation.is_due(step):
        session.validation.run(step)
    return session.metrics.values()
