"""Config: overrides of every type, files that can't be loaded, the rules, and the trip to a dict and back."""

import dataclasses
import json
from pathlib import Path

import pytest

from tpu_train.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    UserError,
    apply_override,
    check,
    differences,
    flatten,
    from_dict,
    load,
    to_dict,
)

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.py"))


def get(config: Config, key: str):
    return dict(flatten(config))[key]


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.packing=false", False),
        ("data.packing=False", False),
        ("model.gated_mlp=true", True),
        ("model.qk_norm=TRUE", True),
        ("model.num_layers=12", 12),
        ("mesh.data=-1", -1),
        ("optim.peak_lr=3e-4", 3e-4),
        ("optim.peak_lr=1", 1.0),
        ("optim.clip_norm=none", None),
        ("optim.clip_norm=None", None),
        ("optim.clip_norm=0.5", 0.5),
        ("model.num_kv_heads=none", None),
        ("model.num_kv_heads=2", 2),
        ("model.window_pattern=128,128,0", (128, 128, 0)),
        ("model.window_pattern=64", (64,)),
        ("model.window_pattern= 64 , 0,", (64, 0)),
        ("data.paths=a.txt,b/*.txt", ("a.txt", "b/*.txt")),
        ("data.paths=", ()),
        ("model.activation=relu_squared", "relu_squared"),
        ("run.sample_prompt=a = b", "a = b"),
        ("run.sample_prompt=", ""),
    ],
)
def test_override_takes_the_type_of_the_field(override, value):
    key = override.partition("=")[0]
    config = apply_override(Config(), override)
    assert get(config, key) == value
    assert type(get(config, key)) is type(value)
    assert [name for name, _, _ in differences(config, Config())] in ([key], [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_layers", "has no value; write --set section.field=value"),
        ("", "has no value"),
        ("model.num_layer=3", "unknown config field 'model.num_layer'; did you mean 'model.num_layers'?"),
        ("optim.num_layers=3", "did you mean 'model.num_layers'?"),
        ("peak_lr=3", "did you mean 'optim.peak_lr'?"),
        ("model=3", "unknown config field 'model'"),
        ("model.=3", "unknown config field 'model.'"),
        ("zzz.qqq=3", "unknown config field 'zzz.qqq'"),
        ("model.num_layers=three", "model.num_layers='three' is not a whole number"),
        ("model.num_layers=1e3", "model.num_layers='1e3' is not a whole number"),
        ("model.num_layers=2.0", "model.num_layers='2.0' is not a whole number"),
        ("model.num_layers=", "model.num_layers='' is not a whole number"),
        ("model.num_layers=none", "model.num_layers='none' is not a whole number"),
        ("model.num_kv_heads=two", "model.num_kv_heads='two' is not a whole number"),
        ("model.window_pattern=8,x", "model.window_pattern='x' is not a whole number"),
        ("optim.peak_lr=fast", "optim.peak_lr='fast' is not a number"),
        ("data.packing=0", "data.packing='0' is not true or false"),
        ("data.packing=no", "data.packing='no' is not true or false"),
        ("data.packing=", "data.packing='' is not true or false"),
        ("optim.schedule=cosin", "is not one of cosine, wsd, constant; did you mean 'cosine'?"),
        ("model.activation=", "is not one of silu, gelu, gelu_tanh, relu, relu_squared"),
    ],
)
def test_override_refuses_what_it_cannot_read(override, message):
    with pytest.raises(UserError) as error:
        apply_override(Config(), override)
    assert message in str(error.value)


def test_override_leaves_the_original_alone():
    before = Config()
    after = apply_override(before, "model.num_layers=8")
    assert (before.model.num_layers, after.model.num_layers) == (ModelConfig().num_layers, 8)


