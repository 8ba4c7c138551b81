"""Bad command lines: each gets one clear line on standard error and exit status 2, and nothing is written.

Each row is a module, a command line and a pattern that the line must match.
"""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import pytest

import train.cli.options
from brl_jax.fields import Checked
from brl_jax.layers import MECHANISMS
from tests.support.command_lines import run
from train.tasks.lm import LM as TASK

# A line that was accepted by mistake would train: keep that short, and the row fails.
TINY = {"--num_layers": "1", "--d_model": "16", "--num_heads": "2", "--steps": "1", "--batch": "2"}

LM = {
    "smal": r"PRESET: got 'smal'; did you mean small\? expected one of stdlib, small, ",
    "lra-text-full": r"PRESET: lra-text-full is a preset of train\.lra$",
    "wikitext-brl": "did you mean wikitext103-brl",
    "small extra": r"unexpected argument 'extra'; usage: .*train.lm \[PRESET\] --NAME VALUE",
    "--stepps 3": r"unknown option --stepps: did you mean --steps\?",
    "--steps 0": "--steps must be at least 1, got 0",
    "--steps 1e3": "--steps: expected an integer, got '1e3'$",
    "--steps": "--steps: expected a value$",
    "--tensorboard yes": "--tensorboard: expected True or False, got 'yes'$",
    "--tensorboard False --full_eval 1 --steps 0": "--full_eval: expected True or False, got '1'$",
    "--learning_rate fast": "--learning_rate: expected a number, got 'fast'$",
    "--mup_base_width wide": "--mup_base_width: got 'wide'; expected --mup_base_width None|INT$",
    "--seed 99999999999999999999": f"--seed must be at most {2**63 - 1}, got 99999999999999999999",
    "--batch 7 --accumulation 2": "--batch must be a multiple of accumulation=2, got 7",
    "--eval_tokens 1": "--eval_tokens must be at least 2, or 0 for all, got 1",
    "--workdir ": "--workdir",
    "--workdir e8\udcc3": r"--workdir must be a path in UTF-8, got 'e8\\udcc3'$",
    "--workdir s3://bucket/run": "--workdir must be a local folder or gs://BUCKET/FOLDER, got 's3://bucket/run'",
    "--warmup_steps 10000000000": "--warmup_steps must be at most 2147483647, got 10000000000",
    "--decay fast": "invalid choice 'fast' for argument '--decay'. Expected one of .'cosine'",
    "--d_model 100 --num_heads 3": "--d_model must be a multiple of num_heads=3, got 100",
    "--num_kv_heads 3": "--num_kv_heads must divide",
    "--dropout 1": "--dropout must be at least 0 and below 1, got 1.0",
    "--implementation gpu": "--implementation",
    "--mup_base_heads 2": "--mup_base_heads must be None",
    "--mechanism": "--mechanism: expected one of full, local, brl",
    "--mechanism local --mechanism full": "--mechanism is given twice; expected it once",
    "--mechanism locl": r"--mechanism: got 'locl'; did you mean local\? expected one of full, local, brl",
    "--mechanism linformer": "--mechanism: mechanism linformer has no causal form",
    "--mechanism local --mechanism.windw 3": r"unknown option --mechanism.windw: did you mean --mechanism.window\?",
    "--mechanism local --mechanism.pattern x": "--mechanism.pattern",
    "--mechanism local --mechanism.pattern bigbird": "no causal form",
    "--mechanism.beta 4": "--mechanism.beta must be 0 to 1, got 4.0",
    "--mechanism.memory x": "--mechanism.memory",
    "--mechanism mlr --mechanism.ranks 16 16": "ranks",
    "--mechanism mlr --mechanism.ranks 9 7 --mechanism.block_sizes 9 4": "--mechanism.block_sizes .*, got 9 before 4$",
    "--mechanism local --mechanism.pattern block_mask --mechanism.block_mask 11 1": "one length, got 11 1$",
    "--mechanism full --mechanism.rope_scaling x": r"did you mean --mechanism.rope_scaling.kind\?",
    "--late_mechanism x": "--late_mechanism: got 'x'",
    "--late_mechanism full --schedule altrnate": r"for argument '--schedule'.*\); did you mean 'alternate'\?$",
    "--num_layers 1 --late_mechanism full": "--num_layers must be at least 2 with schedule 'split' of two mechanisms",
    "--early_layers 1": "--early_layers must be None without a late_mechanism, got 1",
    "--mesh.data 0": "--mesh.data must be at least 1, or -1 for what is left, got 0",
    "--mesh.data 3": "mesh",
    "--mesh.dta 2": r"unknown option --mesh.dta: did you mean --mesh.data\?",
    "--data tokens:x --documents wikitext": "--documents: expected records with tokens:..., .* got 'wiki",
    "--data hf-stream:x --documents a": "--documents: expected records with hf-stream:..., .* got 'a'",
    "--profile 3": "profile must be FIRST:LAST",
    "--profile a:b": "profile must be FIRST:LAST",
    "--hosts.process 1": "--hosts.coordinator, processes and process must be given together",
    "--hosts.coordinator here --hosts.processes 2 --hosts.process 0": "coordinator must be HOST:PORT, got 'here'",
    "--hosts.coordinator a:1 --hosts.processes 0 --hosts.process 0": "processes must be at least 1",
    "--hosts.coordinator a:1 --hosts.processes 2 --hosts.process 2": "process must be at least 0 and below 2, got 2",
    "--data nowhere": "--data: unknown text 'nowhere', expected stdlib, text:GLOB",
    "--data stdlb": "--data: unknown text 'stdlb', expected .*did you mean 'stdlib'",
    "--data txt:*.txt": "--data: unknown text 'txt:.*did you mean 'text'",
    "--data text:": "--data: 'text:' names no text, expected stdlib, ",
    f"--data {__file__}": f"--data: unknown text '{__file__}', expected .*did you mean 'text:{__file__}'",
    "--data stdlib:x": "--data: unknown text 'stdlib:x'",
    "--holdout 0": "--holdout: expected a share between 0 and 1, got 0",
    "--holdout 1": "--holdout: expected a share between 0 and 1, got 1",
    "--tokenizer byte": "--tokenizer: unknown tokenizer 'byte'.*did you mean 'bytes'",
    "--tokenizer char": "--tokenizer: .*did you mean 'chars'",
    "--tokenizer sentencepiece": "--tokenizer: unknown tokenizer 'sentencepiece', expected bytes, chars, ",
    "--tokenizer /nowhere/tokenizer.json": "--tokenizer: there is no file /nowhere/tokenizer.json",
    "--tokenizer bpe": "--tokenizer: bpe:SIZE needs a whole number from 257 to 16777216, got 'bpe'",
    "--tokenizer bpe:256": "--tokenizer: .*from 257 to 16777216, got 'bpe:256'",
    "--tokenizer bpe:1000000000000": "--tokenizer: .*from 257 to 16777216, got 'bpe:1000000000000'",
    "--tokenizer bpe-uncased": "--tokenizer: bpe-uncased:SIZE needs a whole number",
    "--tokenizer words:0": "--tokenizer: .*at least 1",
    "--tokenizer words:": "--tokenizer: .*at least 1",
    "--tokenizer words:max=2": "--tokenizer: .*at least 3",
    "--tokenizer chars:max=1": "--tokenizer: .*at least 2",
    "--tokenizer words:min=2": "--tokenizer: .*got 'words:min=2'",
    "--data text:/nowhere/*.txt": "--data",
    "--data tfds:": "--data",
    "--data mix:1*tokens:a,-1*tokens:b": "--data mix: expected .* with weights above 0, got '-1.tokens:b'",
    "--mechanism tlinformer --num_layers 3": "num_layers must be a multiple of 4",
    "--mechanism tlinformer --mechanism.context x": "--mechanism.context",
    "--mechanism local --mechanism.window 99999999999999999999": "--mechanism.window must be at most 1073741824",
    "--batch 99999999999": "--batch must be at most 1048576, got 99999999999",
    "--length 99999999999": "--length must be at most 134217728, got 99999999999",
    "--num_layers 10000000000000": "--num_layers must be at most 10000, got",
    "--vocab_size 3": "unknown option --vocab_size: the preset, its data or the pretrained run sets it",
    "--steps 1 --steps 2": "--steps is given twice; expected it once",
    "--d_model 8 --d-model=16": "--d_model is given twice; expected it once",
    "--compilation_cache /dev/null/x": "--compilation_cache: cannot write under /dev/null/x",
    f"--workdir {'w' * 300}": "--workdir: cannot write under w+: File name too long",
    "--workdir /dev/null": "--workdir: cannot write under /dev/null: Not a directory",
    "--mechanism local --mechanism.dilation 3": "--mechanism.dilation has no effect with pattern sliding",
    "--mechanism.num_compressed 0 --mechanism.gamma 1": "--mechanism.gamma has no effect with num_compressed 0",
    "--decay constant --final_share 0.5": "--final_share has no effect with decay constant",
    "--eval_tokens 0 --full_eval False": "--full_eval has no effect with eval_tokens 0",
    "--sample_tokens 0 --sample_prompt x": "--sample_prompt has no effect with sample_tokens 0",
    "--data tokens:/nowhere --tokenizer bytes": "--tokenizer has no effect with tokens:DIR",
    "--data hf-stream:x --holdout 0.1": "--holdout has no effect with hf-stream:",
    "--seq_len 3": r"unknown option --seq_len: did you mean --length\?",
    "--precision x": r"unknown option --precision: did you mean --dtype\?",
    "--lr 1": r"unknown option --lr: did you mean --learning_rate\?",
    "--resume": "unknown option --resume: the same command again resumes a run",
    "--device gpu": "unknown option --device: JAX takes the fastest device; set JAX_PLATFORMS",
    "--mechanism local --mechanism.num_compressed 3": "local has no such option; it is an option of brl",
}
# Numbers out of their options' ranges.
OUTSIDE = {
    "0": "accumulation batch checkpoint_every d_ff d_model epsilon eval_every keep_checkpoints learning_rate length "
    "mechanism.block_size mechanism.window mup_base_width num_heads num_layers rope_theta",
    "-1": "clip_norm mechanism.num_compressed patience sample_tokens seed warmup_steps weight_decay",
    "nan": "dropout learning_rate mechanism.gamma rope_theta",
}
LM |= {f"--{x} {value}": f"--{x} must be" for value, names in OUTSIDE.items() for x in names.split()}

