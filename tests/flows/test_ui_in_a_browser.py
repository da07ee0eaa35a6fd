"""What a person sees of a run in MLflow, by the links that we print, in a real browser without a window."""

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from mlflow import MlflowClient

from conf.system import TrackingConfig
from flows.deploy import server_command
from tasks.mlflow_run import VIEW, MlflowRun

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine")]


class Shown(NamedTuple):
    server: str
    run: MlflowRun


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """A server, and a run that reports to it."""
    folder = tmp_path_factory.mktemp("ui")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    uri, address = f"sqlite:///{folder}/mlflow.db", f"http://127.0.0.1:{port}"
    server = subprocess.Popen(server_command(uri=uri, host="127.0.0.1", port=port), cwd=folder)
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=2)
                break
            except OSError:
                time.sleep(0.5)
        cfg = TrackingConfig(uri=address, experiment="tlt", system_metrics=False)
        run = MlflowRun(cfg, run_name="seen-by-people", resume_id="", on_start=lambda _: None)
        for step in (1, 2):
            run.metrics({"critic/rewards/mean": 0.5 * step, "training/global_step": step}, step=step)
        run.end("FINISHED")
        yield Shown(address, run)
    finally:
        server.terminate()
        server.wait(30)


def page(address: str, folder: Path) -> str:
    """The text of a page when its scripts have run."""
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=20000",
    ]
    found = subprocess.run([BROWSER, *options, "--dump-dom", address], capture_output=True, text=True, timeout=200)
    return found.stdout


def test_links_open_on_runs_and_their_metrics(shown: Shown, tmp_path: Path) -> None:
    experiment = MlflowClient(shown.server).get_experiment_by_name("tlt").experiment_id
    runs = page(f"{shown.server}/#/experiments/{experiment}?{VIEW}", tmp_path)
    assert "seen-by-people" in runs
    assert "reinforcement learning with adaptive speculative decoding" in runs, "the experiment's description"
    assert "critic/rewards/mean" in page(shown.run.link, tmp_path)
    without = page(f"{shown.server}/#/experiments/{experiment}", tmp_path / "new")
    assert "seen-by-people" not in without, "MLflow opens on runs by itself now: the links need nothing more"