def write(tmp_path, text, name="small.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


GOOD = "from tpu_train.config import *\ndef config():\n    return Config(model=ModelConfig(num_layers=3))\n"


def test_load_applies_overrides_in_order_and_names_the_workdir_after_the_file(tmp_path):
    config = load(write(tmp_path, GOOD), ["model.num_layers=5", "model.num_layers=7", "run.seed=3"])
    assert (config.model.num_layers, config.run.seed, config.run.workdir) == (7, 3, "runs/small")
    assert load(write(tmp_path, GOOD), ["run.workdir=here"]).run.workdir == "here"


def test_load_checks_the_result(tmp_path):
    with pytest.raises(UserError, match=r"model.num_layers is 0; it must be above 0"):
        load(write(tmp_path, GOOD), ["model.num_layers=0"])


def test_load_of_a_missing_file_names_the_closest_or_all(tmp_path):
    write(tmp_path, GOOD, "small.py")
    write(tmp_path, GOOD, "large.py")
    with pytest.raises(UserError, match=r"no config file .*smal\.py'; did you mean '.*small\.py'"):
        load(str(tmp_path / "smal.py"))
    with pytest.raises(UserError, match=r"no config file 'x'"):
        load("x")
    with pytest.raises(UserError, match="no config file"):
        load(str(tmp_path))


def test_load_of_a_file_without_config_says_what_to_write(tmp_path):
    with pytest.raises(UserError, match=r"has no function config\(\); write `def config\(\) -> Config`"):
        load(write(tmp_path, "x = 1\n"))


@pytest.mark.parametrize(("value", "kind"), [("None", "NoneType"), ("{}", "dict"), ("Config", "type")])
def test_load_refuses_a_config_of_another_type(tmp_path, value, kind):
    text = f"from tpu_train.config import Config\ndef config():\n    return {value}\n"
    with pytest.raises(UserError, match=f"returned {kind}, not tpu_train.config.Config"):
        load(write(tmp_path, text))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("optim.peak_lr=nan", "optim.peak_lr is nan; it must be a finite number"),
        ("optim.clip_norm=inf", "optim.clip_norm is inf; it must be a finite number"),
        ("model.num_heads=3", "model.model_dim=128 is not a multiple of model.num_heads=3; set model.head_dim"),
        ("model.num_kv_heads=3", "model.num_kv_heads=3 does not divide model.num_heads=4"),
        ("model.num_kv_heads=8", "model.num_kv_heads=8 does not divide model.num_heads=4"),
        ("model.head_dim=7", "the head dim is 7; rotary positions need an even one"),
        ("model.window_pattern=", "model.window_pattern has 0 entries"),
        ("model.window_pattern=8,8,0", "model.window_pattern has 3 entries; it needs a number that divides"),
        ("model.window_pattern=-8,0", "has a negative window; 0 means no window"),
        ("model.expert_dim=64", "model.expert_dim is set, but model.num_experts is 0; set model.num_experts"),
        ("model.capacity_factor=1", "model.capacity_factor is set, but model.num_experts is 0"),
        ("model.num_experts=1", "model.experts_per_token=2 is more than model.num_experts=1"),
        (
            "mesh.gradient_scatter=rign",
            "mesh.gradient_scatter='rign'",
        ),
        ("model.num_experts=-1", "model.num_experts is -1; it must be 0 or more"),
        ("model.expert_dim=0", "model.expert_dim is 0; it must be above 0"),
        ("data.source=text", "data.source=text needs data.paths"),
        ("data.paths=a.txt", "data.paths is set, but data.source=python_stdlib reads none"),
        ("data.validation_fraction=0", "data.validation_fraction is 0.0; it must lie between 0 and 1"),
        ("data.validation_fraction=1", "data.validation_fraction is 1.0; it must lie between 0 and 1"),
        ("optim.accumulation_steps=3", "optim.accumulation_steps=3 does not divide data.batch_size=16"),
        ("run.workdir=s3://bucket/run", "run.workdir=s3://bucket/run is neither a folder of this machine nor gs://"),
        ("optim.warmup_steps=101", "optim.warmup_steps=101 is more than run.steps=100"),
        ("optim.b1=1", "optim.b1 is 1.0; it must lie between 0 and 1"),
        ("optim.b2=-0.1", "optim.b2 is -0.1; it must lie between 0 and 1"),
        ("optim.decay_fraction=1.5", "optim.decay_fraction is 1.5; it must lie between 0 and 1"),
        ("optim.ema_decay=1", "optim.ema_decay is 1.0; it must lie between 0 and 1, or be none"),
        ("optim.ema_decay=0", "optim.ema_decay is 0.0; it must lie between 0 and 1, or be none"),
        ("run.spike_factor=1", "run.spike_factor is 1.0; it must be above 1, or none"),
        ("run.max_skipped=-1", "run.max_skipped is -1; it must be 0 or more"),
        ("optim.final_lr_fraction=-1", "optim.final_lr_fraction is -1.0; it must lie between 0 and 1"),
        ("model.num_kv_heads=0", "model.num_kv_heads is 0; it must be above 0"),
        ("model.logit_soft_cap=0", "model.logit_soft_cap is 0.0; it must be above 0"),
        ("optim.weight_decay=-0.1", "optim.weight_decay is -0.1; it must be 0 or more"),
        ("optim.z_loss=-1", "optim.z_loss is -1.0; it must be 0 or more"),
        ("run.steps=0", "run.steps is 0; it must be above 0"),
        ("checkpoint.every_steps=-1", "checkpoint.every_steps is -1; it must be 0 or more"),
        ("checkpoint.every_minutes=-1", "checkpoint.every_minutes is -1.0; it must be 0 or more"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last is 0; it must be above 0"),
        ("checkpoint.keep_every=-1", "checkpoint.keep_every is -1; it must be 0 or more"),
        ("checkpoint.keep_best=-1", "checkpoint.keep_best is -1; it must be 0 or more"),
        ("checkpoint.retry_minutes=-1", "checkpoint.retry_minutes is -1.0; it must be 0 or more"),
        ("checkpoint.stop_seconds=0", "checkpoint.stop_seconds is 0.0; it must be above 0"),
        ("run.seed=-1", "run.seed is -1; it must be 0 or more"),
        ("data.batch_size=-16", "data.batch_size is -16; it must be above 0"),
        ("mesh.stage_rounds=0", "mesh.stage_rounds is 0; it must be above 0"),
        ("mesh.stage_microbatches=-2", "mesh.stage_microbatches is -2; it must be above 0"),
        ("data.prompt_key=q", "data.prompt_key is set, but data.source=python_stdlib has no fields"),
        ("data.on_corrupt=ignore", "data.on_corrupt='ignore' is not one of stop, skip"),
    ],
)
def test_check_says_which_field_is_wrong(overrides, message):
    with pytest.raises(UserError) as error:
        check(apply_override(Config(), overrides))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"cache": "there"}, "data.cache=there is for text, and token files hold none"),
        ({"on_corrupt": "skip"}, "data.on_corrupt=skip is for text, and token files hold none"),
        ({"prompt_key": "q"}, "data.source=tokens has no fields"),
    ],
)
def test_fields_for_text_are_not_ignored_beside_tokens(field, message):
    with pytest.raises(UserError) as error:
        check(Config(data=DataConfig(source="tokens", paths=("a.bin",), **field)))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "model.head_dim=32",
        "optim.clip_norm=none",
        "optim.weight_decay=0",
        "optim.warmup_steps=0",
        "optim.warmup_steps=100",
        "optim.final_lr_fraction=0",
        "optim.decay_fraction=1",
        "model.window_pattern=8,0",
        "run.sample_tokens=0",
        "checkpoint.every_steps=0",
        "checkpoint.retry_minutes=0",
    ],
)
def test_check_accepts_the_edges_of_what_is_allowed(override):
    check(apply_override(Config(), override))