OTHERS = {
    "train.lra imagee": r"PRESET: got 'imagee'; did you mean image\?",
    "train.lra text --task image": "unknown option --task",
    "train.lra listops --mechanism linformer --mechanism.max_length 64": "max_length must be at least .* 128",
    "train.lra listops --listops.min_tokens 2000": "min_tokens must be 0 to max_tokens - 2 = 127, got 2000",
    "train.lra listops --listops.max_depth 1": "max_depth must be at least 2, got 1",
    "train.lra pathfinder --resolution 48": "invalid choice '48' for argument '--resolution'",
    "train.lra pathfinder --resolution 128": "length must be at least 16384 for images of 128 x 128, got 1024",
    "train.graph acm-gcn --data_dir g --identities --neighbours 2": "identities need the whole graph, .* got 2",
    "train.lra listops --listops.max_args 1": "max_args must be 2 to 64, got 1",
    "train.lra text --buckets 100 200": "the longest at least length=512, got 100 200$",
    "train.lra retrieval": "--data_dir: expected a folder with new_aan_pairs",
    "train.lra pathfinder-2d --resolution 64 --length 4096": "--mechanism.grid_width: expected 64, .* got 32",
    "train.lra trace-pathfinder --mechanism.grid_width 16 --train_examples 4 --valid_examples 2 --test_examples 2": (
        "--mechanism.grid_width: expected 32, .* got 16"
    ),
    "train.lra listops --data_dir /nowhere": "--data_dir",
    "train.lra image --data_dir /nowhere": "--data_dir: /nowhere does not exist",
    "train.lra listops --cache_dir gs://bucket/cache": "--cache_dir must be a local folder",
    "train.lra listops --pooling sum": "invalid choice 'sum' for argument '--pooling'",
    "train.lra listops --checkpoint last": "--checkpoint has no effect without pretrained",
    "train.lra listops --listops.min_tokens 3000": " --listops.min_tokens must be 0 to max_tokens - 2 = 127",
    "train.lra_data listops --listops.max_depth 1": " --listops.max_depth must be at least 2, got 1",
    "train.lra --mechanism full --mechanism.rope_scaling.fast_turns 1": " --mechanism.rope_scaling.fast_turns must",
    "train.lra text --listops.max_depth 3": "--listops.max_depth has no effect on text",
    "train.lra listops --data_dir /nowhere --data_seed 3": "--data_seed has no effect with a data_dir",
    "train.lra image --resolution 64": "--resolution has no effect on image",
    "train.lra image --data_dir /dev/null": "--data_dir",
    "train.lra listops --positions learned --rope_theta 100": "--rope_theta has no effect in a network",
    "train.graph acm-brl --cache_dir gs://bucket/cache": "--cache_dir must be a local folder",
    "train.graph acm-gcn --mechanism full": "--mechanism has no effect with network gcn",
    "train.graph acm-brl --row_targets 3": "--row_targets has no effect with network tokens",
    "train.graph acm-gcn --clusters 3": "--clusters has no effect with network gcn",
    "train.graph acm-brl": "--data_dir: expected a folder or a file, got none",
    "train.graph acm-brl --data_dir /nowhere": "--data_dir: no file or folder /nowhere",
    "train.regression btt-9": "PRESET: got 'btt-9'",
    "train.regression full-1 --start_dims 17 --curriculum_steps 5": "start_dims must be 0 to 16, got 17",
    "train.regression full-1 --start_pairs 2": "curriculum_steps must be at least 1 with start_dims or start_pairs",
    "train.regression btt-8 --d_model 22 --num_heads 1 --mup_base_width 22": "d_model: .*22",
    "train.regression mlr-8 --mechanism.ranks 3 3": "ranks must sum to the head_dim 8, got 3\\+3 = 6",
    "train.regression btt-8 --curriculum_steps 9": "--curriculum_steps has no effect without start_dims",
    "train.recall local --implementation cudnn": "options do not fit: implementation='cudnn' supports local attention",
    "train.recall --length 8 --pairs 3 --gap 4": "--length must be at least 15 with 3 pairs and gap 4, got 8",
    "train.recall --length 24 32 40 --pairs 3 4": "--pairs must be one number or one for each of the 3 lengths, got 2$",
    "train.recall --length 24 1e3": r"--length: got '24', '1e3'; expected --length \[INT \[INT \.\.\.\]\]$",
    "train.recall --pairs": "--pairs must be one or more numbers of records, got none",
    "train.recall --pairs 3 --vocabulary 5": "--vocabulary must be at least 6 with 3 pairs, got 5",
    "train.copy copy-ful": "PRESET: got 'copy-ful'; did you mean copy-full",
    "train.copy --data_dir /nowhere": "--data_dir: expected /nowhere/train.jsonl",
    "train.copy --data_dir /nowhere --tokenizer bpe:1": "--tokenizer: bpe:SIZE needs",
    "train.copy --encoder_mechanism loca": "--encoder_mechanism: got 'loca'; did you mean local",
    "train.copy --encoder_mechanism deltanet": "encoder_mechanism: .*no bidirectional form",
    "train.copy --data_dir /nowhere --order sort": "--order has no effect with a data_dir",
    "train.copy --tokenizer words": "--tokenizer has no effect without a data_dir",
    "eval.copy --workdir /nowhere": "--workdir: no run there",
    "eval.copy --workdir x --source a --length 3": "--length has no effect with source",
    "train.mlm --mask_share 0": "--mask_share must be above 0",
    "train.mlm --mechanism deltanet": "has no bidirectional form",
    "train.mlm --pack always": "--pack must be auto or never with brl",
    "train.mlm --pack some": "--pack",
    "train.mlm --pack always --mechanism flash": "--pack must be auto or never with flash, .* got always",
    "train.mlm --data hf-stream:x": "--data: expected a text whose tokens are made first, .* got hf-stream:x",
    "train.mlm --documents (": "--documents: expected records, wikitext or a regular expression",
    "train.glue cola": "--pretrained: expected the folder of a run of train.mlm, got none",
    "train.glue cola --pretrained /nowhere": "--pretrained: no run there",
    "train.glue cola --from_scratch --checkpoint last": "--checkpoint has no effect with from_scratch True",
    "train.glue cola --mechanism local": "unknown option --mechanism: the preset, its data or the pretrained run",
    "train.glue cola --d_model 999": "unknown option --d_model: the preset, its data or the pretrained run sets it",
    "train.glue cola --length 3": "--length must be at least 8",
    "train.glue wnli": "PRESET: got 'wnli'",
    "train.tokenize --out /dev/null": "--out: cannot write under /dev/null: Not a directory",
    f"train.tokenize --out {'w' * 300}": "--out: cannot write under w+: File name too long",
    "train.tokenize --out x --data text:/nowhere": "--data: no file matches",
    "train.tokenize --out x --data tokens:/nowhere": "--data: expected a text to tokenise, got 'tokens:/nowhere'",
    "train.lra_data listops --out /dev/null/x": "--out: cannot write /dev/null/x",
    "train.lra_data pathfinder --out x --listops.max_depth 3": "--listops.max_depth has no effect on pathfinder",
    "eval.jacobian --workdir /nowhere": "--workdir: no run there",
    "train.forecast encoder": "--data",
    "train.forecast tokens --data kernels:0": "--data: expected kernels:N",
    "train.forecast tokens-kernels --target OT --data kernels:3": "--target: expected one of k0, k1, k2, got OT",
    "train.forecast tokens --data kernels:3 --target k0": "--split: expected at most 4096 rows",
    "train.forecast encoder --data /nowhere.csv": "--data",
    "train.forecast encoder --split 1 2": "--split: expected 3 values$",
    "train.forecast encoder --split 1 2 x": "--split: got '1', '2', 'x'; expected --split INT INT INT$",
    "eval.lm --workdir /nowhere": "--workdir: no run there",
    "eval.lm --workdir one two": "unexpected argument 'two'; usage: .*eval.lm --NAME VALUE",
    f"eval.lm --workdir {'w' * 300}": "--workdir: cannot read .*File name too long",
    "eval.lm --workdir /nowhere --split dev": "--split",
    "eval.lm --checkpoint x --workdir /nowhere": "--workdir: no run there|--checkpoint",
    "eval.lra --workdir /nowhere": "--workdir: no run there",
    "eval.lra --json False": "--workdir, --table: expected one of the two",
    "eval.lra --workdir a --picture b.png": "--picture: expected with --table only",
    "eval.lra --table .": "--table: no run of train.lra under",
    "eval.lra --table x --json": "--json has no effect with table",
    "eval.context --picture /dev/null/picture.png": "--picture: expected a .png file in a folder",
    "eval.generate --workdir /nowhere --prompt x": "--workdir: no run there",
    "eval.generate --prompt_file /nowhere": "--prompt_file: cannot read /nowhere: No such file or directory$",
    "eval.generate --batch prompts.jsonl": "--batch and out must be given together",
    "eval.generate --prompt x --max_new_tokens 3": r"unknown option --max_new_tokens: did you mean --tokens\?",
    "eval.generate --prompt x --slots 3": "--slots has no effect without batch",
    "eval.generate --prompt x --draft_tokens 3": "--draft_tokens has no effect without draft",
    "eval.generate --batch a --out b --draft c": "--batch must be given without draft",
    "eval.generate --prompt x --temperature 0 --top_k 3": "--top_k has no effect with temperature 0",
    "eval.generate --prompt x --tokens 10000000000": "--tokens must be at most 2147483647, got 10000000000",
    "eval.survey --tasks text --image_dir x": "--image_dir has no effect without the task image",
    "eval.survey --tasks pathx": "--tasks",
    "eval.survey --mechanisms deltanet": "--mechanisms must be some of",
    "eval.survey --mechanisms full full": "--mechanisms must be some of .*, each once",
    "eval.survey --seeds 1 1": "--seeds must be",
    "eval.survey --picture /nowhere/x.png": "--picture",
    "eval.survey --picture /proc/x.png": "--picture: expected a .png file in a folder that can be written to",
    "eval.speed --levels layers --window 3": "--window has no effect without the level functions",
    "eval.speed --levels planets": "--levels|levels",
    "eval.speed --levels classifiers --mechanisms deltanet": "mechanisms of the level classifiers must be",
    "eval.speed --json /proc": "--json: expected a file in a folder that can be written to",
    "eval.speed --json /proc/x.json": "--json: expected a file in a folder that can be written to",
    "eval.speed --generation --json /nowhere/x.json": "--json: expected a file in a folder that can",
    "eval.speed --levels layers --pictures /proc": "--pictures: cannot write under /proc",
    "eval.speed --references flash": "--references must be out of",
    "eval.speed --mechanisms locall": "--mechanisms must be out of full, local.*, got locall",
    "eval.speed --mechanisms brl --levels functions": "mechanisms of the level functions must be out of",
    "eval.speed --lenghts 3": "did you mean --lengths",
    "eval.speed --generation --window 8 --lengths 12": "lengths must be multiples of window=8, got",
    "eval.speed --generation --lengths 256 --layers 6": "num_layers must be a multiple of 4",
    "eval.locality --length 1": "length must be at least 2, got 1",
    "eval.locality --picture locality.pdf": "--picture: expected a .png file",
    "eval.gradient_std --workdir /nowhere": "--workdir",
    "eval.gpu_costs --targets t4": "--targets must be out of",
    "eval.gpu_costs --operations full": "--operations must be out of",
    "eval.gpu_costs --mechanisms full": "--mechanisms must be out of",
    "eval.pod_plan x --topology v5e:2x2": "PRESET|preset",
    "eval.pod_plan small --topology v9:2x2": "--topology",
    "eval.pod_plan --topology v5e:3x3": "--topology: unknown 'v5e:3x3'; expected one of v4: .*v5e: 1x1, 2x2,",
    "eval.pod_plan --tokenizer words": "--tokenizer: expected bytes, bpe:SIZE, bpe-uncased:SIZE or words:max=SIZE",
    "eval.mesh_check --mechanisms linformer": "--mechanisms must be out of full, .*brl-layer, got linformer",
    "eval.mesh_check --meshes tensor": "--meshes must be out of data 8, fsdp 8, .*, got tensor",
    "eval.tpu_compile --chips v3": "--chips must be out of",
    "eval.gpu_check --only nothing": "--only must be out of .*, got nothing",
    "eval.gpu_check --minutes -1": "--minutes must be above 0, got -1",
    "eval.gpu_check --workers -2": "--workers must be at least 1",
    "eval.gpu_check --json /nowhere/x.json": "--json: expected a file in a folder that can be written to",
    "eval.gpu_check --tune --interpret": "tune must be False with interpret, which has no GPU",
    "eval.coordinates --mechanism ful": "mechanism must be one of 'full'",
    "eval.coordinates --widths 64 32": "widths must be two or more, from the narrowest on",
    "eval.coordinates --widths 6 10 --num_heads 4": "--widths: 6 will not do: d_model must be a multiple",
    "eval.learning_rates --rates 0.01 -1": "rates must be above 0, got",
    "eval.lra_probe": "--workdir: expected the folder of a run",
    "eval.graph_maps --nodes 3": "nodes must be",
    "eval.graph_maps --workdir": "workdir must",
    "eval.tlinformer_operations --lengths 1000 2000": "--lengths must be two or more multiples of window=256",
    "eval.papers --cost lra-listops": "--cost: expected True or False, got 'lra-listops'$",
    "eval.papers table-9": "TABLE: expected one of brl-3, ",
    "eval.regularizer --length 1": "length must be at least 2, or 0 for all, got 1",
}

