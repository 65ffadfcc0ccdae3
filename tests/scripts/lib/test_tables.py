import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import tfp_ibnn as ibnn
from lib import store, tables
from lib.scoring import HELD_OUT
from tests.scripts.lib.test_store import row

pytestmark = pytest.mark.once


def test_paired_differences_are_numpys():
    rows = [row(seed, method="a") for seed in range(4)]
    rows += [{**row(10 + seed, method="b"), "seed": seed} for seed in (1, 2, 3, 9)]
    found = tables.paired(rows, "a", "b", "nll")
    change = [row(10 + seed)["nll"] - row(seed)["nll"] for seed in (1, 2, 3)]
    assert found["mean"] == pytest.approx(np.mean(change))
    assert found["error"] == pytest.approx(np.std(change, ddof=1) / np.sqrt(3))
    assert found["seeds"] == 3


def test_a_pair_needs_two_seeds():
    rows = [row(0, method="a"), row(0, method="b"), row(1, method="a")]
    with pytest.raises(ValueError, match="'a' and 'b'"):
        tables.paired(rows, "a", "b", "nll")


def test_margins_of_two_methods_are_those_of_the_t_test():
    rng = np.random.default_rng(2)
    groups = {"a": rng.normal(0, 1, 4), "b": rng.normal(1, 1, 6)}
    assert tables.alike(groups)
    interval = stats.ttest_ind(groups["b"], groups["a"]).confidence_interval(0.95)
    assert tables.margins(groups)["b"] == pytest.approx((interval.high - interval.low) / 2)


def test_margins_of_methods_whose_spreads_differ_are_welchs():
    rng = np.random.default_rng(0)
    groups = {"a": rng.normal(0, 5, 3), "b": rng.normal(1, 0.1, 3), "c": rng.normal(1, 0.1, 4)}
    assert not tables.alike(groups)
    for name in "bc":
        welch = stats.ttest_ind(groups[name], groups["a"], equal_var=False).confidence_interval()
        assert tables.margins(groups)[name] == pytest.approx((welch.high - welch.low) / 2)
    # Two that are alike by chance do not profit from that.
    swapped = {"b": groups["b"], "c": groups["c"][:3], "a": groups["a"]}
    found = tables.margins(swapped)["c"]
    variances = [np.var(values, ddof=1) for values in swapped.values()]
    pooled = np.sqrt(np.mean(variances) * 2 / 3) * stats.t.ppf(0.975, 6)
    assert found == pytest.approx(pooled)
    assert tables.alike({"a": [1.0, 2.0, 3.0], "b": [2.0, 3.5, 4.0]})
    # One seed has no variance of its own, and takes that of all.
    pooled = np.sqrt(np.mean([np.var(groups[name], ddof=1) for name in "ab"]))
    del groups["c"]
    found = tables.margins(groups | {"d": [2.0]})["d"]
    assert found == pytest.approx(pooled * stats.t.ppf(0.975, 4) * np.sqrt(1 + 1 / 3))


def test_seeds_that_all_have_one_score_are_no_error():
    assert tables.margins({"a": [1.0, 1.0], "b": [2.0, 2.0]}) == {"a": 0.0, "b": 0.0}
    found = tables.margins({"a": [1.0, 1.0], "b": [2.0, 3.0]})
    assert np.isfinite(list(found.values())).all()


@pytest.mark.slow
@pytest.mark.parametrize("spread", [2, 10])
def test_margins_cover_the_truth_as_often_as_they_say(spread):
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(1000):
        sizes = {"a": 3, "b": 3, "c": 2, **({"d": 1} if spread == 2 else {})}
        groups = {name: rng.normal(0, 2, size) for name, size in sizes.items()}
        groups["a"] *= spread / 2
        margins = tables.margins(groups)
        change = {name: abs(groups[name].mean() - groups["a"].mean()) for name in sizes}
        covered += [change[name] < margins[name] for name in sizes if name != "a"]
    # Spreads that differ are not always noticed; a pooled variance alone would cover 89 %.
    assert (0.935 if spread == 2 else 0.9) < np.mean(covered) < 0.965


