"""Offline generation on the real model: equal to transformers, and independent of batch size and workers."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conf.rollout import SpeculationConfig
from tests.tlt_core.export.conftest import write_policy
from tlt_core.data.dataset import DataError
from tlt_core.drafter.eagle3.files import save_eagle3
from tlt_core.drafter.eagle3.model import Eagle3Config, random_eagle3
from tlt_core.items.types import SamplingParams
from tlt_core.machine.disk import FolderError
from tlt_core.machine.processors import TooManyWorkers
from tlt_core.model.config import ModelError
from tlt_core.run.generate import generate_file

QUESTIONS = [f"What is {a} + {b}?" for a in range(10, 35) for b in (7, 19)]  # 50 prompts
NEAR_TIE = 1e-3  # fp32 logits of two computations differ by less than this (SmolLM2: 5e-4 asserted in tests/model)
OFF = SpeculationConfig(policy="off")


def generate(tmp_path, text, **settings):
    """The rows that are made of a file of this text; no file is left behind when it is refused."""
    path, out = tmp_path / "in.jsonl", settings.get("out", tmp_path / "out.jsonl")
    path.write_text(text)
    given = {
        "model": "smollm2-135m-instruct",
        "prompts": path,
        "out": out,
        "params": SamplingParams(),
        "seed": 5,
        "dtype": "float32",
        "batch_size": 16,
        "num_workers": 1,
        "speculation": OFF,
    }
    try:
        generate_file(**(given | settings))
    except Exception:
        assert not out.exists()
        raise
    return [json.loads(line) for line in out.read_text().splitlines()]


def as_text(questions):
    return "".join(json.dumps({"prompt": question}) + "\n" for question in questions)


@pytest.mark.slow
@torch.no_grad()
def test_greedy_equals_transformers(tmp_path, embedded_model):
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    rows = generate(tmp_path, as_text(QUESTIONS[::3]), params=SamplingParams(temperature=0.0, max_new_tokens=24))
    near_ties = []
    for question, row in zip(QUESTIONS[::3], rows, strict=True):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        expected = model.generate(torch.tensor(prompt)[None], do_sample=False, max_new_tokens=24)[0, len(prompt) :]
        ours, theirs = row["token_ids"], expected.tolist()
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            logits = model(torch.tensor(prompt + theirs[:at])[None]).logits[0, -1]
            near_ties.append((question, at, float((logits[ours[at]] - logits[theirs[at]]).abs())))
    assert all(gap < NEAR_TIE for _, _, gap in near_ties), near_ties
    assert len(near_ties) <= 1, f"too many to be chance: {near_ties}"


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_batch_size_or_workers(tmp_path):
    text, params = as_text(QUESTIONS[:16]), SamplingParams(temperature=1.0, max_new_tokens=24)
    reference = generate(tmp_path, text, params=params, batch_size=1)
    assert len({tuple(r["token_ids"]) for r in reference}) == len(reference)
    for batch_size, num_workers, policy in ((16, 1, "off"), (5, 2, "off"), (5, 2, "fixed")):
        speculation = SpeculationConfig(policy=policy)
        changes = {"batch_size": batch_size, "num_workers": num_workers, "speculation": speculation}
        rows = generate(tmp_path, text, params=params, **changes)
        assert [(r["id"], r["token_ids"]) for r in rows] == [(r["id"], r["token_ids"]) for r in reference], changes


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": ', "not JSON"),
        ('{"question": "b"}', "has neither"),
        ('{"token_ids": [1, 64]}', "'token_ids' holds 64; give numbers from 0 to 63"),
        ('{"token_ids": [-1]}', "'token_ids' holds -1"),
        ('{"token_ids": [1.0]}', r"'token_ids' holds 1\.0"),
        ('{"token_ids": [true]}', "'token_ids' holds True"),
        ('{"token_ids": []}', r"'token_ids' is \[\]"),
        ('{"token_ids": "1 2"}', "'token_ids' is '1 2'"),
        ('{"prompt": ["a"]}', r"'prompt' is \['a'\]"),
        ('{"prompt": " "}', "'prompt' is ' '"),
    ],
)
def test_what_is_no_prompt_is_refused_before_the_tokenizer_is_loaded(tmp_path, tiny_folder, row, problem):
    """The tiny model has no tokenizer."""
    with pytest.raises(DataError, match=rf"in\.jsonl, line 2: .*{problem}"):
        generate(tmp_path, f'{{"token_ids": [63]}}\n{row}\n', model=str(tiny_folder))


def test_refused_with_the_tokenizer(tmp_path, embedded_model, tiny_config):
    model = str(embedded_model)
    with pytest.raises(DataError, match=r"--chat-template-kwargs: 'thinking' is no variable"):
        generate(tmp_path, '{"prompt": "a"}', model=model, template_kwargs={"thinking": False})
    with pytest.raises(DataError, match=r"line 1: a prompt of 9000 tokens; .* room for 7680"):
        generate(tmp_path, json.dumps({"token_ids": [1] * 9000}), model=model)
    with pytest.raises(DataError, match=r"has room for 192: .*--max-new-tokens"):
        generate(tmp_path, as_text(["a " * 300]), model=model, params=SamplingParams(max_new_tokens=8000))
    small = write_policy(tmp_path / "model", replace(tiny_config, vocab_size=60))  # its tokenizer knows 64 words
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: the tokenizer has 'w63' as token 63, but .* ends at 59"):
        generate(tmp_path, as_text(["w3", "w3 w63"]), model=str(small), params=SamplingParams(max_new_tokens=4))


def test_refused_before_the_file_is_read(tmp_path, tiny_folder, tiny_config):
    config = Eagle3Config.for_target(replace(tiny_config, hidden_size=64), 8)
    save_eagle3(random_eagle3(config, torch.arange(8), seed=0), tmp_path / "d-eagle3", dtype=torch.float32)
    (tmp_path / "file").write_text("")
    for settings, error, said in (
        ({"num_workers": 4096}, TooManyWorkers, "lower --num-workers"),
        ({"out": tmp_path / "file" / "out.jsonl"}, FolderError, "the folder of --out"),
        ({"speculation": SpeculationConfig(drafter_path=str(tmp_path / "d-eagle3"))}, ModelError, "hidden_size is 64"),
    ):
        with pytest.raises(error, match=said):
            generate(tmp_path, "", model=str(tiny_folder), **settings)
    with pytest.raises(DataError, match="holds no prompts"):
        generate(tmp_path, "\n", model=str(tiny_folder))
