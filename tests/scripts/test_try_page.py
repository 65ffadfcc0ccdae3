"""The page that runs exported networks in a browser: its files, and what it shows."""

import base64
import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX
from tfp_ibnn.export.reading import open_exported

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "try"
FACTS = json.loads((FOLDER / "digits.json").read_text())
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
RUNTIME = ROOT / ".venv-web" / "node_modules" / "onnxruntime-web"

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="the files do not depend on the backend"),
]


def digits():
    images = [np.frombuffer(base64.b64decode(text), np.uint8) for text in FACTS["digits"]]
    return np.reshape(images, (10, 28, 28, 1)).astype("float32") / 255


def test_the_files_know_the_digits_beside_them():
    network = open_exported(FOLDER / "digits.onnx")
    found = network.predict(digits(), batch_size=10)
    assert list(found["mean"].argmax(-1)) == list(range(10))
    assert found["samples"].shape == (10, 32, 10)
    np.testing.assert_allclose(found["samples"].mean(1), found["mean"], atol=1e-5)
    assert found["set"][np.arange(10), np.arange(10)].all()
    assert list(found["refuse"]) == list(found["mean"].max(-1) < 0.9)
    score = open_exported(FOLDER / "unusual.onnx").predict(digits(), batch_size=10)["score"]
    assert (score < FACTS["unusual"]).all()


def test_noise_and_turned_digits_are_found_unusual():
    x = digits()
    sideways = x.transpose(0, 2, 1, 3)[:, ::-1]
    noise = np.random.default_rng(0).uniform(size=x.shape).astype("float32")
    network, detector = (open_exported(FOLDER / f"{name}.onnx") for name in ("digits", "unusual"))
    usual = network.predict(x, batch_size=10)["entropy"]
    # Digits such as 0, 1, 6 and 8 are others when they are turned, or the same.
    for strange, least in ((sideways, 5), (noise, 10)):
        entropy = network.predict(strange, batch_size=10)["entropy"]
        score = detector.predict(strange, batch_size=10)["score"]
        assert np.sum((entropy > np.median(usual) + 0.1) | (score > FACTS["unusual"])) >= least


def test_the_program_writes_such_files(tmp_path, monkeypatch):
    import try_page
    from lib import data

    random = np.random.default_rng(0)
    y = np.arange(80) % 10
    x = (40 * random.random((80, 28, 28, 1)) + 20 * y[:, None, None, None]).astype("uint8")
    monkeypatch.setattr(data, "load", lambda *_, **__: ((x, y), (x[:20], y[:20])))
    monkeypatch.setattr(try_page, "HELD_OUT", 30)
    monkeypatch.setattr(try_page, "COVERAGE", 0.8)
    monkeypatch.setattr(try_page, "BANK", 50)
    assert try_page.main([str(tmp_path), "--epochs", "1"]) == 0
    facts = json.loads((tmp_path / "digits.json").read_text())
    assert set(facts) == set(FACTS)
    scores = ibnn.exported_scores(tmp_path / "digits.onnx", x[:20] / np.float32(255), y[:20])
    assert facts["scores"] == {name: round(float(value), 4) for name, value in scores.items()}
    assert set(open_exported(tmp_path / "unusual.onnx").facts["inputs"]) == {"image"}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Build the site and serve it."""
    if BROWSER is None or not RUNTIME.exists():
        pytest.skip("needs Chromium, and onnxruntime-web: make web")
    site = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=600)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    handler.log_message = lambda *_: None
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/try.html"
    server.shutdown()


def shown(address):
    """Return what the page says, by name, and the percentages of the digits."""
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=60000"]
    done = subprocess.run(
        [*words, "--dump-dom", address], capture_output=True, text=True, timeout=180
    )
    assert 'data-state="done"' in done.stdout, done.stdout[-2000:]
    lines = dict(re.findall(r'data-name="(\w+)">([^<]*)<', done.stdout))
    percent = re.findall(r'class="try-percent">(\d+)%<', done.stdout)
    return lines, [int(number) for number in percent]


@pytest.mark.slow
def test_a_browser_shows_a_digit_a_turned_one_and_a_letter(address):
    usual, percent = shown(f"{address}#digit=4")
    assert percent[4] > 95
    assert (usual["set"], usual["refuse"]) == ("{4}", "no")
    assert usual["unlike"].startswith("no ")
    turned, _ = shown(f"{address}#digit=4&turn=90")
    letter, _ = shown(f"{address}#lines=140,40,70,240;140,40,210,240;95,170,185,170")
    for strange in (turned, letter):
        assert strange["refuse"] == "yes: below 90%"
        assert float(strange["epistemic"].split()[0]) > 10 * float(usual["epistemic"].split()[0])
        assert len(strange["set"].split(",")) > 1
