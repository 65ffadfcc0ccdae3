"""Posterior files: JSON that is not as it should be, and what is no JSON."""

import json
import warnings

from lib import Settings
from lib.posterior_files import read_posteriors
from tests.robustness import mutate
from tests.robustness.configs import use_posterior
from tests.robustness.harness import Wrong, refusal

__all__ = ["Campaign"]

GOOD = {
    "conv2": {"posterior": "NormalInvConv", "depth": 1, "planar": 1, "prior_scale": 0.3},
    "fc(1|2)": {
        "posterior": "FlowPosterior",
        "flows": [{"flow": "Planar"}, {"flow": "Sylvester", "units": 2}],
        "affine": "first",
        "components": 2,
    },
    "fc3": {"posterior": "NormalGlowStep", "depth": 1, "hidden": 4},
    "fc4": {"posterior": "MixturePosterior", "components": 3, "kl": "averaged", "seed": 1},
    ".*": {"posterior": "NormalAffine", "beta": 0.5, "gamma": 0.1},
}
PATTERNS = ("(", "[", "*", "a{99999999999}", "(" * 300 + ")" * 300, "(?P<x>", "\\", "", "(a+)+b")
TEXTS = (
    "",
    " ",
    "null",
    "[]",
    "{}",
    "{",
    "[" * 100_000,
    '{"a":' * 100_000,
    "NaN",
    '{".*": NaN}',
    '{".*": {"posterior": "NormalAffine", "beta": 1e999}}',
    '{".*": {"posterior": "NormalAffine", "beta": ' + "9" * 5000 + "}}",
    '{".*": {"posterior": "NormalPlanar1d", "depth": ' + "9" * 30 + "}}",
    '{".*": {"posterior": "NormalAffine"}, ".*": 3}',
    '{".*": {"posterior": "NormalAffine"}, ".*": {"posterior": "NormalRadial"}}',
    '{".*": {"posterior": "NormalAffine", "beta": 1, "beta": 2}}',
    "\ufeff{}",
    "# text",
)


class Campaign:
    """A file is refused in one line by ValueError, or gives posteriors that work."""

    def __init__(self, place):
        self.path = place.folder / "posteriors.json"

    def case(self, rng, number):
        """Write a file in one of several ways, and read it."""
        good = json.dumps(GOOD)
        kind = number % 6
        if kind == 0:
            self.label, content = mutate.damaged(rng, good.encode())
        elif kind == 1:
            content = rng.choice(TEXTS).encode()
            self.label = content[:30].decode()
        elif kind == 2:
            content = json.dumps(mutate.random_json(rng)).encode()
            self.label = content[:60].decode()
        elif kind == 3:
            pattern = rng.choice(PATTERNS)
            self.label = f"pattern {pattern[:20]!r}"
            content = json.dumps({pattern: rng.choice(list(GOOD.values()))}).encode()
        else:
            place, value = rng.choice(mutate.leaves(GOOD)), rng.choice(mutate.JUNK)
            self.label = f"{'.'.join(map(str, place))} = {str(value)[:40]}"
            content = json.dumps(mutate.put(GOOD, place, value)).encode()
        self.path.write_bytes(content)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if rng.random() < 0.5:
                    found = read_posteriors(self.path)
                else:
                    found = Settings(posterior=str(self.path)).posteriors()
        except Exception as error:
            return refusal(error, ValueError, lines=1)
        for posterior in found.values():
            use_posterior(posterior)
        said = json.loads(content, object_pairs_hook=once_each)
        if found.keys() != said.keys():
            raise Wrong(f"it has {sorted(found)}, not {sorted(said)}")
        return "right"


def once_each(pairs):
    """Refuse what JSON's readers take without a word: one name twice."""
    if len(dict(pairs)) != len(pairs):
        raise Wrong(f"{[name for name, _ in pairs]} has a name twice, and was read")
    return dict(pairs)
