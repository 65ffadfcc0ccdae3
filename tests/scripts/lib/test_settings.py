import dataclasses
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfp_ibnn as ibnn
from lib import Settings, checks, data, networks, read_posteriors
from lib.settings import DATASETS
from lib.shifts import CORRUPTIONS
from tfp_ibnn.flows import InvertibleConv1x1, Planar, Radial

SCRIPTS = Path(__file__).parents[3] / "scripts"

pytestmark = pytest.mark.once


# Settings.

NAMES = [
    "dataset",
    "model",
    "noise",
    "kl_reduction",
    "affine",
    "optimizer",
    "schedule",
    "precision",
]
COUNTS = [
    "base_components",
    "components",
    "train_samples",
    "samples",
    "epochs",
    "batch_size",
    "evaluation_samples",
    "log_every",
]
WHOLE = ["kl_warmup", "pretrain_epochs", "warmup_epochs", "validation", "evaluate_every", "seed"]
POSITIVE = ["prior_scale", "learning_rate"]
OPTIONAL = [
    "initial_scale",
    "mean_spread",
    "stochastic_learning_rate",
    "pretrain_learning_rate",
]
NOT_NEGATIVE = ["beta", "gamma", "weight_decay"]
NO_NUMBERS = ["1", [1], True, float("nan"), float("inf")]
BAD = [
    *((name, value) for name in NAMES for value in ("", "no such", None, 3, [])),
    *((name, value) for name in COUNTS for value in (0, -1, 1.5, None, *NO_NUMBERS)),
    *((name, value) for name in WHOLE for value in (-1, 1.5, None, *NO_NUMBERS)),
    *((name, value) for name in POSITIVE for value in (0, -1.0, None, *NO_NUMBERS)),
    *((name, value) for name in OPTIONAL for value in (0, -1.0, *NO_NUMBERS)),
    *((name, value) for name in NOT_NEGATIVE for value in (-1e-9, None, *NO_NUMBERS)),
    *(("dropout", value) for value in (-0.1, 1, 1.5, None, *NO_NUMBERS)),
    *(("limit", value) for value in (0, -1, 1.5, *NO_NUMBERS)),
    ("pretrain_optimizer", "rmsprop"),
    *(("flow_depth", value) for value in (0, -1, 1.5, *NO_NUMBERS)),
    *(("classes", value) for value in (0, 1, 2.5, 10, 11, *NO_NUMBERS)),
    *((name, value) for name in ("flow_layers", "deterministic_layers") for value in ("(", 3, [])),
    *(
        (name, value)
        for name in ("learn_prior_scale", "freeze_network", "transfer")
        for value in (None, "no", 2)
    ),
    ("augment", "no"),
    ("posterior", None),
    ("posterior", 3),
    ("posterior", "gausian"),
    ("pretrained", 3),
    ("model", "wide_resnet_16"),
    ("model", "wide_resnet_11_4"),
    ("model", "wide_resnet_4_4"),
    ("model", "wide_resnet_16_0"),
    ("model", "mlp_"),
    ("model", "mlp_0"),
    ("model", "mlp_8_tanh"),
    ("model", "mlp_sigmoid"),
    *(("train_size", value) for value in (0, -1, 1.5, 60_000, *NO_NUMBERS)),
    *(("elbo_passes", value) for value in (-1, 1.5, None, *NO_NUMBERS)),
    ("validation", 50_000),
    ("seed", 2**32),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda part: str(part)[:20])
def test_a_bad_value_is_named(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        Settings(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "dataset"), [("lenet", "digits"), ("vgg16", "mnist"), ("vgg16", "digits")]
)
def test_a_network_too_large_for_the_images_is_found_at_once(model, dataset):
    with pytest.raises(ValueError, match="model"):
        Settings(model=model, dataset=dataset)


def test_a_whole_number_is_kept_as_one():
    """Or refused: 3.0 epochs that pass the checks are an error of Keras's later."""
    for name in (*COUNTS, *WHOLE, "limit"):
        try:
            found = Settings(**{name: 3.0})
        except ValueError as error:
            assert name in str(error)  # noqa: PT017
        else:
            assert isinstance(getattr(found, name), int), name


@pytest.mark.parametrize(
    "options",
    [
        {"pretrained": "a.keras", "pretrain_epochs": 1},
        {"pretrained": "a.keras", "dropout": 0.1},
        {"dropout_layers": "fc1"},
        {"limit": 10, "validation": 10},
        {"dataset": "digits", "model": "mlp", "validation": 1297},
    ],
)
def test_settings_that_exclude_each_other_are_named(options):
    with pytest.raises(ValueError, match="`.*`"):
        Settings(**options)


