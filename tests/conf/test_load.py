"""Configuration: every file loads, every mistake is named with its remedy, and nothing heavy is imported."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from conf import coldstart, data, drafter, model, optimizer, reward, rollout, run, system, update
from conf.load import ConfigError, load, validate
from conf.section import Section

FILES = sorted(Path("conf").glob("*.yaml"))
SMOKE = "conf/smoke.yaml"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_loads(path: Path) -> None:
    cfg = load(path)
    assert cfg.run_dir == Path(cfg.output_dir) / cfg.name


def test_there_is_a_file_for_every_situation() -> None:
    ablations = {"ablation_no_spec", "ablation_static_spec", "ablation_no_spot"}
    sizes = {"gpu_7b_lora", "gpu_7b_offload", "gpu_14b"}
    assert {"demo", "smoke", "single_gpu", "multi_gpu", "multi_node"} | sizes | ablations <= {p.stem for p in FILES}


def test_gpu_files_use_gpus_as_they_are_meant_to() -> None:
    single, node, nodes = (load(f"conf/{name}.yaml") for name in ("single_gpu", "multi_gpu", "multi_node"))
    assert [cfg.cluster.num_workers for cfg in (single, node, nodes)] == [1, 8, 16]
    assert [cfg.cluster.address for cfg in (single, node, nodes)] == ["local", "local", "auto"]
    for cfg in (single, node, nodes):
        assert cfg.cluster.gpus_per_worker == 1
        assert cfg.cluster.release_rollout_memory
        assert cfg.update.backend.kind == "deepspeed"
    assert not load(SMOKE).cluster.release_rollout_memory


def test_every_run_has_a_folder_of_its_own() -> None:
    names = [load(p).name for p in FILES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.nun_samples=4", ("rollout.nun_samples", "did you mean 'num_samples'", "4")),
        ("data.tsaks=[]", ("data.tsaks", "did you mean 'tasks'")),
        ("rolout={}", ("rolout", "did you mean 'rollout'")),
        ("data.tasks=[{name: chain_sum, wieght: 2}]", ("data.tasks.0.wieght", "did you mean 'weight'")),
        ("update.optimizer.zzz=1", ("update.optimizer.zzz", "known keys here", "learning_rate")),
        ("model.kind=pretraned", ("model.kind", "did you mean 'pretrained'")),
        ("update.backend={zero_stage: 2}", ("update.backend.kind", "deepspeed, torch")),
        ("rollout.num_samples=0", ("rollout.num_samples", "greater than or equal to 1", "value 0")),
        ("rollout.top_p=1.5", ("rollout.top_p", "1.5")),
        ("data.tasks=[]", ("data.tasks", "at least 1")),
        ("name=a/b", ("name", "'a/b'")),
        ("seed=017", ("seed=017", "octal", "decimals")),
        ("cluster.silence_s=1:30", ("cluster.silence_s=1:30", "sexagesimal")),
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
        (
            ["rollout.num_samples=1", "algorithm.advantage=reinforce_pp_baseline"],
            "set rollout.num_samples to 2 or more",
        ),
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
        (["drafter.method=hass"], "drafter.method: this key is gone: .* choose drafter.loss, soft_ce or tv"),
        (["rollout.vllm.max_probs_diff=0.1"], r"max_probs_diff: this key is gone: it is rollout\.max_probs_diff now"),
        (["drafter.spot.max_slowdown=0.1"], r"max_slowdown: this key is gone: update\.streamed says"),
        (["rollout.speculation.policy=threshold"], r"rollout\.speculation\.policy: threshold is gone: set cost_model"),
        (["rollout.speculation.max_live=4"], "max_live: this key is gone: leave it out"),
        (["drafter.spot.loss=mixed"], "drafter.spot.loss: Input should be 'soft_ce' or 'tv' .value 'mixed'"),
        (
            [
                "rollout.engine=vllm",
                "rollout.speculation.policy=off",
                "drafter.spot.enabled=false",
                "cluster.release_rollout_memory=true",
            ],
            "set cluster.release_rollout_memory to false",
        ),
        (["cluster.gpus_per_worker=1.5"], "set it to 1, or to a part from 0.01 on (0.5: two"),
        (["cluster.gpus_per_worker=0.001"], "set it to 1, or to a part from 0.01 on"),
        (
            ["cluster.gpus_per_worker=0.4", "rollout.engine=vllm"],
            "2 workers to a GPU: a vLLM engine wants one for itself",
        ),
        (
            ["cluster.gpus_per_worker=0.5", "rollout.engine=vllm", "rollout.vllm.tensor_parallel=2"],
            "set gpus_per_worker to 1, or rollout.engine to own",
        ),
        (
            ["cluster.gpus_per_worker=0.5", "update.backend={kind: deepspeed}"],
            "set update.backend.kind to torch, or gpus_per_worker to 1",
        ),
        (
            ["rollout.engine=own", "rollout.vllm.tensor_parallel=2"],
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


def test_what_one_worker_on_half_a_gpu_may_do() -> None:
    """It is alone there."""
    cfg = load(SMOKE, ["cluster.gpus_per_worker=0.5", "cluster.num_workers=1", "update.backend={kind: deepspeed}"])
    assert (cfg.rollout.engine, cfg.cluster.device) == ("own", "cuda")


def test_overrides_are_read_as_yaml_and_win() -> None:
    cfg = load(SMOKE, ["update.optimizer.learning_rate=3e-5", "seed=7", "coldstart.enabled=false", "name=other"])
    assert cfg.update.optimizer.learning_rate == pytest.approx(3e-5)
    assert (cfg.seed, cfg.coldstart.enabled, cfg.name) == (7, False, "other")


def test_an_override_can_open_a_section_that_the_file_lacks() -> None:
    assert load(SMOKE, ["checkpoint.keep_last=5"]).checkpoint.keep_last == 5


@pytest.mark.parametrize("override", ["rollout.num_samples", "=3", "rollout..x=1"])
def test_an_override_of_another_form_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form section\.key=value"):
        load(SMOKE, [override])


def test_a_list_is_replaced_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="lists are replaced as a whole"):
        load(SMOKE, ["data.tasks.0.weight=2"])


def test_a_missing_file_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"does not exist.*conf/smoke\.yaml"):
        load("conf/smok.yaml")


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "a: [1"])
def test_a_file_that_is_no_mapping(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        load(path)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(SMOKE, ["num_steps=0", "seed=-1", "cluster.num_workers=0"])
    assert all(key in str(caught.value) for key in ("num_steps", "seed", "cluster.num_workers"))


def _differences(left: dict[str, object], right: dict[str, object], at: str = "") -> dict[str, object]:
    """Dotted keys whose values differ, with the right one's."""
    found: dict[str, object] = {}
    for key in left.keys() | right.keys():
        a, b = left.get(key), right.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= _differences(a, b, f"{at}{key}.")
        elif a != b:
            found[f"{at}{key}"] = b
    return found


