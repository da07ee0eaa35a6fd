"""What a user can set: the entry `tlt` of vLLM's `additional_config`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

KEY = "tlt"
POLICIES = ("cost_model", "beg_mab", "fixed", "off")
LONGEST = 32  # draft tokens: far beyond what pays


@dataclass(frozen=True)
class Settings:
    """Settings.read({"tlt": {"exact": True}}, longest=5) == Settings(draft_lengths=(1, 2, 3, 5), exact=True)."""

    draft_lengths: tuple[int, ...] = ()  # draft lengths to choose from; 0, plain decoding, is always one
    policy: str = "cost_model"  # how to choose (`conf/rollout`); fixed uses the longest
    exact: bool = True  # noise keyed by position; False: vLLM's own sampling
    policy_logprobs: bool = False  # processed log-probabilities are those before top-k and top-p, after temperature
    capture_mb: int = 0  # memory for hidden states of live requests; 0: none are kept
    ngram: bool = True  # drafts of n-grams beside those of a model
    log_every_s: float = 10.0  # seconds between lines in the log; 0: none

    @classmethod
    def read(cls, additional_config: object, *, longest: int) -> "Settings | None":
        """None where there is no entry.  longest: vLLM's num_speculative_tokens; 0: no speculation.

        Raises ValueError, naming the key and what it may be."""
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        given = additional_config[KEY]
        if not isinstance(given, Mapping):
            raise ValueError(f'additional_config["tlt"]={given!r}: give an object, e.g. {{"tlt": {{"exact": true}}}}')
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"tlt.{name} is not known: choose from {', '.join(known)}")
        settings = cls(**{**given, "draft_lengths": _draft_lengths(given.get("draft_lengths"), longest)})
        settings._check()
        return settings

    def _check(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"tlt.policy={self.policy!r}: choose one of {', '.join(POLICIES)}")
        for name in ("exact", "policy_logprobs", "ngram"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"tlt.{name}={getattr(self, name)!r}: say true or false")
        for name in ("capture_mb", "log_every_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
                raise ValueError(f"tlt.{name}={value!r}: give a number from 0 up")
        for name, nothing in (("capture_mb", "0"), ("policy_logprobs", "false")):
            if getattr(self, name) and not self.exact:
                raise ValueError(
                    f"tlt.{name}={getattr(self, name)} with exact=false: it comes from exact sampling; set tlt.exact "
                    f"to true, or tlt.{name} to {nothing}"
                )


def _draft_lengths(given: Any, longest: int) -> tuple[int, ...]:
    """Draft lengths, ascending.  Not given: 1, 2, 3, 5, 7, ... up to the longest."""
    if given is None:
        return tuple(sorted({k for k in (1, 2, 3, 5, 7, 10, 15) if k < longest} | {longest})) if longest else ()
    whole = isinstance(given, Sequence) and all(isinstance(k, int) and not isinstance(k, bool) for k in given)
    if not whole or isinstance(given, str) or not given or min(given) < 1 or max(given) > LONGEST:
        raise ValueError(f"tlt.draft_lengths={given!r}: list draft lengths from 1 to {LONGEST}, e.g. [1, 3, 5]")
    if max(given) != longest:
        raise ValueError(
            f"tlt.draft_lengths={given!r}, but num_speculative_tokens={longest} in the speculative config: the "
            "longest of draft_lengths must be that number"
        )
    return tuple(sorted(set(given)))


def table(draft_lengths: Sequence[int], max_live: int) -> list[tuple[int, int, int]]:
    """vLLM's `num_speculative_tokens_per_batch_size` with every draft length, the longest for the smallest
    batches: vLLM captures graphs for these lengths.  The scheduler does not choose by it.

    table((1, 3), 8) == [(1, 1, 3), (2, 2, 1), (3, 8, 0)]"""
    lengths = [*sorted(draft_lengths, reverse=True), 0]
    ends = [*range(1, min(len(lengths), max_live)), max_live]
    return [(start, end, k) for start, end, k in zip([1, *(e + 1 for e in ends)], ends, lengths, strict=False)]
