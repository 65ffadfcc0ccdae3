"""An ONNX file says in Node, with onnxruntime-web or onnxruntime-node, what Python says."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfp_ibnn as ibnn
from tests.monte_carlo_tools import JAX, averaged, data, set_weights

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(JAX, reason="TensorFlow writes ONNX files"),
]

ROOT = Path(__file__).parents[2]
PACKAGES = ("onnxruntime-node", "onnxruntime-web")

SCRIPT = """
const [, name, path, text] = process.argv;
const runtime = require(name);
if (runtime.env.wasm) runtime.env.wasm.numThreads = 1;
const { inputs, dims } = JSON.parse(text);
const file = new Uint8Array(require("fs").readFileSync(path));
runtime.InferenceSession.create(file).then(async (session) => {
  const images = new runtime.Tensor("float32", Float32Array.from(inputs), dims);
  const outputs = await session.run({ images });
  const answer = {};
  for (const [key, value] of Object.entries(outputs)) {
    answer[key] = { dims: value.dims, data: Array.from(value.data, Number) };
  }
  console.log(JSON.stringify(answer));
});
"""


def node(*words):
    command = ["node", "-e", *words]
    fetched = str(ROOT / ".venv-web" / "node_modules")  # by `make web`
    places = os.pathsep.join([fetched, os.environ.get("NODE_PATH", "")])
    environment = {**os.environ, "NODE_PATH": places}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def package():
    """The first of the packages that Node finds, in node_modules or by NODE_PATH."""
    if shutil.which("node") is None:
        pytest.skip("Node is not installed")
    for name in PACKAGES:
        if node(f"require.resolve({name!r})").returncode == 0:
            return name
    pytest.skip(f"Node finds none of {', '.join(PACKAGES)}: make web")


def test_a_file_says_in_node_what_python_says(package, tmp_path):
    parts = [layers.Conv2D(3, 3, activation="gelu"), layers.GlobalAveragePooling2D()]
    plain = keras.Sequential([keras.Input((6, 6, 2), name="images"), *parts, layers.Dense(3)])
    model = ibnn.to_stochastic(set_weights(plain), ibnn.NormalAffine(initial_scale=0.5), 100)
    mc = averaged(model, 5, seed=0, from_logits=True)
    path = ibnn.export(mc, tmp_path / "m.onnx", format="onnx", threshold=0.5)
    x = data(4, 6, 6, 2)
    text = json.dumps({"inputs": x.ravel().tolist(), "dims": x.shape})
    answer = node(SCRIPT, package, str(path), text)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    expected = {name: np.asarray(value) for name, value in mc(x).items()}
    expected["refuse"] = expected["mean"].max(axis=1) < 0.5
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert tuple(found[name]["dims"]) == value.shape
        np.testing.assert_allclose(found[name]["data"], value.ravel(), atol=1e-5, err_msg=name)
