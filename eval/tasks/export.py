"""Writes a run's network as safetensors: python -m eval.export --workdir DIR --out DIR.

If an architecture of Hugging Face's transformers computes the same function (docs/huggingface.md), a language model is
written in its layout. Other networks are written under this library's parameter names, with the run's config.json;
those of train.graph are refused. Either folder has the run's tokenizer, and `brl_jax.loading.load_export(DIR)` reads
it.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from etils import epath

from brl_jax.json_files import read_json
from brl_jax.loading import save_export
from brl_jax.models import DecoderConfig, DecoderLM, huggingface
from brl_jax.models.config import ComputationType
from brl_jax.models.huggingface.files import TOKENIZER_FILES
from eval.harness.options import RunOptions, command
from eval.harness.output import emit
from eval.harness.runs import Run, open_run
from train.cli.summary import num_parameters
from train.data.tokenizers.published import PretrainedTokenizer
from train.engine.errors import UserError, reason
from train.engine.metrics import log
from train.engine.storage import write_whole
from train.tasks.every import TASKS


@dataclasses.dataclass(frozen=True)
class ExportOptions(RunOptions):
    """What to write."""

    workdir: str = "runs/stdlib"
    """Folder of the run."""
    out: str = "export"
    """A new folder on this machine."""
    layout: Literal["auto", "huggingface", "own"] = "auto"
    """The layout of transformers ("huggingface"), of this library ("own"), or the first if it can hold the network
    ("auto")."""
    dtype: ComputationType = "float32"
    """Data type of the weights in the file."""


@command(ExportOptions(), "eval.export", "Writes a run's network as safetensors.")
def main(options: ExportOptions) -> None:
    run = open_run(list(TASKS.values()), options.workdir, options.checkpoint)
    config = read_json(epath.Path(options.workdir) / "config.json", dict)
    with tempfile.TemporaryDirectory() as folder:
        shared: dict[str, Any] = {
            "tokenizer": _copy_tokenizer(options.workdir, folder),
            "dtype": options.dtype,
        }
        try:
            layout = _write_huggingface(run, options, shared)
            if layout is None:
                layout = "own"
                save_export(options.out, run.params, config, step=run.step, **shared)
        except UserError:
            raise
        except FileExistsError as error:
            raise UserError(f"--out: {error}") from error
        except OSError as error:
            raise UserError(f"--out: cannot write {options.out}: {reason(error)}") from error
        except ImportError as error:
            raise UserError(str(error)) from error
        except ValueError as error:
            raise UserError(f"--workdir: {error}") from error
    log(f"read it by: brl_jax.loading.load_export({options.out!r})")
    emit({"layout": layout, "step": run.step, "parameters": num_parameters(run.params)}, options.json)


def _write_huggingface(run: Run, options: ExportOptions, shared: dict[str, Any]) -> str | None:
    """The architecture that was written; None if the network needs the other layout."""
    if options.layout == "own":
        return None
    try:
        if not isinstance(run.model, DecoderLM):
            raise ValueError(f"a {type(run.model).__name__} is not a decoder")
        config: DecoderConfig = run.model.config
        if pretrained := getattr(run.config, "pretrained", None):
            config = huggingface.PretrainedConfig(**vars(config), **pretrained)
        return huggingface.save(options.out, config, run.params, **shared)
    except ValueError as error:
        if options.layout == "huggingface":
            raise UserError(f"--layout: {error}") from error
        log(f"not in the layout of transformers: {error}")
        return None


def _copy_tokenizer(workdir: str, folder: str) -> str:
    """Copies the run's tokenizer into the folder, and says so to transformers if it can read it; returns the folder."""
    for name in TOKENIZER_FILES:
        source = epath.Path(workdir) / name
        if source.exists():
            write_whole(epath.Path(folder) / name, source.read_bytes())
    if (Path(folder) / "tokenizer.json").exists():
        path = Path(folder) / "tokenizer_config.json"
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **read_json(path)}
        path.write_text(json.dumps(config))
        # The digest covers what transformers reads.
        config["digest"] = PretrainedTokenizer.load(config["tokenizer"], epath.Path(folder)).digest
        path.write_text(json.dumps(config))
    return folder
