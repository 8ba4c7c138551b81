"""Continues prompts with a trained language model: python -m eval.generate --workdir DIR --prompt TEXT
--tokens N.

With --draft DIR a smaller run drafts tokens, and one call of the model reads several of them (speculative decoding).
With --batch prompts.jsonl --out out.jsonl the prompts are the lines of a file (`eval.tasks.generate_batch`), which
decode --slots at a time: when one ends, the next one takes its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from etils import epath
from jaxtyping import Int

from brl_jax.decoding import generate, generate_drafted
from brl_jax.fields import Checked, Count, Fraction, NonNegative, Rows, Seed, Steps
from brl_jax.speculation import Draft
from eval.harness.options import command
from eval.harness.runs import open_run, regular_file
from eval.tasks.generate_batch import check_length, generate_file
from train.data.tokenizers.base import Tokenizer, encode_given
from train.data.tokenizers.named import load_tokenizer
from train.engine.errors import UserError, reason
from train.engine.metrics import log
from train.tasks.lm import LM


@dataclasses.dataclass(frozen=True)
class GenerateOptions(Checked):
    """What to generate."""

    workdir: str = "runs/stdlib"
    """Folder of the run."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text to continue; may be given several times."""
    prompt_file: str | None = None
    """A file whose whole text is another prompt."""
    batch: str | None = None
    """A file of prompts, one JSON object a line: prompt, and optionally max_tokens and id. Needs --out."""
    out: str | None = None
    """The new file for what --batch generates, one JSON object a line. An interrupted command continues where it was
    stopped."""
    slots: Rows = 8
    """Prompts of --batch that are continued at the same time."""
    draft: str | None = None
    """Folder of a smaller run with the same tokenizer, which drafts tokens for this one: its checkpoint with the best
    evaluation."""
    draft_tokens: Count = 4
    """Tokens that it drafts for each call of the model."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Text of one token with which a continuation ends; may be given several times."""
    tokens: Steps = 256
    """Tokens to add to each prompt; with --batch the most to add to prompts without a max_tokens."""
    temperature: NonNegative = 0.8
    """Divides the logits: below 1 likely tokens become likelier; 0 always takes the likeliest."""
    top_k: Count | None = None
    """Choose only among this many of the likeliest tokens."""
    top_p: Fraction | None = None
    """Choose among the likeliest tokens that together have at least this probability."""
    seed: Seed = 0
    """Seed of the random choices."""
    checkpoint: str = "best"
    """best (lowest held-out loss), last, or a step."""

    def __post_init__(self):
        if (self.batch is None) != (self.out is None):
            raise ValueError(f"batch and out must be given together, got {self.batch} and {self.out}")
        if self.batch is not None and (self.prompt or self.prompt_file is not None):
            raise ValueError("batch must be given without prompt and prompt_file")
        if self.batch is not None and self.draft is not None:
            raise ValueError("batch must be given without draft")

    def without_effect(self) -> dict[str, str]:
        """See `train.cli.options.parse_options`."""
        unused = {} if self.batch is not None else {"slots": "without batch"}
        if self.draft is None:
            unused["draft_tokens"] = "without draft"
        if self.temperature == 0:
            unused |= dict.fromkeys(
                ("top_k", "top_p", "seed"), "with temperature 0, which takes the likeliest"
            )
        return unused


def _prompts(options: GenerateOptions) -> list[tuple[str, str]]:
    """The prompts, each with the option that gave it."""
    prompts = [("--prompt", text) for text in options.prompt]
    if options.prompt_file is not None:
        try:
            file = regular_file("--prompt_file", options.prompt_file)
            text = file.read_bytes().decode("utf-8-sig")  # keeps \r\n, as training does
            prompts.append(("--prompt_file", text))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt_file: cannot read {options.prompt_file}: {reason(error)}") from error
    if not prompts:
        raise UserError("--prompt: expected a text to continue, got none")
    return prompts


@command(GenerateOptions(), "eval.generate", "Continues prompts with a trained model.")
def main(options: GenerateOptions) -> None:
    prompts = [] if options.batch is not None else _prompts(options)
    _, _, model, params, step = open_run([LM], options.workdir, options.checkpoint)
    tokenizer = load_tokenizer(epath.Path(options.workdir))
    stops = tuple(_stop_token(text, tokenizer) for text in options.stop)
    sampling: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "stop_tokens": stops,
    }
    if options.batch is not None and options.out is not None:
        generate_file(
            model,
            params,
            tokenizer,
            batch=Path(options.batch),
            out=Path(options.out),
            max_tokens=options.tokens,
            slots=options.slots,
            seed=options.seed,
            sampling=sampling,
            run=f"{options.workdir}, step {step}",
        )
        return
    encoded = [encode_given(tokenizer, text, option) for option, text in prompts]
    lengths = np.array([len(tokens) for tokens in encoded])
    batch = np.zeros((len(encoded), lengths.max()), np.int32)
    for row, tokens in zip(batch, encoded):
        row[: len(tokens)] = tokens
    check_length(model, int(lengths.max()) + options.tokens, "--tokens")
    asked: dict[str, Any] = {
        "lengths": lengths,
        "max_new_tokens": options.tokens,
        "rng": jax.random.key(options.seed),
        **sampling,
    }
    calls = None
    if options.draft is None:
        texts = generate(model, {"params": params}, batch, **asked)
    else:
        draft = _open_draft(options, tokenizer)
        check_length(draft.model, int(lengths.max()) + options.tokens, "--draft, --tokens")
        try:
            texts, calls = generate_drafted(model, {"params": params}, draft, batch, **asked)
        except ValueError as error:  # another vocabulary, or a mechanism that cannot go back
            raise UserError(f"--draft: {error}") from error
    rows = [
        _until_stop(row[: length + options.tokens], length, stops)
        for row, length in zip(np.asarray(texts), lengths)
    ]
    for i, row in enumerate(rows):
        if len(encoded) > 1:
            print(f"--- {i + 1} of {len(encoded)}")
        print(tokenizer.decode(row))
    if calls is not None:
        new = sum(map(len, rows)) - int(lengths.sum())
        log(f"{new} tokens in {calls} calls of the model, {new / int(calls):.2f} a call")


def _open_draft(options: GenerateOptions, tokenizer: Tokenizer) -> Draft:
    """The run of --draft. Raises UserError: there is none, or it has another tokenizer."""
    assert options.draft is not None
    try:
        run = open_run([LM], options.draft, "best")
    except UserError as error:
        raise UserError(str(error).replace("--workdir", "--draft", 1)) from error
    if not tokenizer.equals(load_tokenizer(epath.Path(options.draft))):
        raise UserError(
            f"--draft: expected the tokenizer of {options.workdir}, got another one in {options.draft}"
        )
    return Draft(run.model, {"params": run.params}, options.draft_tokens)


def _stop_token(text: str, tokenizer: Tokenizer) -> int:
    """The one token of a text of --stop."""
    tokens = encode_given(tokenizer, text, "--stop")
    if len(tokens) != 1:
        raise UserError(f"--stop: expected a text of one token, got {text!r}, which has {len(tokens)}")
    return int(tokens[0])


def _until_stop(
    row: Int[np.ndarray, " tokens"], length: int, stops: Sequence[int]
) -> Int[np.ndarray, " tokens"]:
    """A prompt of `length` tokens and what follows it, up to the first stop token after the prompt."""
    ends = np.flatnonzero(np.isin(row[length:], stops))
    return row[: length + ends[0] + 1] if ends.size else row
