"""What an unknown option probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

from brl_jax.fields import field_hints
from brl_jax.layers import MECHANISMS

# Names of options in other training programs.
_SYNONYMS = {
    "batch_size": "batch",
    "block_length": "length",
    "checkpoint_dir": "workdir",
    "context": "length",
    "context_length": "length",
    "dataset": "data",
    "epochs": "steps",
    "grad_clip": "clip_norm",
    "gradient_accumulation_steps": "accumulation",
    "hidden_size": "d_model",
    "iters": "steps",
    "layers": "num_layers",
    "lr": "learning_rate",
    "max_grad_norm": "clip_norm",
    "max_iters": "steps",
    "max_steps": "steps",
    "model": "mechanism",
    "attention": "mechanism",
    "n_embd": "d_model",
    "n_head": "num_heads",
    "n_layer": "num_layers",
    "output_dir": "workdir",
    "out_dir": "workdir",
    "outdir": "workdir",
    "precision": "dtype",
    "save_steps": "checkpoint_every",
    "eval_steps": "eval_every",
    "seq_len": "length",
    "seq_length": "length",
    "max_length": "length",
    "max_new_tokens": "tokens",
    "sequence_length": "length",
    "wandb": "log",
    "warmup": "warmup_steps",
    "wd": "weight_decay",
    "width": "d_model",
}
_ANSWERS = {
    "resume": "the same command again resumes a run, and --workdir names it",
    "device": "JAX takes the fastest device; set JAX_PLATFORMS=cpu (or cuda, tpu) in the environment to choose one",
    "devices": "the options of the mesh, such as --mesh.fsdp, divide a run among devices",
    "gpus": "the options of the mesh, such as --mesh.fsdp, divide a run among devices",
}


def hint_for(name: str, options: Collection[str], decided: Collection[str], config: Any) -> str:
    """What to tell the user of an unknown option: `name` has no dashes, and `decided` are the options of other commands
    that the preset, its data or a pretrained run sets here."""
    if name in decided or f"{name}.name" in decided:
        return "the preset, its data or the pretrained run sets it"
    if name in _ANSWERS:
        return _ANSWERS[name]
    if _SYNONYMS.get(name) in options:
        return f"did you mean --{_SYNONYMS[name]}?"
    parts = [option for option in options if option.startswith(f"{name}.")]
    if parts:
        return f"did you mean --{parts[0]}?"
    part, _, field = name.rpartition(".")
    mechanism = getattr(getattr(config, "model", None), part, None) if part else None
    if mechanism is not None:
        owners = [other for other, kind in MECHANISMS.items() if field in field_hints(kind)]
        if owners:
            shown = ", ".join(owners[:4]) + (", ..." if len(owners) > 4 else "")
            return f"{mechanism.name} has no such option; it is an option of {shown}"
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"did you mean --{near[0]}?" if near else "see --help-all"
