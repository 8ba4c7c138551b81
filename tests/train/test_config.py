import dataclasses
import importlib
import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import brl_jax
from brl_jax.configuration import to_json
from brl_jax.layers import BRLConfig, FullConfig, LocalConfig
from brl_jax.models import DecoderLM
from tests.support.command_lines import config_of
from tests.support.processes import python
from train.cli.help import first_screen, preset_list
from train.cli.main import _resumed
from train.cli.options import parse, parse_options
from train.engine.config import LoopConfig
from train.engine.config_file import differences, flatten, write_json
from train.engine.errors import UserError
from train.engine.hosts import HostsConfig
from train.tasks.decoder_flops import training_flops
from train.tasks.every import TASKS
from train.tasks.lm import LM
from train.tasks.lm_config import PRESETS, LmConfig
from train.tasks.task import from_json, read_config


def _parse(line=""):
    return config_of(LM, line)


def test_no_arguments_mean_the_default_preset():
    config = _parse()
    assert config == PRESETS["stdlib"]
    assert config.loop.workdir == "runs/stdlib"
    assert isinstance(config.model.mechanism, BRLConfig)
    assert config.data.data == "stdlib"
    assert config.data.tokenizer == "bpe:2048"


def test_every_part_is_reached():
    config = _parse(
        "wikitext103-brl --steps 7 --batch 6 --accumulation 3 --data text:a --tokenizer bytes --d_model 64 "
        "--mechanism.window 5 --learning_rate 0.25 --dropout 0.5 --tensorboard False --dtype bfloat16 "
        "--d-ff None --sample_prompt hello"
    )
    assert config.loop.workdir == "runs/wikitext103-brl"
    assert (config.loop.steps, config.loop.batch, config.loop.accumulation) == (7, 6, 3)
    assert (config.data.data, config.data.tokenizer) == ("text:a", "bytes")
    assert (config.model.d_model, config.model.d_ff, config.model.dropout) == (64, None, 0.5)
    assert config.model.mechanism == dataclasses.replace(PRESETS["wikitext103-brl"].model.mechanism, window=5)
    assert config.optimizer.learning_rate == 0.25
    assert config.loop.tensorboard is False
    assert config.model.dtype == "bfloat16"
    assert config.sample_prompt == "hello"
    # Everything else comes from the preset.
    assert config.model.num_heads == 8
    assert _parse("small --workdir here").loop.workdir == "here"


@pytest.mark.parametrize("spelling", ["--mechanism local", "--mechanism=local"])
def test_a_mechanism_is_swapped_whole(spelling):
    config = _parse(f"small {spelling} --mechanism.window 9")
    assert config.model.mechanism == LocalConfig(window=9)
    assert _parse(f"small --mechanism.window 9 {spelling}") == config
    assert _parse("--mechanism full").model.mechanism == FullConfig()


def test_the_presets_own_mechanism_keeps_its_settings():
    assert _parse("--mechanism brl").model.mechanism == PRESETS["stdlib"].model.mechanism


def test_the_list_of_presets_is_a_table():
    header, *rows = preset_list(PRESETS).splitlines()
    assert len({row.index(" steps of ") for row in rows}) == 1
    assert all(row[header.index("attention") - 1 :].startswith(f" {row.split()[4]} ") for row in rows)
    assert len(rows) == len(PRESETS)


def test_a_late_mechanism():
    config = _parse("--late_mechanism local --late_mechanism.window 9 --schedule alternate")
    assert config.model.late_mechanism == LocalConfig(window=9)
    assert config.model.mechanism == PRESETS["stdlib"].model.mechanism
    assert _parse("--late-mechanism none").model.late_mechanism is None
    one_layer = TASKS["lra"].presets["lra-image-original"]
    assert one_layer.model.num_layers == 1
    parsed = config_of(TASKS["lra"], "lra-image-original --late_mechanism local --num_layers 4")
    assert [mechanism.name for mechanism in parsed.model.mechanisms] == ["full", "full", "local", "local"]


