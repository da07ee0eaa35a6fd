"""One `config.json` for every route: what vLLM and SGLang read by path, and what vLLM reads in the speculators format.

    eagle3_files' config  +  speculators keys   ->   vllm serve POLICY --speculative-config '{"model": DRAFTER, ...}'
                                                     vllm serve DRAFTER          (target, method and K from the file)
                                                     sglang --speculative-draft-model-path DRAFTER

SGLang does not know the speculators keys and reads a plain llama configuration.  `norm_before_residual` must be there:
without it vLLM takes true on the speculators route and false on the other.  Layout: speculators (vllm-project), as read
by vLLM 0.32.
"""

from typing import Any

_SPECULATORS_VERSION = "0.3.0"  # the format's; nothing newer than it is used
_NOT_THE_LAYER = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "tap_scales")


def with_speculators(
    raw: dict[str, Any], *, verifier: str, verifier_architectures: list[str], num_speculative_tokens: int
) -> dict[str, Any]:
    """The configuration with the speculators keys.

    verifier: what vLLM loads as target when it is given the drafter alone: a folder or a hub name.
    num_speculative_tokens: the chain length that it then drafts, at least 1.
    """
    return raw | {
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "target_hidden_size": raw["hidden_size"],
        "transformer_layer_config": {key: value for key, value in raw.items() if key not in _NOT_THE_LAYER},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
    }