def test_settings_are_keyword_only_and_frozen():
    with pytest.raises(TypeError):
        Settings("cifar10")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().epochs = 3


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"posterior": "none"}, "deterministic"),
        ({"posterior": "none", "dropout": 0.1}, "mc_dropout"),
        ({"posterior": "gaussian", "dropout": 0.1}, "gaussian"),
        ({"posterior": "mixture"}, "mixture"),
    ],
)
def test_the_method_has_a_name(options, method):
    assert Settings(**options).method == method


def test_stages_and_defaults():
    assert Settings().augments
    assert not Settings(dataset="mnist").augments
    assert Settings(dataset="mnist", augment=True).augments
    assert not Settings(augment=False).augments
    (only,) = Settings(epochs=3).stages()
    assert only == ("training", 3, "nesterov", 0.02)
    first, second = Settings(epochs=3, pretrain_epochs=2, pretrain_learning_rate=1.0).stages()
    assert (first, second) == (("pretraining", 2, "nesterov", 1.0), only)
    first, _ = Settings(pretrain_epochs=2, pretrain_optimizer="adam").stages()
    assert first == ("pretraining", 2, "adam", 0.02)
    assert Settings(model="wide_resnet_16_4").network() == (
        "wide_resnet",
        {"depth": 16, "width": 4},
    )
    assert Settings(model="wide_resnet").network() == ("wide_resnet", {})
    hidden = {"hidden": (64, 32), "activation": "relu"}
    assert Settings(model="mlp_64_32").network() == ("mlp", hidden)
    assert Settings(model="mlp_5_sigmoid").network()[1]["activation"] == "sigmoid"


def test_settings_survive_json():
    chosen = Settings(epochs=3, learning_rate=0.1 + 0.2, augment=False)
    assert Settings(**json.loads(json.dumps(chosen.as_dict()))) == chosen


def test_a_record_of_the_first_runs_stays_valid():
    """Settings that came later are absent at their defaults, as they are in older records."""
    later = {
        "warmup_epochs": 1,
        "log_every": 2,
        "deterministic_layers": "conv1",
        "flow_layers": "conv2",
        "flow_depth": 1,
        "base_components": 2,
        "learn_prior_scale": True,
        "freeze_network": True,
        "classes": 5,
        "transfer": True,
        "train_size": 100,
        "elbo_passes": 2,
        "dropout_layers": "fc.*",
    }
    assert not set(later) & set(Settings().as_dict())
    assert set(later) <= set(Settings(**later, pretrain_epochs=2, dropout=0.1).as_dict())


def test_a_transfer_needs_half_of_the_classes_and_a_pretraining():
    for wrong in ({}, {"classes": 5}, {"classes": 4, "pretrain_epochs": 1}, {"pretrain_epochs": 1}):
        with pytest.raises(ValueError, match="cifar10's `classes` and `pretrain_epochs`"):
            Settings(transfer=True, **wrong)


@pytest.mark.parametrize("options", [{}, {"posterior": "none", "dropout": 0.5}])
def test_a_mobilenet_has_no_flow_and_no_dropout(options):
    with pytest.raises(ValueError, match="takes `posterior` 'none' or 'gaussian', and no"):
        Settings(model="mobilenet_v2", **options)


