import gc
from pathlib import Path

import pytest

# Imports and tracing make many objects that stay: `collected` looks for garbage, between tests.
gc.set_threshold(100_000)

# Folders and modules whose tests say something about the device they run on.
OF_A_DEVICE = (
    "calibration",
    "data/test_augmentation.py",
    "decisions",
    "diagnostics",
    "distillation",
    "export/test_saved_model.py",
    "flows",
    "generative",
    "metrics/test_all_streaming.py",
    "prediction/test_temperature.py",
    "scripts/lib/test_networks.py",
    "scripts/lib/test_networks_resnet20.py",
    "layers/test_adapter.py",
    "conversion/test_convert_any_model.py",
    "_core/test_backend.py",
    "layers/test_carried.py",
    "training/test_checkpoint.py",
    "conversion/test_choice.py",
    "conversion/test_convert.py",
    "noise/test_counter.py",
    "prediction/test_dropout.py",
    "whole/test_elbo.py",
    "whole/test_finiteness.py",
    "whole/test_gpu.py",
    "conversion/test_graph.py",
    "layers/test_control.py",
    "layers/test_heads.py",
    "layers/test_model.py",
    "likelihoods/test_distribution.py",
    "likelihoods/test_gaussian.py",
    "likelihoods/test_infer.py",
    "likelihoods/test_last_layer.py",
    "likelihoods/test_several.py",
    "posteriors/test_joint.py",
    "whole/test_keras_checklist.py",
    "whole/test_keras_files.py",
    "layers/test_multiplicative.py",
    "layers/test_loss_scale.py",
    "layers/test_mean_field.py",
    "whole/test_mixed_precision.py",
    "layers/test_mnf.py",
    "prediction/test_monte_carlo.py",
    "prediction/test_summary.py",
    "prediction/test_validation.py",
    "noise/test_forward_pass.py",
    "prediction/test_padding.py",
    "prediction/test_padding_steps.py",
    "layers/test_convolution.py",
    "posteriors/test_all.py",
    "posteriors/test_base.py",
    "posteriors/test_flow.py",
    "posteriors/test_gaussian.py",
    "posteriors/test_mixture.py",
    "posteriors/test_recipes.py",
    "layers/test_all_quantized.py",
    "layers/test_multiplicative_both_sides.py",
    "layers/test_rows.py",
    "scripts/lib/test_scan.py",
    "prediction/test_saved_model.py",
    "layers/test_folding_subclasses.py",
    "whole/test_trainability.py",
    "training/test_callbacks.py",
    "training/test_callbacks_monte_carlo.py",
    "training/test_optimizers.py",
    "weights",
)


def pytest_addoption(parser):
    parser.addoption("--gpu", action="store_true", help="run what says something about a GPU")


def pytest_sessionstart(session):
    """Set the backend up, unless other processes run the tests: they need not wait for that."""
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("dist", "no") != "no" and not is_worker:
        return
    from tests import autodiff, precision

    # JAX cannot switch once arrays exist. Keras makes its own arrays in floatx, so what a test does
    # in float32 stays in float32.
    autodiff.enable_float64()
    autodiff.end_datasets_at_once()
    autodiff.keep_contexts()
    autodiff.keep_kernels()
    autodiff.optimise_no_graphs()

    # On a GPU, as far as it has one, float32 products are coarser than a CPU's.
    precision.follow_hardware()


# They take many steps: the tests of every flow take minutes, those of their own file seconds.
SLOW_FLOWS = {"autoregressive-spline", "continuous", "residual"}
# Settings that no parameter depends on: what they do with a condition, the same flow does without.
SLOW_WITH_CONDITION = {
    *("autoregressive-reverse", "conv1x1-orthogonal", "coupling-mask", "coupling-swap"),
    *("glow-orthogonal", "sylvester-1"),
}

# Examples in docstrings that take seconds; other tests show the same.
SLOW_EXAMPLES = (
    "tfp_ibnn.calibration.run.calibrate",
    "tfp_ibnn.generative.density.FlowDensity",
)


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.name in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if not isinstance(name, str):
            continue
        conditional = item.path.name == "test_all_condition.py" and name in SLOW_WITH_CONDITION
        if conditional or name.removeprefix("over-") in SLOW_FLOWS:
            item.add_marker(pytest.mark.slow)
    if not config.getoption("--gpu"):
        return
    root = Path(__file__).parent
    wanted = [root / part for part in OF_A_DEVICE]
    chosen = [i for i in items if any(i.path.is_relative_to(place) for place in wanted)]
    others = set(items) - set(chosen)
    config.hook.pytest_deselected(items=list(others))
    items[:] = chosen
    from lib.devices import accelerators
    from tests.precision import NO_GPU

    if not accelerators():
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


@pytest.fixture(autouse=True)
def fixed_seed():
    import keras

    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def collected():
    """Collect what tests leave behind, once it is much, and pass by what was there before.

    The older one of TensorFlow's data iterators is, the longer it takes to be deleted, up to a
    minute; a training that ends amid an epoch leaves one.
    """
    yield
    if gc.get_count()[0] > 2_000:
        gc.collect()
        gc.freeze()


@pytest.fixture
def full_precision():
    """Multiply in float32 on a GPU too, for tests of two ways to the same numbers."""
    from tests import precision

    with precision.full_precision():
        yield


@pytest.fixture
def int8():
    """Skip where the backend multiplies int8 numbers wrongly, with Keras alone too."""
    from tests import precision

    if not precision.int8_is_right():
        pytest.skip("keras.ops.matmul of int8 numbers is wrong on this device")


@pytest.fixture
def eagerly():
    """Compile nothing on TensorFlow, for tests of a few steps that say nothing about graphs.

    To trace a training step takes as long as to run it six times.
    """
    from tests import autodiff

    autodiff.run_eagerly(True)
    yield
    autodiff.run_eagerly(False)


@pytest.fixture
def few_steps(eagerly):
    """End every training after two epochs of five steps, where it is only shown that it runs."""
    import keras

    keras.config.set_max_epochs(2)
    keras.config.set_max_steps_per_epoch(5)
    yield
    keras.config.set_max_epochs(None)
    keras.config.set_max_steps_per_epoch(None)


@pytest.fixture
def policy():
    """A function that sets floatx and the dtype policy for one test."""
    import keras

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
