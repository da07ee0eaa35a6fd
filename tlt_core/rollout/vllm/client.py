"""vLLM as a worker's replica: the worker's side of a process that runs in vLLM's own Python environment.

Requests and responses go through pipes, weights in pieces of bounded size through shared memory.  Every answer of the
process has a time limit and names the policy version that it decoded with.  A process that hangs, has died or missed an
update ends the phase with a message and the end of its log.

The process runs the plug-in `tlt_vllm`: tokens are sampled with our noise, so speculation does not change them, and
responses are those of our engine up to rounding.  The tuner chooses draft lengths, and hidden states come back for
training a drafter.  Log-probs are those of the policy, after temperature and before top-k and top-p.
"""

import contextlib
import itertools
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tlt_core.items.speculation import RoundReport, Strategy
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.items.types import FinishReason, GenerationRequest, Rollout, SamplingParams
from tlt_core.model.sampling import stream_key
from tlt_core.rollout.engine import Pull, RoundTrace
from tlt_core.rollout.replica import DecodeReport, OnCaptured
from tlt_core.rollout.vllm.environment import environment, why_not

_SCRIPT = Path(__file__).with_name("process.py")
_START_S = 1200.0  # loading takes half a minute, on a busy machine ten
_ANSWER_S = 600.0  # steps take a quarter of a second, weights some seconds
_STOP_S = 20.0
_LOG_LINES = 25
_PIECE_BYTES = 256 << 20
_SHARED = Path("/dev/shm")

_log = logging.getLogger(__name__)


class VllmUnusable(ValueError):
    """vLLM cannot be started as configured; the message says what is missing."""


class VllmError(Exception):
    """vLLM did not start, ended, or refused a request; the message says what it answered."""


