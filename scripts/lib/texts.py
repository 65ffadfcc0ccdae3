"""Paragraphs of documentation, to be classified by the package that they are from."""

import ast
import functools
import re
import zlib
from pathlib import Path

import numpy as np
import scipy

PACKAGES = ("interpolate", "linalg", "optimize", "signal", "sparse", "spatial", "special", "stats")
"""The packages of SciPy that are the classes."""
WORDS = 40  # of a paragraph that are read; shorter ones are filled up by 0
FEWEST = 8  # words of a paragraph
VOCABULARY = 4096  # numbers of words, from 1 on, by their hash
OF_A_PACKAGE = 700  # paragraphs


def scipy_paragraphs(seed, train, validation):
    """Return (x, y) of training, validation and test paragraphs of SciPy's docstrings.

    They are those of the installed version. x (N, 40) holds the numbers of words, and y the package
    that a paragraph is from. Each package has as many, so 5,600 in all.
    """
    random = np.random.default_rng(seed)
    tokens, labels = [], []
    for label, name in enumerate(PACKAGES):
        found = _of_package(name)
        drawn = random.permutation(len(found))[:OF_A_PACKAGE]
        tokens += [numbers(found[place]) for place in drawn]
        labels += [label] * len(drawn)
    order = random.permutation(len(labels))
    parts = (np.split(np.array(z)[order], [train, train + validation]) for z in (tokens, labels))
    return list(zip(*parts, strict=True))


def numbers(words):
    """Return the numbers of the first 40 words, (40,), with 0 in the places of missing ones."""
    hashed = [1 + zlib.crc32(word.encode()) % VOCABULARY for word in words[:WORDS]]
    return np.pad(np.array(hashed, "int64"), (0, WORDS - len(hashed)))


@functools.cache
def _of_package(name):
    """Return the words of each different paragraph of a package's docstrings."""
    folder = Path(scipy.__file__).parent / name
    found = {}
    for path in sorted(folder.rglob("*.py")):
        if "tests" not in path.parts:
            found |= dict.fromkeys(paragraphs(path.read_text(encoding="utf-8")))
    return list(found)


def paragraphs(source):
    """Return the words of each paragraph of all docstrings in Python source, as tuples."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        for paragraph in re.split(r"\n\s*\n", text or ""):
            words = re.findall(r"[a-z]+", paragraph.lower())
            if len(words) >= FEWEST:
                found.append(tuple(words))
    return found
