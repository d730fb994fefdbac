"""Lines of text files."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from replicax import _jax
from replicax.data.files.file_bytes import Lines, check_encoding
from replicax.data.files.format import Format, Reader
from replicax.data.files.paths import Path, expand


@_jax.hiding_frames
def text_lines(files: Path | Iterable[Path], *, encoding: str = "utf-8", errors: str = "strict") -> Any:
    r"""The lines of text files, plain or gzipped, as a Grain dataset of ``str``.

    Lines end with ``\n`` or ``\r\n``, which are removed, or with the file; empty lines count. Files are read one after
    the other, in pieces, in the order of their names. Iterators save byte offsets, so a restored one continues at once
    (in a gzip file after reading up to there).

    Args:
      files: a path, a glob (``**`` goes through directories), or a list of these. Gzip is detected by the content.
      encoding: the encoding of the text; any in which a line feed is one byte.
      errors: how to treat invalid bytes, as in ``bytes.decode``. ``"strict"`` is an error.

    Returns:
      A ``grain.IterDataset``: continue with its ``map``, ``filter``, ``batch``.

    Raises:
      FileNotFoundError: a file does not exist, or a glob matches none.
      ValueError: a path is given twice, or there is no such encoding; and, while reading, bad bytes or a truncated gzip
        file, with file and byte.

    >>> import replicax, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("one\ntwo\n"), (folder / "b.txt").write_text("three\n")
    >>> lines = replicax.data.text_lines(folder / "*.txt")
    >>> list(lines)
    ['one', 'two', 'three']
    >>> [batch.tolist() for batch in lines.map(len).batch(2)]
    [[3, 3], [5]]
    """
    from replicax.data.files.file_source import FilesDataset  # loads Grain

    check_encoding(encoding, errors, "text_lines")
    read = functools.partial(TextReader, encoding=encoding, errors=errors)
    return FilesDataset(expand(files, "text_lines"), Format("text_lines", ("byte",), read))


class TextReader(Lines, Reader):
    """Reads lines, without their ends."""

    def __next__(self) -> str:
        line = self.read()
        if not line:
            raise StopIteration
        return line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line

    def position(self) -> dict[str, int]:
        return {"byte": self.byte}

    def seek(self, position: dict[str, int]) -> None:
        self.go_to(position["byte"])
