"""`tlt verify-export`: may this export be served with this target?

    contents -> digests -> config, layers, tensors, values, vocabulary -> target -> replay in a fresh process

Each check is one line: what was found, or the reason and the remedy.  A check whose ground is missing is skipped.
Nothing is unpickled, no code of the folder is run, and nothing is read through links or paths that lead out of it.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_core.drafter.eagle3_files import load_eagle3
from tlt_core.export import config_checks, replay, tensor_checks
from tlt_core.export.contents import Refused, check_contents, check_digests, read_json, read_provenance
from tlt_core.export.digests import tokenizer_digest, weights_digest
from tlt_core.export.folder import DRAFTER, KEPT, POLICY
from tlt_core.model.config import ModelError
from tlt_core.model.load import load_config, load_decoder, resolve

_TOLERANCE = 1e-3  # of the spread of the values compared; 1e-5 is usual between two fp32 implementations
_REPLAY_RESTS_ON = ("digests", "values", "vocabulary", "target", "layers", "tokenizer", "weights", "verifier")
_SLACK = 0.02  # share of the probe's guesses that may turn out otherwise: near-ties


class Check(NamedTuple):
    """One line of the report."""

    name: str
    outcome: str  # ok, REFUSED or skipped
    text: str


def verify(export: Path, *, target: str | None, other_weights: bool = False) -> list[Check]:
    """Every check, in order.

    export: what `tlt export` wrote, or the drafter's folder alone.  target: folder, hub name or embedded model; None:
    the policy beside the drafter.  other_weights: the target's weights need not be those that were exported (a further
    trained or quantised copy).  Raises ModelError where there is nothing to verify, or no target.
    """
    if not export.is_dir():
        raise ModelError(f"{export} is not a folder; give what 'tlt export' wrote, or a drafter's folder")
    policy, drafter = export / POLICY, export / DRAFTER
    if not policy.is_dir() and not drafter.is_dir():
        if target is None:
            raise ModelError(f"{export} is taken for a drafter's folder, with no policy beside it: say --target FOLDER")
        return _Drafter(export, resolve(target), target, other_weights=other_weights).run()
    checks = [_check("export", lambda: _check_root(export))]
    if not passed(checks):
        return [*checks, Check("policy, drafter", "skipped", "they rest on it")]
    if policy.is_dir():
        checks += _verify_policy(policy, replayed=target is None and drafter.is_dir())
    if drafter.is_dir():
        if target is None and not policy.is_dir():
            raise ModelError(f"{export} holds no policy to verify the drafter with: say --target FOLDER")
        found = policy if target is None else resolve(target)
        if found == policy and any(c.outcome != "ok" for c in checks):
            return [*checks, Check("drafter", "skipped", "its target was refused")]
        checks += _Drafter(drafter, found, target or str(policy), other_weights=other_weights).run()
    return checks


def passed(checks: Sequence[Check]) -> bool:
    """Whether nothing was refused or skipped."""
    return all(check.outcome == "ok" for check in checks)


def _check(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", check())
    except (Refused, ModelError) as error:
        return Check(name, "REFUSED", str(error))


def _check_root(export: Path) -> str:
    known = {POLICY, DRAFTER, *KEPT}
    for path in sorted(export.iterdir()):
        if path.name not in known or path.is_symlink():
            what = "a link" if path.is_symlink() else "no part of an export"
            raise Refused(f"{path.name} is {what}; remove it, or copy the export again")
    return " and ".join(name for name in (POLICY, DRAFTER) if (export / name).is_dir())


def _verify_policy(policy: Path, *, replayed: bool) -> list[Check]:
    """replayed: it is loaded as the drafter's target anyway."""
    stages: list[tuple[str, Callable[[], str]]] = [
        ("policy contents", lambda: check_contents(policy)),
        ("policy digests", lambda: check_digests(policy)),
    ]
    if not replayed:
        stages.append(("policy replay", lambda: _replay_policy(policy)))
    checks: list[Check] = []
    for name, check in stages:
        good = passed(checks)
        checks.append(_check(name, check) if good else Check(name, "skipped", "rests on the policy's checks before"))
    return checks


def _replay_policy(policy: Path) -> str:
    decoder = load_decoder(policy, dtype=torch.float32)
    probe = replay.synthetic_probe(decoder.config.vocab_size)
    worst = compare(replay.replay(decoder, probe), replay.replay_elsewhere(policy, probe))
    return f"transformers loads it in a fresh process; logits as ours to {worst:.0e}"


