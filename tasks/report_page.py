"""One run as one HTML file, which needs nothing else: no server, no network, no other file.

In: a run's folder.  Out: HTML text with all pictures inside.
"""

import base64
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from conf.run import RunConfig
from tasks import figures
from tlt_core.machine import provenance
from tlt_core.run.savings import Part, Row, Savings, savings

_NEWEST = 3  # timelines that are shown
_IDLE = {  # use of idle time: in words, and the setting that governs it
    "update": ("gradients of the policy update", "update.streamed"),
    "drafter": ("training of the drafter", "drafter.idle_training"),
    "min_idle": ("too short to begin with training", "drafter.idle_training.min_idle_s"),
    "no_data": ("nothing to train on yet", ""),
    "disabled": ("the drafter is not trained", "drafter.idle_training.enabled"),
    "interval": ("the drafter is not trained in this step", "drafter.idle_training.interval"),
    "max_steps": ("the most micro-steps were reached", "drafter.idle_training.max_steps"),
    "unknown": ("no reason was recorded", ""),
}
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; }
.when { color: #666; margin-top: .2rem; }
.verdict { background: #eef4fa; border-left: 4px solid #3b75af; padding: .8rem 1rem; font-size: 1.1rem; }
.verdict ul { margin: .4rem 0 0; padding-left: 1.2rem; font-size: 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem .4rem 0; border-bottom: 1px solid #ddd; }
td.n, th.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.helped { color: #2f7a1f; } .not { color: #b02a2a; } .off { color: #666; }
figure { margin: 1rem 0; } figcaption { font-weight: 600; } img { max-width: 100%; height: auto; }
code, pre { font: .88em ui-monospace, monospace; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
.note { color: #555; font-size: .9rem; }
"""


def page(run_dir: Path, cfg: RunConfig, rows: Sequence[Row]) -> str:
    """The HTML text.  cfg: the run's own; rows: of its `metrics.jsonl`."""
    found = savings(rows, cfg)
    record = (provenance.attempts(run_dir) or [{}])[-1]
    begun = str(record.get("started", "")).replace("T", " ")[:16]
    parts = [
        f"<h1>{escape(cfg.name)}</h1>",
        f'<p class="when">{_escaped(_when(found, cfg, begun))}</p>',
        _verdict(found),
        "<h2>What was saved</h2>",
        _saved(found),
        "<h2>Where idle time went</h2>",
        _idle(found),
        "<h2>Curves</h2>",
        _drawn("Reward", figures.curve("reward", rows)),
        _drawn("Step time by phase", figures.step_time(rows)),
        _drawn("Acceptance length (1: no gain)", figures.curve("acceptance", rows)),
        _drawn("Use of idle time", figures.idle_use(rows)),
        "<h2>Newest timelines</h2>",
        *_pictures(run_dir, "timeline_*.png", most=_NEWEST, empty="No timeline was kept."),
        *_pictures(run_dir, "speculation_*.png", most=1),
        "<h2>Response lengths</h2>",
        _drawn("over the steps", figures.curve("lengths", rows)),
        *_pictures(run_dir, "lengths_*.png", most=1),
        "<h2>Configuration and machine</h2>",
        _machine(record),
        _settings(cfg),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(cfg.name)}</title>'
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _when(found: Savings, cfg: RunConfig, begun: str) -> str:
    steps = f"{found.steps} of {cfg.num_steps} steps, {found.step_s:.1f} s"
    return f"{steps}, {cfg.cluster.num_workers} workers{f'; newest start {begun} UTC' if begun else ''}"


def _verdict(found: Savings) -> str:
    head, *details = found.verdict.split("; ")
    text = "".join(f"<li>{_escaped(detail)}</li>" for detail in details)
    return f'<div class="verdict"><strong>{_escaped(head)}</strong>{f"<ul>{text}</ul>" if text else ""}</div>'


def _saved(found: Savings) -> str:
    head = _tr("part", "outcome", "seconds", "share", "what happened", "setting to change", cell="th", numbers=(2, 3))
    rows = [_tr(*_saved_cells(part), numbers=(2, 3)) for part in found.parts]
    share = f"{found.saved_s / found.plain_s:.0%}" if found.plain_s > 0 else "-"
    rows.append(_tr("<strong>together</strong>", "", f"{found.saved_s:+.1f}", share, "", "", numbers=(2, 3)))
    how = "".join(f"<li>{_escaped(part.name)}: {_escaped(part.how)}</li>" for part in found.parts if part.how)
    note = (
        f'<div class="note"><p>Seconds are estimates, against what plain work costs in this run. Shares are of '
        f"{found.plain_s:.1f} s: the measured {found.step_s:.1f} s of the steps, and all that was saved. They are "
        f"computed so:</p><ul>{how}</ul></div>"
    )
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>{note if how else ""}'


def _saved_cells(part: Part) -> tuple[str, ...]:
    color = {"helped": "helped", "did not help": "not"}.get(part.outcome, "off")
    return (
        _escaped(part.name),
        f'<span class="{color}">{part.outcome}</span>',
        "-" if part.saved_s is None else f"{part.saved_s:+.1f}",
        "-" if part.share is None else f"{part.share:.0%}",
        _escaped(part.finding),
        f"<code>{_escaped(part.change)}</code>" if part.change else "-",
    )


def _idle(found: Savings) -> str:
    total_s = sum(item.worker_s for item in found.idle)
    if not total_s:
        return "<p>No worker was idle during the rollouts.</p>"
    rows = [_tr("idle time of the rollouts", "worker seconds", "share", "setting", cell="th", numbers=(1, 2))]
    for use, worker_s in found.idle:
        words, setting = _IDLE.get(use, (use, ""))
        code = f"<code>{escape(setting)}</code>" if setting else "-"
        rows.append(_tr(_escaped(words), f"{worker_s:.1f}", f"{worker_s / total_s:.0%}", code, numbers=(1, 2)))
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _drawn(caption: str, svg: str) -> str:
    if not svg:
        return f'<p class="note">{escape(caption)}: nothing was recorded.</p>'
    return _figure(caption, "image/svg+xml", svg.encode())


def _pictures(run_dir: Path, pattern: str, *, most: int, empty: str = "") -> list[str]:
    """The newest first; their names end in the step."""
    newest = sorted((run_dir / "figures").glob(pattern), reverse=True)[:most]
    found = []
    for path in newest:
        what, _, step = path.stem.partition("_")
        found.append(_figure(f"{what.capitalize()} of step {int(step)}", "image/png", path.read_bytes()))
    return found or ([f'<p class="note">{empty}</p>'] if empty else [])


def _figure(caption: str, kind: str, content: bytes) -> str:
    data = base64.b64encode(content).decode()
    text = _escaped(caption)
    return f'<figure><figcaption>{text}</figcaption><img alt="{text}" src="data:{kind};base64,{data}"></figure>'


def _machine(record: dict[str, Any]) -> str:
    machine, versions = record.get("machine", {}), record.get("machine", {}).get("versions", {})
    facts = {
        "processor": machine.get("cpu"),
        "cores": machine.get("cores"),
        "memory": f"{machine['memory_gb']} GB" if "memory_gb" in machine else None,
        "GPUs": ", ".join(map(str, machine.get("gpus") or ["none"])),
        "kernels": machine.get("cpu_kernels"),
        "precision": ", ".join(f"{name} {kind}" for name, kind in record.get("precision", {}).items()),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "commit": record.get("commit"),
        "took": ", ".join(f"{stage} {seconds} s" for stage, seconds in record.get("took_s", {}).items()),
        "settings given": " ".join(record.get("argv", [])[1:]),
    }
    rows = "".join(_tr(escape(name), _escaped(str(value))) for name, value in facts.items() if value)
    return (
        f'<div class="wide"><table>{rows}</table></div>' if record else '<p class="note">No machine was recorded.</p>'
    )


def _settings(cfg: RunConfig) -> str:
    text = yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False)
    return f"<details><summary>Every setting</summary><pre>{escape(text)}</pre></details>"


def _tr(*cells: str, cell: str = "td", numbers: Collection[int] = ()) -> str:
    """A row of a table; the cells are HTML.  numbers: which of them are numbers."""
    made = (f"<{cell}{' class=n' if i in numbers else ''}>{text}</{cell}>" for i, text in enumerate(cells))
    return f"<tr>{''.join(made)}</tr>"


def _escaped(text: str) -> str:
    return escape(text).replace("+-", "&plusmn;")
