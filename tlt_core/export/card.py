"""The drafter's model card: what it is, how to serve it, and what was measured.  What was not measured is not said.

In: `provenance.json` as a dictionary, so the card says what the record says.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def model_card(record: Mapping[str, Any]) -> str:
    """Markdown."""
    sections = [_head(record), _serving(record), _measured(record), _schedule(record), _origin(record)]
    return "\n\n".join(part for part in sections if part) + "\n"


def vllm_config(serving: Mapping[str, Any], drafter: str) -> str:
    """The value of vLLM's `--speculative-config`."""
    return json.dumps({"model": drafter, "method": "eagle3", **serving})


def _head(record: Mapping[str, Any]) -> str:
    target, drafter = record["target"], record["drafter"]
    return "\n".join(
        [
            "---",
            "tags: [eagle3, speculative-decoding, speculators]",
            "---",
            f"# EAGLE-3 drafter of {record['run']['name']}",
            "",
            f"One decoder layer that guesses the next tokens of its target from the target's hidden states (streams "
            f"{drafter['taps']}); it may propose {drafter['draft_vocab_size']} of {target['vocab_size']} tokens.  The "
            "target checks every guess, so a drafter changes the time that text takes, not the text.  It fits this "
            "target only: the policy that was exported with it (its digests are in `provenance.json`).",
            "",
            "Before serving: `tlt verify-export DRAFTER --target POLICY`.",
        ]
    )


def _serving(record: Mapping[str, Any]) -> str:
    serving = record["serving"]
    depth = serving["num_speculative_tokens"]
    sglang = [
        "python -m sglang.launch_server --host 127.0.0.1 --model-path policy --speculative-algorithm EAGLE3 \\",
        "  --speculative-draft-model-path drafter-eagle3 --speculative-eagle-topk 1 \\",
        f"  --speculative-num-steps {depth} --speculative-num-draft-tokens {depth + 1}",
    ]
    table = serving.get("num_speculative_tokens_per_batch_size", [])
    useless = ["**As measured here no chain pays at any batch size: serve the target without the drafter.**", ""]
    lines = [
        "## Serving",
        "",
        *(useless if table and not any(chain for *_, chain in table) else []),
        "From the folder that holds `policy` and `drafter-eagle3`:",
        "",
        "```bash",
        f"vllm serve ./policy --host 127.0.0.1 --speculative-config '{vllm_config(serving, './drafter-eagle3')}'",
        "",
        *sglang,
        "```",
        "",
        f"`vllm serve ./drafter-eagle3` works too: target ({record['target']['name']}) and chain length ({depth}) are "
        "then taken from the drafter's `config.json`, and batch sizes make no difference.",
        "",
        "Always name the method: by a folder's name alone vLLM may take a drafter for a plain draft model.  SGLang "
        "drafts chains of one length; `--speculative-adaptive` (0.5.23) lets it vary.",
    ]
    return "\n".join(lines)


def _measured(record: Mapping[str, Any]) -> str:
    measured = record.get("measured")
    training = (record.get("training") or {}).get("metrics", {})
    overlaps = {int(k.rpartition("_")[2]): v for k, v in training.items() if k.startswith("drafter/overlap_pos_")}
    lines = ["## Measured acceptance", ""]
    if not measured and not overlaps:
        return "\n".join([*lines, "Nothing was measured for this export (`tlt export --prompts 0`)."])
    if measured:
        depth = max(len(row["survival"]) for row in measured["acceptance"])
        data = record["dataset"]
        lines += [
            f"Share of chains accepted to each position, on {measured['acceptance'][0]['responses']} held-out prompts "
            f"of {_name(data)} (digest `{data['digest'][:12]}`).  Length: tokens of a round with a chain of {depth}, "
            "the target's own token included (1: no gain).",
            "",
            _row(["temperature", *(f"position {i}" for i in range(1, depth + 1)), "length", "tokens", "chains"]),
            _row(["---"] * (depth + 4)),
        ]
        for row in measured["acceptance"]:
            shares = [f"{share:.3f}" for share in row["survival"]]
            lines.append(
                _row(
                    [
                        f"{row['temperature']:g}",
                        *shares,
                        f"{row['accept_length']:.2f}",
                        row["tokens"],
                        row["offered"][0],
                    ]
                )
            )
        if measured["top_p"] < 1 or measured["top_k"]:
            lines += ["", f"Above temperature 0 with top_p={measured['top_p']}, top_k={measured['top_k']}."]
        lines += [
            "",
            "At temperature 0 any engine accepts these.  Above it these are TLT's, whose drafts use the noise that the "
            "target samples with; vLLM and SGLang draft differently there and accept another share, not measured.",
        ]
    if overlaps:
        text = ", ".join(f"{overlaps[i]:.3f}" for i in sorted(overlaps))
        lines += [
            "",
            "Overlap with the target's distribution at temperature 1 on the warm-up's held-out rollouts, positions 1 "
            f"to {max(overlaps)}: {text} (what an optimal coupling would accept of a draft whose predecessors were "
            "right; from the end of the off-line training).",
        ]
    return "\n".join(lines)


def _schedule(record: Mapping[str, Any]) -> str:
    measured = record.get("measured")
    if not measured:
        return ""
    machine = record["machine"]
    where = ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['threads']} thread(s)"
    lines = [
        "## Chain length by batch size",
        "",
        "`num_speculative_tokens_per_batch_size`, from the acceptance above and the cost of rounds measured with TLT's "
        f"engine on {where}, {record['drafter']['dtype']}, {measured['context']} tokens of context a request.  "
        "Costs are the machine's own: export again where it is served, for a table of that machine.",
        "",
    ]
    for row in measured["schedules"]:
        lines.append(f"- temperature {row['temperature']:g}: `{json.dumps(row['table'])}`")
    lines += ["", "Tokens a second expected at temperature 0 (K drafts a round; 0: plain decoding):", ""]
    rates = measured["schedules"][0]["tokens_per_s"]
    columns = len(next(iter(rates.values())))
    lines += [_row(["requests", *(f"K={k}" for k in range(columns))]), _row(["---"] * (columns + 1))]
    lines += [_row([size, *(f"{rate:.0f}" for rate in rates_K)]) for size, rates_K in rates.items()]
    return "\n".join(lines)


def _origin(record: Mapping[str, Any]) -> str:
    run = record["run"]
    lines = [
        "## Origin",
        "",
        f"Exported {record['created']} by `{' '.join(record['command'])}`, TLT commit `{record['commit']}`; run "
        f"`{run['name']}`"
        + (f", RL step {run['step']}" if run["step"] is not None else "")
        + (f", MLflow run `{run['mlflow_run_id']}`" if run["mlflow_run_id"] else "")
        + ".  Versions, digests and the commands of the run are in `provenance.json`; `probe.json` holds a few of its "
        "responses, on which `tlt verify-export` replays the drafter.",
    ]
    return "\n".join(lines)


def _name(data: Mapping[str, Any]) -> str:
    return f"{', '.join(data['tasks'])} ({data['generator']})"


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
