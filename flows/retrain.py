"""Flows of the champion drafter: `retrain` trains a candidate, `check_drafter` looks whether acceptance has dropped.

    retrain   newest policy -> candidate drafter -> candidate and champion on held-out prompts -> decision -> registry
    check     newest policy -> champion on held-out prompts -> acceptance length -- far below --> event, log, exit 1
                         webhook (`_automations.py`), deployment `retrain` (prefect.yaml) <---------'

Both are meant to run on a schedule.  `retrain` does nothing when policy, data and settings are those of the last
decision.  Every decision is a line in `runs/NAME/retrain.jsonl` and a run in MLflow.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.events import emit_event

from conf.run import RunConfig
from flows._automations import DROPPED
from flows._config import at_work, checked, run_name
from flows._terminal import Terminal
from tasks.registry import ROLLED_BACK, Registry, last_decided, model_name, write_down
from tasks.retrain import (
    check_champion,
    export_checkpoint,
    fetch_champion,
    find_version,
    record_decision,
    try_drafters,
)
from tasks.stages import cold_start, prepare_data, prepare_model, warm_up_drafter
from tlt_core.export import lineage
from tlt_core.export.promotion import Check, Decision, decide
from tlt_core.export.record import weights_digest
from tlt_core.items import checkpoint
from tlt_core.items.store import Ref
from tlt_core.machine import provenance
from tlt_core.machine.file_lock import Locked, exclusive

log = logging.getLogger(__name__)

_NO_POLICY = "{} has neither a policy nor a checkpoint: 'tlt train' makes them"


@flow(name="retrain", flow_run_name=run_name)
def retrain(config: RunConfig | str, overrides: list[str] | None = None) -> Decision:
    """The outcome with its reason: promoted, refused, unchanged, nothing (to retrain for) or busy.

    Raises RegistryError when MLflow's registry, which knows the champion, does not answer.
    """
    cfg = checked(config, overrides)
    journal = cfg.run_dir / "retrain.jsonl"
    try:
        with exclusive(cfg.run_dir / "retrain" / "lock"), at_work(cfg) as (settled, show):
            try:
                decision = attempt(settled, journal, show)
            except Exception as error:
                write_down(journal, {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"})
                raise
    except Locked as other:
        decision = Decision("busy", str(other))
    log.info("retrain %s: %s: %s", cfg.name, decision.outcome, decision.reason)
    return decision


@flow(name="check-drafter", flow_run_name=run_name)
def check_drafter(config: RunConfig | str, overrides: list[str] | None = None) -> Check:
    """Does the champion still draft as well as at its promotion?  ok, dropped, nothing (to check) or busy, and why.

    A policy that has been trained on, other data, or a bad drafter that was promoted are causes of a drop, of which an
    event tells.  Raises RegistryError.
    """
    cfg = checked(config, overrides)
    try:
        with exclusive(cfg.run_dir / "retrain" / "lock"), at_work(cfg) as (settled, show):
            made = newest_policy(settled, show)
            found = check_champion(settled, *made) if made else Check("nothing", _NO_POLICY.format(cfg.run_dir))
            write_down(cfg.run_dir / "acceptance.jsonl", found._asdict())
    except Locked as other:
        found = Check("busy", str(other))
    level = logging.WARNING if found.outcome == "dropped" else logging.INFO
    log.log(level, "check-drafter %s: %s: %s", cfg.name, *found)
    if found.outcome == "dropped":
        whole = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
        model = model_name(cfg, "drafter")
        emit_event(
            event=DROPPED,
            resource={"prefect.resource.id": f"tlt.drafter.{model}", "prefect.resource.name": model},
            payload={"message": found.reason, "config": whole, "overrides": overrides or []},
        )
    return found


def attempt(cfg: RunConfig, journal: Path, show: Terminal) -> Decision:
    """Train a candidate, try it, decide, register the result and write it down."""
    made = newest_policy(cfg, show)
    if made is None:
        return Decision("nothing", _NO_POLICY.format(cfg.run_dir))
    policy, dataset = made
    inputs = inputs_of(cfg, policy, dataset)
    last = last_decided(journal)
    if last is not None and last["inputs"] == inputs:
        return Decision("unchanged", f"policy, data and settings are those of {last['time']}: {last['outcome']} then")
    candidate = cfg.run_dir / "retrain" / "candidate-eagle3"
    metrics = warm_up_drafter(cfg, policy, dataset, candidate, show.stage)
    champion = fetch_champion(cfg, policy)
    trials = try_drafters(cfg, policy, dataset, candidate, champion)
    known = find_version(cfg, candidate)
    if known is not None and known.tags.get(ROLLED_BACK):
        undo = f"'tlt rollback --to {known.number}' makes it the champion"
        decision = Decision("refused", f"the candidate is {known}, which was rolled back: {undo}")
    elif champion is not None and weights_digest(candidate) == champion.version.digest:
        decision = Decision("refused", f"the candidate is {champion.version}, byte for byte")
    else:
        rival = "plain" if champion is None else "champion"
        name = "plain decoding (there is no champion for this policy)" if champion is None else str(champion.version)
        decision = decide(trials["candidate"], trials[rival], rival_name=name, cfg=cfg.retrain)
    version = record_decision(cfg, policy, dataset, candidate, decision, trials, _digest(inputs))
    row = {
        **decision._asdict(),
        "inputs": inputs,
        "version": str(version),
        "rival": None if champion is None else str(champion.version),
        "trials": {name: trial._asdict() for name, trial in trials.items()},
        "training": metrics,
        "commit": provenance.commit(),
    }
    write_down(journal, row)
    return decision


def newest_policy(cfg: RunConfig, show: Terminal) -> tuple[Path, Ref] | None:
    """Folder of the run's newest policy, and the data set; None: the run has neither a policy nor a checkpoint.

    Raises RegistryError.
    """
    Registry(cfg.tracking).require()
    policy, is_newest = cfg.run_dir / "policy", lineage.newest_is_exported(cfg)
    if not is_newest and checkpoint.newest_valid(cfg.run_dir / "checkpoints") is None:
        return None
    start = prepare_model(cfg)
    dataset = prepare_data(cfg, start)
    if not is_newest:  # a run that is not finished, or has gone on since
        if cfg.coldstart.enabled:
            start, _ = cold_start(cfg, start, dataset, show.stage)
        policy, _ = export_checkpoint(cfg, start, dataset, show)
    return policy, dataset


def inputs_of(cfg: RunConfig, policy: Path, dataset: Ref) -> dict[str, str]:
    """Digests of everything that a decision depends on."""
    decides = cfg.model_dump(
        mode="json",
        include={"seed", "rollout", "drafter", "retrain"},
        exclude={"rollout": {"speculation"}, "drafter": {"idle_training", "warmup"}, "retrain": {"alert_below"}},
    )
    decides["update"] = {"dtype": cfg.update.dtype}  # of the drafter's training
    return {
        "policy_digest": weights_digest(policy),
        "data_digest": dataset.sha256,
        "settings_digest": _digest(decides),
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
