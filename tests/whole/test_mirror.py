"""A test is where its code is, so that whoever changes a file finds what is said about it.

tests/<room>/test_<file>.py is about tfp_ibnn/<room>/<file>.py; a second one has a word more, as in
test_<file>_<aspect>.py. test_all.py and test_all_<aspect>.py run over everything in a room, and
tests/whole/ holds what crosses rooms. tests/scripts/ mirrors scripts/ in the same way.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
APART = ("robustness", "stranger", "whole")  # campaigns, toys, and what crosses rooms

TESTED_ELSEWHERE = {
    "_core/backend/graphs": "export/test_frozen.py",
    "_core/backend/jax": "_core/test_backend.py",
    "_core/backend/shared": "_core/test_backend.py",
    "_core/backend/tensorflow": "_core/test_backend.py",
    "_core/command_line": "calibration/test_run.py",
    "_core/gamma": "likelihoods/test_dirichlet.py",
    "_core/keras_layers": "_core/test_keras_internals.py",
    "_core/keras_losses": "_core/test_keras_internals.py",
    "_core/keras_optimizers": "_core/test_keras_internals.py",
    "_core/protocols": "whole/test_stranger.py",
    "_core/serialization": "whole/test_keras_files.py",
    "_core/text": "whole/test_strings.py",
    "_core/unrolling": "export/test_all.py",
    "calibration/card": "calibration/test_report.py",
    "calibration/deciding": "calibration/test_run.py",
    "calibration/engine": "calibration/test_run.py, calibration/test_fine_tuned.py",
    "calibration/record": "calibration/test_report.py",
    "calibration/table": "calibration/test_report.py",
    "conversion/classes": "layers/test_carried.py",
    "conversion/copying": "conversion/test_convert.py",
    "conversion/transfer": "conversion/test_convert_any_model.py",
    "conversion/wrappers": "prediction/test_temperature.py, prediction/test_monte_carlo.py",
    "data/datasets": "whole/test_datasets.py",
    "decisions/class_scores": "decisions/test_conformal.py",
    "decisions/fitted": "decisions/test_all_files.py",
    "decisions/groups": "decisions/test_conformal.py",
    "decisions/hashing": "decisions/test_conformal_coverage.py",
    "decisions/limits": "decisions/test_conformal.py",
    "distillation/student": "distillation/test_distill.py",
    "distillation/transfer": "distillation/test_distill.py",
    "export/command": "export/test_exporting.py",
    "export/inputs": "export/test_saved_model.py",
    "export/reading": "export/test_all.py, export/test_scores.py",
    "export/served": "export/test_exporting.py",
    "flows/_conditional": "flows/test_all_condition.py",
    "flows/_elementwise": "flows/test_coupling.py, flows/test_autoregressive.py",
    "flows/_networks": "flows/test_coupling.py, flows/test_autoregressive.py",
    "flows/_rows": "flows/test_all_contract.py, flows/test_all_condition.py",
    "flows/_splines": "flows/test_spline.py",
    "flows/bijector": "flows/test_all_bijectors.py",
    "flows/flow": "flows/test_all_contract.py",
    "flows/inverse": "flows/test_all_contract.py, flows/test_all_condition.py",
    "generative/conditions": "generative/test_density.py, generative/test_all_inputs.py",
    "generative/mixture": "generative/test_density.py",
    "generative/pixels": "generative/test_vae.py",
    "generative/unsupervised": "generative/test_all_inputs.py",
    "layers/base": "layers/test_multiplicative.py",
    "layers/blocks": "layers/test_mean_field.py",
    "layers/estimators": "layers/test_mean_field.py",
    "layers/inside": "conversion/test_convert_any_model.py",
    "layers/noise_model": "layers/test_model.py, layers/test_loss_scale.py",
    "layers/recurrent": "conversion/test_convert_any_model.py",
    "layers/tracking": "layers/test_model.py, whole/test_finiteness.py",
    "likelihoods/base": "whole/test_stranger.py",
    "likelihoods/categorical": "likelihoods/test_temperature.py, prediction/test_summary.py",
    "likelihoods/arrays": "likelihoods/test_labels.py, likelihoods/test_last_layer.py",
    "likelihoods/numbers": "whole/test_stranger.py, likelihoods/test_several.py",
    "likelihoods/quantiles": "likelihoods/test_dirichlet.py, likelihoods/test_gaussian.py",
    "likelihoods/second_order": "likelihoods/test_dirichlet.py, likelihoods/test_spread.py",
    "metrics/_base": "metrics/test_all_streaming.py",
    "metrics/_mean": "likelihoods/test_several.py",
    "metrics/_running_sum": "metrics/test_all_streaming.py",
    "noise/hashing": "decisions/test_conformal_coverage.py",
    "noise/source": "noise/test_forward_pass.py",
    "plots/style": "plots/test_all_baseline.py",
    "posteriors/deep_recipes": "posteriors/test_recipes.py",
    "posteriors/densities": "posteriors/test_all.py, posteriors/test_mixture.py",
    "posteriors/earlier": "conversion/test_continual.py",
    "posteriors/mean_field": "layers/test_mean_field.py",
    "posteriors/mnf": "layers/test_mnf.py",
    "posteriors/template": "posteriors/test_all.py",
    "prediction/exporting": "export/test_saved_model.py",
    "prediction/noise_sampler": "prediction/test_monte_carlo.py",
    "prediction/scaling": "prediction/test_temperature.py, prediction/test_class_scaling.py",
    "prediction/samplers": "prediction/test_monte_carlo.py",
    "prediction/verbs": "prediction/test_monte_carlo.py",
    "training/nonfinite": "whole/test_finiteness.py",
    "weights/adam": "weights/test_gaussian_vi.py, weights/test_refinement.py",
    "weights/base": "weights/test_ensemble.py, weights/test_snapshots_swag.py",
    "weights/chains": "weights/test_hmc.py, diagnostics/test_reference_hmc.py",
    "weights/density": "diagnostics/test_evidence.py",
    "weights/flat": "weights/test_gaussian_vi.py",
    "weights/laplace/blocks": "weights/laplace/test_kronecker.py",
    "weights/laplace/marginal": "weights/laplace/test_evidence.py",
    "weights/laplace/options": "weights/laplace/test_laplace.py",
    "weights/laplace/patches": "weights/laplace/test_kronecker.py",
    "weights/laplace/structure": "weights/laplace/test_full.py",
    "weights/laplace/structures": "weights/laplace/test_kronecker.py",
    "weights/members": "weights/test_ensemble.py",
    "weights/objectives": "weights/test_refinement.py",
    "weights/refining": "weights/test_refinement.py",
    "weights/scaled": "calibration/test_run.py",
    "weights/target": "weights/test_features.py",
    "weights/vectors": "weights/test_natural_gradients.py",
}
"""Files of the package without a test of their own, and the tests that show what they do."""


def subjects(folder):
    """Return the names of the files and folders of Python code in a folder."""
    files = {path.stem for path in folder.glob("*.py") if path.stem != "__init__"}
    return files | {path.parent.name for path in folder.glob("*/*.py")}


def code_of(folder):
    """Return the folder with the code that a folder of tests is about."""
    parts = folder.relative_to(TESTS).parts
    return ROOT.joinpath(*parts) if parts[0] == "scripts" else ROOT.joinpath("tfp_ibnn", *parts)


def is_about(test, names, others=("all",)):
    """Whether the name of a test begins with that of one of the subjects, or with `all`."""
    subject = test.stem.removeprefix("test_")
    return any(f"{subject}_".startswith(f"{name.strip('_')}_") for name in (*names, *others))


def folders():
    found = {path.parent for path in TESTS.rglob("test_*.py")}
    return sorted(x for x in found if x.relative_to(TESTS).parts[0] not in APART)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(TESTS)))
def test_tests_are_where_their_code_is(folder):
    assert folder != TESTS
    names = subjects(code_of(folder))
    assert [
        test.name for test in sorted(folder.glob("test_*.py")) if not is_about(test, names)
    ] == []


def test_a_test_about_nothing_is_found():
    assert is_about(Path("test_planar_float32.py"), {"planar"})
    assert is_about(Path("test_all_contract.py"), {"planar"})
    assert not is_about(Path("test_planarity.py"), {"planar"})
    assert not is_about(Path("test_all_contract.py"), {"planar"}, ())
    assert is_about(Path("test_callbacks.py"), {"callbacks"}, ())


def files_without_a_test():
    for path in sorted((ROOT / "tfp_ibnn").rglob("*.py")):
        parts = path.relative_to(ROOT / "tfp_ibnn").with_suffix("").parts
        if len(parts) == 1 or parts[-1] == "__init__":
            continue
        tests = TESTS.joinpath(parts[0]).rglob("test_*.py")
        if not any(is_about(test, {parts[-1]}, ()) for test in tests):
            yield "/".join(parts)


def test_every_file_has_a_test_or_it_is_said_where():
    assert sorted(files_without_a_test()) == sorted(TESTED_ELSEWHERE)
    places = {place for text in TESTED_ELSEWHERE.values() for place in text.split(", ")}
    assert sorted(place for place in places if not (TESTS / place).exists()) == []
