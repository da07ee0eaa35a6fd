"""Flow: does the champion drafter still draft as well as at its promotion?  If not, an event says so.

    newest policy, present data -> champion on held-out prompts -> acceptance length -- far below --> event, log, exit 1
                                                                                       |
                       webhook (`_automations.py`), deployment `retrain` (prefect.yaml) <-'

The cause may be a policy that has been trained on, other data, or a bad drafter that has become the champion.
"""

import logging

from prefect import flow
from prefect.events import emit_event

from conf.run import RunConfig
from flows._automations import DROPPED
from flows._config import as_config, at_work, run_name
from flows._terminal import Terminal
from flows.retrain import newest_policy
from tasks.journal import Journal
from tasks.registry import Registry, model_name
from tasks.retrain import check_champion
from tlt_core.export.promotion import Check
from tlt_core.machine.file_lock import Locked, exclusive
from tlt_core.run import preflight

log = logging.getLogger(__name__)


@flow(name="check-drafter", flow_run_name=run_name)
def check_drafter(config: RunConfig | str, overrides: list[str] | None = None) -> Check:
    """ok, dropped, nothing (to check) or busy, with the reason.  Raises RegistryError."""
    cfg = as_config(config, overrides)
    preflight.check_run(cfg)
    try:
        with exclusive(cfg.run_dir / "retrain" / "lock"), at_work(cfg) as (settled, show):
            found = _check(settled, show)
            log.log(
                logging.WARNING if found.outcome == "dropped" else logging.INFO,
                "check-drafter %s: %s: %s",
                cfg.name,
                *found,
            )
            Journal(cfg.run_dir / "acceptance.jsonl").append(found._asdict())
    except Locked as other:
        found = Check("busy", str(other))
        log.info("check-drafter %s: %s: %s", cfg.name, *found)
    if found.outcome == "dropped":
        whole = config.model_dump(mode="json") if isinstance(config, RunConfig) else config
        model = model_name(cfg, "drafter")
        emit_event(
            event=DROPPED,
            resource={"prefect.resource.id": f"tlt.drafter.{model}", "prefect.resource.name": model},
            payload={"message": found.reason, "config": whole, "overrides": overrides or []},
        )
    return found


def _check(cfg: RunConfig, show: Terminal) -> Check:
    Registry(cfg.tracking).require()
    made = newest_policy(cfg, show)
    if made is None:
        return Check("nothing", f"{cfg.run_dir} has neither a policy nor a checkpoint: 'tlt train' makes them")
    return check_champion(cfg, *made)
