"""Files that are whole or not there."""

from __future__ import annotations

import uuid

from etils import epath


def beside(path: epath.Path) -> epath.Path:
    """A name next to `path` that no other process uses, to write under before renaming."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex}"


def write_whole(path: epath.Path, text: str) -> None:
    """Writes `path` aside, then renames it; the folder must exist."""
    aside = beside(path)
    try:
        aside.write_text(text)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
