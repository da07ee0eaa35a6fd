"""`tlt ui`: MLflow's pages for the runs of this machine."""

import os
import socket
import sys
from contextlib import closing

from conf.load import ConfigError
from conf.system import TrackingConfig, why_no_store


class PortInUse(ValueError):
    """Another program uses the port.  The text names the port and the remedy."""


def serve(*, uri: str | None, host: str, port: int) -> None:
    """Replace this process with MLflow's server.  Raises ConfigError for a store that cannot be, PortInUse."""
    uri = uri or TrackingConfig().uri
    if problem := why_no_store(uri):
        raise ConfigError(f"--uri {problem}")
    require_free(host, port)
    print(f"MLflow on http://{host}:{port} for {uri}; stop it with Ctrl-C", file=sys.stderr, flush=True)
    os.execve(sys.executable, server_command(uri=uri, host=host, port=port), {**os.environ, **_ENVIRONMENT})


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


_ENVIRONMENT = {
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
}
