"""What `tlt bench spot` measures on a run's recorded responses: methods of training, packing, checkpoints.

All of it on the hidden states that rollout left behind, with the drafters that were in use at the time.
"""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file

from bench.spot.chains import Recording
from bench.timing import median_s
from conf.run import RunConfig
from tlt_core.drafter.eagle3.loss import LossKind
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.train import Eagle3Trainer, TrainSettings
from tlt_core.drafter.eagle3.windows import whole
from tlt_core.items.train_sequence import TrainSequence
from tlt_core.machine.precision import as_torch
from tlt_core.model.decoder import Decoder
from tlt_core.spot.checkpoint import async_checkpoint
from tlt_core.spot.sampling import WindowSampler
from tlt_core.spot.training import ENOUGH
from tlt_core.spot.writer import BackgroundWriter

METHODS: Mapping[str, LossKind] = {"eagle3, soft cross-entropy": "soft_ce", "eagle3, total variation": "tv"}
_PACKED_SEQUENCES = 8
_TRIALS = 3


def trained(
    cfg: RunConfig, first: Eagle3Model, decoder: Decoder, recording: Recording, *, kind: str, rows: int
) -> tuple[Eagle3Model, float]:
    """A copy of the first drafter after so many rows of these responses, as idle time would train it with this method;
    and its rows per second."""
    trainer = _trainer(first, decoder, recording, _settings(cfg, loss=METHODS[kind]))
    spot = cfg.drafter.spot
    sampler = WindowSampler(window_rows=spot.window_rows, length_bias=spot.length_bias, recency=spot.recency)
    sampler.refresh([r.sequence for r in recording.responses], max(r.step for r in recording.responses))
    done, seconds = 0, 0.0
    while done < rows:
        windows = sampler.next(spot.rows_per_step - trainer.rows)
        began_s = time.perf_counter()
        done += trainer.accumulate(windows).rows
        if trainer.rows >= ENOUGH * spot.rows_per_step:
            trainer.apply()
        seconds += time.perf_counter() - began_s
    return trainer.model.requires_grad_(False), done / seconds


def packing(cfg: RunConfig, first: Eagle3Model, decoder: Decoder, recording: Recording) -> dict[str, float]:
    """Responses per second of one training pass, packed and padded: padding computes every one as long as the longest.

    The batch takes every N-th response in order of length, so that it has the run's own tail.
    """
    ordered = sorted((r.sequence for r in recording.responses), key=lambda s: s.rows)
    every = max(1, len(ordered) // _PACKED_SEQUENCES)
    batch = ordered[every - 1 :: every][-_PACKED_SEQUENCES:]
    trainer = _trainer(first, decoder, recording, _settings(cfg))

    def pass_over(sequences: Sequence[TrainSequence]) -> Callable[[], object]:
        windows = [window for s in sequences for window in whole(s)]
        return lambda: trainer.accumulate(windows)

    packed_s, padded_s = (
        median_s(pass_over(batch), trials=_TRIALS),
        median_s(pass_over([batch[-1]] * len(batch)), trials=_TRIALS),
    )
    return {
        "responses": float(len(batch)),
        "longest_rows": float(batch[-1].rows),
        "median_rows": float(batch[len(batch) // 2].rows),
        "packed_per_s": len(batch) / packed_s,
        "padded_per_s": len(batch) / padded_s,
        "packed_over_padded": padded_s / packed_s,
    }


def checkpoint_seconds(
    cfg: RunConfig, first: Eagle3Model, decoder: Decoder, recording: Recording, folder: Path
) -> dict[str, float]:
    """How long training stands still: for the selective asynchronous checkpoint, and for a full synchronous one, which
    writes hidden states and the frozen embedding too."""
    trainer = _trainer(first, decoder, recording, _settings(cfg))
    trainer.step([recording.responses[0].sequence])  # there are moments to save
    folder.mkdir(parents=True, exist_ok=True)
    everything = {"embedding": decoder.embed_tokens.weight.detach().contiguous()}
    for index, r in enumerate(recording.responses):
        everything |= {f"{index}.taps": r.sequence.taps_LE, f"{index}.last": r.sequence.last_PD}
    writer = BackgroundWriter()

    def selective() -> None:
        async_checkpoint(writer, folder / "selective.safetensors", trainer.state_dict(), {})

    def full() -> None:
        save_file(trainer.state_dict() | everything, folder / "full.safetensors")

    seconds = {}
    blocked = []
    for _ in range(_TRIALS):
        began_s = time.perf_counter()
        selective()
        blocked.append(time.perf_counter() - began_s)
        writer.wait()
    seconds["selective_async_s"] = statistics.median(blocked)
    seconds["full_sync_s"] = median_s(full, trials=_TRIALS)
    seconds["selective_mb"] = (folder / "selective.safetensors").stat().st_size / 1e6
    seconds["full_mb"] = (folder / "full.safetensors").stat().st_size / 1e6
    seconds["full_over_selective"] = seconds["full_sync_s"] / seconds["selective_async_s"]
    writer.close()
    return seconds


def _trainer(first: Eagle3Model, decoder: Decoder, recording: Recording, settings: TrainSettings) -> Eagle3Trainer:
    return Eagle3Trainer(copy.deepcopy(first).requires_grad_(True), decoder, settings, heads=recording.heads)


def _settings(cfg: RunConfig, *, loss: LossKind = "soft_ce") -> TrainSettings:
    return TrainSettings(
        learning_rate=cfg.drafter.spot.learning_rate,
        depth=cfg.drafter.depth,
        compute_dtype=as_torch(cfg.update.dtype),
        loss=loss,
    )
