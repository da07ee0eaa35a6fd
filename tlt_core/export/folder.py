"""Export: a run's policy and drafter as two folders for serving, with their origin and measurements.

    policy   -> copied                                           -> OUT/policy           + provenance.json
    drafter  -> read, measured on held-out prompts, rewritten    -> OUT/drafter-eagle3   + provenance, probe, README

OUT appears whole or not at all; an older export is replaced.  The drafter passes through our reader and writer, so it
always leaves in the one layout that loads everywhere (`drafter/eagle3/files`).  Its `config.json` serves three routes:

    vllm serve POLICY --speculative-config '{"model": DRAFTER, ...}'
    vllm serve DRAFTER                              target, method and chain length come from the speculators keys
    sglang --speculative-draft-model-path DRAFTER   ignores the speculators keys and reads a plain llama configuration

The layout is that of speculators (vllm-project), as vLLM 0.32 reads it.  `norm_before_residual` must be given: without
it vLLM assumes true on the speculators route and false on the other.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from conf.rollout import RolloutConfig
from conf.run import RunConfig
from tlt_core.data import dataset
from tlt_core.drafter.eagle3.acceptance import measure_acceptance
from tlt_core.drafter.eagle3.files import load_eagle3, save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Model
from tlt_core.drafter.eagle3.observe import observe
from tlt_core.export import card, record
from tlt_core.export.contents import Refused
from tlt_core.export.measure import Measured, depth_table, expected_rates, measure
from tlt_core.items.store import read_json, write_folder_atomically
from tlt_core.items.types import SamplingParams
from tlt_core.machine.disk import check_space
from tlt_core.machine.driver import driver_device
from tlt_core.machine.precision import as_torch
from tlt_core.model.config import DecoderConfig, ModelError
from tlt_core.model.decoder import Decoder
from tlt_core.model.load import check_finite, load_config, load_decoder, load_tokenizer, stop_token_ids

POLICY, DRAFTER = "policy", "drafter-eagle3"  # vLLM infers the method from the folder's name when none is given
_POLICY_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
KEPT = (".gitignore", f"{POLICY}.dvc", f"{DRAFTER}.dvc")  # written by DVC beside the folders that it tracks
_SPARE_BYTES = 16 << 20
PROBE = "probe.json"  # a few greedy responses of the target
_LEFT_OUT = 2  # last tokens of a sequence, which no guess counts for: as in the probes of older exports
_PROBE_SEQUENCES, _PROBE_TOKENS = 4, 256
_SIZES = [2**i for i in range(9)]  # batch sizes whose rates are recorded
_SPECULATORS_VERSION = "0.3.0"  # of the format; nothing newer is used
_NOT_THE_LAYER = ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "tap_scales")
_SPECULATORS = (
    "speculators_model_type",
    "speculators_version",
    "target_hidden_size",
    "transformer_layer_config",
    "speculators_config",
)


def run(cfg: RunConfig, source: record.Source, *, out_dir: Path, num_prompts: int, verifier: str | None = None) -> Path:
    """Write OUT; returns it.  num_prompts: held-out prompts to measure on (0: measure nothing).

    verifier: target that the drafter's folder names for `vllm serve DRAFTER`; None: the exported policy's path.
    Raises ModelError (weights or figures that are not finite, a drafter that does not fit the policy), StoreError (the
    disk refuses, a damaged record), DataError, SpaceError.
    """
    _check_replaceable(out_dir)
    torch.set_num_threads(cfg.cluster.num_workers * cfg.cluster.threads_per_worker)
    size = sum(path.stat().st_size for folder in (source.policy, source.drafter) if folder for path in folder.iterdir())
    check_space(out_dir, needed_bytes=size + _SPARE_BYTES)
    verifier = verifier or str((out_dir / POLICY).absolute())

    def write(partial: Path) -> None:
        origin = record.origin(cfg, source)
        _write_policy(source.policy, partial / POLICY, origin)
        if source.drafter is not None:
            _write_drafter(cfg, source, partial / DRAFTER, origin, verifier=verifier, num_prompts=num_prompts)

    write_folder_atomically(out_dir, write, keep=KEPT)
    return out_dir


def _check_replaceable(out_dir: Path) -> None:
    """A wrong --out must not destroy anything but an older export."""
    others = {p.name for p in out_dir.iterdir()} - {POLICY, DRAFTER, *KEPT} if out_dir.is_dir() else set()
    if others or (out_dir.exists() and not out_dir.is_dir()):
        what = f"holds {min(others)}, which no export does" if others else "is not a folder"
        raise ModelError(f"{out_dir} {what}, so it is not replaced; choose another --out, or remove it")


def _write_policy(policy: Path, folder: Path, origin: Mapping[str, Any]) -> None:
    check_finite(policy)
    folder.mkdir()
    for pattern in _POLICY_FILES:
        for path in sorted(policy.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    record.write_record(folder, {**origin, "kind": "policy", "target": record.identity(folder)})


def _write_drafter(
    cfg: RunConfig, source: record.Source, folder: Path, origin: Mapping[str, Any], *, verifier: str, num_prompts: int
) -> None:
    """Read, measure, write.  Raises ModelError when the drafter does not fit the policy, or is not finite."""
    assert source.drafter is not None, "the caller checks this"
    model = load_eagle3(source.drafter, load_config(source.policy))
    raw = json.loads((source.drafter / "config.json").read_text(encoding="utf-8"))
    dtype = raw.get("dtype") or raw.get("torch_dtype") or cfg.rollout.dtype
    measured = _measure(cfg, source, model, num_prompts=num_prompts) if num_prompts else None
    schedules = _schedules(measured) if measured else []
    serving = _serving(schedules, trained_depth=cfg.drafter.depth)
    save_eagle3(model, folder, dtype=getattr(torch, dtype))
    _add_speculators(folder / "config.json", source.policy, verifier=verifier, serving=serving)
    if measured:
        _write_probe(folder, source.policy, measured)
    training = source.drafter / "drafter.json"
    content = {
        **origin,
        "kind": "drafter",
        "target": {"name": verifier, **record.identity(source.policy)},
        "drafter": {
            "taps": list(model.config.taps),
            "draft_vocab_size": model.config.draft_vocab_size,
            "dtype": dtype,
        },
        "training": read_json(training, remedy="remove it: only figures are lost") if training.is_file() else None,
        "measured": _measured_record(cfg.rollout, measured, schedules) if measured else None,
        "serving": serving,
    }
    (folder / "README.md").write_text(card.model_card(content), encoding="utf-8")
    record.write_record(folder, content)


def _serving(schedules: Sequence[Mapping[str, Any]], *, trained_depth: int) -> dict[str, Any]:
    """vLLM's settings: the table for temperature 0, which holds for any engine, or the trained depth."""
    if not schedules:
        return {"num_speculative_tokens": trained_depth}
    table = schedules[0]["table"]
    return {
        "num_speculative_tokens": max(1, *(depth for *_, depth in table)),
        "num_speculative_tokens_per_batch_size": table,
    }