def test_a_schedule():
    config = _parse(
        "--num_layers 6 --mechanism local --late_mechanism full --schedule alternate --early_layers 2 "
        "--swap_mechanisms --late_mechanism.qk_norm --ffn swiglu"
    )
    assert config.model.late_mechanism.qk_norm
    assert [type(m) for m in config.model.mechanisms] == [FullConfig, FullConfig, LocalConfig] * 2
    assert config.model.ffn == "swiglu"
    assert from_json(LmConfig, json.loads(json.dumps(to_json(config))), "f") == config


def test_help_shows_options_and_presets(capsys):
    with pytest.raises(SystemExit) as caught:
        _parse("--mechanism local --help-all")
    assert not caught.value.code
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "--steps INT",
        "--mechanism.window INT",
        "--learning_rate FLOAT",
        "--data STR",
        "which --presets lists; the default is stdlib",
        "full, local, brl",
        "Number of training steps.",
        "The highest learning rate",
    ):
        assert words in text
    assert "--mechanism.num_compressed" not in text
    assert "vocab_size" not in text


@pytest.mark.parametrize("name", PRESETS)
def test_json_there_and_back(name, tmp_path):
    config = PRESETS[name]
    if config.model.mechanism.group == 1:  # a second mechanism can be combined with it
        late = dataclasses.replace(config.model, late_mechanism=LocalConfig(window=3))
        config = dataclasses.replace(config, model=late)
    write_json(LM.to_json(config), tmp_path / "new" / "config.json")
    assert read_config([LM], tmp_path / "new" / "config.json") == (LM, config)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["config.json"]
    values = json.loads((tmp_path / "new" / "config.json").read_text())
    if config.model.late_mechanism is not None:
        assert values["model"]["late_mechanism"]["name"] == "local"


def _with(values, path, value):
    first, _, rest = path.partition(".")
    return values | {first: _with(values[first], rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model.width", 3, "unknown field model.width"),
        ("colour", 3, "unknown field colour"),
        ("model.mechanism.name", "brrl", "model.mechanism.name: expected one of full, local, brl, .*got 'brrl'"),
        ("model.mechanism.windw", 3, "unknown field model.mechanism.windw"),
        ("model.mechanism.window", 0, "model.mechanism.window must be at least 1, got 0"),
        ("optimizer", 3, "optimizer must be an object, got 3"),
        ("model.mechanism", None, "model.mechanism must be an object, got None"),
        ("loop.steps", "many", "loop.steps must be an integer, got 'many'"),
        ("loop.tensorboard", 1, "loop.tensorboard must be True or False, got 1"),
        ("model.dropout", "none", "model.dropout must be a number, got 'none'"),
    ],
)  # fmt: skip
def test_a_file_that_says_what_this_version_does_not_know(path, value, message):
    with pytest.raises(UserError, match=f"^the file: {message}"):
        from_json(LmConfig, _with(to_json(PRESETS["small"]), path, value), "the file")


def test_a_mechanism_that_no_file_can_name():
    class Unlisted(LocalConfig):
        pass

    with pytest.raises(ValueError, match="Unlisted is not listed in MECHANISMS"):
        to_json(Unlisted())


def test_differences_that_matter():
    base = _parse()
    assert differences(to_json(base), to_json(base)) == []
    free = _parse(
        "--steps 9 --workdir x --eval_every 3 --eval_tokens 9 --full_eval False --checkpoint_every 3 "
        "--keep_checkpoints 9 --tensorboard False --sample_tokens 3 --sample_prompt x --cache_dir x"
    )
    assert differences(to_json(base), to_json(free), LM.free_fields()) == []
    other = _parse("--seed 5 --mechanism.window 9 --d_model 64 --beta1 0.5")
    assert differences(to_json(base), to_json(other), LM.free_fields()) == [
        "seed 0 -> 5",
        f"d_model {base.model.d_model} -> 64",
        f"mechanism.window {base.model.mechanism.window} -> 9",
        "beta1 0.9 -> 0.5",
    ]
    swapped = to_json(_parse("--mechanism full --late_mechanism local"))
    assert differences(to_json(base), swapped) == ["mechanism brl -> full", "late_mechanism None -> local"]
    long = [0] * 1000  # a graph has as many token kinds as nodes
    assert differences({"kinds": long}, {"kinds": [0]}) == ["kinds [0, 0, 0, 0, 0, 0, ...] -> [0]"]