def test_a_gate_that_is_always_one_is_refused():
    one_choice = ModelConfig(num_experts=4, experts_per_token=1)
    with pytest.raises(UserError, match=r"makes every gate 1, .* set model\.normalize_gates=false"):
        check(Config(model=one_choice))
    check(Config(model=dataclasses.replace(one_choice, normalize_gates=False)))


def test_derived_fields_follow_the_others_unless_set():
    assert (ModelConfig(num_heads=8).kv_heads, ModelConfig(num_heads=8, num_kv_heads=2).kv_heads) == (8, 2)
    assert (ModelConfig(mlp_dim=96).expert_size, ModelConfig(expert_dim=8).expert_size) == (96, 8)
    assert (ModelConfig(model_dim=96, num_heads=8).head_size, ModelConfig(head_dim=64).head_size) == (12, 64)


def test_dict_round_trip_through_json_gives_the_same_config():
    config = Config(
        model=ModelConfig(window_pattern=(8, 0), num_kv_heads=2, attention_soft_cap=30.0),
        data=DataConfig(source="text", paths=("a", "b"), packing=False),
        optim=OptimConfig(clip_norm=None, schedule="wsd"),
        run=RunConfig(workdir="here", seed=5),
    )
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert hash(from_dict(to_dict(config))) == hash(config)


def test_from_dict_takes_defaults_for_new_fields_and_refuses_unknown_ones():
    assert from_dict({"model.num_layers": 9}) == apply_override(Config(), "model.num_layers=9")
    with pytest.raises(UserError, match=r"unknown field 'model.num_layer'; did you mean 'model.num_layers'\?"):
        from_dict({"model.num_layer": 9})


def test_differences_lists_each_changed_field_with_both_values():
    other = apply_override(apply_override(Config(), "model.num_layers=9"), "run.seed=4")
    assert differences(Config(), other) == [("model.num_layers", 4, 9), ("run.seed", 0, 4)]
    assert differences(Config(), Config()) == []


def test_flatten_names_every_field_once():
    names = [name for name, _ in flatten(Config())]
    count = sum(len(dataclasses.fields(getattr(Config(), section.name))) for section in dataclasses.fields(Config))
    assert len(names) == len(set(names)) == count


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_and_survives_the_round_trip(path):
    config = load(str(path))
    assert config.run.workdir == f"runs/{path.stem}"
    assert from_dict(to_dict(config)) == config
    assert f"--config=configs/{path.name}" in path.read_text()


def test_there_are_shipped_configs():
    assert len(CONFIGS) >= 1


def test_a_choice_misspelt_in_python_is_refused_too():
    config = Config(model=ModelConfig(remat="ful"))  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"model\.remat='ful' is not one of none, dots, offload_dots, full; did you mean 'full'"
    ):
        check(config)
