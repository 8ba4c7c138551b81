"""The tokenizer and the corpora that the command line names, made once and kept with the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from etils import epath

from brl_jax.checkpoints import steps_in
from brl_jax.fields import Checked
from brl_jax.json_files import read_json
from train.data.corpus import Corpus, corpus_files, open_corpus, read_corpus, reading
from train.data.documents import RECORDS, check_documents
from train.data.hf_stream import StreamedBatches, StreamedText, file_versions, open_stream
from train.data.mixture import MixedStreams, Mixture, joined, parse_mixture
from train.data.shards import MANIFEST as SHARDS
from train.data.shards import open_shards
from train.data.sources import naming_file, open_source
from train.data.splits import SPLITS, Source, present
from train.data.streams import TokenStreams
from train.data.tokenizers.base import CONFIG, Tokenizer
from train.data.tokenizers.named import check_tokenizer, load_tokenizer, train_tokenizer
from train.data.tokenizers.published import is_pretrained
from train.engine.errors import UserError, reason
from train.engine.fields import Free
from train.engine.storage import (
    as_os_errors,
    check_address,
    copy_files,
    digest,
    is_remote,
    user_cache,
    write_whole,
)

# Part of every key: after a change of how text becomes tokens, the files of older versions must not be read.
_FORMAT = 5
_MANIFEST = "data.json"
# Fields by which our own files are told from other programs' files of the same name.
_MANIFEST_FIELDS = {
    **dict.fromkeys(("data", "tokenizer", "documents", "tokens", "tokenizer_digest"), str),
    "holdout": float,
    "splits": list[str],
    "vocab_size": int,
}
_OURS = {_MANIFEST: {"tokenizer", "holdout", "splits", "tokens"}, CONFIG: {"tokenizer"}}


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """The text of a run, and how it becomes tokens."""

    data: str = "stdlib"
    """The text: stdlib (the Python standard library's sources), text:GLOB[,GLOB...] (.txt, also .gz, .bz2 or .xz, local
    or gs://...; names with the word train, valid, val, dev or test in them are those splits),
    jsonl:GLOB (a document a line: {"text": ...}, {"messages": [...]} or {"prompt": ..., "completion": ...}, with its
    "weight" in the loss),
    tfds:NAME[/CONFIG][:FIELD], hf:NAME[:CONFIG] (or a folder), hf-stream:NAME[:CONFIG] (read while training),
    tokens:DIR (see train.tokenize) or mix:WEIGHT*TEXT,WEIGHT*TEXT."""
    tokenizer: str = "bytes"
    """bytes, bpe:SIZE (learnt from the training text), bpe-uncased:SIZE (the same on lower-case words), words,
    words:MIN_COUNT, words:max=SIZE or the same with chars; or one that exists: a tokenizer.json, a SentencePiece
    .model, or hf:NAME of the Hugging Face hub. Names of special tokens in the text, such as <|endoftext|>, become those
    tokens, or remain text with plain:hf:NAME or plain:PATH.json. Shards (tokens:) have their own tokenizer."""
    holdout: float = 0.05
    """Share of the text held out for evaluation if it has no validation split; of hf-stream these are
    the first 1,000 documents, and shards (tokens:) have theirs."""
    documents: str = RECORDS
    """What a document of the text is: records (a row of a data set, a file), wikitext (which starts with a line
    " = Title = " between empty ones), or a regular expression that matches the whole of a document's first line. A
    file always starts one."""
    cache_dir: Free[str | None] = None
    """Folder for the tokens, which runs may share, local or gs://BUCKET/FOLDER; the run's own folder by default."""

    def __post_init__(self):
        if self.cache_dir is not None:
            check_address("cache_dir", self.cache_dir)
        check_documents(self.documents)
        kind = self.data.partition(":")[0]
        if kind in ("tokens", "hf-stream", "jsonl") and self.documents != RECORDS:
            raise UserError(
                f"--documents: expected {RECORDS} with {kind}:..., whose documents are known, got {self.documents!r}"
            )

    def without_effect(self) -> dict[str, str]:
        if self.data.startswith("tokens:"):
            reason = "with tokens:DIR, whose tokens are made"
            return {"tokenizer": reason, "holdout": reason, "cache_dir": reason}
        streams = self.data.startswith("hf-stream:")
        return {"holdout": "with hf-stream:, of which the first documents are held out"} if streams else {}


def load(
    config: DataConfig,
    workdir: str | os.PathLike[str],
    splits: Sequence[str] = SPLITS,
    *,
    is_part: bool = False,
    given: Tokenizer | None = None,
) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and the corpora of a run; makes those that do not exist yet.

    The text of a run is fixed when it starts: data.json in its folder names its tokens, which are read again even where
    the sources have changed or are gone. The tokenizer is saved in the run's folder. The run's tokenizer can read
    another text than the run's, to evaluate on it, if "train" is not among the splits.

    Args:
      workdir: the run's folder. Tokens that are kept in a remote folder are read from a copy in ~/.cache/brl-jax.
      splits: some of train, valid and test; test is left out where the text has none.
      is_part: whether the text is one of a mixture's, for some of which `holdout` may have no effect.
      given: the tokenizer of a new run, where it is not made for its text.

    Returns:
      The tokenizer and a mapping from split to Corpus; "train" may also be a StreamedText or a Mixture
      (`training_batches` makes batches of each).
    """
    kind, _, rest = config.data.partition(":")
    if kind == "mix":
        return _load_mixture(config, rest, workdir, splits)
    if kind == "tokens":
        shards = open_shards(Path(rest).expanduser(), splits)
        _keep_tokenizer(config.data, shards[0], epath.Path(workdir), splits)
        return shards
    check_tokenizer(config.tokenizer)
    run = epath.Path(workdir)
    cache, shared = cache_folder(config.cache_dir, run), _shared_folder(config.cache_dir, run)
    asked = {name: getattr(config, name) for name in ("data", "tokenizer", "holdout", "documents")}
    manifest = _read_manifest(run)
    tokenizer = given
    if manifest is not None:
        differing = [name for name, value in asked.items() if manifest[name] != value]
        if "tokenizer" in differing or ("train" in splits and differing):
            name = "tokenizer" if "tokenizer" in differing else differing[0]
            raise UserError(
                f"--{name}: the run in {run} was started with {manifest[name]!r}, got {asked[name]!r}; "
                "expected the same, or another --workdir"
            )
        tokenizer = load_tokenizer(run)
        if tokenizer.digest != manifest["tokenizer_digest"]:
            raise UserError(
                f"--workdir: the tokenizer in {run} is not the one that the run was started with; its vocabulary had "
                f"{manifest['vocab_size']} tokens, this one has {tokenizer.vocab_size}"
            )
        if not differing:
            wanted = _wanted(splits, manifest["splits"], config.data)
            read = {s: _read(cache, shared, manifest["tokens"], s, tokenizer) for s in wanted}
            kept = {s: corpus for s, corpus in read.items() if corpus is not None}
            if len(kept) == len(wanted):
                return tokenizer, _with_stream(config, splits, tokenizer) | kept

    source = open_source(
        config.data,
        config.holdout,
        config.documents,
        template=lambda: None if tokenizer is None else tokenizer.chat_template,
    )
    if manifest is None and "train" in splits and not is_part:
        check_holdout(config, source)
    wanted = _wanted(splits, source.splits, config.data)
    try:
        with naming_file(source):
            if tokenizer is None:
                tokenizer = tokenizer_of(config.tokenizer, source, cache)
            folder = "tokens-" + _key(source.fingerprint, config.documents, tokenizer.digest)
            opened = {}
            for split in wanted:
                kept_one = _read(cache, shared, folder, split, tokenizer)
                opened[split] = kept_one or open_corpus(
                    cache / folder, split, source.splits[split], tokenizer
                )
                if shared is not None and not _is_there(shared / folder, split):
                    copy_files(cache / folder, shared / folder, corpus_files(split))
        if manifest is None:
            with as_os_errors():
                if _has_another_tokenizer(run, tokenizer):
                    raise UserError(
                        f"--data: the run in {run} has another tokenizer; expected the data that it was started with, "
                        "or another --workdir"
                    )
                tokenizer.save(run)
                manifest = asked | {
                    "splits": list(source.splits),
                    "tokens": folder,
                    "tokenizer_digest": tokenizer.digest,
                    "vocab_size": tokenizer.vocab_size,
                }
                write_whole(run / _MANIFEST, json.dumps(manifest, indent=1) + "\n")
    except OSError as error:
        option, place = ("--cache_dir", cache) if config.cache_dir else ("--workdir", run)
        raise UserError(f"{option}: cannot write under {place}: {reason(error)}") from error
    return tokenizer, _with_stream(config, splits, tokenizer) | opened


def training_batches(
    text: Corpus | Mixture | StreamedText, **options: Any
) -> TokenStreams | MixedStreams | StreamedBatches:
    """Endless batches of a text; options as for the classes."""
    kinds: dict[type, Any] = {Corpus: TokenStreams, Mixture: MixedStreams, StreamedText: StreamedBatches}
    return kinds[type(text)](text, **options)


def check_holdout(config: DataConfig, source: Source) -> None:
    """Raises UserError if a share to hold out was chosen for a text that has validation text."""
    if config.holdout != DataConfig.holdout and not source.holds_out:
        raise UserError(f"--holdout has no effect with {config.data}, which has validation text")


def _with_stream(config: DataConfig, splits: Sequence[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """The training text, if it is read while training."""
    kind, _, rest = config.data.partition(":")
    if kind != "hf-stream" or "train" not in splits:
        return {}
    opened = open_stream(rest)
    key = _key(config.data, opened.field, tokenizer.digest, *map(str, file_versions(rest)))
    return {"train": StreamedText(opened.raw, opened.field, tokenizer, key, opened.held_out)}


def _keep_tokenizer(data: str, tokenizer: Tokenizer, run: epath.Path, splits: Sequence[str]) -> None:
    """Saves the tokenizer that tokens were made with in the folder of a new run."""
    with as_os_errors():
        if _has_another_tokenizer(run, tokenizer):
            raise UserError(f"--data: {data} was made with another tokenizer than the run in {run} has")
        if "train" in splits and not (run / CONFIG).exists():
            tokenizer.save(run)


def _has_another_tokenizer(run: epath.Path, tokenizer: Tokenizer) -> bool:
    return (run / CONFIG).exists() and not load_tokenizer(run).equals(tokenizer)


def _load_mixture(
    config: DataConfig, spec: str, workdir: str | os.PathLike[str], splits: Sequence[str]
) -> tuple[Tokenizer, dict[str, Any]]:
    """Loads each text of a mixture as a separate data set. They share a tokenizer, which is not learnt from one of
    them."""
    weights = parse_mixture(spec)
    if not (config.tokenizer == "bytes" or is_pretrained(config.tokenizer)) and not all(
        text.startswith("tokens:") for text in weights
    ):
        raise UserError(
            f"--tokenizer: a mixture needs bytes or a tokenizer that exists (tokenizer.json, .model, hf:NAME), got "
            f"{config.tokenizer!r}"
        )
    loaded = []
    for number, text in enumerate(weights):
        part = dataclasses.replace(config, data=text)
        if text.startswith("hf-stream:"):
            raise UserError(f"--data mix: {text} is not read whole; tokenise it first (train.tokenize)")
        place = epath.Path(workdir) / "mixture" / str(number)
        loaded.append(load(part, place, splits, is_part=True))
    tokenizer = loaded[0][0]
    other = next((text for text, each in zip(weights, loaded) if not each[0].equals(tokenizer)), None)
    if other is not None:
        raise UserError(f"--data mix: {other} has another tokenizer than {next(iter(weights))}")
    _keep_tokenizer(config.data, tokenizer, epath.Path(workdir), splits)
    corpora: dict[str, Any] = {}
    for split in splits:
        parts = [each[1][split] for each in loaded if split in each[1]]
        if split == "train":
            corpora[split] = Mixture(tuple(parts), tuple(weights.values()))
        elif len(parts) == len(loaded):
            corpora[split] = joined(parts, list(weights.values()))
        elif len(splits) == 1:
            raise UserError(f"--data: not every text of the mixture has {split} text")
    return tokenizer, corpora


def cache_folder(cache_dir: str | None, run: epath.Path) -> Path:
    """The local folder for what a run makes of its data: the given one, or one in the run's folder if that is local."""
    if cache_dir and not is_remote(cache_dir):
        return Path(cache_dir).expanduser()
    if cache_dir or is_remote(run):
        return user_cache()
    return Path(run) / "data"


def _shared_folder(cache_dir: str | None, run: epath.Path) -> epath.Path | None:
    """The remote folder from which other hosts, and this one when it starts afresh, get what a run made of its data."""
    if cache_dir:
        return epath.Path(cache_dir) if is_remote(cache_dir) else None
    return run / "data" if is_remote(run) else None


def _is_there(folder: epath.Path, split: str) -> bool:
    """Whether a remote folder has all files of a split, the last of which is its summary."""
    with as_os_errors():
        return (folder / corpus_files(split)[-1]).exists()


def _read(
    cache: Path, shared: epath.Path | None, folder: str, split: str, tokenizer: Tokenizer
) -> Corpus | None:
    """The tokens of a split that were made before; they are copied here first where only the remote folder has them."""
    corpus = read_corpus(cache / folder, split, tokenizer)
    if corpus is None and shared is not None and _is_there(shared / folder, split):
        copy_files(shared / folder, cache / folder, corpus_files(split))
        corpus = read_corpus(cache / folder, split, tokenizer)
    return corpus


def forget_unstarted(workdir: str | os.PathLike[str]) -> None:
    """Removes what binds a folder without checkpoints to its data: a command that was stopped before its first one
    leaves data.json and the tokenizer, and the corrected one may name others. Files of other programs stay, and shards.
    """
    folder = epath.Path(workdir)
    with contextlib.suppress(OSError), as_os_errors():
        if steps_in(folder / "checkpoints") or (folder / SHARDS).exists():
            return
        for place in (folder, *folder.glob("mixture/*")):
            for name, ours in _OURS.items():
                with contextlib.suppress(FileNotFoundError, ValueError):
                    if ours <= set(read_json(place / name, dict)):
                        (place / name).unlink()
                        if name == CONFIG:
                            (place / "vocab.txt").unlink(missing_ok=True)


def _read_manifest(run: epath.Path) -> dict[str, Any] | None:
    """What the run's folder records of its data: its DataConfig, the names of the text's splits, its tokens."""
    try:
        with as_os_errors():
            return read_json(run / _MANIFEST, _MANIFEST_FIELDS)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(f"--workdir: {error}") from error


def _wanted(splits: Sequence[str], there: Collection[str], spec: str) -> list[str]:
    """The splits whose tokens to open: those that are `present`, without train where tokens are made while training."""
    streamed = ("train",) if spec.startswith("hf-stream:") else ()
    return [split for split in present(splits, there, spec) if split not in streamed]


def _key(*parts: str) -> str:
    return digest(_FORMAT, *parts)[:16]


def tokenizer_of(spec: str, source: Source, cache: Path) -> Tokenizer:
    """The tokenizer of this text, from the cache, or learnt and kept there."""
    if spec == "bytes" or is_pretrained(spec):
        return train_tokenizer(spec, lambda: ())
    folder = cache / ("tokenizer-" + _key(source.fingerprint, spec))
    if (folder / CONFIG).exists():
        return load_tokenizer(folder)
    if "train" not in source.splits:
        raise UserError(
            f"--data: --tokenizer {spec} is learnt from a train text, got {', '.join(source.splits)}"
        )
    # The vocabulary depends on the text and not on how it is divided into documents.
    with reading("vocabulary", source.splits["train"], by_document=False) as pieces:
        tokenizer = train_tokenizer(spec, lambda: pieces)
    tokenizer.save(folder)
    return tokenizer