def test_a_run_from_before_an_option_existed_is_resumed_with_its_default():
    values = LM.to_json(PRESETS["small"])
    default = values["loop"].pop("seed")
    assert LM.differences(values, PRESETS["small"]) == []
    changed = dataclasses.replace(PRESETS["small"].loop, seed=default + 1)
    assert LM.differences(values, dataclasses.replace(PRESETS["small"], loop=changed)) == [
        f"seed {default} -> {default + 1}"
    ]
    # A field that this version lacks may enable something that this version cannot do.
    assert LM.differences({**values, "warp": 9}, PRESETS["small"]) == [
        "warp 9 -> absent",
        f"seed absent -> {default}",
    ]
    assert LM.differences({**values, "task": "lra"}, PRESETS["small"]) == ["task lra -> lm"]


def test_every_field_of_the_loop_either_matters_or_is_free():
    """For each new field, decide whether it changes what a resumed run computes."""
    base = to_json(PRESETS["small"])
    matter = {
        name
        for name in flatten(base)
        if differences(base, _with(base, name, "something else"), LM.free_fields())
    }
    assert {name for name in matter if name.startswith("loop.")} == {
        "loop.seed",
        "loop.batch",
        "loop.accumulation",
        "loop.length",
        "loop.log_gradient_std",  # the checkpoint contains the moments
    }
    assert matter >= {name for name in flatten(base) if name.startswith(("model.", "optimizer."))}


def test_a_command_goes_on_with_the_run_in_its_folder(tmp_path):
    """It names the folder and no preset; what it leaves out stays as it was."""
    config = PRESETS["small"]
    hosts = HostsConfig(coordinator="first:1", processes=2, process=0)
    started = dataclasses.replace(config, loop=dataclasses.replace(config.loop, seed=3), hosts=hosts)
    write_json(LM.to_json(started), tmp_path / "config.json")
    folder = str(tmp_path)

    def resumed(*words):
        return _resumed([LM], words, prog="p", about="a")

    assert resumed("--workdir", folder).loop.seed == 3
    # Without a checkpoint it was killed, or it failed because of an option that this command corrects.
    assert resumed("--workdir", folder, "--steps", "7", "--mesh.fsdp", "1").loop.seed == 3
    assert resumed("--workdir", folder, "--steps", "7", "--batch", "4") is None
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    for words in (
        ("--workdir", folder, "--steps", "7", "--mechanism", "brl"),
        ("--mechanism=brl", "--steps=7", f"--workdir={folder}"),
    ):
        found = resumed(*words)
        assert (found.loop.seed, found.loop.steps, found.loop.workdir) == (3, 7, folder)
        assert found.model == config.model
        assert found.hosts == HostsConfig()  # perhaps on other machines
    changed = resumed("--workdir", folder, "--mechanism", "local", "--mechanism.window", "9")
    assert LM.differences(LM.to_json(started), changed) == ["mechanism brl -> local"]
    for words in (
        ("small", "--workdir", folder),
        ("--workdir", folder, "--from_hf", "other"),
        ("--workdir", folder, "--help"),
        ("--workdir", folder, "-h"),
        ("--workdir", f"{folder}/new"),
        ("--workdir",),
        ("--steps", "7"),
        (),
    ):
        assert resumed(*words) is None
    with pytest.raises(UserError, match=r"unknown option --mesh\.tensr: did you mean --mesh\.tensor"):
        resumed("--workdir", folder, "--mesh.tensr", "2")
    (tmp_path / "config.json").write_text("damaged")
    assert resumed("--workdir", folder, "--steps", "7") is None
    with pytest.raises(UserError, match="is not JSON"):
        resumed("--workdir", folder)
    # A checkpoint has it too.
    (tmp_path / "checkpoints" / "1" / "meta").mkdir()
    meta = json.dumps({"config": LM.to_json(started), "score": None})
    (tmp_path / "checkpoints" / "1" / "meta" / "metadata").write_text(meta)
    for _ in range(2):
        assert resumed("--workdir", folder).loop.seed == 3
        assert resumed("--workdir", folder, "--steps", "7").loop.steps == 7
        (tmp_path / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["full", "local", "global-window", "alternate"])
