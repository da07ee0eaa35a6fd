"""`tlt deploy`: a Prefect server and a worker on this machine, and every deployment of prefect.yaml on them.  `tlt ui`:
MLflow's pages for the runs of this machine.

It can be repeated: what is alive stays, what has died is started, and lost runs are recovered first.
`tlt deploy --stop` ends worker, flow processes and server, each with a deadline.  Interrupted runs resume at the next
deployment.
"""

import logging
import os
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from conf.load import ConfigError
from conf.system import TrackingConfig, why_no_store
from flows import _environment as _environment_defaults
from flows._server import answers

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

log = logging.getLogger(__name__)

POOL = "tlt"
_HOST = "127.0.0.1"
_START_S = 180.0
_STOP_WORKER_S, _STOP_FLOWS_S, _STOP_SERVER_S = 5.0, 20.0, 10.0


_MLFLOW = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}


class DeployError(ValueError):
    """The deployment failed.  The text says what to do."""


class PortInUse(ValueError):
    """Another program uses the port.  The text names the port and the remedy."""


class Daemon:
    """A background process that outlives the command that started it: Prefect has this for its server alone.

    FOLDER/NAME.pid has pid and start time, so that another process with the same pid is not taken for ours;
    FOLDER/NAME.log has its output.
    """

    def __init__(self, name: str, *, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._pid_file = folder / f"{name}.pid"

    def process(self) -> psutil.Process | None:
        """The process, if it is alive."""
        try:
            pid, started = self._pid_file.read_text().split()
            process = psutil.Process(int(pid))
            alive = process.create_time() == float(started) and process.status() != psutil.STATUS_ZOMBIE
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):  # ValueError: a half-written file
            return None
        return process if alive else None

    def start(self, arguments: Sequence[str], *, env: Mapping[str, str]) -> psutil.Process:
        """Start `python ARGUMENTS` in a session of its own, out of reach of the terminal's Ctrl-C."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            command = [sys.executable, *arguments]
            started = subprocess.Popen(command, env=dict(env), stdout=log, stderr=log, start_new_session=True)
        process = psutil.Process(started.pid)
        self._pid_file.write_text(f"{process.pid} {process.create_time()}\n")
        return process

    def stop(self, *, patience_s: float) -> list[psutil.Process]:
        """Terminate the process, and kill it after `patience_s`; returns its descendants, which are left alone."""
        process = self.process()
        if process is None:
            self._pid_file.unlink(missing_ok=True)
            return []
        children = process.children(recursive=True)
        end([process], patience_s=patience_s)
        self._pid_file.unlink(missing_ok=True)
        return children

    def last_lines(self) -> str:
        """The end of its output, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])


def deploy(*, port: int, file: Path, notify_url: str = "", with_worker: bool = True) -> str:
    """Start everything; returns the address of the API.  Raises DeployError.

    with_worker=False: the pool's workers are elsewhere, so none is started here and no lost run is looked for.
    """
    if not file.is_file():
        raise DeployError(f"{file} does not exist; run this in the project's folder, or give --file")
    own_url = f"http://{_HOST}:{port}/api"
    given = os.environ.get("PREFECT_API_URL")
    url = os.environ["PREFECT_API_URL"] = given or own_url  # before Prefect is imported
    env = _environment(url)
    if given is None or (given == own_url and not answers(given)):
        _start_server(port=port, url=url, env=env)
    elif not answers(url):
        raise DeployError(f"no Prefect server answers at PREFECT_API_URL={url}; start it, or unset the variable")

    from prefect.client.orchestration import get_client

    from flows import _automations

    worker = Daemon("worker", folder=_folder())
    start_worker = with_worker and worker.process() is None
    with get_client(sync_client=True) as client:
        _make_pool(client)
        log.info("automations: %s", ", ".join(_automations.install(client, notify_url=notify_url)))
        _deploy_all(file, env=env)
        if start_worker and _is_local(url):  # elsewhere, other machines' workers may share the pool
            for line in _automations.recover(client, pool=POOL):
                log.warning("run %s", line)
    if start_worker:
        worker.start(["-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"], env=env)
    return url