def script():
    spec = importlib.util.spec_from_file_location("train_cifar", SCRIPTS / "train_cifar.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(command):
    """Return the settings that the script makes of a command line."""
    python, name, *arguments = shlex.split(command)
    assert (python, name) == ("python", "scripts/train_cifar.py")
    options = vars(script().parse([*arguments, "--output", "x"]))
    precision = options.pop("mixed_precision")
    for other in ("output", "data_dir", "backend", "devices", "distributed", "jit"):
        options.pop(other)
    return Settings.with_defaults(
        **options, precision=f"mixed_{precision}" if precision else "float32"
    )


def test_the_options_know_all_there_is():
    train, evaluate = checks.OPTIONS["train"], checks.OPTIONS["evaluate"]
    assert train["dataset"]["kind"] == list(DATASETS) == [*data.DATASETS, "four_clusters"]
    assert evaluate["dataset"]["kind"] == evaluate["foreign"]["each"] == list(data.DATASETS)
    assert evaluate["corruptions"]["each"] == evaluate["corruptions"]["default"]
    assert evaluate["corruptions"]["each"] == list(CORRUPTIONS)


def test_the_groups_of_the_help_hold_known_options():
    grouped = " ".join(script().GROUPS.values()).split()
    assert len(set(grouped)) == len(grouped)
    assert set(grouped) < set(checks.OPTIONS["train"])


def test_the_parser_has_the_defaults_of_the_library_and_else_those_of_the_settings():
    found = {"prior_scale": 0.3, "initial_scale": 0.1, "beta": 100.0}
    assert parsed("python scripts/train_cifar.py") == Settings(**found)
    few = parsed("python scripts/train_cifar.py --model vgg16 --classes 5 --limit 2000")
    assert (few.prior_scale, few.initial_scale, few.beta) == (3 / 16, 0.1, 4.0)
    deep = parsed("python scripts/train_cifar.py --model mobilenet_v2 --posterior gaussian")
    assert deep.prior_scale == deep.initial_scale == 3 / 53
    given = parsed("python scripts/train_cifar.py --prior-scale 0.5 --beta 1")
    assert given == Settings()
    assert parsed("python scripts/train_cifar.py --posterior none") == Settings(posterior="none")


@pytest.mark.parametrize(
    "name", ["lenet", "mlp", "mlp_8_8_8", "wide_resnet_10_1", "wide_resnet_10_2"]
)
def test_the_depth_of_a_network_is_that_of_its_posteriors(name):
    chosen = Settings(model=name, posterior="gaussian")
    kind, size = chosen.network()
    model = getattr(networks, kind)(input_shape=(32, 32, 3), **size)
    sto = ibnn.to_stochastic(model, ibnn.NormalAffine(), train_size=9)
    assert chosen.depth == len(ibnn.stochastic_layers(sto))


@pytest.mark.parametrize("learning_rate", [0.1, 1e-7, 0.123456789, 1234567.5, 3e-4 / 7, 2])
def test_the_command_keeps_every_digit(learning_rate):
    chosen = Settings(learning_rate=learning_rate)
    assert parsed(chosen.command()) == chosen


COUNT = st.integers(1, 10**7)
WHOLE_NUMBER = st.integers(0, 10**6)
NUMBER = st.sampled_from([0.001, 0.25, 1.0, 3.0, 1e-7, 12.5, 1e6])
FIELDS = {
    "dataset": st.sampled_from(["cifar10", "fashion_mnist", "mnist"]),
    "model": st.sampled_from(["lenet", "mlp", "wide_resnet", "wide_resnet_16_4"]),
    "posterior": st.sampled_from(["none", "gaussian", "flow", "mixture"]),
    "noise": st.sampled_from(["channel", "position"]),
    "kl_reduction": st.sampled_from(["sum", "mean"]),
    "affine": st.sampled_from(["last", "first"]),
    "optimizer": st.sampled_from(["sgd", "nesterov", "adam"]),
    "pretrain_optimizer": st.sampled_from([None, "sgd", "nesterov", "adam"]),
    "schedule": st.sampled_from(["constant", "cosine"]),
    "precision": st.sampled_from(["float32", "mixed_bfloat16", "mixed_float16"]),
    "augment": st.sampled_from([None, True, False]),
    "components": st.integers(2, 9),
    "base_components": st.integers(1, 9),
    **{name: COUNT for name in COUNTS if "components" not in name},
    **{name: WHOLE_NUMBER for name in WHOLE if name != "validation"},
    **{name: NUMBER for name in (*POSITIVE, *NOT_NEGATIVE)},
    **{name: st.none() | NUMBER for name in OPTIONAL},
    "dropout": st.sampled_from([0.0, 0.05, 0.5]),
    "flow_layers": st.sampled_from([None, "conv[2-7]", "fc1|fc2"]),
    "flow_depth": st.none() | st.integers(1, 9),
    "deterministic_layers": st.sampled_from([None, "conv1", "it's"]),
    "learn_prior_scale": st.booleans(),
    "freeze_network": st.booleans(),
    "transfer": st.booleans(),
    "pruning": st.booleans(),
    "classes": st.none() | st.integers(2, 9),
    "validation": st.integers(0, 9),
    "limit": st.none() | st.integers(10, 10**5),
    "train_size": st.none() | st.integers(100, 1000),
    "elbo_passes": st.integers(0, 9),
    "dropout_layers": st.sampled_from([None, "conv2|fc.*"]),
}


OF_FLOWS = ("flow_layers", "flow_depth", "base_components")


def test_every_field_is_tried():
    assert set(FIELDS) | {"pretrained"} == {field.name for field in dataclasses.fields(Settings)}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional=FIELDS))
