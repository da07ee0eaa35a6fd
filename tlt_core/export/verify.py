"""`tlt verify-export`: whether an export may be served with a target.

    contents -> digests -> layout, speculators keys -> tokenizer and weights of the target -> replay

Each check gives one line.  A check is skipped when one that it builds on has failed.  Nothing is unpickled, no code of
the folder runs, and no link or path out of the folder is followed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tlt_core.drafter.eagle3.files import check_layout, load_eagle3
from tlt_core.export.contents import Refused, check_contents, check_digests, read_json, read_provenance
from tlt_core.export.folder import DRAFTER, KEPT, POLICY, PROBE, check_speculators, read_probe, replay
from tlt_core.export.record import tokenizer_digest, weights_digest
from tlt_core.model.config import ModelError
from tlt_core.model.load import check_finite, load_config, load_decoder, resolve

_REPLAY_NEEDS = ("digests", "layout", "tokenizer", "weights", "verifier")
_SLACK = 0.02  # share of the probe's guesses that may differ, because of near-ties


class Check(NamedTuple):
    name: str
    outcome: str  # ok, REFUSED or skipped
    text: str


Stage = tuple[str, Callable[[], str], tuple[str, ...]]  # name, check, stages that it builds on


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
        checks += _verify_policy(policy)
    if drafter.is_dir():
        if target is None and not policy.is_dir():
            raise ModelError(f"{export} holds no policy to verify the drafter with: say --target FOLDER")
        found = policy if target is None else resolve(target)
        if found == policy and any(c.outcome != "ok" for c in checks):
            return [*checks, Check("drafter", "skipped", "its target was refused")]
        checks += _Drafter(drafter, found, target or str(policy), other_weights=other_weights).run()
    return checks


def passed(checks: Sequence[Check]) -> bool:
    return all(check.outcome == "ok" for check in checks)


def _check(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", check())
    except (Refused, ModelError) as error:
        return Check(name, "REFUSED", str(error))


def _check_all(part: str, stages: Sequence[Stage]) -> list[Check]:
    outcomes: dict[str, Check] = {}
    for name, check, needs in stages:
        missing = [need for need in needs if outcomes[need].outcome != "ok"]
        skipped = Check(f"{part} {name}", "skipped", f"needs: {', '.join(missing)}")
        outcomes[name] = skipped if missing else _check(f"{part} {name}", check)
    return list(outcomes.values())


def _check_root(export: Path) -> str:
    known = {POLICY, DRAFTER, *KEPT}
    for path in sorted(export.iterdir()):
        if path.name not in known or path.is_symlink():
            what = "a link" if path.is_symlink() else "no part of an export"
            raise Refused(f"{path.name} is {what}; remove it, or copy the export again")
    return " and ".join(name for name in (POLICY, DRAFTER) if (export / name).is_dir())


def _verify_policy(policy: Path) -> list[Check]:
    stages: list[Stage] = [
        ("contents", lambda: check_contents(policy), ()),
        ("digests", lambda: check_digests(policy), ("contents",)),
        ("weights", lambda: _check_policy(policy), ("contents", "digests")),
    ]
    return _check_all("policy", stages)


def _check_policy(policy: Path) -> str:
    check_finite(policy)
    config = load_decoder(policy, dtype=torch.float32).config
    return f"a {config.family} of {config.num_layers} layers, finite numbers"


class _Drafter:
    """The checks of one drafter's folder; later ones use what earlier ones read."""

    def __init__(self, folder: Path, target: Path, target_name: str, *, other_weights: bool) -> None:
        self._folder, self._target, self._target_name = folder, target, target_name
        self._other_weights = other_weights
        self._verifier = ""  # the target that `vllm serve DRAFTER` would load

    def run(self) -> list[Check]:
        stages: list[Stage] = [
            ("contents", lambda: check_contents(self._folder), ()),
            ("digests", lambda: check_digests(self._folder), ("contents",)),
            ("layout", self._check_layout, ("contents",)),
            ("tokenizer", self._check_tokenizer, ("contents",)),
            ("weights", self._check_weights, ("contents",)),
            ("verifier", self._check_verifier, ("layout",)),
            ("replay", self._check_replay, _REPLAY_NEEDS),
        ]
        return _check_all("drafter", stages)

    def _check_layout(self) -> str:
        target = load_config(self._target)
        check_layout(self._folder, target)
        self._verifier = check_speculators(read_json(self._folder / "config.json"), target)
        return f"as vLLM and SGLang read it, for a target of {target.num_layers} layers"

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
        name, path = self._verifier, Path(self._verifier)
        if name == self._target_name or (path.is_dir() and path.resolve() == self._target.resolve()):
            return f"{name}, this target"
        if path.is_absolute() and not path.exists():
            return f"{name} is not on this machine: name the target to vLLM, 'vllm serve DRAFTER' alone won't find it"
        if path.is_dir() and not path.is_symlink() and weights_digest(path) == self._recorded("weights_sha256"):
            return f"{name}, with the weights that were exported"
        raise Refused(
            f"'vllm serve DRAFTER' would load {name} as target, which is not {self._target_name}; export again with "
            "--verifier, or do not serve the drafter's folder alone"
        )

    def _check_replay(self) -> str:
        if not (self._folder / PROBE).is_file():
            return "no text was recorded at the export"
        decoder = load_decoder(self._target, dtype=torch.float32)
        raw = read_json(self._folder / PROBE)
        probe, recorded = read_probe(raw, vocab_size=decoder.config.vocab_size)
        if self._other_weights:
            return "the recorded guesses are another target's"
        found = replay(decoder, load_eagle3(self._folder, decoder.config), probe)
        slack = max(1, _SLACK * recorded.positions)
        if found.positions != recorded.positions or abs(found.agreeing - recorded.agreeing) > slack:
            raise Refused(
                f"of {found.positions} recorded tokens the drafter guesses {found.agreeing}, at its export it guessed "
                f"{recorded.agreeing} of {recorded.positions}: its parts, or drafter and target, do not belong "
                "together; export again"
            )
        return f"guesses {found.agreeing} of {found.positions} recorded tokens, as at its export"
