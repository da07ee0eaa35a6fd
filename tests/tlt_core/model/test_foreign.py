"""Families that transformers computes: the same numbers as there, in decoding, update and export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from conf.optimizer import AdamWConfig
from conf.rollout import SpeculationConfig, StrategyConfig
from conf.update import AlgorithmConfig, UpdateConfig
from kernels.attention.packed_attention import packed_causal_attention
from tests.tlt_core.grpo.rollouts import make_trainer, tiny_scored
from tests.tlt_core.rollout.playing import PARAMS, requests
from tlt_core.grpo.batch import make_train_batches
from tlt_core.items.types import SamplingParams
from tlt_core.model.config import ModelError
from tlt_core.model.load import load_config, load_decoder, read_tensors, save_hf
from tlt_core.rollout import build

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma3_text": {"sliding_window": 96, "query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 96},
    "olmo2": {},
    "phi3": {},
    "granite": {"attention_multiplier": 0.5, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    "llama": {"rope_parameters": YARN},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[request.param](**SIZES, **FAMILIES[request.param]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)  # distributions that are far from uniform
    path: Path = tmp_path_factory.mktemp(request.param) / "model"
    model.save_pretrained(path)
    return path


def theirs(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_logits_and_taps_are_those_of_transformers_and_come_back_from_a_folder(folder: Path, tmp_path: Path) -> None:
    config, model = load_config(folder), theirs(folder)
    assert config.foreign
    assert config.max_position_embeddings == (96 if config.family in ("mistral", "gemma3_text") else 256)
    decoder = load_decoder(folder, dtype=torch.float32)
    one, other = torch.randint(3, 64, (9,)), torch.randint(3, 64, (14,))
    offsets = torch.tensor([0, 9, 23])
    hidden = decoder(
        torch.cat([one, other]),
        torch.cat([torch.arange(9), torch.arange(14)]),
        lambda _, q, k, v: packed_causal_attention(q, k, v, offsets),
        taps=(0, 2),
    )
    wanted = [model(tokens[None], output_hidden_states=True) for tokens in (one, other)]
    torch.testing.assert_close(
        decoder.logits(hidden.last_TD) / decoder.logits(hidden.last_TD).std(),
        torch.cat([w.logits[0] for w in wanted]) / decoder.logits(hidden.last_TD).std(),
        atol=1e-5,
        rtol=1e-5,
    )
    taps = torch.cat([torch.cat([w.hidden_states[k][0] for w in wanted]) for k in (0, 2)], dim=-1)
    torch.testing.assert_close(hidden.taps_TE, taps, atol=1e-4, rtol=1e-4)
    save_hf(decoder.named_parameters(), config, tmp_path / "out", tokenizer_from=folder, dtype=torch.float32)
    assert read_tensors(tmp_path / "out").keys() == read_tensors(folder).keys(), "names that serving engines know"
    for before, after in zip(model.parameters(), theirs(tmp_path / "out").parameters(), strict=True):
        assert torch.equal(before, after)


def test_decoding_is_transformers_and_drafts_change_nothing(folder: Path) -> None:
    decoder = load_decoder(folder, dtype=torch.float32)

    def decoded(params: SamplingParams, **speculation: Any) -> list[list[int]]:
        engine = build.make_engine(decoder, SpeculationConfig(**speculation), max_live=4, max_len=80, seed=0)
        return [r.tokens.tolist() for r in engine.decode_all(requests(6), params)]

    chain = StrategyConfig(drafter="ngram", depth=3, tokens=3)
    for name in ("greedy", "T=1"):
        plain = decoded(PARAMS[name], policy="off")
        assert decoded(PARAMS[name], policy="fixed", strategies=(chain,)) == plain
    model, sampled = theirs(folder), decoded(PARAMS["greedy"], policy="off")
    for prompt in {tuple(request.prompt_tokens.tolist()) for request in requests(6)}:
        start = torch.tensor([prompt])
        wanted = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=40)[0]
        assert wanted.tolist() in sampled


def test_an_update_is_that_of_plain_autograd_and_resumes_to_the_bit(folder: Path, tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(loss_aggregation="sequence_mean", tis_cap=0.0)
    optimizer = AdamWConfig(learning_rate=1e-3, max_grad_norm=1e9)
    cfg = UpdateConfig(optimizer=optimizer, tokens_per_micro_batch=64, dtype="float32")
    scored = tiny_scored(seed=0, num_groups=4)
    (share,) = make_train_batches(scored, cfg, algorithm, num_workers=1, seed=0, step=0)[0]

    def trainer() -> Any:
        return make_trainer(load_decoder(folder, dtype=torch.float32), cfg, algorithm=algorithm)

    first = trainer()
    norm = first.step(share)["actor/grad_norm"]
    model, total = theirs(folder), torch.zeros(())
    for s in range(len(share)):
        tokens = share.tokens_T[share.offsets_S1[s] : share.offsets_S1[s + 1]].long()
        logp = F.log_softmax(model(tokens[None]).logits[0].float(), dim=-1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        logp = logp[share.prompt_lens_S[s] - 1 :]
        total = total - share.advantages_S[s] * (logp - logp.detach()).exp().mean() / share.num_sequences
    total.backward()
    wanted = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert norm == pytest.approx(float(wanted), rel=1e-4)
    state = {name: value.clone() for name, value in first.state_dict().items()}
    first.step(share)
    second = trainer()
    second.load_state_dict(state)
    second.step(share)
    for (name, before), (_, after) in zip(first.weights(), second.weights(), strict=True):
        assert torch.equal(before, after), name


@pytest.mark.parametrize(
    ("family", "settings", "problem"),
    [
        ("gemma2", {}, "final_logit_softcapping=30"),
        ("gpt_oss", {"num_local_experts": 4}, "attention sinks"),
        ("qwen3_next", {}, "layers of linear_attention keep no keys and values"),
        ("cohere", {}, "logit_scale=0.0625"),
        ("gpt2", {}, "another structure"),
        (
            "mistral",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type dynamic",
        ),
        ("t5", {}, "it is no text model of transformers"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_its_configuration(
    family: str, settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[family](**SIZES, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=problem):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "family",
    ["gemma3", "llama4", "bloom", "mpt", "falcon", "gptj", "lfm2_moe", "glm4_moe", "deepseek_v3", "mamba", "none_such"],
)
def test_other_kinds_of_models_are_refused_in_words(family: str, tmp_path: Path) -> None:
    """Multimodal ones, other structures, state beside the weights, keys and values of other sizes."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SIZES}))
    with pytest.raises(ModelError, match=rf"config\.json: .*'{family}' is not supported; .*; and "):
        load_config(tmp_path)


def test_a_layer_that_does_not_attend_is_noticed(folder: Path) -> None:
    decoder = load_decoder(folder, dtype=torch.float32)
    layer = decoder.layers[1]
    layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    tokens, offsets = torch.arange(5), torch.tensor([0, 5])
    with pytest.raises(ModelError, match=r"layers \[0, 2\] .* attend, of 3"):
        decoder(tokens, tokens, lambda _, q, k, v: packed_causal_attention(q, k, v, offsets))