def recover_here(*, port: int, alone: bool = False) -> list[str]:
    """`recover` for the runs of this machine.  Raises DeployError where no server answers, or the worker is alive.

    alone: no other machine has a worker of the pool.  Where the server is elsewhere, it would take theirs for lost.
    """
    url = os.environ.setdefault("PREFECT_API_URL", f"http://{_HOST}:{port}/api")
    if not answers(url):
        raise DeployError(f"no Prefect server answers at {url}; `tlt deploy` starts one")
    if not (alone or _is_local(url)):
        raise DeployError(
            f"{url} is another machine's server, and runs of other machines' workers would be taken for lost; if there "
            "are no such workers, say --alone"
        )
    if Daemon("worker", folder=_folder()).process() is not None:
        raise DeployError("the worker is alive: it reports the runs whose process dies by itself")

    from prefect.client.orchestration import get_client

    from flows._automations import recover

    with get_client(sync_client=True) as client:
        return recover(client, pool=POOL)


def stop() -> list[str]:
    """End what `deploy` started.  The worker ends first: it must not start the interrupted runs again."""
    folder = _folder()
    worker, server = Daemon("worker", folder=folder), Daemon("server", folder=folder)
    stopped = [daemon.name for daemon in (worker, server) if daemon.process() is not None]
    flows = worker.stop(patience_s=_STOP_WORKER_S)
    end(flows, patience_s=_STOP_FLOWS_S)
    end(server.stop(patience_s=_STOP_SERVER_S), patience_s=1.0)
    return stopped


def end(processes: Sequence[psutil.Process], *, patience_s: float) -> None:
    """SIGTERM, and SIGKILL for processes that are alive after `patience_s`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


def _folder() -> Path:
    return Path(os.environ["PREFECT_HOME"])


def _environment(url: str) -> dict[str, str]:
    """Environment of the server, the worker and its flow processes."""
    from flows._automations import HEARTBEAT_S

    project = str(Path.cwd())
    paths = [project, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # longest wait of a scheduled run; default 10
        **_environment_defaults.NO_BARS,  # their output is a file, though this command's may be a terminal
        **os.environ,
        "PREFECT_API_URL": url,
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_S),
        "TLT_PROJECT": project,  # prefect.yaml's working directory
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _start_server(*, port: int, url: str, env: Mapping[str, str]) -> None:
    server = Daemon("server", folder=_folder())
    if server.process() is None:
        if answers(url):
            raise DeployError(
                f"a server that `tlt deploy` did not start answers at {url}; set PREFECT_API_URL={url} to deploy to "
                f"it, or choose another port (make deploy PREFECT_PORT={port + 1})"
            )
        require_free(_HOST, port)
        server.start(["-m", "prefect", "server", "start", "--host", _HOST, "--port", str(port)], env=env)
    deadline = time.monotonic() + _START_S
    while not answers(url):
        if server.process() is None or time.monotonic() > deadline:
            raise DeployError(f"Prefect's server did not start; the end of {server.log}:\n{server.last_lines()}")
        time.sleep(0.2)


def _make_pool(client: "SyncPrefectClient") -> None:
    """One run at a time: a run takes the whole machine.  A limit that somebody has set stays."""
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists

    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=1))


def _deploy_all(file: Path, *, env: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all", "--prefect-file", str(file)]
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True)
    if done.returncode:
        raise DeployError(f"Prefect refused {file}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    log.info("deployed %s", file)


def _is_local(url: str) -> bool:
    return urllib.parse.urlsplit(url).hostname in (_HOST, "localhost")


def serve(*, uri: str | None, host: str, port: int) -> None:
    """Replace this process with MLflow's server.  Raises ConfigError for a store that cannot be, PortInUse."""
    from tasks.mlflow_run import VIEW

    uri = uri or TrackingConfig().uri
    if problem := why_no_store(uri):
        raise ConfigError(f"--uri {problem}")
    require_free(host, port)
    page = f"http://{host}:{port}/#/experiments?{VIEW}"
    print(f"MLflow on {page} for {uri}; stop it with Ctrl-C", file=sys.stderr, flush=True)
    os.execve(sys.executable, server_command(uri=uri, host=host, port=port), {**os.environ, **_MLFLOW})


def server_command(*, uri: str, host: str, port: int) -> list[str]:
    """Command line of MLflow's server, with one process: the default of four takes 2 GB."""
    from tasks.mlflow_run import store_folder

    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--workers", "1"]
    folder = store_folder(uri)
    if folder is not None:
        command += ["--artifacts-destination", str(folder / "mlartifacts")]
    return [*command, "--host", host, "--port", str(port)]


def require_free(host: str, port: int) -> None:
    """Raises PortInUse if a port is taken."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(
                f"port {port} on {host} cannot be used ({error.strerror}); choose another: tlt ui --port {port + 1} "
                f"(make ui PORT={port + 1})"
            ) from None