class _Drafter:
    """The checks of one drafter's folder; later ones use what earlier ones read."""

    def __init__(self, folder: Path, target: Path, target_name: str, *, other_weights: bool) -> None:
        self._folder, self._target, self._target_name = folder, target, target_name
        self._other_weights = other_weights
        self._raw: dict[str, Any] = {}
        self._tensors: dict[str, Tensor] = {}

    def run(self) -> list[Check]:
        """In order; each names the checks that it builds on."""
        stages: list[tuple[str, Callable[[], str], tuple[str, ...]]] = [
            ("contents", lambda: check_contents(self._folder), ()),
            ("digests", lambda: check_digests(self._folder), ("contents",)),
            ("config", self._check_config, ("contents",)),
            ("tensors", self._check_tensors, ("config",)),
            ("values", lambda: tensor_checks.check_values(self._tensors), ("tensors",)),
            ("vocabulary", lambda: tensor_checks.check_vocabulary(self._tensors, self._raw), ("tensors",)),
            ("target", self._check_target, ("config",)),
            ("layers", self._check_layers, ("config",)),
            ("tokenizer", self._check_tokenizer, ("contents",)),
            ("weights", self._check_weights, ("contents",)),
            ("verifier", self._check_verifier, ("config",)),
            ("replay", self._check_replay, _REPLAY_RESTS_ON),
        ]
        outcomes: dict[str, Check] = {}
        for name, check, ground in stages:
            missing = [g for g in ground if outcomes[g].outcome != "ok"]
            skipped = Check(f"drafter {name}", "skipped", f"rests on: {', '.join(missing)}")
            outcomes[name] = skipped if missing else _check(f"drafter {name}", check)
        return list(outcomes.values())

    def _check_config(self) -> str:
        self._raw = read_json(self._folder / "config.json")
        return config_checks.check_config(self._raw)

    def _check_tensors(self) -> str:
        self._tensors = tensor_checks.read_tensors(self._folder)
        return tensor_checks.check_tensors(self._tensors, self._raw)

    def _check_target(self) -> str:
        return config_checks.check_sizes(self._raw, load_config(self._target))

    def _check_layers(self) -> str:
        return config_checks.check_taps(self._raw, load_config(self._target).num_layers)

    def _check_tokenizer(self) -> str:
        if tokenizer_digest(self._target) != self._recorded("tokenizer_sha256"):
            raise Refused(
                f"{self._target} has another tokenizer than the target that the drafter was exported for: "
                "token ids mean other text; give that target, or train a drafter for this one with 'tlt warmup'"
            )
        return "the target's is the one that was exported"

    def _check_weights(self) -> str:
        if weights_digest(self._target) == self._recorded("weights_sha256"):
            return "the target's are those that were exported"
        if self._other_weights:
            return "not those that were exported, as --other-weights allows: the acceptance on the card is not theirs"
        raise Refused(
            f"the weights of {self._target} are not those that the drafter was exported for: it would draft, but "
            "accept less than the card says; give that target, or say --other-weights if this one is meant"
        )

    def _recorded(self, key: str) -> str:
        target = read_provenance(self._folder).get("target")
        if not isinstance(target, dict) or not isinstance(target.get(key), str):
            raise Refused(f"provenance.json names no {key} of the target; export again")
        return target[key]

    def _check_verifier(self) -> str:
        """What `vllm serve DRAFTER` would load as target."""
        name = self._raw["speculators_config"]["verifier"]["name_or_path"]
        path = Path(name)
        if name == self._target_name or (path.is_dir() and path.resolve() == self._target.resolve()):
            return f"{name}, this target"
        if path.is_absolute() and not path.exists():
            return (
                f"{name} is not on this machine: name the target to vLLM, 'vllm serve DRAFTER' alone will not find it"
            )
        if path.is_dir() and not path.is_symlink() and weights_digest(path) == self._recorded("weights_sha256"):
            return f"{name}, with the weights that were exported"
        raise Refused(
            f"'vllm serve DRAFTER' would load {name} as target, which is not {self._target_name}; export again with "
            "--verifier, or do not serve the drafter's folder alone"
        )

    def _check_replay(self) -> str:
        decoder = load_decoder(self._target, dtype=torch.float32)
        model = load_eagle3(self._folder, decoder.config)
        probe, told = replay.synthetic_probe(decoder.config.vocab_size), None
        if (self._folder / replay.PROBE).is_file():
            raw = read_json(self._folder / replay.PROBE)
            probe, told = replay.read_probe(raw, vocab_size=decoder.config.vocab_size)
        ours = replay.replay(decoder, probe, model=model)
        del decoder  # a large target need not be in memory twice
        theirs = replay.replay_elsewhere(self._target, probe, drafter=self._folder)
        worst = compare(ours, theirs)
        found = replay.agreement(theirs[replay.LOGITS], tensor_checks.draft_ids(self._tensors, self._raw), probe)
        text = f"loads in a fresh process; logits, hidden states and target as ours to {worst:.0e}"
        if told is None or self._other_weights:
            return f"{text}; the recorded guesses are another target's" if told else f"{text} (no recorded text)"
        if found.positions != told.positions or abs(found.agreeing - told.agreeing) > max(1, _SLACK * told.positions):
            raise Refused(
                f"of {found.positions} recorded tokens the drafter guesses {found.agreeing}, at its export it guessed "
                f"{told.agreeing} of {told.positions}: its parts, or its target, do not belong together; export again"
            )
        return f"{text}; guesses {found.agreeing} of {found.positions} recorded tokens, as at its export"


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest difference, as a share of the spread of what is compared.  Raises Refused beyond the tolerance."""
    worst = 0.0
    for name, a in ours.items():
        b = theirs[name]
        if a.shape != b.shape:
            raise Refused(f"{name}: ours have shape {tuple(a.shape)}, the reference's {tuple(b.shape)}; report this")
        # Not (x <= y): a NaN must not pass.
        share = float((a - b).abs().max() / b.std().clamp_min(1e-9))
        if not share <= _TOLERANCE:
            raise Refused(
                f"{name} differ from the reference implementation's by {share:.1e} of their spread (at most "
                f"{_TOLERANCE:.0e}): the export would not do in a server what it did here; report this"
            )
        worst = max(worst, share)
    return worst
