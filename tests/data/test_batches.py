import keras
import numpy as np
import pytest

import tfp_ibnn as ibnn

N = 11
X = np.arange(N, dtype="float32")[:, None]


def batches(size=4, seed=0, **options):
    return ibnn.data.ShuffledBatches(X, np.arange(N), size, seed=seed, **options)


def order(data, epoch):
    data.set_epoch(epoch)
    return np.concatenate([data[index][1] for index in range(len(data))])


class Line(keras.Model):
    """A model with one weight."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.scale * x


class Record(keras.callbacks.Callback):
    """Notes the labels of every epoch, from the batches that `fit` asks for."""

    def __init__(self, data):
        super().__init__()
        self.data, self.epochs, self.steps = data, [], []
        fetch = type(data).__getitem__
        record = self

        class Recording(type(data)):
            def __getitem__(self, index):
                x, y = fetch(self, index)
                np.testing.assert_array_equal(x[:, 0], y)  # they belong together
                record.steps.append(y)
                return x, y

        data.__class__ = Recording

    def on_epoch_begin(self, epoch, logs=None):
        self.steps = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(np.concatenate(self.steps[: len(self.data)]))


def fit(data, epochs, initial_epoch=0, follow=True):
    model = Line()
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    record = Record(data)
    callbacks = [data.follow()] if follow else []
    model.fit(
        data,
        shuffle=False,
        epochs=epochs,
        initial_epoch=initial_epoch,
        callbacks=[*callbacks, record],
        verbose=0,
    )
    return record.epochs


@pytest.mark.once
@pytest.mark.parametrize("size", [1, 4, 11, 50])
def test_each_example_comes_once_an_epoch(size):
    data = batches(size)
    assert len(data) == -(-N // size)
    for epoch in range(3):
        np.testing.assert_array_equal(np.sort(order(data, epoch)), np.arange(N))


@pytest.mark.once
def test_the_order_is_a_function_of_seed_and_epoch():
    data = batches()
    forward = [order(data, epoch) for epoch in range(4)]
    np.random.seed(1)
    again = batches()
    for epoch in (3, 0, 2, 1):
        np.testing.assert_array_equal(order(again, epoch), forward[epoch])
    everything = [*forward, *(order(batches(seed=1), epoch) for epoch in range(4))]
    assert len({tuple(one) for one in everything}) == 8


@pytest.mark.once
def test_the_first_epoch_is_there_before_it_is_asked_for():
    data = batches()
    np.testing.assert_array_equal(data[0][1], order(batches(), 0)[:4])


@pytest.mark.once
@pytest.mark.parametrize(("size", "lengths"), [(4, [4, 4]), (11, [11]), (5, [5, 5]), (12, [11])])
def test_the_remainder_can_be_dropped(size, lengths):
    data = batches(size, drop_remainder=True)
    assert len(data) == len(lengths)
    assert [len(data[index][1]) for index in range(len(data))] == lengths
    whole = batches(size)
    np.testing.assert_array_equal(order(data, 5), order(whole, 5)[: sum(lengths)])


@pytest.mark.once
def test_over_the_epochs_nobody_is_left_out():
    data = batches(4, drop_remainder=True)
    seen = np.concatenate([order(data, epoch) for epoch in range(20)])
    assert set(seen) == set(range(N))


@pytest.mark.once
@pytest.mark.parametrize(("size", "drop"), [(4, True), (8, True), (50, False)])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_shares_make_up_the_batch(size, drop, count):
    x = np.arange(20)

    def shard(*which):
        return ibnn.data.ShuffledBatches(
            x, -x, size, seed=1, drop_remainder=drop, shard=which or (0, 1)
        )

    whole, shares = shard(), [shard(index, count) for index in range(count)]
    for data in (whole, *shares):
        data.set_epoch(3)
        assert len(data) == len(whole)
    for index in range(len(whole)):
        parts = [data[index] for data in shares]
        assert len({len(part) for part, _ in parts}) == 1
        together = [np.concatenate(both) for both in zip(*parts, strict=True)]
        np.testing.assert_array_equal(together, whole[index])


@pytest.mark.once
def test_what_keras_reads_ahead_is_no_epoch():
    """Under TensorFlow's strategies it begins before it tells the epoch."""
    data = batches()
    for _ in range(2):
        for index in range(len(data)):
            data[index]
        data.on_epoch_begin()
    with pytest.raises(ValueError, match=r"batches\.follow\(\)"):
        data[0]


@pytest.mark.once
def test_an_epoch_without_notice_is_an_error():
    data = batches()
    order(data, 0)
    with pytest.raises(ValueError, match=r"batches\.follow\(\)"):
        data[0]
    data.set_epoch(1)
    data[0]


@pytest.mark.parametrize("size", [2, 4, 6, 11])
def test_fit_sees_the_order_and_goes_on_with_it(size):
    expected = [order(batches(size), epoch) for epoch in range(4)]
    whole = fit(batches(size), 4)
    rest = fit(batches(size), 4, initial_epoch=2)
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(rest, expected[2:])


@pytest.mark.parametrize("size", [4, 6])
def test_fit_without_the_callback_is_noticed(size):
    with pytest.raises(Exception, match=r"batches\.follow\(\)"):
        fit(batches(size), 2, follow=False)


def test_a_model_can_be_evaluated_on_the_batches_again_and_again():
    data = batches()
    model = Line()
    model.compile("sgd", "mse")
    model.fit(data, shuffle=False, epochs=2, callbacks=[data.follow()], verbose=0)
    first = model.evaluate(data, verbose=0)
    assert model.evaluate(data, verbose=0) == pytest.approx(first)


@pytest.mark.once
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"y": np.arange(3)}, "same number"),
        ({"x": X[:0], "y": np.arange(0)}, "at least 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"shard": (2, 2)}, "`shard` must be .index, count."),
        ({"shard": 5}, "`shard` must be .index, count., such as .0, 2.; got 5"),
        ({"shard": (0, 1, 2)}, "`shard` must be .index, count."),
        ({"shard": (-1, 2)}, "shard"),
        ({"shard": (0, 0)}, "shard"),
        ({"shard": (0, 3)}, "batch of 4 .* 3 equal shares"),
        ({"shard": (0, 2)}, "batch of 3 .* 2 equal shares.*`drop_remainder`"),
    ],
)
def test_bad_arguments_are_named(changed, message):
    arguments = {"x": X, "y": np.arange(N), "batch_size": 4, "seed": 0} | changed
    with pytest.raises(ValueError, match=message):
        ibnn.data.ShuffledBatches(**arguments)
