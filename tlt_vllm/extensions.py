"""Names for vLLM's worker_extension_cls, which takes one class: ours, or ours and that of a trainer (verl, SkyRL, ..).

beside_ours("verl.rollout.Extension") == "tlt_vllm.worker.Beside-verl-rollout-Extension": `worker` makes that class when
vLLM looks the name up in a process of its own.  No identifier has a hyphen.
"""

WORKER = "tlt_vllm.worker.WorkerExtension"
_BESIDE = "Beside-"


def beside_ours(given: str) -> str:
    """given: the user's worker_extension_cls, or what this function made of it; "" for none."""
    if given in ("", WORKER) or _BESIDE in given:
        return given or WORKER
    return f"tlt_vllm.worker.{_BESIDE}{given.replace('.', '-')}"


def other_of(name: str) -> str | None:
    """The other class of such a name, without our module's; None for any other name."""
    return name.removeprefix(_BESIDE).replace("-", ".") if name.startswith(_BESIDE) else None