def test_presets_of_characters_take_equal_operations(name):
    """Equal within half a step; everything else matches MLR's preset."""
    mlr, other = PRESETS["chars-mlr"], PRESETS[f"chars-{name}"]
    a_step, mlr_step = (training_flops(config.model, config.loop.length) for config in (other, mlr))
    assert abs(other.loop.steps * a_step - mlr.loop.steps * mlr_step) <= a_step / 2
    assert other.model.mechanism.name == ("local" if name == "alternate" else name.replace("-", "_"))
    assert all(m.qk_norm for m in other.model.mechanisms)
    mixers = ("mechanism", "late_mechanism", "schedule", "early_layers")
    alike = dataclasses.replace(other.model, **{field: getattr(mlr.model, field) for field in mixers})
    steps = dataclasses.replace(other.loop, steps=mlr.loop.steps)
    assert dataclasses.replace(other, model=alike, loop=steps) == mlr


def test_presets_have_the_papers_parameters():
    """Tables 6 and 7 of BRL-Attention count 50.93M for full and local attention: ours, with the 50,304 rows to which
    nanoGPT pads GPT-2's 50,257; TransNormer's table 4 counts 155.99M. The paper's BRL has 80.96M, ours 1.8% more."""
    attention = 50.93e6 - (50_304 - 50_257) * 512
    counts = {"full": attention, "local": attention, "brl": 82.44e6, "brl-paper-128": 82.44e6}
    counts |= {"transnormer-vanilla": 156.00e6, "transnormer-flash": 153.52e6, "transnormer-t1": 155.99e6}
    for name, count in {**counts, "transnormer-t2": 155.99e6, "transnormer-diag": 155.99e6}.items():
        model = DecoderLM(LM.sized(PRESETS[f"wikitext103-{name}"]).model)
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        found = sum(a.size for a in jax.tree.leaves(shapes))
        assert abs(found / count - 1) < 1e-4, (name, found)


def test_mlrs_levels_follow_the_length_of_training():
    """Checkpoints keep this configuration, so generation uses the same blocks."""
    config = LM.sized(_parse("--mechanism mlr --length 192"))
    assert config.model.mechanism.context == 192
    assert config.model.mechanism.levels(32, 1000)["block_sizes"] == (None, 96, 48, 24, 12, 6)
    late = LM.sized(_parse("--late_mechanism mlr --length 64")).model
    assert (late.late_mechanism.context, late.mechanism) == (64, PRESETS["stdlib"].model.mechanism)
    assert LM.sized(_parse("--mechanism mlr --mechanism.context 32")).model.mechanism.context == 32


def test_parts_that_do_not_fit_are_told_before_training():
    config = _parse(
        "--mechanism.memory output --late_mechanism brl --late_mechanism.memory output "
        "--late_mechanism.block_size 99"
    )
    with pytest.raises(UserError, match=r"the model's options do not fit: .*block_size"):
        LM.build(config)


def test_importing_takes_no_device():
    """A pod cannot start if an import has already started a backend. Checked in a fresh process."""
    code = (
        "import train.lm, eval.lm, eval.generate, jax; "
        "import jax._src.xla_bridge as bridge; print(bridge.backends_are_initialized())"
    )
    assert python("-c", code).stdout == "False\n"
    assert jax.devices()


