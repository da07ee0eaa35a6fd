"""What the tuner does, on the /metrics page of `vllm serve`.

vLLM's own counters reach the server with each step's outputs, which have no room for ours.  So the engine leaves a
small file, at most once a second and whenever no request is left; who asks for the page reads it.
"""

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tlt_vllm.draft_lengths import DraftLengths

_log = logging.getLogger("vllm.plugins.tlt")

FOLDER = "TLT_VLLM_COUNTERS"  # environment variable: where the files are; the engine's process inherits it
_EVERY_S = 1.0
_COUNTERS = {  # in the order of an entry of `DraftLengths.rounds`
    "tlt_rounds": "Engine steps that decoded with this draft length; steps that also read prompts are left out.",
    "tlt_round_requests": "Requests in these steps, one for each step.",
    "tlt_draft_tokens": "Tokens drafted for them.",
    "tlt_accepted_tokens": "Drafted tokens accepted.",
    "tlt_round_seconds": "Seconds that these steps took.",
}


def publish() -> None:
    """In the server's process, before the engine starts: show what engines will leave.  Later calls do nothing."""
    if FOLDER in os.environ:
        return
    import atexit

    from prometheus_client import REGISTRY

    folder = tempfile.mkdtemp(prefix="tlt-counters-")
    os.environ[FOLDER] = folder
    owner = os.getpid()  # a forked engine leaves this way, too
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    REGISTRY.register(Page(Path(folder)))


class Writer:
    """Of one engine.  Does nothing where no server has called `publish`."""

    def __init__(self, engine: int) -> None:
        folder = os.environ.get(FOLDER)
        self._path = None if folder is None else Path(folder) / f"engine-{engine}.json"
        self._written_s = 0.0

    def write(self, lengths: DraftLengths, *, is_idle: bool) -> None:
        """is_idle: no request is left, so that no step may follow soon."""
        now_s = time.monotonic()
        if self._path is None or not (is_idle or now_s > self._written_s + _EVERY_S):
            return
        self._written_s = now_s
        arms = {str(length): of for length, of in lengths.by_length.items()}
        arms |= {f"ngram {of.tokens}": of for of in lengths.ngrams}
        rows = {name: lengths.rounds.get(str(of), [0.0] * 5) for name, of in arms.items()}
        partial = self._path.with_suffix(".partial")
        try:
            partial.write_text(json.dumps({"rounds": rows, "failed": lengths.has_failed}))
            partial.replace(self._path)
        except OSError as error:  # a full disk, or a server that has gone; requests matter more than counters
            self._path = None
            _log.warning("tlt: no counters on /metrics from now on: %s", error)


class Page:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Counters by engine and draft length, and whether an engine's tuner has failed."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        families = [CounterMetricFamily(name, text, labels=["engine", "k"]) for name, text in _COUNTERS.items()]
        failed = GaugeMetricFamily(
            "tlt_tuner_failed", "1: the tuner failed (see the log), and the longest draft is used.", labels=["engine"]
        )
        for path in sorted(self._folder.glob("engine-*.json")):
            engine, left = path.stem.removeprefix("engine-"), json.loads(path.read_text())
            failed.add_metric([engine], float(left["failed"]))
            for length, row in left["rounds"].items():
                for family, value in zip(families, row, strict=True):
                    family.add_metric([engine, length], value)
        yield from (*families, failed)
