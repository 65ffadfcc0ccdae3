"""Files that are written whole or not at all, and locks."""

import json
import os
import re
import shutil
from pathlib import Path

from tfp_ibnn.training import replacing

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None


def write_text(path, text):
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def filled(text, tag, tables):
    """Return a page with tables, by name, between `<!-- TAG: NAME -->` and `<!-- end -->`."""
    return re.sub(
        rf"(<!-- {tag}: ([^>]+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{tables.get(match[2], 'Not run yet.')}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


def fill_tables(page, tag, tables):
    """Fill the tables of a page."""
    page = Path(page)
    write_text(page, filled(page.read_text(encoding="utf-8"), tag, tables))


def write_json(path, content):
    """Write a JSON file; NaN and infinity, which JSON lacks, are an error."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def is_leftover(path):
    """Whether a file is what a writer that was killed has left behind."""
    return re.fullmatch(r"\..*-[0-9a-f]{32}(\..*)?", path.name) is not None


def remove_leftovers(folder):
    """Remove what writers that were killed have left in a folder."""
    for path in filter(is_leftover, folder.iterdir()):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def locked(path):
    """Return the file, open and locked until it is closed, or None if another holds the lock."""
    while True:
        file = path.open("r+b")  # network file systems lock only what can be written
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        except OSError:  # a file system without locks
            return file
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # another process has replaced it in between
