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


def run(tmp_path, questions, *, temperature, batch_size=16, num_workers=1, max_new_tokens=24, speculation=OFF):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / f"out-{batch_size}-{num_workers}.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in questions))
    generate_file(
        model="smollm2-135m-instruct",
        prompts=prompts,
        out=out,
        params=SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens),
        seed=5,
        dtype="float32",
        batch_size=batch_size,
        num_workers=num_workers,
        speculation=speculation,
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


def scores_at(model, tokens: list[int], candidates: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor(tokens)[None]).logits[0, -1]
    return logits[candidates].tolist()


@pytest.mark.slow
def test_greedy_equals_transformers(tmp_path, embedded_model):
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model)
    rows = run(tmp_path, QUESTIONS[::3], temperature=0.0)
    near_ties = []
    for question, row in zip(QUESTIONS[::3], rows, strict=True):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        expected = model.generate(torch.tensor(prompt)[None], do_sample=False, max_new_tokens=24)[0, len(prompt) :]
        ours, theirs = row["token_ids"], expected.tolist()
        if ours != theirs:
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            gap = scores_at(model, prompt + theirs[:at], [ours[at], theirs[at]])
            near_ties.append((question, at, abs(gap[0] - gap[1])))
    assert all(gap < NEAR_TIE for _, _, gap in near_ties), near_ties
    assert len(near_ties) <= 1, f"too many to be chance: {near_ties}"


@pytest.mark.slow
def test_sampled_tokens_do_not_depend_on_batch_size_or_workers(tmp_path):
    questions = QUESTIONS[:16]
    reference = run(tmp_path, questions, temperature=1.0, batch_size=1)
    assert len({tuple(r["token_ids"]) for r in reference}) == len(reference)
    differing = {}
    fixed = SpeculationConfig(policy="fixed")
    for case in ((16, 1, OFF), (5, 2, OFF), (5, 2, fixed)):
        batch_size, num_workers, speculation = case
        rows = run(
            tmp_path,
            questions,
            temperature=1.0,
            batch_size=batch_size,
            num_workers=num_workers,
            speculation=speculation,
        )
        assert [r["id"] for r in rows] == [r["id"] for r in reference]
        differing[case] = sum(a["token_ids"] != b["token_ids"] for a, b in zip(reference, rows, strict=True))
    assert sum(differing.values()) == 0, f"sequences that differ, by case: {differing}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": "a"}\n{"question": "b"}\n', "line 2: has neither"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_input_names_file_and_line(tmp_path, embedded_model, text, problem):
    with pytest.raises(DataError, match=problem):
        refuse(tmp_path, embedded_model, text)


def test_a_template_variable_that_is_none_is_refused(tmp_path, embedded_model):
    with pytest.raises(DataError, match=r"--chat-template-kwargs: 'thinking' is no variable"):
        refuse(tmp_path, embedded_model, '{"prompt": "a"}', template_kwargs={"thinking": False})


def test_a_prompt_with_a_token_beyond_the_embedding_names_file_and_line(tmp_path, tiny_config):
    """The tokenizer knows 64 words, the model 60."""
    model = write_policy(tmp_path / "model", replace(tiny_config, vocab_size=60))
    with pytest.raises(DataError, match=r"in\.jsonl, line 2: the tokenizer has 'w63' as token 63, but .* ends at 59"):
        refuse(tmp_path, model, '{"prompt": "w3"}\n{"prompt": "w3 w63"}\n', params=SamplingParams(max_new_tokens=4))


def refuse(tmp_path, model, text, **settings):
    """Generate from a file of this text, which leaves nothing behind when it is refused."""
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(text)
    given = {
        "model": str(model),
        "prompts": path,
        "out": out,
        "params": SamplingParams(),
        "seed": 0,
        "dtype": "float32",
        "batch_size": 1,
        "num_workers": 1,
        "speculation": OFF,
    }
    try:
        generate_file(**(given | settings))
    finally:
        assert not out.exists()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"token_ids": [1, 64]}', "'token_ids' holds 64; give numbers from 0 to 63"),
        ('{"token_ids": [-1]}', "'token_ids' holds -1; give"),
        ('{"token_ids": [1.0]}', r"'token_ids' holds 1\.0; give"),
        ('{"token_ids": [true]}', "'token_ids' holds True; give"),
        ('{"token_ids": ["1"]}', "'token_ids' holds '1'; give"),
        ('{"token_ids": [[1]]}', r"'token_ids' holds \[1\]; give"),
        ('{"token_ids": [null]}', "'token_ids' holds None; give"),
        ('{"token_ids": []}', r"'token_ids' is \[\]; give a list of token ids"),
        ('{"token_ids": "1 2"}', "'token_ids' is '1 2'; give a list of token ids"),
        ('{"prompt": ["a"]}', r"'prompt' is \['a'\]; give a text"),
        ('{"prompt": null}', "'prompt' is None; give a text"),
        ('{"prompt": " "}', "'prompt' is ' '; give a text"),
        (r'{"prompt": "a", "id": "\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' stands twice"),
    ],
)
def test_what_is_no_prompt_is_refused_before_the_tokenizer_is_loaded(tmp_path, tiny_folder, row, problem):
    """The tiny model has no tokenizer."""
    with pytest.raises(DataError, match=rf"in\.jsonl, line 2: .*{problem}"):
        refuse(tmp_path, tiny_folder, f'{{"token_ids": [63]}}\n{row}\n')


def test_a_prompt_beyond_the_context_of_the_model_is_refused(tmp_path, embedded_model):
    said = r"line 1: a prompt of 9000 tokens; beside the response the model's context has room for 7680: shorten"
    with pytest.raises(DataError, match=said):
        refuse(tmp_path, embedded_model, json.dumps({"token_ids": [1] * 9000}))
    with pytest.raises(DataError, match=r"has room for 192: .*lower --max-new-tokens"):
        refuse(tmp_path, embedded_model, json.dumps({"prompt": "a " * 300}), params=SamplingParams(max_new_tokens=8000))


def test_a_drafter_of_another_model_is_refused(tmp_path, tiny_folder, tiny_config):
    config = Eagle3Config.for_target(replace(tiny_config, hidden_size=64), 8)
    save_eagle3(random_eagle3(config, torch.arange(8), seed=0), tmp_path / "d-eagle3", dtype=torch.float32)
    with pytest.raises(ModelError, match="hidden_size is 64, but the target's is 32"):
        refuse(tmp_path, tiny_folder, "", speculation=SpeculationConfig(drafter_path=str(tmp_path / "d-eagle3")))


def test_too_many_workers_and_a_place_that_cannot_be_written_are_refused(tmp_path, tiny_folder):
    with pytest.raises(TooManyWorkers, match="lower --num-workers"):
        refuse(tmp_path, tiny_folder, "", num_workers=4096)
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match="set the folder of --out to one that can"):
        refuse(tmp_path, tiny_folder, "", out=tmp_path / "file" / "out.jsonl")
