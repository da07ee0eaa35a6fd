"""What a vLLM process speculates with, as a worker's `cluster/drafting` sees it (`rollout/drafts.Drafts`).

The tuner lives in vLLM's process, beside its scheduler.  Its messages go through the process's pipe.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from conf.rollout import SpeculationConfig
from tlt_core.drafter.kinds import KINDS, learned_in, strategies_of
from tlt_core.items.speculation import Strategy
from tlt_core.model.edge_weights import EdgeWeights
from tlt_core.tuner.policies import UNKNOWN

Ask = Callable[[Mapping[str, Any]], dict[str, Any]]


def vllm_strategies(cfg: SpeculationConfig) -> tuple[Strategy, ...]:
    """The chains that vLLM may draft: one drafter an engine, the first strategy's."""
    if cfg.policy == "off":
        return ()
    strategies = strategies_of(cfg)
    chains = tuple(s for s in strategies if s.drafter == strategies[0].drafter and s.width == 1)
    return chains[:1] if cfg.policy == "fixed" else chains


def vllm_speculation(cfg: SpeculationConfig, strategies: Sequence[Strategy]) -> dict[str, Any] | None:
    """vLLM's speculative_config for our section; None: plain decoding.  strategies: chains of one drafter."""
    if not strategies:
        return None
    settings: dict[str, Any] = {"num_speculative_tokens": max(s.depth for s in strategies)}
    return settings | KINDS[strategies[0].drafter].for_vllm(cfg)


def tlt_settings(cfg: SpeculationConfig, strategies: Sequence[Strategy], *, capture_mb: int) -> dict[str, Any]:
    """Settings of `tlt_vllm`.  capture_mb: memory for hidden states; 0: none are kept."""
    settings: dict[str, Any] = {"policy": cfg.policy, "log_every_s": 0}
    if strategies:
        settings["draft_lengths"] = [s.depth for s in strategies]
    return settings | {"capture_mb": capture_mb}


class VllmDrafts:
    """As `BuiltinDrafts`; edge_weights: None where no drafter is trained."""

    def __init__(self, ask: Ask, cfg: SpeculationConfig, edge_weights: EdgeWeights | None, *, folder: Path) -> None:
        """ask: asks the process.  folder: for weights on their way."""
        self._ask, self._folder = ask, folder
        self.strategies: Sequence[Strategy] = vllm_strategies(cfg)
        self.policy = f"vllm {cfg.policy}"
        self.tuner = RemoteTuner(ask)
        self.learned: Sequence[str] = learned_in(self.strategies)
        self.edge_weights = edge_weights

    def calibrate(self) -> None:
        """Nothing: the tuner learns costs from vLLM's first steps."""

    def load_drafter(self, weights: Mapping[str, Tensor]) -> None:
        """As `BuiltinDrafts.load_drafter`.  Raises VllmError, also when a layer of the running drafter does not compute
        with them afterwards."""
        file = self._folder / "drafter.safetensors"
        save_file({name: value.cpu().contiguous() for name, value in weights.items()}, file)
        self._ask({"ask": "drafter", "file": str(file)})
        file.unlink()


class RemoteTuner:
    """The part of `RecordedTuner` that is called from outside, between two rounds."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def notify_change(self, drafter: str | None = None, *, change: float = UNKNOWN) -> None:
        self._call("notify_change", drafter, change=change)

    def suspend(self, drafter: str) -> None:
        self._call("suspend", drafter)

    def resume(self, drafter: str) -> None:
        self._call("resume", drafter)

    def state_dict(self) -> Mapping[str, Any]:
        state: Mapping[str, Any] = self._call("state_dict")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._call("load_state_dict", dict(state))

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._ask({"ask": "tuner", "call": method, "arguments": list(arguments), "options": options})["answer"]
