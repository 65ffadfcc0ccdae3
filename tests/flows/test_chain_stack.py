"""A stack against its flows one by one; the registry covers what all flows promise."""

import keras
import numpy as np
import pytest
from keras import ops

import tfp_ibnn as ibnn
from tests.flows.tools import close, draws, numpy
from tests.registry import FLOWS
from tfp_ibnn import flows
from tfp_ibnn.flows.chain import copied, through

SIZE, NUMBER = 2, 3  # of the conditions, and of the flows


def pair(name, condition_size):
    """A stack at random weights, and as many flows with the same."""
    options = {"condition_size": condition_size, "dtype": "float64"}
    stack = flows.Stack(FLOWS[name](), NUMBER, **options)
    alone = [FLOWS[name](**options) for _ in range(NUMBER)]
    for flow in (stack, *alone):
        flow.build((None, 3))
    rng = np.random.default_rng(1)
    for key, weight in stack._parameters.items():
        value = rng.normal(size=weight.shape)
        weight.assign(value)
        for flow, each in zip(alone, value, strict=True):
            flow._parameters[key].assign(each)
        if condition_size:
            value = rng.normal(size=(SIZE, NUMBER, int(np.prod(weight.shape[1:]))))
            stack._linear_maps[key].assign(value.reshape(SIZE, -1))
            for i, flow in enumerate(alone):
                flow._linear_maps[key].assign(value[:, i])
    return stack, alone


@pytest.mark.parametrize("name", ["affine", "planar", "radial", "sylvester-3"])
@pytest.mark.parametrize("condition_size", [None, SIZE])
@pytest.mark.parametrize("way", ["forward", "inverse"])
def test_a_stack_is_its_flows_one_by_one(float64, name, condition_size, way):
    stack, alone = pair(name, condition_size)
    x = ops.convert_to_tensor(draws((5, 2, 4, 3)))
    condition = None if condition_size is None else draws((2, 4, SIZE), seed=7)
    expected, change = through(alone, x, condition, way)
    y, found = getattr(stack, f"{way}_and_log_det")(x, condition)
    close(numpy(y), numpy(expected), 1e-12)
    close(numpy(found) + np.zeros((5, 2, 4)), numpy(change), 1e-12)  # one for all, if constant
    close(numpy(getattr(stack.bijector(condition), way)(x)), numpy(expected), 1e-12)


def test_a_stack_starts_as_its_flows_would():
    keras.utils.set_random_seed(0)
    alone = [flows.Sylvester(units=2, condition_size=SIZE) for _ in range(NUMBER)]
    for flow in alone:
        flow.build((None, 3))
    keras.utils.set_random_seed(0)
    stack = flows.Stack(flows.Sylvester(units=2), NUMBER, condition_size=SIZE)
    stack.build((None, 3))
    assert len(stack.weights) == len(alone[0].weights)
    for name, weight in stack._parameters.items():
        close(numpy(weight), np.stack([numpy(flow._parameters[name]) for flow in alone]), 0)


def test_neighbours_of_one_kind_with_a_condition_become_stacks():
    given = [flows.Planar(), flows.Planar(), flows.Sylvester(2), flows.Sylvester(3), flows.Planar()]
    made = copied([*given, *(flows.AffineCoupling() for _ in range(2))], "float32", "flows", SIZE)
    kinds = [type(flow).__name__ for flow in made]
    assert kinds == ["Stack", *["Sylvester"] * 2, "Planar", *["AffineCoupling"] * 2]
    assert made[0].number == 2
    assert made[0].condition_size == made[0].flow.condition_size == SIZE
    assert [type(flow) for flow in copied(given, "float32")] == [type(flow) for flow in given]


def test_a_flow_with_a_map_of_its_own_keeps_it():
    class Still(flows.Planar):
        def forward_and_log_det(self, x, condition=None, training=False):
            return x, ops.zeros_like(x[..., 0])

    assert len(copied([Still(), Still()], "float32", "flows", SIZE)) == 2
    with pytest.raises(ValueError, match="an Affine, Planar, Radial or Sylvester flow; got Still"):
        flows.Stack(Still(), 2)


@keras.saving.register_keras_serializable(package="tests")
class Declared(flows.Planar):
    stackable = True


def test_a_flow_declares_that_it_is_stackable():
    known = {kind for kind in vars(flows).values() if isinstance(kind, type)}
    stackable = {kind for kind in known if getattr(kind, "stackable", False)}
    assert stackable == {flows.Affine, flows.Planar, flows.Radial, flows.Sylvester}


def test_a_subclass_does_not_inherit_that_it_is_stackable():
    class Stretched(flows.Planar):
        def bijector(self, condition=None):
            ones = ops.ones((self.channels,))
            return flows.AffineBijector(shift=ones, scale=2 * ones)

    assert not Stretched.stackable
    assert len(copied([Stretched(), Stretched()], "float32", "flows", SIZE)) == 2
    with pytest.raises(ValueError, match="got Stretched, .* declare `stackable = True`"):
        flows.Stack(Stretched(), 2)


def test_a_flow_of_ones_own_can_be_stackable():
    (stack,) = copied([Declared(), Declared()], "float32", "flows", SIZE)
    assert (type(stack), type(stack.flow), stack.number) == (flows.Stack, Declared, 2)


@pytest.mark.parametrize(
    ("flow", "number", "problem"),
    [
        (flows.InverseAutoregressive(), 2, "an Affine, Planar, Radial or Sylvester flow"),
        (
            flows.Stack(flows.Planar(), 2),
            2,
            "an Affine, Planar, Radial or Sylvester flow; got Stack",
        ),
        ("planar", 2, "`flow` must be a flow"),
        (flows.Planar(), 0, "`number` must be"),
    ],
)
def test_wrong_arguments_are_refused(flow, number, problem):
    with pytest.raises(ValueError, match=problem):
        flows.Stack(flow, number)


def test_a_vae_with_a_stack_is_saved_whole(tmp_path):
    encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "relu")])
    decoder = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])
    vae = ibnn.VAE(encoder, decoder, 3, [flows.Planar() for _ in range(NUMBER)], seed=0)
    vae.compile("adam")
    x = np.random.default_rng(0).random((20, 6)).astype("float32")
    vae.fit(x, epochs=2, batch_size=10, verbose=0)
    assert [type(flow) for flow in vae.flows] == [flows.Stack]
    assert np.all(numpy(vae.flows[0]._linear_maps["u"]).any(axis=0))  # all of them are trained
    vae.save(tmp_path / "vae.keras")
    again = keras.models.load_model(tmp_path / "vae.keras")
    close(again.encode(x, seed=1), vae.encode(x, seed=1), 1e-6)
