"""The card says what was measured, and nothing else; its commands can be run."""

import itertools
import json
import shlex

from tlt_core.export.card import model_card


def test_the_card_of_an_export(exported):
    folder = exported / "drafter-eagle3"
    record = json.loads((folder / "provenance.json").read_text())
    card, serving, (greedy, *_) = (
        (folder / "README.md").read_text(),
        record["serving"],
        record["measured"]["acceptance"],
    )
    shares = " | ".join(f"{share:.3f}" for share in greedy["survival"])
    assert f"| 0 | {shares} | {greedy['accept_length']:.2f} | {greedy['tokens']} | {greedy['offered'][0]} |" in card
    assert f"- temperature 0: `{serving['num_speculative_tokens_per_batch_size']}`" in card
    block = card.split("```")[1].removeprefix("bash").replace("\\\n", " ")
    vllm, sglang = (dict(itertools.pairwise(shlex.split(line))) for line in block.splitlines() if line)
    assert vllm["--host"] == sglang["--host"] == "127.0.0.1"
    drafter = {"model": "./drafter-eagle3", "method": "eagle3"}
    assert json.loads(vllm["--speculative-config"]) == serving | drafter
    depth = serving["num_speculative_tokens"]
    assert (sglang["--speculative-num-steps"], sglang["--speculative-num-draft-tokens"]) == (str(depth), str(depth + 1))
    assert (sglang["--speculative-algorithm"], sglang["--speculative-eagle-topk"]) == ("EAGLE3", "1")
    card = model_card({**record, "measured": None, "serving": {"num_speculative_tokens": 2}})
    assert "Nothing was measured for this export" in card
    assert "Chain length by batch size" not in card
