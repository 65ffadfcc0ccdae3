"""The study of where the noise should sit: its texts, its networks, and a run from end to end."""

import io
import json
import tarfile

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from lib import tasks
from studies.places import STUDY, texts
from studies.places import run as study
from studies.places import tables as place_tables

pytestmark = pytest.mark.once


def archive(records):
    """The bytes of a package with JSON records, by path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, record in records.items():
            content = json.dumps(record).encode()
            info = tarfile.TarInfo(f"package/data/{name}.json")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Small packages of made-up mails and speeches, as if they had been fetched."""
    rng = np.random.default_rng(0)

    def mail(group, number, words):
        body = " ".join(rng.choice(words, 20))
        return {"group": group, "text": f"From: spam ham\n\n<b>{body}</b> &amp; {number}"}

    words = {"easy-ham-1": ["meeting", "code"], "spam-1": ["money", "win"], "hard-ham-1": ["sale"]}
    mails = {
        f"{group}/{number:05}.a": mail(group, number, words[group])
        for group in words
        for number in range(60)
    }
    speeches = {f"{year}_x": {"text": "Fellow citizens " * 300} for year in range(1790, 1810)}
    for name, records in (("mails", mails), ("speeches", speeches)):
        content = archive(records)
        (tmp_path / f"{name}.tgz").write_bytes(content)
        digest = texts.hashlib.sha256(content).hexdigest()
        monkeypatch.setitem(texts.CHECKSUMS, name, digest)
    return tmp_path


def test_words_have_no_markup_and_no_headers():
    assert texts.words_of("<p>Don't pay &lt;10</p>") == ["don't", "pay", "1", "0"]


def test_mails(packages):
    (train, validation, test), hard, speeches = texts.mails(0, packages, train=60, validation=20)
    assert [x.shape for x, _ in (train, validation, test)] == [(60, 128), (20, 128), (40, 128)]
    assert hard[0].shape == (60, 128)
    assert set(hard[1]) == {0}
    assert speeches.shape == (20, 128)
    x, y = train
    assert x.max() < texts.WORDS
    assert (x[:, 20:] == 0).any()
    for word in np.unique(x[x > 1]):  # four words tell the classes apart
        assert len(set(y[(x == word).any(axis=1)])) == 1 or word > 5
    again = texts.mails(0, packages, train=60, validation=20)[0][0][0]
    np.testing.assert_array_equal(again, x)


def test_another_archive_is_refused(packages):
    (packages / "mails.tgz").write_bytes(archive({}))
    with pytest.raises(ValueError, match="SHA-256"):
        texts.records("mails", packages)


class Small(study.Problem):
    """A problem with random data."""

    def __init__(self, pair):
        self.pair, self.seed = pair, 0
        shape = (4, 128) if pair == "mails_transformer" else (4, 28, 28, 1)
        x = np.random.default_rng(0).integers(0, 9, shape)
        self.train = x, np.zeros(4, "int32")


@pytest.mark.parametrize(
    ("pair", "counts"),
    [
        pytest.param(
            *("fashion_vit", {"attention": 16, "MLPs": 8, "both": 24}), marks=pytest.mark.slow
        ),  # of the same blocks as the next
        ("mails_transformer", {"attention": 8, "MLPs": 4, "both": 12}),
        ("fashion_lstm", {"input and state": 1, "last layer": 1, "both": 2}),
    ],
)
def test_places_hold_the_layers_that_they_say(pair, counts):
    problem = Small(pair)
    for place, count in counts.items():
        model = study.posterior_in(problem, "Gaussian", place)
        assert len(ibnn.stochastic_layers(model)) == count
    names = study.tasks(pair)
    assert len(names) == 3 + 6 + 2
    plain = problem.build(0)
    with ibnn.noise_off(model):
        np.testing.assert_allclose(
            keras.ops.convert_to_numpy(model(problem.train[0])),
            keras.ops.convert_to_numpy(plain(problem.train[0])),
            atol=1e-4,
        )


def test_steps_are_compared_with_the_network():
    record = {"pair": "fashion_vit", "seed": 0, "steps": {"network": 0.01, "flow, both": 0.015}}
    assert "1.50" in place_tables.steps([record], "fashion_vit")
    assert place_tables.steps([], "fashion_vit") == "Not run yet."


def test_contrasts_are_paired_by_seed():
    methods = ["network", *study.tasks("fashion_vit")[3:-2]]
    records = [
        {"pair": "fashion_vit", "seed": seed, "methods": {name: {"NLL, T": seed + 0.1 * place}}}
        for seed in (0, 1)
        for place, name in enumerate(methods)
    ]
    lines = place_tables.contrasts(records, "fashion_vit").splitlines()
    assert lines[2].split(" | ")[1:] == [
        "+0.1000 ± 0.0000",
        "+0.2000 ± 0.0000",
        "+0.3000 ± 0.0000",
        "-0.1000 ± 0.0000 |",
    ]
    assert "+0.3000" in lines[4]
    assert place_tables.contrasts([], "fashion_vit") == "Not run yet."


@pytest.mark.slow
def test_a_quick_run_is_stored_and_not_repeated(monkeypatch, packages, capsys):
    monkeypatch.setattr(tasks, "apart", lambda function, *task: function(*task))
    mails = texts.mails

    def few(seed, folder):
        return mails(seed, folder, train=60, validation=20)

    monkeypatch.setattr(texts, "mails", few)
    command = ["--quick", "--pairs", "mails_transformer", "--seeds", "0"]
    command += ["--output", str(packages / "out"), "--data-dir", str(packages)]
    assert STUDY.main(command) == 0
    records = tasks.read(packages / "out")
    assert [record["group"] for record in records] == study.tasks("mails_transformer")
    rows = [row for record in records for row in record.get("methods", {}).values()]
    assert len(rows) == 8
    assert all(np.isfinite(row["NLL"]) for row in rows)
    assert records[-1]["steps"].keys() >= {"network", "flow, both"}
    assert STUDY.main(command) == 0
    assert "0 runs to do, 10 are there" in capsys.readouterr().out