def test_the_command_gives_the_settings_back(options):
    if warmup := options.get("warmup_epochs"):
        longer = {name: warmup + options.get(name, 1) for name in ("epochs", "pretrain_epochs")}
        options = {**options, **longer}
        options["pretrain_epochs"] += 1
    if options.get("posterior", "flow") != "flow":
        options = {name: value for name, value in options.items() if name not in OF_FLOWS}
    if not options.get("pretrain_epochs") or options.get("posterior") == "none":
        options = {name: value for name, value in options.items() if name != "freeze_network"}
    if options.get("transfer"):
        options = {**options, "classes": 5, "pretrain_epochs": options.get("pretrain_epochs") or 1}
    if not options.get("dropout"):
        options = {name: value for name, value in options.items() if name != "dropout_layers"}
    chosen = Settings(**options)
    assert parsed(chosen.command()) == chosen


@pytest.mark.parametrize("options", [{}, {"posterior": "none", "pretrain_epochs": 1}])
def test_what_is_frozen_must_be_trained_and_leave_something(options):
    with pytest.raises(ValueError, match="it needs a `posterior`, and `pretrained`"):
        Settings(freeze_network=True, **options)


@pytest.mark.parametrize("option", [{"flow_layers": "fc1"}, {"flow_depth": 2}])
@pytest.mark.parametrize("posterior", ["gaussian", "mixture", "none"])
def test_what_is_of_flows_is_refused_without_any(posterior, option):
    with pytest.raises(ValueError, match=f"`{next(iter(option))}` is of the posterior 'flow'"):
        Settings(posterior=posterior, **option)


def test_flows_go_where_they_are_told():
    chosen = Settings(
        model="vgg16",
        flow_layers="conv[2-7]",
        flow_depth=1,
        base_components=3,
        deterministic_layers="conv1",
        learn_prior_scale=True,
    )
    early, rest = chosen.posteriors().items()
    assert early[0] == "conv[2-7]"
    assert sum(isinstance(flow, InvertibleConv1x1) for flow in early[1].flows) == 1
    assert not rest[1].flows
    assert re.fullmatch(rest[0], "conv10")
    assert not re.fullmatch(rest[0], "conv1")
    for _, posterior in (early, rest):
        assert (posterior.components, posterior.shared_components) == (3, True)
        assert posterior.learn_prior_scale


def test_held_out_images_must_be_left_of_the_classes():
    assert Settings(dataset="cifar10", classes=2, validation=9_999).validation == 9_999
    with pytest.raises(ValueError, match="10000 training images"):
        Settings(dataset="cifar10", classes=2, validation=10_000)


@pytest.mark.parametrize("stage", ["epochs", "pretrain_epochs"])
def test_a_warmup_must_end(stage):
    with pytest.raises(ValueError, match="`warmup_epochs` must be below the 3 epochs of"):
        Settings(warmup_epochs=3, **{stage: 3})


