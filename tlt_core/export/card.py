"""The drafter's model card: what it is, how to serve it, and what was measured.

In: the content of `provenance.json`, so the card agrees with the record and claims nothing that was not measured.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def model_card(record: Mapping[str, Any]) -> str:
    sections = [_head(record), _serving(record), _measured(record), _schedule(record), _origin(record)]
    return "\n\n".join(part for part in sections if part) + "\n"


def vllm_config(serving: Mapping[str, Any], drafter: str) -> str:
    """The value of vLLM's `--speculative-config`."""
    return json.dumps({"model": drafter, "method": "eagle3", **serving})


def _head(record: Mapping[str, Any]) -> str:
    target, drafter = record["target"], record["drafter"]
    return (
        "---\ntags: [eagle3, speculative-decoding, speculators]\n---\n"
        f"# EAGLE-3 drafter of {record['run']['name']}\n\n"
        f"One decoder layer that guesses the next tokens of its target from the target's hidden states (streams "
        f"{drafter['taps']}); it may propose {drafter['draft_vocab_size']} of {target['vocab_size']} tokens.  The "
        "target checks every guess, so a drafter makes decoding faster and does not change the text.  It fits only the "
        "policy that was exported with it, whose digests are in `provenance.json`.\n\n"
        "Before serving: `tlt verify-export DRAFTER --target POLICY`."
    )


def _serving(record: Mapping[str, Any]) -> str:
    serving = record["serving"]
    depth = serving["num_speculative_tokens"]
    system, prompts = record["run"].get("system_prompt"), "as the target's chat template writes them"
    if system is not None:
        prompts = f"with the system message {json.dumps(system)}" if system else "with an empty system message"
    table = serving.get("num_speculative_tokens_per_batch_size", [])
    useless = ["**As measured here, no chain pays at any batch size: serve the target without the drafter.**", ""]
    lines = [
        "## Serving",
        "",
        *(useless if table and not any(chain for *_, chain in table) else []),
        "From the folder that holds `policy` and `drafter-eagle3`:",
        "",
        "```bash",
        "vllm serve ./policy --host 127.0.0.1 --generation-config vllm \\",
        f"  --speculative-config '{vllm_config(serving, './drafter-eagle3')}'",
        "",
        "python -m sglang.launch_server --host 127.0.0.1 --model-path policy --speculative-algorithm EAGLE3 \\",
        "  --speculative-draft-model-path drafter-eagle3 --speculative-eagle-topk 1 \\",
        f"  --speculative-num-steps {depth} --speculative-num-draft-tokens {depth + 1}",
        "```",
        "",
        f"`vllm serve ./drafter-eagle3` works too: target ({record['target']['name']}) and chain length ({depth}, at "
        "every batch size) then come from the drafter's `config.json`.",
        "",
        "Always name the method: otherwise vLLM guesses it from the folder's name and may take the drafter for a plain "
        "draft model.  SGLang drafts chains of one length; `--speculative-adaptive` (0.5.23) lets it vary.",
        "",
        f"It knows prompts {prompts}.  With others fewer drafts are accepted.",
    ]
    return "\n".join(lines)


def _measured(record: Mapping[str, Any]) -> str:
    measured = record.get("measured")
    lines = ["## Measured acceptance", ""]
    if not measured:
        return "\n".join([*lines, "Nothing was measured for this export (`tlt export --prompts 0`)."])
    data, depth = record["dataset"], max(len(chains["survival"]) for chains in measured["acceptance"])
    lines += [
        f"Share of chains accepted to each position, on {measured['acceptance'][0]['responses']} held-out prompts "
        f"of {', '.join(data['tasks'])} ({data['generator']}) (digest `{data['digest'][:12]}`).  Length: tokens of "
        f"a round with a chain of {depth}, the target's own token included (1: no gain).",
        "",
        _table_row(["temperature", *(f"position {i}" for i in range(1, depth + 1)), "length", "tokens", "chains"]),
        _table_row(["---"] * (depth + 4)),
    ]
    for chains in measured["acceptance"]:
        shares = [f"{share:.3f}" for share in chains["survival"]]
        totals = (f"{chains['accept_length']:.2f}", chains["tokens"], chains["offered"][0])
        lines.append(_table_row([f"{chains['temperature']:g}", *shares, *totals]))
    if measured["top_p"] < 1 or measured["top_k"]:
        lines += ["", f"Above temperature 0 with top_p={measured['top_p']}, top_k={measured['top_k']}."]
    lines += [
        "",
        "At temperature 0 these shares hold for every engine.  Above it they hold for TLT, whose drafts use the "
        "noise that the target samples with; vLLM and SGLang draft differently there, which was not measured.",
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
        f"engine on {where}, {record['drafter']['dtype']}, {measured['context']} tokens of context per request.  "
        "Costs depend on the machine: for the serving machine's table, export there.",
        "",
    ]
    for schedule in measured["schedules"]:
        lines.append(f"- temperature {schedule['temperature']:g}: `{json.dumps(schedule['table'])}`")
    lines += ["", "Expected tokens per second at temperature 0 (K drafts per round; 0: plain decoding):", ""]
    rates = measured["schedules"][0]["tokens_per_s"]
    columns = len(next(iter(rates.values())))
    lines += [_table_row(["requests", *(f"K={k}" for k in range(columns))]), _table_row(["---"] * (columns + 1))]
    lines += [_table_row([size, *(f"{rate:.0f}" for rate in rates_K)]) for size, rates_K in rates.items()]
    return "\n".join(lines)


def _origin(record: Mapping[str, Any]) -> str:
    run = record["run"]
    step = f", RL step {run['step']}" if run["step"] is not None else ""
    tracked = f", MLflow run `{run['mlflow_run_id']}`" if run["mlflow_run_id"] else ""
    return (
        f"## Origin\n\nExported {record['created']} by `{' '.join(record['command'])}`, TLT commit "
        f"`{record['commit']}`; run `{run['name']}`{step}{tracked}.  Versions, digests and the commands of the run are "
        "in `provenance.json`; `probe.json` holds a few of its responses, on which `tlt verify-export` replays the "
        "drafter."
    )


def _table_row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
