"""Policy update in the tail of the rollout: idle workers compute gradients of groups that have ended.

    finished responses --add--> packs of groups --ready--> workers without requests
                                                   '-- passes that were not computed are dealt in the update

The policy does not change before the update, so a pass gives the same gradient now as later, and `grpo/exact_sum` adds
gradients up without regard to their order.  The update is therefore the same to the bit, whatever was streamed.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from conf.run import RunConfig
from tlt_core.cluster.dispatcher import OfferedPass
from tlt_core.grpo.batch import train_batch
from tlt_core.grpo.passes import Key, Pass, kept, make_passes, packs, power_of_two
from tlt_core.grpo.reward import Score
from tlt_core.items.types import Prompt, Rollout, RolloutBatch, ScoredBatch

log = logging.getLogger(__name__)


class StreamedUpdate:
    def __init__(
        self,
        cfg: RunConfig,
        *,
        scores: Callable[[RolloutBatch], list[Score] | None],
        with_advantages: Callable[[RolloutBatch, list[Score]], ScoredBatch],
    ) -> None:
        """scores: of these responses, None while some are outstanding."""
        self._cfg, self._scores, self._with_advantages = cfg, scores, with_advantages
        self._offers = cfg.update.streamed != "off" and not cfg.why_not_streamed
        if cfg.update.streamed == "auto" and cfg.why_not_streamed:
            log.info("the update is not streamed: %s", cfg.why_not_streamed)
        self.planned_sequences = -(-cfg.rollout.num_prompts * cfg.rollout.num_samples // cfg.update.num_minibatches)
        self.begin_step()

    def begin_step(self) -> None:
        self.pack_of: dict[int, int] = {}  # by prompt id
        self._missing: dict[int, int] = {}  # responses that have not ended, by pack
        self._ended: dict[int, list[Rollout]] = {}  # of packs that are not offered yet
        self.done: set[Key] = set()  # passes whose gradient the workers have

    def plan(self, prompts: Sequence[Prompt]) -> None:
        first = len(self._missing)
        found = packs(
            [p.id for p in prompts],
            [len(p.tokens) for p in prompts],
            groups_per_pack=self._cfg.update.groups_per_pack,
        )
        self.pack_of |= {prompt: first + pack for prompt, pack in found.items()}
        for pack in found.values():
            number = first + pack
            self._missing[number] = self._missing.get(number, 0) + self._cfg.rollout.num_samples
            self._ended[number] = []

    def add(self, finished: Iterable[Rollout]) -> None:
        for rollout in finished:
            pack = self.pack_of[rollout.key.prompt_id]
            self._ended[pack].append(rollout)
            self._missing[pack] -= 1

    def ready(self) -> list[OfferedPass]:
        """Passes of the packs that have been scored since the last call."""
        if not self._offers:
            return []
        offered: list[OfferedPass] = []
        for pack in [p for p, missing in self._missing.items() if missing == 0 and p in self._ended]:
            rollouts = RolloutBatch.pack(self._ended[pack])
            scores = self._scores(rollouts)
            if scores is not None:
                del self._ended[pack]
                scored = self._with_advantages(rollouts, scores)
                planned = power_of_two(self.planned_sequences)
                offered += [
                    (p.key, train_batch(scored, [p], planned_sequences=planned)) for p in self._passes_of(scored)
                ]
        return offered

    def metrics(self, scored: ScoredBatch) -> Mapping[str, float]:
        """idle/streamed_share.  scored: the step's whole batch."""
        if not self._offers:
            return {}
        lens = scored.rollouts.response_lens_R
        tokens = {p.key: int(lens[p.rows].sum()) for p in self._passes_of(scored)}
        return {
            "idle/streamed_share": sum(tokens[key] for key in tokens.keys() & self.done) / max(sum(tokens.values()), 1)
        }

    def _passes_of(self, scored: ScoredBatch) -> list[Pass]:
        """Those with a gradient."""
        cfg = self._cfg
        rows = kept(scored.rollouts, cfg.algorithm).nonzero().flatten().tolist()
        passes = make_passes(scored, rows, cfg.update, cfg.algorithm, pack_of=self.pack_of)
        return [p for p in passes if p.needs_grad]