@pytest.mark.parametrize(
    ("stem", "changed"),
    [
        ("ablation_no_spec", {"rollout.speculation.policy": "off"}),
        ("ablation_static_spec", {"rollout.speculation.policy": "fixed", "drafter.spot.enabled": False}),
        ("ablation_no_spot", {"drafter.spot.enabled": False}),
    ],
)
def test_an_ablation_is_the_demo_with_one_thing_taken_away(stem: str, changed: dict[str, object]) -> None:
    demo, ablation = (load(f"conf/{name}.yaml").model_dump(mode="json") for name in ("demo", stem))
    assert _differences(demo, ablation) == {"name": stem} | changed


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


def test_a_wrong_key_of_a_base_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(Path(SMOKE).read_text() + "checkpoint: {evry_steps: 2}\n")
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    with pytest.raises(ConfigError, match=r"checkpoint\.evry_steps.*did you mean 'every_steps'"):
        load(tmp_path / "a.yaml")


def test_an_override_cannot_name_a_base() -> None:
    with pytest.raises(ConfigError, match="only a file can name its base"):
        load(SMOKE, ["base=demo.yaml"])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_resolved_configuration_loads_again(path: Path) -> None:
    cfg = load(path)
    assert validate(yaml.safe_load(yaml.safe_dump(cfg.model_dump(mode="json"))), source="resolved") == cfg


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("num_steps=true", "num_steps must be a number, found true"),
        ("num_steps=10000000000000000000000000000", "num_steps: Input should be less than or equal to 10000000"),
        ("rollout.num_prompts=1000000000", "rollout.num_prompts: Input should be less than or equal to 1000000"),
        ("reward.functions=[{kind: format, weight: .nan}]", "weight: Input should be a finite number"),
        ("reward.timeout_s=.inf", "reward.timeout_s: Input should be a finite number"),
        ("update.optimizer.betas=[5, -3]", "betas.0: Input should be less than 1"),
        ("tracking.experiment=../../../esc", "tracking.experiment: String should match pattern"),
        (f"name={'x' * 300}", "name: String should have at most 100 characters"),
        ("rollout.max_live_requests=1000000", "max_live_requests: Input should be less than or equal to 4096"),
        ("cluster.num_workers=100000", "cluster.num_workers: Input should be less than or equal to 4096"),
        ("reward.max_memory_gb=0", "reward.max_memory_gb: Input should be greater than or equal to 0.5"),
        ("tracking.uri=foo://bar", "tracking.uri: 'foo://bar': MLflow knows no store of kind 'foo'; give a SQLite"),
        ("tracking.uri=sqlite:/x.db", "tracking.uri: 'sqlite:/x.db' is incomplete; write sqlite:///FOLDER/mlflow.db"),
        ("tracking.uri=http://", "tracking.uri: 'http://' is incomplete; write sqlite:///FOLDER/mlflow.db"),
        ("seed=2024-13-45", "the value is not YAML: line 1, column 1: not a valid timestamp"),
        (f"seed={'[' * 3000}", "the value is nested too deeply"),
    ],
)
def test_what_was_taken_without_a_word_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SMOKE, [override])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("uri", "remedy"),
    [
        ("https://me:geheim@host/x", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("https://geheim@host", "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        ("postgresql://me:geheim@host/db", "~/.pgpass"),
        ("mysql+pymysql://me:ge/he@geheim@host/db", "~/.my.cnf"),
        ("postgresql://host/db?user=me&password=geheim", "~/.pgpass"),
        ("foo://me:geheim@host", "leave it out"),
    ],
)
def test_a_password_of_the_tracking_store_is_refused_and_not_repeated(uri: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SMOKE, [f"tracking.uri={uri}"])
    assert "tracking.uri" in str(refused.value)
    assert "holds a password" in str(refused.value)
    assert remedy in str(refused.value)
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    "override",
    [
        "tracking=http://me:geheim@host",
        "tracking.url=http://me:geheim@host",
        "tracking.uri='http://me:geheim@host",
        "http://me:geheim@host",
    ],
)
def test_no_message_repeats_the_password_of_a_url(override: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(SMOKE, [override])
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////data/mlflow.db",
        "file:///data/mlruns",
        "./mlruns",
        "http://host:5000/a@b",
        "postgresql+psycopg2://me@host/db",
        "mysql+pymysql://me@host/db?read_default_file=~/.my.cnf",
        "databricks://profile",
    ],
)
def test_stores_that_mlflow_knows_are_taken(uri: str) -> None:
    assert load(SMOKE, [f"tracking.uri={uri}"]).tracking.uri == uri


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: *geheim", "line 1, column 4: found undefined alias"),
        ("b: 1\na: !geheim b", "line 2, column 4: could not determine a constructor for the tag"),
        ("a: !geheim!x b", "line 1, column 4: while parsing a node: found undefined tag handle"),
        ("a: &geheim 1\nb: &geheim 2", "line 2, column 4: found duplicate anchor"),
        ("geheim: x y: z", "line 1, column 12: mapping values are not allowed here"),
        ("a: 'geheim", "found unexpected end of stream"),
        ("a: !!int geheim", "line 1, column 4: not a valid int"),
        ("a: !!timestamp geheim", "line 1, column 4: not a valid timestamp"),
        ("a: 2024-13-45 # geheim", "line 1, column 4: not a valid timestamp"),
        (f"a: {'1' * 5000} # geheim", "line 1, column 4: not a valid int"),
        ("geheim: \x00", "a character that is none of text"),
        ("geheim\n", "must hold a mapping of sections"),
        ("key: geheim\n", "key: unknown key"),
    ],
)
def test_what_a_file_holds_is_not_repeated(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert said in str(refused.value)
    assert "geheim" not in str(refused.value)


def test_a_file_that_is_not_text_and_a_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"x\.yaml cannot be read: it is not UTF-8"):
        load(tmp_path / "x.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory; give a YAML file"):
        load(tmp_path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("name: a\nrollout:\n  num_samples: 2\n  num_samples: 8\n")
    with pytest.raises(ConfigError, match="'num_samples' stands twice, again in line 4; remove one"):
        load(path)


def test_a_file_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load(path)


def test_the_tree_is_frozen() -> None:
    cfg = load(SMOKE)
    with pytest.raises(ValueError, match="frozen"):
        cfg.num_steps = 3  # type: ignore[misc]


def _sections() -> list[type[BaseModel]]:
    files = (coldstart, data, drafter, model, optimizer, reward, rollout, run, system, update)
    found = {v for f in files for v in vars(f).values() if isinstance(v, type) and issubclass(v, Section)}
    return sorted(found, key=lambda section: section.__name__)


@pytest.mark.parametrize("section", _sections(), ids=lambda s: s.__name__)
def test_every_field_is_documented_and_no_section_is_open(section: type[BaseModel]) -> None:
    assert section.__doc__
    assert section.model_config["extra"] == "forbid"
    undocumented = [n for n, f in section.model_fields.items() if not f.description and n not in ("kind", "dtype")]
    assert not undocumented


def test_every_number_has_a_bound() -> None:
    unbounded = [
        f"{section.__name__}.{name}"
        for section in _sections()
        for name, field in section.model_fields.items()
        if field.annotation in (int, float) and not field.metadata
    ]
    # a reward may be given a negative weight (a punishment) of any size
    assert unbounded == ["RewardFunction.weight"]


def test_every_count_has_an_upper_bound() -> None:
    """A slip of the keyboard must not keep a machine busy for hours."""
    counts = {
        f"{section.__name__}.{name}": field.metadata
        for section in _sections()
        for name, field in section.model_fields.items()
        if field.annotation in (int, int | None)
    }
    assert not [
        name for name, bounds in counts.items() if not any(hasattr(b, "le") or hasattr(b, "lt") for b in bounds)
    ]


def test_configuration_needs_neither_torch_nor_prefect() -> None:
    """What makes a wrong key known at once: none of the imports that take seconds.  (Speed itself is not tested.)"""
    code = "import sys, conf.run, conf.load; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "triton", "prefect", "ray", "mlflow", "transformers", "numpy"}
    assert not heavy & set(done.stdout.split())