ROWS = [("train.lm", line, message) for line, message in LM.items()]
ROWS += [(*line.partition(" ")[::2], message) for line, message in OTHERS.items()]


@pytest.mark.parametrize(
    ("module", "line", "message"), ROWS, ids=[f"{m} {x}".replace(" ", "_") for m, x, _ in ROWS]
)
def test_one_line(module, line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = line.split(" ") if line else []
    if line.startswith("--") and module == "train.lm":
        words += [word for pair in TINY.items() if pair[0] not in words for word in pair]
    status, err = run(module, words, monkeypatch, capsys)
    lines = err.strip().splitlines()
    assert status == 2, err
    assert len(lines) == 1, err
    assert re.search(message, lines[0]), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["train.lm", "train.recall", "eval.lm"])
def test_checkpoints_that_are_a_file(module, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").touch()
    if module == "eval.lm":
        (tmp_path / "config.json").write_text(json.dumps(TASK.to_json(TASK.presets["small"])))
    before = sorted(tmp_path.rglob("*"))
    status, err = run(module, ["--workdir", str(tmp_path)], monkeypatch, capsys)
    assert status == 2, err
    assert err == f"{module}: --workdir: cannot read {tmp_path}/checkpoints: Not a directory\n"
    assert sorted(tmp_path.rglob("*")) == before


class _Captured(Exception):
    """The options of a command with their defaults."""


COMMANDS = sorted(
    f"{folder}.{path.stem}"
    for folder in ("train", "eval")
    for path in Path(folder).glob("*.py")
    if path.stem[0] != "_"
)


# eval.pod_plan has the options of the training commands.
@pytest.mark.parametrize("module", [*sorted({*COMMANDS} - {"eval.pod_plan"}), "eval.speed.__main__"])
def test_every_number_has_a_range(module, tmp_path, monkeypatch):
    """`Checked` gives each integer and each number of a dataclass one, and refuses other types."""

    def capture(kind, *, default, **options):
        raise _Captured(default)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.cli.options.tyro, "cli", capture)
    with pytest.raises(_Captured) as caught:
        importlib.import_module(module).main([])
    parts = [caught.value.args[0], *(mechanism() for mechanism in MECHANISMS.values())]
    for part in parts:
        assert isinstance(part, Checked), type(part)
        parts += filter(dataclasses.is_dataclass, (getattr(part, f.name) for f in dataclasses.fields(part)))
