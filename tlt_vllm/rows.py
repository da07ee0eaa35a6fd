"""Which requests are sampled by our definition of the policy, and with which noise.  Without vLLM.

A request's stream is extra_args["tlt_stream"] (with n > 1, child i has one made from it and i); else made from its
seed; else from the engine's seed, the number of the replica, and how many such requests came before it.
"""

import hashlib
import logging
from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

from tlt_core.items.types import SamplingParams
from tlt_core.model.sampling import splitmix64

STREAM = "tlt_stream"
_INT64 = range(-(1 << 63), 1 << 63)
_OURS = "_tlt_row"  # set on vLLM's state of a request, which lives as long as the request
_log = logging.getLogger("vllm.plugins.tlt")  # vLLM shows INFO of its own loggers only


class Row(NamedTuple):
    stream: int
    params: SamplingParams


class Rows:
    def __init__(self, *, seed: int, replica: int) -> None:
        """seed: the engine's; replica: number of this engine where several share the requests."""
        self._engine = f"engine {seed}, replica {replica}"
        self._count = 0  # requests without a stream and a seed of their own
        self._told: set[str] = set()

    def of(self, requests: Mapping[str, Any], name: str) -> Row | None:
        """Of a request; None where vLLM must sample.  requests: all that the runner knows, in the order of arrival."""
        if not hasattr(requests[name], _OURS):
            for other, state in requests.items():
                if not hasattr(state, _OURS):
                    setattr(state, _OURS, self.new(other, state.sampling_params))
        row: Row | None = getattr(requests[name], _OURS)
        return row

    def new(self, name: str, wanted: Any) -> Row | None:
        """Of a request that has just come, as `of`.  wanted: its vLLM's SamplingParams."""
        if wanted is None:
            return None
        stream = (wanted.extra_args or {}).get(STREAM)
        if stream is None and wanted.seed is not None:
            stream = _hashed(f"seed {wanted.seed}")
        elif stream is None:
            stream = _hashed(f"{self._engine}, request {self._count}")
            self._count += 1
        if foreign := beyond_us(wanted):
            self._tell(name, foreign)
            return None
        # vLLM's "all tokens" is -1 or 0 for top_k.
        params = SamplingParams(
            temperature=wanted.temperature, top_p=wanted.top_p, top_k=max(wanted.top_k, 0), max_new_tokens=1
        )
        return Row(stream, params)

    def _tell(self, name: str, foreign: Mapping[str, object]) -> None:
        """Once for each reason."""
        reason = ", ".join(foreign)
        if reason in self._told:
            return
        self._told.add(reason)
        _log.warning(
            "tlt: vLLM samples request %s itself, so drafts and the batch may change its tokens: it wants %s.  If it "
            "did not ask for that, the model's generation_config.json did: start vLLM with --generation-config vllm",
            name,
            ", ".join(f"{key}={value!r}" for key, value in foreign.items()),
        )


def require_stream(wanted: Any) -> None:
    """Raises ValueError for a stream that is no int64, before the request reaches the engine, which would end.  wanted:
    vLLM's SamplingParams."""
    stream = (wanted.extra_args or {}).get(STREAM)
    if stream is not None and (type(stream) is not int or stream not in _INT64):
        raise ValueError(f"{STREAM}={stream!r} in extra_args (vllm_xargs over HTTP): give an integer of 64 bits")


def beyond_us(wanted: Any) -> dict[str, object]:
    """What of vLLM's SamplingParams our definition lacks, with its value."""
    neutral = {"repetition_penalty": 1}
    lacking = (
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "logit_bias", "bad_words"),
        *("allowed_token_ids", "structured_outputs", "min_tokens"),
    )
    values = {name: getattr(wanted, name) for name in lacking}
    found = {name: value for name, value in values.items() if value and value != neutral.get(name)}
    budget = getattr(wanted, "thinking_token_budget", None)
    return found if budget is None else found | {"thinking_token_budget": budget}  # 0 is one, too


def of_child(wanted: Any, index: int) -> Any:
    """vLLM's SamplingParams for child `index` of a request with n > 1.  wanted: what it shares with the others."""
    stream = (wanted.extra_args or {}).get(STREAM)
    if index == 0 or not isinstance(stream, int):  # the first one's noise is that of a request with n = 1, as with seed
        return wanted
    own = splitmix64(splitmix64(stream) + index)
    child = copy(wanted)
    child.extra_args = {**wanted.extra_args, STREAM: own - (own >> 63 << 64)}
    return child


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
