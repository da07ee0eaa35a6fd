"""What a flow run's page in Prefect shows: progress, the table of steps, a link to MLflow.

The run waits for none of it: see `tasks/outbox`.
"""

import contextvars
import re
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

from tasks.mlflow_run import MlflowRun
from tasks.outbox import Outbox

_END_S = 15.0  # for what is still to be sent
_COLUMNS = {
    "reward": "critic/rewards/mean",
    "length p50": "response_length/p50",
    "length p99": "response_length/p99",
    "tok/s": "perf/rollout_tokens_per_s",
    "idle": "idle/idle_ratio",
    "rollout s": "timing_s/gen",
    "update s": "timing_s/update_actor",
    "step s": "timing_s/step",
    "accuracy": "val-core/all/reward/greedy",
}


class RunPage:
    def __init__(self, *, run_name: str, num_steps: int) -> None:
        self._key = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
        self._num_steps = num_steps
        self._rows: list[dict[str, Any]] = []
        self._progress: UUID | None = None
        errors = (httpx.HTTPError, PrefectException)
        self._outbox = Outbox("Prefect's server", errors=errors, refused=lambda _: True)  # later calls show more

    def begin(self, *, done: int, mlflow_run: MlflowRun) -> None:
        """Show the progress bar, and where MLflow has the run."""

        def send() -> None:
            percent = 100.0 * done / self._num_steps
            created = create_progress_artifact(percent, key=f"{self._key}-progress", description="RL steps")
            assert isinstance(created, UUID), "a coroutine only inside an event loop"
            self._progress = created
            if link := mlflow_run.link:
                create_link_artifact(key=f"{self._key}-mlflow", link=link, link_text="MLflow run")
            else:
                where = f"MLflow run `{mlflow_run.run_id}` in `{mlflow_run.uri}`; `tlt ui` or `make ui` opens it."
                create_markdown_artifact(key=f"{self._key}-mlflow", markdown=where)

        self._send(send)

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = {column: round(metrics[name], 3) for column, name in _COLUMNS.items() if name in metrics}
        self._rows.append({"step": step, **shown})

        def send() -> None:
            if self._progress is not None:
                update_progress_artifact(self._progress, progress=100.0 * step / self._num_steps)

        self._send(send)

    def end(self) -> None:
        key, text = f"{self._key}-steps", "Steps of this run"
        self._send(lambda: create_table_artifact(key=key, table=self._rows, description=text))
        self._outbox.settle(within_s=_END_S)
        self._outbox.close()

    def _send(self, call: Callable[[], object]) -> None:
        """In this flow's context, by which Prefect knows whose artifact it is."""
        context = contextvars.copy_context()
        self._outbox.put(lambda: context.run(call))
