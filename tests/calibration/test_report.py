"""The rule by which a candidate is chosen, and the words for it."""

import types

import numpy as np

from tfp_ibnn.calibration.report import Candidate, Report, choose


def test_cheapest_within_one_standard_error_is_chosen():
    base = np.array([1.0, 2.0, 3.0, 4.0])
    noise = np.array([0.1, -0.1, 0.1, -0.1])
    error = noise.std(ddof=1) / 2
    near, far = base + noise + 0.9 * error, base + noise + 1.1 * error
    assert choose(np.stack([near, base]), [(1,), (2,)]) == 0
    assert choose(np.stack([far, base]), [(1,), (2,)]) == 1
    # In pairs: it is not the spread of the NLL itself that counts.
    assert choose(np.stack([base + 0.01, base]), [(1,), (2,)]) == 1
    # The best costs least; then, among equally cheap ones, the better.
    assert choose(np.stack([base, near]), [(1,), (2,)]) == 0
    assert choose(np.stack([near, base, near - 0.5 * error]), [(1,), (2,), (1,)]) == 2
    # Even if that one is so like the best that it is outside of its own standard error.
    assert choose(np.stack([near, base + 0.5 * error, base]), [(1,), (1,), (2,)]) == 1


def test_why_names_the_best_and_what_is_as_good_for_less():
    def candidate(name, nll, samples):
        trial = types.SimpleNamespace(engine=types.SimpleNamespace(samples=samples), trained=False)
        return Candidate(name, trial, 1.0, 0.0, np.zeros((4, 2)), np.array(nll), np.zeros(4))

    def why(*candidates):
        report = Report.__new__(Report)
        report.candidates = list(candidates)
        costs = [x.cost for x in candidates]
        report.chosen = candidates[choose([x.nll for x in candidates], costs)]
        return report.why()

    dear = candidate("dear", [1.0, 1.0, 1.0, 1.0], 8)
    noisy = candidate("noisy", [0.0, 2.2, 0.0, 2.2], 1)
    only = why(candidate("cheap", [2.0, 2.0, 2.0, 2.1], 1), dear)
    assert only == "Chosen: dear, NLL 1.0000: the best of 2, and none as good is cheaper."
    text = "noisy, NLL 1.1000, 0.1000 ± 0.6351 behind the best of 2, dear, which costs more."
    assert why(noisy, dear) == f"Chosen: {text}"
