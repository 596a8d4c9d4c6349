"""Statistics against scipy and tables by hand; reports on results whose outcome is known."""

import csv
import io
import re
from html.parser import HTMLParser

import made_study
import numpy as np
import pytest
from matplotlib.image import imread
from scipy import stats

from recast_pl.study.__main__ import main
from recast_pl.study.folder import collect
from recast_pl.study.pictures import grid_figure, pictures_of
from recast_pl.study.report import write_report
from recast_pl.study.statistics import detectable_difference, front, holm, interval, paired_difference
from recast_pl.study.tables import all_comparisons, by_seed, plus_minus

SEEDS = range(4)


# ------------------------------------------------------------------ statistics


def test_an_interval_is_scipy_s():
    values = [0.3, 0.9, 0.4, 0.7, 0.55]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    found = interval(values)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_a_paired_difference_is_scipy_s_paired_test():
    one, other = [1.2, 2.1, 3.3, 2.0], [1.0, 2.0, 3.0, 2.1]
    expected = stats.ttest_rel(one, other)
    found = paired_difference(dict(enumerate(one)), dict(enumerate(other)))
    low, high = expected.confidence_interval()
    assert found.p == pytest.approx(expected.pvalue, abs=1e-12)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), abs=1e-12)


def test_only_seeds_of_both_count():
    found = paired_difference({0: 1.0, 1: 5.0}, {1: 4.0, 2: 0.0})
    assert (found.interval.mean, found.interval.count) == (1.0, 1)
    assert found.verdict == "tie"  # one seed tells nothing
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize("count", [3, 5, 10])
def test_the_detectable_difference_is_detected_four_times_in_five(count):
    random = np.random.default_rng(0)
    difference = detectable_difference(2.0, count)
    drawn = difference + 2.0 * random.standard_normal((20_000, count))
    p = stats.ttest_1samp(drawn, 0.0, axis=1).pvalue
    assert float((p < 0.05).mean()) == pytest.approx(0.8, abs=0.015)


def test_holm_by_hand():
    # .05/4 = .0125, .05/3 = .0167, .05/2 = .025: the third p-value, .03, does not reject, nor what follows
    assert holm([0.016, 0.03, 0.001, 0.04]) == [True, False, True, False]
    assert holm([float("nan"), 0.001]) == [False, True]


def test_the_front_keeps_what_nothing_beats():
    assert front([(1, 1), (1, 1), (2, 0.5), (0.5, 0.9)]) == [0, 1, 2]


def test_runs_that_lack_a_budget_do_not_enter_a_pooled_mean():
    cells = [{"strategy": "snr", "budget": budget} for budget in ("x", "y")]
    results = [
        *(made_study.result(cell, 0, {"a": value}) for cell, value in zip(cells, (1.0, 3.0), strict=True)),
        made_study.result(cells[0], 1, {"a": 9.0}),
    ]
    assert by_seed(results, "strategy", lambda result: result.after["a"]) == {"snr": {0: 2.0}}


def test_digits_follow_the_interval():
    assert plus_minus(0.123456, 0.00021) == "0.12346 ± 0.00021"
    assert plus_minus(-7.0, 14.0, sign=True) == "-7 ± 14"


# ------------------------------------------------------------------ reports


def strategies(*, missing=(), failures=()):
    """`good` is .3 above the baseline in `a` and level in `b`; the wobble of seeds is common to both."""
    wobble, own = [0.02, -0.05, 0.07, 0.0], [0.004, -0.003, 0.001, -0.002]
    results = []
    for seed in SEEDS:
        base = {"a": 0.6 + wobble[seed], "b": 0.7 + wobble[seed]}
        good = {"a": base["a"] + 0.3 + own[seed], "b": base["b"] + own[seed]}
        results.append(made_study.result({"strategy": "uniform"}, seed, base, judges={"j": 0.2 + wobble[seed]}))
        results.append(made_study.result({"strategy": "good"}, seed, good, judges={"j": 0.2 - wobble[seed]}))
    return [r for r in results if (r.cells["strategy"], r.seed) not in missing]


def table_of(folder):
    study = collect(folder)
    (table,) = all_comparisons(study.plan, study.results)
    return {(cell.strategy, cell.metric.name): cell for cell in table.cells}


def test_a_known_win_a_known_tie_and_what_pairing_is_good_for(tmp_path):
    cells = table_of(made_study.write(tmp_path, strategies()))
    win, tie = cells["good", "a"].difference, cells["good", "b"].difference
    assert win.verdict == "win"
    assert win.interval.mean == pytest.approx(0.3)
    assert tie.verdict == "tie"
    assert cells["good", "j"].difference.verdict == "tie"
    # seeds wobble by .05; their differences within seeds by .003
    assert cells["good", "a"].interval.deviation > 10 * win.interval.deviation
    assert cells["good", "a"].robust
    assert not cells["good", "b"].robust