class VllmRollout:
    """A `Replica`; see the module docstring."""

    def __init__(
        self,
        python: Path,
        settings: Mapping[str, Any],
        *,
        for_vllm: Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]],
        threads: int,
        devices: Sequence[str] = (),
    ) -> None:
        """Start the process and wait until the model is loaded.

        python: of the environment with vLLM.  settings: what the process is told first, see `replica`.  for_vllm: makes
        Hugging Face's tensors of weights under our names.  devices: GPUs, as CUDA_VISIBLE_DEVICES names them; none:
        those that this process sees.  Raises VllmError, VllmUnusable."""
        require_vllm(python)
        self.folder = Path(settings["folder"])
        self._for_vllm, self._max_live, self._version = for_vllm, settings["max_live"], settings["version"]
        self._speculates = settings["speculative"] is not None
        self._unread = b""
        self._rounds: list[RoundTrace] = []  # since the last report
        self._names = map(str, itertools.count(1))  # of requests
        self.folder.mkdir(parents=True, exist_ok=True)
        self._log_file = self.folder / "vllm.log"
        began_s = time.monotonic()
        with self._log_file.open("wb") as log:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [str(python), "-P", str(_SCRIPT)],
                env=environment(python, threads=threads, devices=devices) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            described = self.ask(settings, limit_s=_START_S)["ready"]
        except BaseException:
            self.close()
            raise
        _log.info("vLLM is ready after %.0f s: %s", time.monotonic() - began_s, described)

    def close(self) -> None:
        """End the process.  A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None, "opened as pipes"  # noqa: PT018
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # which ends it
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """As `Replica.load_weights`, into the running engine.  Raises VllmError."""
        for piece in pieces(self._for_vllm(weights)):
            with in_shared_memory(piece, otherwise=self.folder) as file:
                self.ask({"ask": "part", "file": str(file)})
        self.ask({"ask": "weights", "version": policy_version})
        self._version = policy_version

    def decode(
        self,
        pull: Pull,
        on_finish: Callable[[Rollout], None],
        params: SamplingParams,
        *,
        on_tokens: Callable[[int], None] = lambda _: None,
        on_round: Callable[[RoundReport], None] | None = None,
        on_captured: OnCaptured | None = None,
        worker: int = 0,
    ) -> None:
        """As `Replica.decode`.  Raises VllmError."""
        live: dict[str, tuple[GenerationRequest, float]] = {}
        sampling = _sampling(params)
        while True:
            new = pull(self._max_live - len(live)) if len(live) < self._max_live else ()
            started = {next(self._names): request for request in new}
            live |= {name: (request, time.time()) for name, request in started.items()}
            if not live:
                return
            rows = [
                {
                    "id": name,
                    "tokens": request.prompt_tokens.tolist(),
                    "stream": stream_key(request.key),
                    "max_tokens": min(params.max_new_tokens, request.max_new_tokens or params.max_new_tokens),
                }
                for name, request in started.items()
            ]
            answer = self.ask({"ask": "decode", "params": sampling, "requests": rows})
            if answer["version"] != self._version:
                raise VllmError(f"vLLM decoded with policy {answer['version']}, {self._version} was published to it")
            on_tokens(answer["tokens"])
            self._hear(answer["rounds"], on_round)
            for done in answer["finished"]:
                request, started_s = live.pop(done["id"])
                rollout = _rollout(request, done, policy_version=self._version, worker=worker, started_s=started_s)
                if on_captured is not None and done["states"] is not None:
                    on_captured(_sequence(rollout, Path(done["states"])))
                on_finish(rollout)

    def report(self) -> DecodeReport:
        rounds, self._rounds = tuple(self._rounds), []
        return DecodeReport(rounds, self.counters()["tuner"] if self._speculates else {}, 0)

    def counters(self) -> dict[str, Any]:
        """vLLM's own counters of drafts since the start, the tuner's figures, and responses whose hidden states were
        lost."""
        return self.ask({"ask": "counters"})

    def release_memory(self) -> None:
        """As `Replica.release_memory`.  The next call that needs the engine wakes it, and raises VllmError when a layer
        of policy or drafter does not compute what it did before.  On a CPU vLLM keeps its memory."""
        self.ask({"ask": "sleep"})

    def _hear(self, rounds: Iterable[Mapping[str, Any]], on_round: Callable[[RoundReport], None] | None) -> None:
        for told in rounds:
            strategy, *counted = told["report"]
            live, context, drafted, offered, accepted, *seconds = counted
            report = RoundReport(
                Strategy(*strategy), live, context, tuple(drafted), tuple(offered), tuple(accepted), *seconds
            )
            tokens = sum(accepted) + live
            self._rounds.append(RoundTrace(report, tuple(told["rows"]), tokens, told["end_s"], told["seconds"]))
            if on_round is not None:
                on_round(report)

    def ask(self, value: Mapping[str, Any], *, limit_s: float = _ANSWER_S) -> dict[str, Any]:
        """One question to the process, and its answer.  Raises VllmError."""
        process = self._process
        if process is None:
            raise VllmError("vLLM is not running: start it first")
        assert process.stdin is not None, "opened as a pipe"
        try:
            process.stdin.write(json.dumps(dict(value)).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("vLLM has ended") from None
        answer: dict[str, Any] = json.loads(self._line(process, limit_s=limit_s))
        if "error" in answer:
            raise self._failed(f"vLLM refused ({answer['error']})")
        return answer

    def _line(self, process: subprocess.Popen[bytes], *, limit_s: float) -> bytes:
        assert process.stdout is not None, "opened as a pipe"
        pipe, until_s, parts = process.stdout.fileno(), time.monotonic() + limit_s, [self._unread]
        while b"\n" not in parts[-1]:
            if not select.select([pipe], [], [], max(until_s - time.monotonic(), 0))[0]:
                raise self._failed(f"vLLM gave no answer in {limit_s:.0f} s")
            parts.append(os.read(pipe, 1 << 20))
            if not parts[-1]:
                raise self._failed("vLLM has ended")
        line, _, self._unread = b"".join(parts).partition(b"\n")
        return line

    def _failed(self, what: str) -> VllmError:
        end = "\n".join(self._log_file.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        return VllmError(f"{what}; the end of {self._log_file}:\n{end}")


def require_vllm(python: Path, device: str | None = None) -> None:
    """Raises VllmUnusable when this interpreter cannot run vLLM with our plug-in.  device: see `why_not`."""
    problem = why_not(python, device)
    if problem:
        raise VllmUnusable(f"rollout.engine='vllm' needs vLLM in an environment of its own, but {problem}")


def _sampling(params: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
    }


def _sequence(rollout: Rollout, states: Path) -> TrainSequence:
    """What the drafter learns from, with the hidden states of a file, which is deleted."""
    tensors = load_file(states)
    states.unlink()
    return TrainSequence(
        key=rollout.key,
        policy_version=rollout.policy_version,
        stream=stream_key(rollout.key),
        first=rollout.prompt_len,
        tokens_L=rollout.tokens.clone(),
        **tensors,
    )


def _rollout(
    request: GenerationRequest, done: Mapping[str, Any], *, policy_version: int, worker: int, started_s: float
) -> Rollout:
    completion = torch.tensor(done["tokens"], dtype=torch.int32)
    return Rollout(
        key=request.key,
        tokens=torch.cat([request.prompt_tokens, completion]),
        prompt_len=len(request.prompt_tokens),
        logprobs=torch.tensor(done["logprobs"], dtype=torch.float32),
        finish=FinishReason.STOP if done["stopped"] else FinishReason.LENGTH,
        policy_version=policy_version,
        worker=worker,
        started_s=started_s,
        finished_s=time.time(),
    )


def pieces(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors by name, together at most `_PIECE_BYTES`; a larger tensor is a piece by itself."""
    piece: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if piece and size + tensor.nbytes > _PIECE_BYTES:
            yield piece
            piece, size = {}, 0
        piece[name] = tensor
        size += tensor.nbytes
    if piece:
        yield piece


@contextlib.contextmanager
def in_shared_memory(piece: dict[str, Tensor], *, otherwise: Path) -> Iterator[Path]:
    """A safetensors file of the piece, for the block.  otherwise: folder for it where there is no shared memory."""
    needed = 2 * sum(tensor.nbytes for tensor in piece.values())
    roomy = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > needed
    file = (_SHARED if roomy else otherwise) / f"tlt-weights-{os.getpid()}.safetensors"
    try:
        save_file(piece, file)
        yield file
    finally:
        file.unlink(missing_ok=True)