def test_margins_need_two_seeds_of_some_method():
    with pytest.raises(ValueError, match="two seeds"):
        tables.margins({"a": [1.0], "b": [2.0]})


# Tables of records that are made up.


def record(method, seed, **changes):
    base = {"accuracy": 0.98 + 0.001 * seed, "nll": 0.1, "brier": 0.1, "ece": 0.01, "samples": 1}
    base |= {"budget": "width_400", "dataset": "mnist", "model": "mlp", "epochs": 1, "seconds": 3.0}
    name = f"{changes.get('budget', 'width_400')}/mnist/{method}/seed{seed}"
    return {**base, "method": method, "seed": seed, "name": name, "parameters": 100, **changes}


def test_errors_stand_beside_published_ones():
    rows = [record(m, seed) for m in ("deterministic", "mnf") for seed in (0, 1)]
    rows[2]["parameters"] = rows[3]["parameters"] = 103
    table = tables._errors(pd.DataFrame(rows)).set_index("method")
    assert table["error (%)"].to_list() == ["1.95 ± 0.07"] * 2
    assert table["published"].to_list() == ["1.83", "-"]
    assert table["more"].to_list() == ["0.00%", "3.00%"]


def test_the_table_of_pruning():
    rows = [{"removed": 0.0, "accuracy": 0.98}, {"removed": 0.98, "accuracy": 0.9}]
    pruned = [record("mean_field", s, weights={"pruned": rows}) for s in (0, 1)]
    frame = pd.DataFrame([record("mnf", 0, weights={"histogram": []}), *pruned])
    (row,) = tables._pruned(frame).to_dict("records")
    assert row == {"error (%) without": "mean_field", "0%": "2.00 ± 0.00", "98%": "10.00 ± 0.00"}


def test_the_table_of_rotations():
    turned = [{"shift": "rotation", "level": d, "entropy": d / 90} for d in (0, 15, 90)]
    records = [record("mnf", seed, evaluations={"rotation": turned}) for seed in (0, 1)]
    (row,) = tables._turned(store.evaluated(records)).to_dict("records")
    assert row == {"method": "mnf", "0°": "0.000 ± 0.000", "90°": "1.000 ± 0.000"}


def test_unknown_classes_and_the_ensemble(tmp_path):
    """The ensemble's entropies are those of the mean prediction, on known and unknown images."""
    (tmp_path / "probabilities").mkdir()
    rng, records = np.random.default_rng(0), []
    for seed in (0, 1):
        parts = {
            n: rng.dirichlet(np.ones(5), 60).astype("float16") for n in ("probabilities", "unknown")
        }
        arrays = {**parts, "labels": np.arange(60) % 5}
        np.savez(tmp_path / f"probabilities/equal-deterministic-seed{seed}.npz", **arrays)
        rows = {"unknown": [{"name": HELD_OUT, "entropy_auroc": 0.5 + seed / 10}]}
        records.append(record("deterministic", seed, budget="equal", evaluations=rows))
    (averaged,) = store._averaged(records, tmp_path)
    known, unknown = store.stored_entropies(averaged, tmp_path)
    assert averaged["entropy_auroc"] == pytest.approx(ibnn.metrics.auroc(known, unknown))
    single = [store.stored_entropies(one, tmp_path) for one in records]
    assert known.mean() > max(one[0].mean() for one in single)
    (tmp_path / "summary.json").write_text(json.dumps({"averaged": [averaged]}))
    found = tables._unknown(pd.DataFrame(records), {}, tmp_path).set_index("method")
    assert found.loc["deterministic", "AUROC of unseen"] == "0.5500 ± 0.0707"
    assert found.loc["ensemble", "AUROC of unseen"] == f"{averaged['entropy_auroc']:.4f}"
    assert found["published error (%)"].to_list() == ["24", "21"]