def test_the_other_way_round_it_is_a_loss(tmp_path):
    cells = table_of(made_study.write(tmp_path, strategies(), baseline="good"))
    assert cells["uniform", "a"].difference.verdict == "loss"


def test_a_failed_run_is_shown_and_in_no_number(tmp_path):
    lost = made_study.failure({"strategy": "good"}, 3)
    results = strategies(missing=[("good", 3)])
    folder = made_study.write(
        tmp_path / "s", results, failures=[lost], missing=[("a", {"strategy": "good"}, 9)]
    )
    text = (write_report(folder, tmp_path / "r")[0]).read_text(encoding="utf-8")
    assert "1 failed, 1 not at their end" in text
    assert "a/good/seed-3: `fit` ended with status 1" in text
    assert "ValueError: no such <thing>" in text
    assert "a/good/seed-9" in text
    cells = table_of(folder)
    assert cells["good", "a"].difference.interval.count == 3
    assert cells["uniform", "a"].interval.count == 4


class _References(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("src", "href")]


def test_a_report_s_files(tmp_path):
    folder = made_study.write(tmp_path / "s", strategies(), pictures=3)
    output = tmp_path / "r"
    paths = write_report(folder, output)
    assert [path.name for path in paths] == ["report.md", "report.html", "runs.csv", "comparisons.csv"]
    text = paths[0].read_text(encoding="utf-8")
    shown = re.findall(r"!\[.*\]\((.+)\)", text)
    assert len(shown) == 5  # differences, Pareto, curves, W, pictures
    for name in shown:
        assert imread(output / name).shape[1] > 400
    (row,) = [line for line in text.splitlines() if line.startswith("| good | 4 |")]
    assert "<br>▲ †+0.3000 ± 0.0050 |" in row
    page = _References()
    page.feed(paths[1].read_text(encoding="utf-8"))
    assert len(page.found) == 5
    assert all(reference.startswith("data:image/png;base64,") for reference in page.found)
    rows = list(csv.DictReader(io.StringIO(paths[2].read_text(encoding="utf-8"))))
    assert len(rows) == 8 * 4  # two rewards, a judge, the mean gain
    assert float(rows[0]["change"]) == pytest.approx(0.62 - 0.5)


def test_a_grid_has_prompts_above_and_strategies_beside(tmp_path):
    for name in ("one", "other"):
        made_study.draw(tmp_path / name / "pictures" / "iteration=00000", 2, seed=0)
    figure = grid_figure({name: pictures_of(tmp_path / name, 0) for name in ("one", "other")})
    titles = [axes.get_title().replace("\n", " ") for axes in figure.axes]
    assert titles == ["prompt 0 of a scene with some words", "prompt 1 of a scene with some words", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == ["one", "", "other", ""]


def test_without_a_finished_run_there_is_a_report_that_says_so(tmp_path):
    folder = made_study.write(tmp_path / "s", [], missing=[("a", {"strategy": "uniform"}, 0)])
    text = write_report(folder, tmp_path / "r")[0].read_text(encoding="utf-8")
    assert "0 finished, 0 failed, 1 not at their end" in text


def test_another_axis_can_be_compared(tmp_path, capsys):
    results = [
        made_study.result({"objective": o, "credit": c}, seed, {"a": value + 0.1 * seed})
        for o, c, value in (
            ("nft", "uniform", 0.5),
            ("nft", "snr", 0.6),
            ("rvm", "uniform", 0.7),
            ("rvm", "snr", 0.8),
        )
        for seed in (0, 1)
    ]
    folder = made_study.write(tmp_path / "s", results, axis="credit")
    assert main(["report", str(folder), "--compare", "objective=nft"]) == 0
    rows = csv.DictReader(io.StringIO((folder / "report" / "comparisons.csv").read_text(encoding="utf-8")))
    found = {
        row["group"]: float(row["difference"])
        for row in rows
        if (row["strategy"], row["metric"]) == ("rvm", "a")
    }
    assert found == pytest.approx({"a: all together": 0.2, "a, credit uniform": 0.2, "a, credit snr": 0.2})
    assert main(["report", str(folder), "--compare", "objective=sgd"]) == 2
    assert "'sgd' is no cell of objective; expected one of nft, rvm" in capsys.readouterr().err
    assert main(["report", str(folder), "--compare", "budget=x"]) == 2
    assert "no axis 'budget'; it has objective, credit" in capsys.readouterr().err


def test_a_folder_that_is_no_study_s(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "there is no study.json in it" in capsys.readouterr().err
