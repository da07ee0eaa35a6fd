"""A real MLflow server of the test's own."""

import os
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import closing
from pathlib import Path

from mlflow import MlflowClient

from flows.deploy import server_command

_START_S = 240


class Mlflow:
    def __init__(self, folder: Path) -> None:
        with closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.store = f"sqlite:///{folder}/mlflow.db"
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = server_command(uri=self.store, host="127.0.0.1", port=self.port)
        with (self.folder / "mlflow.log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self) -> None:
        until_s = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                assert time.monotonic() < until_s, (self.folder / "mlflow.log").read_text()[-2000:]
                time.sleep(0.5)

    def steps(self, run_id: str) -> list[int]:
        """Steps that it has of a run, in the order of their recording; read from its database."""
        history = MlflowClient(self.store).get_metric_history(run_id, "training/global_step")
        return [metric.step for metric in history]

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGCONT)
