import gc

import keras
import pytest

from tests import autodiff

# For the whole session: JAX cannot switch once arrays exist. Keras makes its own arrays in floatx,
# so what a test does in float32 stays in float32.
autodiff.enable_float64()


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def collected():
    """Collect what each test leaves behind, at once, and pass by all that was there before.

    The older one of TensorFlow's data iterators is, the longer it takes to be deleted, up to a
    minute; a training that ends amid an epoch leaves one.
    """
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture
def eagerly():
    """Compile nothing on TensorFlow, for tests of a few steps that say nothing about graphs.

    To trace a training step takes as long as to run it six times.
    """
    autodiff.run_eagerly(True)
    yield
    autodiff.run_eagerly(False)


@pytest.fixture
def few_steps(eagerly):
    """End every training after five steps, for examples of which only that they run is shown."""
    keras.config.set_max_epochs(1)
    keras.config.set_max_steps_per_epoch(5)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.fixture
def policy():
    """A function that sets floatx and the dtype policy for one test."""
    before = keras.config.floatx(), keras.config.dtype_policy()

    def switch(name):
        if name in ("float32", "float64"):
            keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)

    yield switch
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@pytest.fixture
def float64(policy):
    policy("float64")