def _add_speculators(path: Path, policy: Path, *, verifier: str, serving: Mapping[str, Any]) -> None:
    """verifier: what vLLM loads as target when it is given the drafter alone: a folder or a hub name."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    depth = serving["num_speculative_tokens"]
    record.write_json(path, raw | _speculators(raw, load_config(policy), verifier=verifier, depth=depth))


def _speculators(raw: Mapping[str, Any], target: DecoderConfig, *, verifier: str, depth: int) -> dict[str, Any]:
    """The speculators keys.  raw: the plain ones.  depth: chain length."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": _SPECULATORS_VERSION,
        "target_hidden_size": raw["hidden_size"],
        "transformer_layer_config": {key: raw[key] for key in raw if key not in _NOT_THE_LAYER},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": target.to_hf()["architectures"]},
        },
    }


def check_speculators(raw: Mapping[str, Any], target: DecoderConfig) -> str:
    """Do the speculators keys describe the same drafter as the plain ones?  Returns the target that they name.

    Raises Refused.
    """
    try:
        settings = raw["speculators_config"]
        depth, verifier = settings["proposal_methods"][0]["speculative_tokens"], settings["verifier"]["name_or_path"]
    except (KeyError, IndexError, TypeError) as error:
        raise Refused(f"speculators_config is incomplete ({error!r}), 'vllm serve' needs it; export again") from None
    if not isinstance(verifier, str) or not isinstance(depth, int) or depth < 1:
        raise Refused(f"speculators_config has speculative_tokens={depth!r}, verifier {verifier!r}; export again")
    plain = {key: value for key, value in raw.items() if key not in _SPECULATORS}
    for key, wanted in _speculators(plain, target, verifier=verifier, depth=depth).items():
        if raw.get(key) != wanted:
            raise Refused(f"{key} is {raw.get(key)!r}, 'vllm serve' of this folder needs {wanted!r}; export again")
    return verifier


