"""Everything of a worker that has to do with drafting: what its engine speculates with, how that learns, who watches.

prepare -> the tuner is restored if policy, arms and machine are those it learnt with, else measured anew
observe -> the first training rounds after a publish are watched; a drafter that gets nothing accepted is suspended
publish -> candidates of all workers are summed, tried, and swapped in between two rollouts
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from conf.drafter import DrafterConfig
from conf.rollout import SpeculationConfig
from tlt_core.drafter.eagle3.files import export_weights, load_eagle3, save_eagle3
from tlt_core.idle_training.comparison import Comparison
from tlt_core.idle_training.training import IdleTraining
from tlt_core.items.speculation import RoundReport
from tlt_core.machine.doctor import machine
from tlt_core.rollout.drafts import Drafts
from tlt_core.tuner.collapse import CollapseCheck

_DRAFTER_DIR = "drafter-eagle3"  # of a checkpoint: the drafter in use
_STATE_FILE = "tuner_{}.json"  # by rank
_FOLDER = "worker_{}"  # by rank
_MOST_PEERS = 7  # whose responses a worker trains on besides its own
_COSTS_DEPEND_ON = ("cpu", "cpu_kernels", "threads", "gpus")


class DrafterPublished(NamedTuple):
    """What one worker made of a drafter candidate.  All workers agree."""

    accepted: bool
    trial: Comparison | None  # of the average, on what all workers have held back; None: known before
    checksum: int  # of the drafter now in use


def newest_drafter(cfg: SpeculationConfig, checkpoint: Path | None) -> SpeculationConfig:
    """The drafter that was in use when the checkpoint was written, where there was one."""
    saved = None if checkpoint is None else checkpoint / _DRAFTER_DIR
    if cfg.drafter_path is None or saved is None or not saved.is_dir():
        return cfg
    return cfg.model_copy(update={"drafter_path": str(saved)})


class Drafting:
    """See the module docstring.  One a worker."""

    def __init__(
        self,
        drafts: Drafts | None,
        *,
        rank: int,
        hosts: Sequence[int],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """drafts: None where the engine does not speculate.  hosts: ranks of the workers that run an engine.
        group: of those; None: all workers."""
        self._drafts, self._rank, self._hosts, self._group = drafts, rank, tuple(hosts), group
        self._tuner = None if drafts is None else drafts.tuner
        self.idle_training: IdleTraining | None = None
        self._trial_errors = 0.0
        self._check = CollapseCheck(() if drafts is None else drafts.learned)

    def prepare(self, checkpoint: Path | None) -> None:
        """What was learnt before the restart, or a first measurement."""
        saved = None if checkpoint is None else checkpoint / _STATE_FILE.format(self._rank)
        state = json.loads(saved.read_text()) if saved is not None and saved.is_file() else {}
        if "check" in state:
            self._check.load_state_dict(state.pop("check"))
        if self._tuner is not None and state.pop("of", None) == self._tuner_of():
            self._tuner.load_state_dict(state)
            return
        if self._drafts is not None:
            self._drafts.calibrate()
        for drafter in self._check.suspended:
            if self._tuner is not None:
                self._tuner.suspend(drafter)

    def train_in_idle_time(
        self,
        cfg: DrafterConfig,
        speculation: SpeculationConfig,
        *,
        temperature: float,
        compute_dtype: torch.dtype,
        folder: Path,
        resume: bool,
    ) -> None:
        """Make the drafter trainable.  speculation: names the folder that the engine's drafter came from.
        compute_dtype: of the training; the engine drafts in its own.  folder: each worker has a subfolder."""
        if speculation.drafter_path is None or self._drafts is None or not self._drafts.learned:
            return
        edge_weights = self._drafts.edge_weights
        assert edge_weights is not None, "training a drafter needs the target's embedding, norm and head"
        self.idle_training = IdleTraining(
            cfg.idle_training,
            model=load_eagle3(
                Path(speculation.drafter_path), edge_weights.config, device=edge_weights.head_weight.device
            ),
            target=edge_weights,
            depth=cfg.depth,
            temperature=temperature,
            compute_dtype=compute_dtype,
            folder=folder / _FOLDER.format(self._rank),
            resume=resume,
            peers=[folder / _FOLDER.format(rank) for rank in _followers(self._rank, self._hosts)],
        )
        self._trial_errors = cfg.idle_training.canary_errors

    def observe(self, report: RoundReport) -> None:
        collapsed = self._check.observe(report)
        if collapsed is not None and self._tuner is not None:
            self._tuner.suspend(collapsed)

    @property
    def suspended(self) -> tuple[str, ...]:
        return self._check.suspended

    def publish(self, shares: Sequence[float], *, measured: Comparison | None) -> DrafterPublished:
        """Sum the workers' candidates, each times its share, and draft with the result from now on.

        A collective: every worker that runs an engine takes part.  shares: of each of these.  measured: the trial of
        the sum.  None: nobody has tried it, so all of them try it first, and it is refused when it drafts worse than
        the drafter in use.
        """
        idle_training, parameters_N = self._idle_training(), self._weighted(shares)
        trial = measured
        if trial is None:
            sums = torch.tensor(idle_training.candidate.compare(parameters_N), dtype=torch.float64)
            self._sum(sums)
            trial = Comparison(*sums.tolist())
        accepted = measured is not None or not trial.is_worse(errors=self._trial_errors)
        if accepted:
            assert self._drafts is not None, "there is training, so something is drafted"
            self._drafts.load_drafter(
                export_weights(idle_training.adopt(parameters_N, is_mine=self._share(shares) == 1))
            )
            trained = self._drafts.learned[0]
            was_suspended = self._check.published(trained)
            if self._tuner is not None:
                self._tuner.notify_change(trained, change=trial.change)
                if was_suspended:
                    self._tuner.resume(trained)
        else:
            idle_training.reject()
        return DrafterPublished(accepted, trial if measured is None else None, idle_training.candidate.checksum)

    def refuse(self) -> None:
        """No candidate of this phase is published."""
        self._idle_training().reject()

    def export(self, out_dir: Path, *, dtype: torch.dtype) -> None:
        save_eagle3(self._idle_training().candidate.used, out_dir, dtype=dtype)

    def save(self, folder: Path, *, dtype: torch.dtype) -> None:
        """This worker's part of a checkpoint.  The drafter's training state follows in the background."""
        if self._tuner is not None:
            state: dict[str, Any] = {**self._tuner.state_dict(), "of": self._tuner_of()}
            state["check"] = self._check.state_dict()
            (folder / _STATE_FILE.format(self._rank)).write_text(json.dumps(state))
        if self.idle_training is not None:
            self.idle_training.save()
            if self._rank == 0:
                self.export(folder / _DRAFTER_DIR, dtype=dtype)

    def close(self) -> None:
        if self.idle_training is not None:
            self.idle_training.close()

    def _tuner_of(self) -> dict[str, Any]:
        """What a tuner's knowledge holds for: another policy knows other things, another machine has other costs."""
        assert self._drafts is not None, "there is a tuner"
        own = {name: value for name, value in machine().items() if name in _COSTS_DEPEND_ON}
        return own | {"policy": self._drafts.policy, "arms": [str(strategy) for strategy in self._drafts.strategies]}

    def _idle_training(self) -> IdleTraining:
        assert self.idle_training is not None, "only a worker that trains a drafter is asked"
        return self.idle_training

    def _weighted(self, shares: Sequence[float]) -> Tensor:
        """The candidates' parameters, each times its share; where it is one worker's alone, that one's."""
        parameters_N = self._idle_training().candidate.contribution(self._share(shares))
        if 1.0 not in shares:
            self._sum(parameters_N)
        elif len(self._hosts) > 1:
            dist.broadcast(parameters_N, src=self._hosts[list(shares).index(1.0)], group=self._group)
        return parameters_N

    def _share(self, shares: Sequence[float]) -> float:
        return shares[self._hosts.index(self._rank)]

    def _sum(self, values: Tensor) -> None:
        """In place, over all workers that run an engine."""
        if len(self._hosts) > 1:
            dist.all_reduce(values, group=self._group)


def _followers(rank: int, hosts: Sequence[int]) -> list[int]:
    """The hosts after this one, in a circle."""
    own = hosts.index(rank)
    return [*hosts[own + 1 :], *hosts[:own]][:_MOST_PEERS]
