"""Configuration: every file loads, every mistake is named with its remedy, and nothing heavy is imported."""

import shutil
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from conf import data, drafter, model, optimizer, reward, rollout, run, system, update
from conf.load import ConfigError, load, validate
from conf.section import Section

FILES = sorted(Path("conf").glob("*.yaml"))
SMOKE = "conf/smoke.yaml"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_loads(path: Path) -> None:
    cfg = load(path)
    assert validate(yaml.safe_load(yaml.safe_dump(cfg.model_dump(mode="json"))), source="resolved") == cfg
    assert [other for other in FILES if load(other).name == cfg.name] == [path], "every run has a folder of its own"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.nun_samples=4", ("rollout.nun_samples", "did you mean 'num_samples'", "4")),
        ("rolout={}", ("rolout", "did you mean 'rollout'")),
        ("data.tasks=[{name: chain_sum, wieght: 2}]", ("data.tasks.0.wieght", "did you mean 'weight'")),
        ("update.optimizer.zzz=1", ("update.optimizer.zzz", "known keys here", "learning_rate")),
        ("model.kind=pretraned", ("model.kind", "did you mean 'pretrained'")),
        ("update.backend={zero_stage: 2}", ("update.backend.kind", "deepspeed, torch")),
        ("rollout.num_samples=0", ("rollout.num_samples", "greater than or equal to 1", "value 0")),
        ("data.tasks=[]", ("data.tasks", "at least 1")),
        ("name=a/b", ("name", "'a/b'")),
        ("seed=017", ("seed=017", "octal", "decimals")),
        ("cluster.silence_s=1:30", ("cluster.silence_s=1:30", "sexagesimal")),
        ("base=demo.yaml", ("base",)),
        ("data.tasks.0.weight=2", ("data.tasks", "lists are replaced as a whole")),
        ("num_steps=true", ("num_steps", "true")),
        ("rollout.num_prompts=1000000000", ("rollout.num_prompts", "1000000")),
        ("reward.timeout_s=.inf", ("reward.timeout_s", "finite")),
        ("update.optimizer.betas=[5, -3]", ("betas.0", "less than 1")),
        ("tracking.experiment=../../../esc", ("tracking.experiment",)),
        ("tracking.uri=foo://bar", ("tracking.uri", "foo", "SQLite")),
        ("tracking.uri=sqlite:/x.db", ("tracking.uri", "sqlite:///")),
        ("seed=2024-13-45", ("seed", "timestamp")),
        (f"seed={'[' * 3000}", ("nested too deeply",)),
        ("rollout.num_samples", ("not of the form section.key=value",)),
        ("rollout..x=1", ("not of the form section.key=value",)),
    ],
)
def test_a_wrong_key_or_value_is_named(override: str, said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMOKE, [override])
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["rollout.num_samples=1"], "set rollout.num_samples to 2 or more"),
        (["algorithm.kl={kind: k1, coef: 0.1}"], "set kind to k2 or k3, or place to reward"),
        (["rollout.engine=vllm", "rollout.temperature=0.005"], "set rollout.temperature to 0.01 or more"),
        (["rollout.temperature=0"], "set rollout.temperature above 0"),
        (["update.num_minibatches=9"], "minibatches are made of whole groups"),
        (["algorithm.overlong_buffer_tokens=24"], "must be below"),
        (
            ["update.lora={enabled: true}", "update.backend={kind: deepspeed, zero_stage: 3}"],
            "set update.backend.zero_stage to 2 or lower",
        ),
        (["update.streamed=first", "update.backend={kind: deepspeed}"], "set update.streamed to auto or off"),
        (["reward.functions=[{kind: python}]"], "a path 'package.module:function' is needed"),
        (["reward.functions=[{kind: exact, path: 'a:b'}]"], "must be left out"),
        (["model={kind: random, hidden_size: 64, num_heads: 3}"], "must be a multiple of num_heads"),
        (["drafter.method=hass"], "drafter.method: .* choose drafter.loss, soft_ce or tv"),
        (["rollout.vllm.max_probs_diff=0.1"], r"rollout\.max_probs_diff now"),
        (["drafter.idle_training.max_slowdown=0.1"], r"update\.streamed says"),
        (["rollout.speculation.policy=threshold"], r"rollout\.speculation\.policy: .* set cost_model"),
        (["rollout.speculation.max_live=4"], r"rollout\.speculation\.max_live: .* leave it out"),
        (["drafter.spot.enabled=false"], r"drafter\.spot: .* it is drafter\.idle_training now"),
        (["rollout.speculation.menu=[{depth: 2, tokens: 2}]"], r"it is rollout\.speculation\.strategies now"),
        (["rollout.engine=own"], r"rollout\.engine: .*own is called builtin now"),
        (["drafter.idle_training.loss=mixed"], "drafter.idle_training.loss: .*'soft_ce' or 'tv'"),
        (["rollout.engine=vllm", "cluster.release_rollout_memory=true"], "set cluster.release_rollout_memory to false"),
        (["cluster.gpus_per_worker=1.5"], "set it to 1, or to a part from 0.01 on"),
        (
            ["cluster.gpus_per_worker=0.5", "rollout.engine=vllm", "rollout.vllm.tensor_parallel=2"],
            "set gpus_per_worker to 1, or rollout.engine to builtin",
        ),
        (
            ["cluster.gpus_per_worker=0.5", "update.backend={kind: deepspeed}"],
            "set update.backend.kind to torch, or gpus_per_worker to 1",
        ),
        (
            ["rollout.engine=builtin", "rollout.vllm.tensor_parallel=2"],
            "set rollout.engine to vllm, or tensor_parallel to 1",
        ),
        (
            ["rollout.engine=vllm", "rollout.vllm.tensor_parallel=2", "cluster.num_workers=3"],
            "set num_workers to a multiple",
        ),
    ],
)
def test_impossible_combinations_say_what_to_do(overrides: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy.replace("(", r"\(")):
        load(SMOKE, overrides)