def _measure(cfg: RunConfig, source: record.Source, model: Eagle3Model, *, num_prompts: int) -> Measured:
    tokenizer, rollout = load_tokenizer(source.policy), cfg.rollout
    device = driver_device(cfg.cluster)
    params = SamplingParams(
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=cfg.evaluation.max_new_tokens or rollout.max_new_tokens,
        stop_token_ids=stop_token_ids(source.policy, tokenizer, also=rollout.stop_token_ids),
    )
    return measure(
        load_decoder(source.policy, dtype=as_torch(rollout.dtype), device=device),
        model,
        dataset.load(source.data_dir, "validation", tokenizer)[:num_prompts],
        temperatures=sorted({0.0, rollout.temperature}),
        params=params,
        depth=cfg.drafter.depth,
        max_live=rollout.max_live_requests,
        seed=cfg.seed,
    )


def _schedules(measured: Measured) -> list[dict[str, Any]]:
    """For each temperature the table, and some of the rates behind it by batch size and chain length."""
    schedules = []
    for row in measured.acceptance:
        rates = expected_rates(row.survival, measured.seconds_BK)
        sizes = [*(size for size in _SIZES if size < len(rates)), len(rates)]
        shown = {str(size): [round(rate, 1) for rate in rates[size - 1]] for size in sizes}
        schedules.append({"temperature": row.temperature, "table": depth_table(rates), "tokens_per_s": shown})
    return schedules


def _measured_record(
    rollout: RolloutConfig, measured: Measured, schedules: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    rows = [
        row._asdict() | {"survival": [round(x, 4) for x in row.survival], "accept_length": round(row.accept_length, 4)}
        for row in measured.acceptance
    ]
    return {
        "split": "validation",
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "acceptance": rows,
        "context": measured.context,
        "schedules": list(schedules),
    }


def _write_probe(folder: Path, policy: Path, measured: Measured) -> None:
    """A few greedy responses, and how many of their tokens the drafter's first guess gets right."""
    probe: list[ProbeSequence] = []
    for rollout in measured.greedy:
        tokens = tuple(rollout.tokens[:_PROBE_TOKENS].tolist())
        if is_probe(tokens, rollout.prompt_len) and len(probe) < _PROBE_SEQUENCES:
            probe.append(ProbeSequence(tokens, rollout.prompt_len))
    if not probe:
        return
    decoder = load_decoder(policy, dtype=torch.float32)
    found = replay(decoder, load_eagle3(folder, decoder.config), probe)
    sequences = [{"tokens": list(s.tokens), "prompt_len": s.prompt_len} for s in probe]
    (folder / PROBE).write_text(json.dumps({**found._asdict(), "sequences": sequences}), encoding="utf-8")


class ProbeSequence(NamedTuple):
    tokens: tuple[int, ...]  # of a prompt and the target's answer
    prompt_len: int


class Agreement(NamedTuple):
    agreeing: int
    positions: int


def is_probe(tokens: Sequence[int], prompt_len: int) -> bool:
    return prompt_len >= 2 and len(tokens) >= prompt_len + 3 + _LEFT_OUT


def read_probe(raw: Any, *, vocab_size: int) -> tuple[list[ProbeSequence], Agreement]:
    """Parse the content of probe.json.  Raises Refused."""
    try:
        sequences = [ProbeSequence(tuple(map(int, s["tokens"])), int(s["prompt_len"])) for s in raw["sequences"]]
        told = Agreement(int(raw["agreeing"]), int(raw["positions"]))
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"{PROBE} is not a record of probe sequences ({error!r}); export again") from None
    if not all(is_probe(*s) and all(0 <= token < vocab_size for token in s.tokens) for s in sequences):
        raise Refused(f"{PROBE} holds a sequence that is too short or not of this target's vocabulary; export again")
    return sequences, told


def replay(decoder: Decoder, model: Eagle3Model, probe: Sequence[ProbeSequence]) -> Agreement:
    """By our own engine's code.  Counted where the drafter reads the target's states and guesses a response's token."""
    texts = [torch.tensor(s.tokens[:-_LEFT_OUT]) for s in probe]
    observed = observe(decoder, texts, model, firsts=[s.prompt_len for s in probe], dtype=torch.float32)
    measured = measure_acceptance(model, decoder.embed_tokens.weight, observed, depth=1, temperature=0.0)
    return Agreement(measured.accepted_by_depth[0], measured.starts)
