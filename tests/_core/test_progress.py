"""What takes long says so on the console; what is silent stays so."""

import time

import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn
from tfp_ibnn._core import progress
from tfp_ibnn._core.progress import FirstBatch, Heartbeat

layers = keras.layers


def test_a_heartbeat_says_what_is_being_done_until_it_ends():
    lines = []
    with Heartbeat("reading", lines.append, every=0.01):
        while len(lines) < 2:
            time.sleep(0.005)
    assert all(line.startswith("reading: ") and line.endswith(" s so far") for line in lines)
    time.sleep(0.05)  # for one that is on its way
    count = len(lines)
    time.sleep(0.05)
    assert len(lines) == count


def test_an_error_ends_a_heartbeat():
    lines = []
    with pytest.raises(KeyError), Heartbeat("reading", lines.append, every=0.01) as heartbeat:
        raise KeyError
    assert heartbeat._ended.is_set()


@pytest.fixture
def slow(monkeypatch, eagerly):
    """A stochastic model whose every batch takes 0.3 s, and compilations are noticed after 0.1."""
    monkeypatch.setattr(progress, "EVERY", 0.1)

    class Slow(layers.Layer):
        def call(self, x):
            if not isinstance(x, keras.KerasTensor):
                time.sleep(0.3)
            return x

    model = keras.Sequential([keras.Input((2,)), Slow(), layers.Dense(2, "softmax")])
    stochastic = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=4)
    stochastic.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    return stochastic


X, Y = np.ones((4, 2), "float32"), np.zeros(4, int)


@pytest.mark.parametrize("verb", ["fit", "predict", "evaluate"])
def test_a_first_batch_that_takes_long_is_announced(slow, verb, capsys):
    model = slow if verb == "fit" else ibnn.MonteCarlo(slow, 2, name="average")
    data = (X,) if verb == "predict" else (X, Y)
    if verb != "fit":
        model.compile(run_eagerly=True)
    getattr(model, verb)(*data, verbose=0)
    assert not capsys.readouterr().out
    model.compile(*(("sgd", "sparse_categorical_crossentropy") if verb == "fit" else ()))
    if keras.backend.backend() == "tensorflow":
        getattr(model, verb)(*data, verbose=2)
        assert f"{model.name!r} compiles its first batch" in capsys.readouterr().out
    getattr(model, verb)(*data, verbose=2)
    assert "compiles" not in capsys.readouterr().out.split("so far")[-1]


def test_a_failed_first_batch_is_not_announced_any_more():
    notice = FirstBatch(None)
    notice.set_params({"verbose": 1})
    notice.set_model(keras.Sequential([keras.Input((1,))]))

    def fail():
        with notice:
            notice.on_predict_begin()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert notice._heartbeat._ended.is_set()


def test_only_the_first_validation_of_a_fit_is_announced():
    notice = FirstBatch(None)
    notice.set_params({"verbose": 1})
    notice.set_model(keras.Sequential([keras.Input((1,))]))
    heartbeats = []
    for _ in range(3):
        notice.on_test_begin()
        heartbeats.append(notice._heartbeat)
        notice.on_test_batch_end(0)
    assert heartbeats[0] is heartbeats[1] is heartbeats[2]
    assert heartbeats[0]._ended.is_set()