def test_the_command_quotes_paths(tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    path = write(folder, {".*": {"posterior": "NormalAffine"}})
    chosen = Settings(posterior=str(path), pretrained="a b.keras")
    assert parsed(chosen.command()) == chosen
    assert chosen.method == "custom"


# Posterior files.


def write(folder, content):
    path = folder / "posteriors.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_the_example_of_the_docstring(tmp_path):
    text = read_posteriors.__doc__.split("and its arguments:")[1].split("A prior is")[0]
    found = read_posteriors(write(tmp_path, text), {"prior_scale": 0.7, "gamma": 0.2})
    assert list(found) == ["conv2", "fc1", ".*"]
    assert found["conv2"].prior_scale == 0.3
    assert found["fc1"].prior_scale == found[".*"].prior_scale == 0.7
    assert found["conv2"].gamma == 0.2
    assert [type(flow) for flow in found["fc1"].flows if type(flow) in (Planar, Radial)] == [
        Planar,
        Radial,
    ]


def test_the_content_of_a_file_will_do():
    text = (
        '{"fc1": {"posterior": "NormalPlanar1d", "depth": 3}, ".*": {"posterior": "NormalAffine"}}'
    )
    chosen = Settings(posterior=text, prior_scale=0.7)
    assert parsed(chosen.command()) == chosen
    first, rest = chosen.posteriors().values()
    assert first.prior_scale == rest.prior_scale == 0.7
    assert [type(flow) for flow in first.flows].count(Planar) == 3
    for bad, message in ((text[:-1], "not JSON"), (text.replace("depth", "dept"), "'dept'; did")):
        with pytest.raises(ValueError, match=message):
            Settings(posterior=bad)


def test_settings_read_the_file(tmp_path):
    path = write(tmp_path, {"fc1": {"posterior": "NormalPlanar1d", "beta": 0.5}})
    found = Settings(posterior=str(path), prior_scale=0.9, beta=2.0).posteriors()
    assert found["fc1"].prior_scale == 0.9
    assert float(found["fc1"].get_config()["beta"]) == 0.5


@pytest.mark.parametrize("name", ["fow", "Flow", "", "no/such.json", "a" * 5000, "\0"])
def test_what_is_neither_a_posterior_nor_a_file_is_told_with_the_names(name):
    with pytest.raises(ValueError, match="`posterior` must be 'none', 'gaussian', 'flow', 'mix"):
        Settings(posterior=name)


def affine(**arguments):
    return {".*": {"posterior": "NormalAffine", **arguments}}


def flow(**arguments):
    return {"fc": {"posterior": "FlowPosterior", "flows": [{"flow": "Planar"}, arguments]}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1, 2]", "must map"),
        ("{}", "must map"),
        ("null", "must map"),
        ({"fc": "NormalAffine"}, "'fc'.*'posterior'"),
        ({"fc": {}}, "'fc'.*'posterior'"),
        ({"fc": None}, "'fc'.*'posterior'"),
        ({"fc": {"posterior": "NormalAfine"}}, "'fc'.*did you mean 'NormalAffine'"),
        ({"fc": {"posterior": 3}}, "'fc'.*unknown posterior 3"),
        ({"fc": {"posterior": None}}, "'fc'.*unknown posterior None"),
        ({"fc": {"posterior": ["NormalAffine"]}}, "'fc'.*unknown posterior"),
        ({"fc": {"posterior": {}}}, "'fc'.*unknown posterior"),
        (affine(prior_scal=1), "prior_scal'.*did you mean 'prior_scale'"),
        (affine(zzz=1), "unknown key 'zzz'; known are"),
        (affine(depth=2), "unknown key 'depth'"),
        (affine(flows=[]), "unknown key 'flows'"),
        (affine(prior_scale="0.5"), r"'\.\*'.*prior_scale"),
        (affine(prior_scale=-1), r"'\.\*'.*prior_scale"),
        ('{".*": {"posterior": "NormalAffine", "prior_scale": NaN}}', "prior_scale"),
        (affine(affine="middle"), "affine"),
        (affine(seed="one"), "seed"),
        ({"fc": {"posterior": "NormalPlanar1d", "depth": 0}}, "depth"),
        ({"fc": {"posterior": "FlowPosterior", "flows": "Planar"}}, "`flows` must be a list"),
        ({"fc": {"posterior": "FlowPosterior", "flows": {"flow": "Planar"}}}, "must be a list"),
        ({"fc": {"posterior": "FlowPosterior", "flows": ["Planar"]}}, "flow 1.*'flow'"),
        (flow(flow="Planer"), "flow 2: unknown flow 'Planer'; did you mean 'Planar'"),
        (flow(flow="Flow"), "flow 2: unknown flow"),
        (flow(flow="PlanarBijector"), "flow 2: unknown flow"),
        (flow(flow="FlowBijector"), "flow 2: unknown flow"),
        (flow(flow=[]), "flow 2: unknown flow"),
        (flow(flow="Sylvester", unit=3), "flow 2: unknown key 'unit'; did you mean 'units'"),
        (flow(flow="Sylvester", units=0), "flow 2.*units"),
        ({"fc": {"posterior": "MixturePosterior", "components": 0}}, "components"),
        ({"(": {"posterior": "NormalAffine"}}, r"'\('"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_posteriors(path)
    assert "posteriors.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, reason in ((tmp_path / "none.json", "No such file"), (tmp_path, "directory")):
        with pytest.raises(ValueError, match=reason) as caught:
            read_posteriors(path)
        assert path.name in str(caught.value)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes\.json"):
        read_posteriors(tmp_path / "bytes.json")


@pytest.mark.parametrize("option", [{"affine": "first"}, {"components": 2}, {"initial_scale": 0.1}])
def test_what_belongs_into_a_posterior_file_is_refused_beside_it(tmp_path, option):
    path = tmp_path / "posterior.json"
    path.write_text(json.dumps({".*": {"posterior": "NormalAffine"}}))
    with pytest.raises(ValueError, match=next(iter(option))):
        Settings(posterior=str(path), **option)
