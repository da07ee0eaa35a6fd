"""`tlt verify-export`: whether an export may be served with a target.

    contents -> digests -> config, layers, tensors, values, vocabulary -> target -> replay in a fresh process

Each check gives one line: what was found, or the problem and the remedy.  A check is skipped when one that it builds on
has failed.  Nothing is unpickled, no code of the folder runs, and no link or path out of the folder is followed.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt_core.drafter.eagle3.files import load_eagle3
from tlt_core.export import layout, replay
from tlt_core.export.contents import Refused, check_contents, check_digests, read_json, read_provenance
from tlt_core.export.folder import DRAFTER, KEPT, POLICY
from tlt_core.export.record import tokenizer_digest, weights_digest
from tlt_core.model.config import ModelError
from tlt_core.model.load import load_config, load_decoder, resolve

_TOLERANCE = 1e-3  # share of the standard deviation; two fp32 implementations usually differ by 1e-5
_REPLAY_NEEDS = ("digests", "values", "vocabulary", "target", "layers", "tokenizer", "weights", "verifier")
_SLACK = 0.02  # share of the probe's guesses that may differ, because of near-ties


class Check(NamedTuple):
    """One line of the report."""

    name: str
    outcome: str  # ok, REFUSED or skipped
    text: str


def verify(export: Path, *, target: str | None, other_weights: bool = False) -> list[Check]:
    """Every check, in order.

    export: what `tlt export` wrote, or the drafter's folder alone.  target: folder, hub name or embedded model; None:
    the policy beside the drafter.  other_weights: accept a target whose weights are not the exported ones (a further
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
        return [*checks, Check("policy, drafter", "skipped", "they need it")]
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
    """replayed: the drafter's check replays it anyway."""
    stages: list[tuple[str, Callable[[], str]]] = [
        ("policy contents", lambda: check_contents(policy)),
        ("policy digests", lambda: check_digests(policy)),
    ]
    if not replayed:
        stages.append(("policy replay", lambda: _replay_policy(policy)))
    checks: list[Check] = []
    for name, check in stages:
        good = passed(checks)
        checks.append(_check(name, check) if good else Check(name, "skipped", "needs the policy's earlier checks"))
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
        """All checks in order; each names those that it needs."""
        stages: list[tuple[str, Callable[[], str], tuple[str, ...]]] = [
            ("contents", lambda: check_contents(self._folder), ()),
            ("digests", lambda: check_digests(self._folder), ("contents",)),
            ("config", self._check_config, ("contents",)),
            ("tensors", self._check_tensors, ("config",)),
            ("values", lambda: layout.check_values(self._tensors), ("tensors",)),
            ("vocabulary", lambda: layout.check_vocabulary(self._tensors, self._raw), ("tensors",)),
            ("target", self._check_target, ("config",)),
            ("layers", self._check_layers, ("config",)),
            ("tokenizer", self._check_tokenizer, ("contents",)),
            ("weights", self._check_weights, ("contents",)),
            ("verifier", self._check_verifier, ("config",)),
            ("replay", self._check_replay, _REPLAY_NEEDS),
        ]
        outcomes: dict[str, Check] = {}
        for name, check, needs in stages:
            missing = [n for n in needs if outcomes[n].outcome != "ok"]
            skipped = Check(f"drafter {name}", "skipped", f"needs: {', '.join(missing)}")
            outcomes[name] = skipped if missing else _check(f"drafter {name}", check)
        return list(outcomes.values())

    def _check_config(self) -> str:
        self._raw = read_json(self._folder / "config.json")
        return layout.check_config(self._raw)

    def _check_tensors(self) -> str:
        self._tensors = layout.read_tensors(self._folder)
        return layout.check_tensors(self._tensors, self._raw)

    def _check_target(self) -> str:
        return layout.check_sizes(self._raw, load_config(self._target))

    def _check_layers(self) -> str:
        return layout.check_taps(self._raw, load_config(self._target).num_layers)

    def _check_tokenizer(self) -> str:
        if tokenizer_digest(self._target) != self._recorded("tokenizer_sha256"):
            raise Refused(
                f"{self._target} has another tokenizer than the target that the drafter was exported for, so token ids "
                "mean other text; give that target, or train a drafter for this one with 'tlt warmup'"
            )
        return "the target's is the exported one"

    def _check_weights(self) -> str:
        if weights_digest(self._target) == self._recorded("weights_sha256"):
            return "the target's are the exported ones"
        if self._other_weights:
            return "not the exported ones, as --other-weights allows: the card's acceptance does not apply"
        raise Refused(
            f"the weights of {self._target} are not those that the drafter was exported for: fewer drafts would be "
            "accepted than the card says; give that target, or say --other-weights if this one is meant"
        )

    def _recorded(self, key: str) -> str:
        target = read_provenance(self._folder).get("target")
        if not isinstance(target, dict) or not isinstance(target.get(key), str):
            raise Refused(f"provenance.json names no {key} of the target; export again")
        return target[key]

    def _check_verifier(self) -> str:
        """Whether `vllm serve DRAFTER` would load this target."""
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
        probe, recorded = replay.synthetic_probe(decoder.config.vocab_size), None
        if (self._folder / replay.PROBE).is_file():
            raw = read_json(self._folder / replay.PROBE)
            probe, recorded = replay.read_probe(raw, vocab_size=decoder.config.vocab_size)
        ours = replay.replay(decoder, probe, model=model)
        del decoder  # so that a large target is not in memory twice
        theirs = replay.replay_elsewhere(self._target, probe, drafter=self._folder)
        worst = compare(ours, theirs)
        found = replay.agreement(theirs[replay.LOGITS], layout.draft_ids(self._tensors, self._raw), probe)
        text = f"loads in a fresh process; logits, hidden states and target as ours to {worst:.0e}"
        if recorded is None:
            return f"{text} (no recorded text)"
        if self._other_weights:
            return f"{text}; the recorded guesses are another target's"
        slack = max(1, _SLACK * recorded.positions)
        if found.positions != recorded.positions or abs(found.agreeing - recorded.agreeing) > slack:
            raise Refused(
                f"of {found.positions} recorded tokens the drafter guesses {found.agreeing}, at its export it guessed "
                f"{recorded.agreeing} of {recorded.positions}: its parts, or drafter and target, do not belong "
                "together; export again"
            )
        return f"{text}; guesses {found.agreeing} of {found.positions} recorded tokens, as at its export"


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """Largest difference, as a share of the standard deviation.  Raises Refused beyond the tolerance."""
    worst = 0.0
    for name, a in ours.items():
        b = theirs[name]
        if a.shape != b.shape:
            raise Refused(f"{name}: ours have shape {tuple(a.shape)}, the reference's {tuple(b.shape)}; report this")
        share = float((a - b).abs().max() / b.std().clamp_min(1e-9))
        if not share <= _TOLERANCE:  # a NaN must not pass
            raise Refused(
                f"{name} differ from the reference implementation's by {share:.1e} of their standard deviation (at "
                f"most {_TOLERANCE:.0e}): the export would behave differently in a server; report this"
            )
        worst = max(worst, share)
    return worst