def test_a_mechanism_whose_layers_come_in_blocks_gets_whole_ones():
    model = _parse("--mechanism tlinformer").model
    assert (model.num_layers, model.mechanism.group) == (4, 4)
    model = _parse("--mechanism tlinformer --mechanism.hidden 1 --num_layers 9").model
    assert (model.num_layers, model.mechanism.hidden) == (9, 1)


def test_help_has_no_colour_where_none_is_wanted(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screens = []
    for _ in range(2):
        with pytest.raises(SystemExit):
            parse_options(LoopConfig(), ["--help"], prog="p", about="About.")
        screens.append(capsys.readouterr().out)
        monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" in screens[0]
    assert "\x1b[" not in screens[1]
    assert re.sub(r"\x1b\[[0-9;]*m", "", screens[0]) == screens[1]


@pytest.mark.parametrize(
    "name",
    [
        "train.lm",
        "train.lra",
        "train.regression",
        "train.forecast",
        "train.glue",
        "train.graph",
        "eval.pod_plan",
    ],
)
def test_help_is_one_screen_whose_examples_parse(name, monkeypatch, capsys):
    monkeypatch.setenv("NO_COLOR", "1")
    main = importlib.import_module(name).main
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    out = capsys.readouterr().out
    assert not stop.value.code
    assert "\x1b" not in out
    assert 5 <= len(re.findall("^  --[a-z_]+ [A-Z]", out, re.MULTILINE)) <= 8
    if name == "train.lm":
        assert all(option in out for option in ("--data TEXT", "--tokenizer NAME", "--length N"))
    examples = re.findall(rf"^  python -m {name}(.*)$", out, re.MULTILINE)
    assert len(examples) == 3
    needed = {
        "train.forecast": "--data FILE",
        "train.glue": "--pretrained DIR",
        "train.graph": "--data_dir DIR",
    }
    assert all(needed.get(name, "") in example for example in examples)
    module = importlib.import_module("train.cli.main" if name.startswith("train") else main.__module__)

    def stop_there(*args, **kwargs):
        raise InterruptedError(parse(*args, **kwargs).loop.workdir)

    monkeypatch.setattr(module, "parse", stop_there)
    for example in examples:
        with pytest.raises(InterruptedError, match="runs/"):
            main(example.split())
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        main(["--presets"])
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "preset"
    names = [line.split()[0] for line in lines]
    assert set(names) >= {re.search(r"PRESET is (\S+)", out)[1]}
    assert len(names) == int(re.search(r"lists the (\d+) presets", out)[1])


def test_version(capsys):
    with pytest.raises(SystemExit):
        _parse("--version")
    assert capsys.readouterr().out == f"brl-jax {brl_jax.__version__}\n"


def test_help_shows_the_values_of_the_preset_that_is_named(capsys):
    with pytest.raises(SystemExit):
        _parse("wikitext103-brl --help")
    out = " ".join(capsys.readouterr().out.split())
    config = LM.presets["wikitext103-brl"]
    assert config.loop.steps != LM.presets["small"].loop.steps
    assert f"training steps ({config.loop.steps})" in out
    assert f"rows of a step ({config.loop.batch})" in out
    assert "PRESET is stdlib if none is named; the values below are from wikitext103-brl." in out
    with pytest.raises(UserError, match="did you mean small"):
        _parse("smal --help")


def test_help_is_one_screen_for_every_preset():
    for task in TASKS.values():
        prog = f"python -m train.{task.name.partition('_')[0]}"
        for name in task.presets:
            screen = first_screen(task.presets, task.default_preset, name, prog=prog, about=task.about)
            assert len(screen.splitlines()) <= 24, name
            assert max(map(len, screen.splitlines())) <= 80, name
            assert "((" not in screen, name  # a tuple's parentheses
            if task.name == "graph":  # some of its networks have no attention
                assert ("--mechanism NAME" in screen) == name.split("-")[1].startswith(
                    ("brl", "local", "full")
                )