def test_overrides_are_read_as_yaml_and_win() -> None:
    cfg = load(SMOKE, ["update.optimizer.learning_rate=3e-5", "seed=7", "coldstart.enabled=false", "name=other"])
    assert cfg.update.optimizer.learning_rate == pytest.approx(3e-5)
    assert (cfg.seed, cfg.coldstart.enabled, cfg.name) == (7, False, "other")


def test_a_missing_file_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"does not exist.*conf/smoke\.yaml"):
        load("conf/smok.yaml")


def test_an_ablation_is_the_demo_with_one_thing_taken_away() -> None:
    for stem, changed in (
        ("ablation_no_spec", ["rollout.speculation.policy=off"]),
        ("ablation_static_spec", ["rollout.speculation.policy=fixed", "drafter.idle_training.enabled=false"]),
        ("ablation_no_idle_training", ["drafter.idle_training.enabled=false"]),
    ):
        assert load(f"conf/{stem}.yaml") == load("conf/demo.yaml", [f"name={stem}", *changed])


def test_a_file_changes_its_base_key_by_key(tmp_path: Path) -> None:
    shutil.copy(SMOKE, tmp_path / "bottom.yaml")
    (tmp_path / "sub").mkdir()
    (tmp_path / "middle.yaml").write_text(
        "base: bottom.yaml\nname: middle\nseed: 3\nrollout: {num_samples: 6}\n"
        "data: {tasks: [{name: chain_sum}]}\nupdate: {backend: {kind: deepspeed, zero_stage: 1}}\n"
    )
    (tmp_path / "sub" / "top.yaml").write_text(
        "base: ../middle.yaml\nname: top\nrollout: {top_k: 5}\nupdate: {backend: {kind: torch}}\n"
    )
    cfg, smoke = load(tmp_path / "sub" / "top.yaml", ["rollout.num_prompts=3"]), load(SMOKE)
    assert (cfg.name, cfg.seed) == ("top", 3)
    assert (cfg.rollout.num_prompts, cfg.rollout.num_samples, cfg.rollout.top_k) == (3, 6, 5)
    assert cfg.rollout.max_new_tokens == smoke.rollout.max_new_tokens
    assert [t.name for t in cfg.data.tasks] == ["chain_sum"]  # a list is replaced as a whole
    assert cfg.data.num_train == smoke.data.num_train
    assert cfg.update.backend.kind == "torch"  # zero_stage belongs to the other kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: b.yaml", r"each other's base: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"),
        ("base: a.yaml", r"each other's base: .*a\.yaml -> .*a\.yaml"),
        ("base: there/is/none.yaml", r"none\.yaml does not exist.* It is the base of .*a\.yaml"),
        ("base: [b.yaml]", r"base must name a file.*\['b\.yaml'\]"),
        ("bsae: b.yaml", "did you mean 'base'"),
        ("rollout: {base: b.yaml}", r"rollout\.base: unknown key"),
    ],
)
def test_a_base_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text + "\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("uri", "remedy"),
    [
        ("https://me:geheim@host/x", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("https://geheim@host", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("postgresql://me:geheim@host/db", "~/.pgpass"),
        ("mysql+pymysql://me:ge/he@geheim@host/db", "~/.my.cnf"),
        ("postgresql://host/db?user=me&password=geheim", "~/.pgpass"),
    ],
)
def test_a_password_of_the_tracking_store_is_refused_and_not_repeated(uri: str, remedy: str) -> None:
    for override in (f"tracking.uri={uri}", f"tracking={uri}", f"tracking.url={uri}", uri):
        with pytest.raises(ConfigError) as refused:
            load(SMOKE, [override])
        assert "geheim" not in str(refused.value)
        if override.startswith("tracking.uri"):
            assert "tracking.uri" in str(refused.value)
            assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"a: *geheim", "line 1, column 4"),
        (b"a: &geheim 1\nb: &geheim 2", "line 2, column 4"),
        (b"geheim: x y: z", "line 1, column 12"),
        (b"a: !!int geheim", "not a valid int"),
        (b"a: %s # geheim" % (b"1" * 5000), "line 1, column 4"),
        (b"geheim: \x00", "x.yaml"),
        (b"geheim\n", "mapping of sections"),
        (b"key: geheim\n", "key: unknown key"),
        (b"geheim: \xff", "UTF-8"),
        (b"a: " + b"[" * 5000, "nested too deeply"),
        (
            b"name: a\nrollout:\n  num_samples: 2\n  num_samples: 8 # geheim\n",
            "'num_samples' stands twice, again in line 4",
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_cannot_be_read_is_refused_and_not_repeated(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert said in str(refused.value)
    assert "geheim" not in str(refused.value)


def _sections() -> list[type[BaseModel]]:
    files = (data, drafter, model, optimizer, reward, rollout, run, system, update)
    found = {v for f in files for v in vars(f).values() if isinstance(v, type) and issubclass(v, Section)}
    return sorted(found, key=lambda section: section.__name__)


def test_every_field_is_documented_and_every_number_has_bounds() -> None:
    """A slip of the keyboard must not keep a machine busy for hours.  A reward may have any weight."""
    fields = {f"{s.__name__}.{name}": field for s in _sections() for name, field in s.model_fields.items()}
    assert [n for n, f in fields.items() if not f.description and not n.endswith((".kind", ".dtype"))] == []
    counts = {name: f.metadata for name, f in fields.items() if f.annotation in (int, int | None)}
    assert [n for n, bounds in counts.items() if not any(hasattr(b, "le") or hasattr(b, "lt") for b in bounds)] == []
    unbounded = [name for name, f in fields.items() if f.annotation in (int, float) and not f.metadata]
    assert unbounded == ["RewardFunction.weight"]
