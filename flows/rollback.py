"""`tlt rollback`: the champion that was replaced is the champion again.  It needs MLflow's registry, not Prefect."""

import logging
from datetime import UTC, datetime

from conf.run import RunConfig
from tasks.journal import Journal
from tasks.registry import BEFORE, CHAMPION, ROLLED_BACK, Registry, RegistryError, Version, model_name
from tlt_core.machine.file_lock import Locked, exclusive

log = logging.getLogger(__name__)


def roll_back(cfg: RunConfig, *, kind: str, to: str | None) -> tuple[Version, Version]:
    """The champion before, and the champion now.  Raises RegistryError.

    kind: drafter or policy.  to: number of the version; None: the one that the champion has replaced.  Retraining does
    not promote again what was rolled back; a roll-back to it does.
    """
    try:
        with exclusive(cfg.run_dir / "retrain" / "lock"):  # a retraining at work could promote against the old champion
            return _roll_back(cfg, model_name(cfg, kind), to)
    except Locked as other:
        raise RegistryError(f"{other}; end it first, or wait for its decision") from None


def _roll_back(cfg: RunConfig, model: str, to: str | None) -> tuple[Version, Version]:
    registry = Registry(cfg.tracking)
    registry.require()
    left = registry.by_alias(model, CHAMPION)
    if left is None:
        raise RegistryError(f"{model} has no champion at {cfg.tracking.uri}; check tracking.uri and the run's name")
    number = to or left.tags.get(BEFORE)
    if number is None:
        raise RegistryError(f"{left} has replaced no champion; name the version that shall be it: --to NUMBER")
    version = registry.by_number(model, number)
    if version is None:
        raise RegistryError(f"{model} has no version {number}; MLflow's pages list its versions (make ui)")
    if version.number == left.number:
        raise RegistryError(f"{left} is the champion already")
    if int(version.number) > int(left.number):  # forward again
        registry.promote(version)
        registry.tag(version, ROLLED_BACK, "")
    else:
        registry.tag(left, ROLLED_BACK, datetime.now(UTC).isoformat(timespec="seconds"))
        registry.set_alias(version, CHAMPION)
    reason = f"from version {left.number} to version {version.number} by hand"
    Journal(cfg.run_dir / "retrain.jsonl").append({"outcome": "rolled back", "reason": f"{model}: {reason}"})
    log.info("the champion of %s is version %s, it was version %s", model, version.number, left.number)
    return left, version
