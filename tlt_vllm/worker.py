"""What TLT asks of vLLM's workers, beside vLLM's own methods: worker_extension_cls="tlt_vllm.worker.WorkerExtension".

llm.collective_rpc("tlt_load_drafter", args=("drafter/model.safetensors",))
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from safetensors.torch import save_file

from tlt_vllm import hooks, weights
from tlt_vllm.extensions import other_of

hooks.install()  # this module is imported before the worker builds its runner


class WorkerExtension:
    """Mixed into vLLM's worker, so names must not clash with its own."""

    model_runner: Any
    _tlt_answers: list[dict[str, Any]]
    _tlt_loading: weights.Loading | None = None

    def tlt_load_policy(self, file: str) -> dict[str, Any]:
        """New weights of the policy, in place, from a safetensors file or a folder with one.  Raises ValueError; see
        `weights`."""
        file = weights.file_of(file)
        weights.require_fits(self.model_runner.get_model(), file)
        self.tlt_load_policy_part(file)
        return self.tlt_end_policy()

    def tlt_load_policy_part(self, file: str) -> None:
        """Some of the policy's new weights.  The engine must not decode before `tlt_end_policy`."""
        loading, self._tlt_loading = self._tlt_loading, None  # one that fails is not gone on with
        loading = loading or weights.Loading(self.model_runner, self.model_runner.get_model())
        loading.add(file)
        self._tlt_loading = loading

    def tlt_end_policy(self) -> dict[str, Any]:
        """All parts are there.  Raises ValueError; see `weights`."""
        loading, self._tlt_loading = self._tlt_loading, None
        if loading is None:
            raise ValueError("no part of the policy came before the end: call tlt_load_policy_part first")
        report = loading.end()
        tap = hooks.parts_of(self.model_runner).tap
        if tap is not None:
            tap.clear()
        return report

    def tlt_load_drafter(self, file: str) -> dict[str, Any]:
        """As `tlt_load_policy`, of the drafter."""
        model = hooks.draft_model(self.model_runner)
        if model is None:
            raise ValueError("this engine has no drafter with weights: start it with a speculative config of eagle3")
        file = weights.file_of(file)
        weights.require_fits(model, file)
        loading = weights.Loading(self.model_runner, model)
        loading.add(file)
        return loading.end()

    def tlt_before_sleep(self) -> None:
        """Remember what the layers of policy and drafter compute."""
        self._tlt_answers = [weights.answers(model) for model in self._tlt_models()]

    def tlt_after_sleep(self) -> None:
        """Raises ValueError when a layer computes something else than before the sleep."""
        for model, before in zip(self._tlt_models(), self._tlt_answers, strict=True):
            weights.require_answers(model, before)

    def _tlt_models(self) -> list[Any]:
        drafter = hooks.draft_model(self.model_runner)
        return [self.model_runner.get_model(), *([] if drafter is None else [drafter])]

    def tlt_write_states(self, name: str, first: int, sampled: Sequence[int], file: str) -> bool:
        """Write what `Tap.take` returns into a safetensors file; False where nothing is kept."""
        tap = hooks.parts_of(self.model_runner).tap
        kept = None if tap is None else tap.take(name, first=first, length=first + len(sampled), sampled=sampled)
        if kept is None:
            return False
        save_file(kept._asdict(), file)
        return True

    def tlt_report(self) -> dict[str, int]:
        parts = hooks.parts_of(self.model_runner)
        return {
            "dropped": 0 if parts.tap is None else parts.tap.dropped,
            "foreign_rows": 0 if parts.exact is None else parts.exact.foreign,
        }


def __getattr__(name: str) -> type:
    """Ours and another extension in one class, see `extensions`.  Raises what importing the other one does."""
    other = other_of(name)
    if other is None:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return _beside(other)


@functools.cache
def _beside(other: str) -> type:
    module, _, name = other.rpartition(".")
    return type("WorkerExtension", (WorkerExtension, getattr(importlib.import_module(module), name)), {})
