"""A file of prompts for `python -m eval.generate --batch`: its lines, the file of what was generated, and its progress.

Each line of the input is one JSON object: `prompt`, a text; optionally `max_tokens` and `id`. Each line of the output
belongs to the same line of the input: `id` (by default the line's number, from 1), `prompt`, `text` (what follows it),
`tokens` (how many) and `finish_reason` ("stop" or "length"). The output appears when it is whole. Until then finished
lines are in a new file OUT.*.part; the same command finds it after a stop and goes on from there.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
from etils import epath
from rich.console import Console
from rich.progress import Progress

from brl_jax.batching import Request, generate_requests
from brl_jax.json_files import check_json, parse_json
from eval.harness.runs import regular_file
from train.data.tokenizers.base import Tokenizer, continuation, encode_given
from train.engine.errors import UserError, reason
from train.engine.metrics import log
from train.engine.storage import write_whole

_KEYS = ("prompt", "max_tokens", "id")


class Line(NamedTuple):
    """A line of the input: what it asks for, and its place in the file (from 0)."""

    number: int
    id: Any
    prompt: str
    max_tokens: int


def read_lines(path: Path, max_tokens: int) -> list[Line]:
    """The lines of a file of prompts without blank ones."""
    try:
        rows = regular_file("--batch", str(path)).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--batch: cannot read {path}: {reason(error)}") from error
    lines = [_line(path, i, row, max_tokens) for i, row in enumerate(rows) if row.strip()]
    if not lines:
        raise UserError(f"--batch: expected a prompt in {path}, got none")
    return lines


def _line(path: Path, number: int, row: str, max_tokens: int) -> Line:
    where = f"{path}:{number + 1}"
    try:
        read = parse_json(row, {"prompt": str}, where)
        unknown = [key for key in read if key not in _KEYS]
        if unknown:
            raise ValueError(f"{where}: unknown key {unknown[0]!r}; expected {', '.join(_KEYS)}")
        most, name = read.get("max_tokens", max_tokens), read.get("id", number + 1)
        check_json(most, int, f"{where}: max_tokens")
        if most < 1:
            raise ValueError(f"{where}: max_tokens must be at least 1, got {most}")
        try:
            json.dumps([read["prompt"], name], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # "\ud800" is valid JSON
            raise ValueError(f"{where} has half a surrogate pair: {row[:40]!r}") from error
    except ValueError as error:
        raise UserError(f"--batch: {error}") from error
    return Line(number, name, read["prompt"], most)


def check_length(model: Any, length: int, options: str) -> None:
    """Raises UserError, naming the options, if a mechanism of the model has a shorter maximum length."""
    try:
        jax.eval_shape(lambda: model.init_cache(1, length))
    except ValueError as error:
        raise UserError(f"{options}: {error}") from error


def generate_file(
    model: Any,
    params: Any,
    tokenizer: Tokenizer,
    *,
    batch: Path,
    out: Path,
    max_tokens: int,
    slots: int,
    seed: int,
    sampling: Mapping[str, Any],
    run: str,
) -> None:
    """Continues the prompts of the file `batch` into the file `out`, with progress and tokens a second on stderr.

    Args:
      max_tokens: for lines without their own.
      slots: lines that decode at the same time.
      seed: of the random choices. sampling: how tokens are chosen, options of `generate_requests`.
      run: names the parameters. An unfinished output is continued if run, prompts and sampling are the same.
    """
    lines = read_lines(batch, max_tokens)
    encoded = [encode_given(tokenizer, line.prompt, f"--batch: {batch}:{line.number + 1}") for line in lines]
    if out.exists():
        raise UserError(f"--out: {out} exists; remove it or name another file")
    if not out.parent.is_dir():
        raise UserError(f"--out: expected a folder, got {out.parent}")
    length = max(len(tokens) + line.max_tokens for line, tokens in zip(lines, encoded))
    check_length(model, length, "--tokens, --batch")
    call = {"run": run, "seed": seed, "sampling": sampling, "lines": [list(line) for line in lines]}
    with _naming(out):
        part, done = _progress_file(out, json.loads(json.dumps(call)))
    left = [i for i in range(len(lines)) if i not in done]
    if done:
        log(f"{part}: {len(done)} of {len(lines)} prompts are done")
    started, new = time.monotonic(), 0
    with (
        _naming(out),
        part.open("a", encoding="utf-8") as file,
        Progress(console=Console(stderr=True)) as progress,
    ):
        bar = progress.add_task("prompts", total=len(lines), completed=len(done))
        completions = generate_requests(
            model,
            {"params": params},
            [Request(encoded[i], lines[i].max_tokens, i) for i in left],
            slots=min(slots, max(len(left), 1)),
            length=length,
            rng=jax.random.key(seed),
            **sampling,
            numbers=left,  # a line keeps its random key in a call that goes on
        )
        for completion in completions:
            i, tokens = completion.request.id, completion.tokens
            done[i] = {
                "id": lines[i].id,
                "prompt": lines[i].prompt,
                "text": continuation(tokenizer, encoded[i], tokens),
                "tokens": len(tokens),
                "finish_reason": completion.finish_reason,
            }
            _append(file, {"line": i, **done[i]})
            new += len(tokens)
            rate = new / (time.monotonic() - started)
            progress.update(bar, advance=1, description=f"prompts, {rate:.0f} tokens a second")
    whole = (json.dumps(done[i], ensure_ascii=False) + "\n" for i in range(len(lines)))
    with _naming(out):
        write_whole(epath.Path(out), "".join(whole))
        part.unlink()
    seconds = time.monotonic() - started
    log(f"{out}: {len(lines)} prompts; {new} tokens in {seconds:.1f} s, {new / seconds:.0f} tokens a second")


@contextlib.contextmanager
def _naming(out: Path) -> Iterator[None]:
    """Turns an OSError, such as a full disk, into a UserError that names --out."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: cannot write {out}: {reason(error)}") from error


def _append(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _progress_file(out: Path, call: dict[str, Any]) -> tuple[Path, dict[int, dict[str, Any]]]:
    """The file of finished lines, and those that an earlier, stopped call of the same command has left in it.

    A new file gets a name that nobody can have taken. Files of other calls, links and other people's files stay as they
    are.
    """
    for part in sorted(out.parent.glob(f"{glob.escape(out.name)}.*.part")):
        done = _unfinished(part, call)
        if done is not None:
            return part, done
        log(f"{part} is left alone: it is of other prompts, settings or parameters")
    number, name = tempfile.mkstemp(prefix=f"{out.name}.", suffix=".part", dir=out.parent)
    part = Path(name)
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            _append(file, call)
    except OSError:
        part.unlink()
        raise
    return part, {}


def _unfinished(part: Path, call: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
    """The finished lines in a file, by the place of the line among the prompts; None unless it is of this call.

    A last line that was not written to its end is cut off the file.
    """
    if part.is_symlink() or not part.is_file():
        return None
    try:
        rows = part.read_bytes().split(b"\n")
        first, *others = [json.loads(row) for row in rows[:-1]]
        done = {row.pop("line"): row for row in others}
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    if first != call:
        return None
    if rows[-1]:
        part.write_bytes(b"".join(row + b"\n" for row in rows[:-1]))
    return done
