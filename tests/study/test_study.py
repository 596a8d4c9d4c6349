"""Study files, and studies run by processes of the real command line on a miniature pipeline."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import CONFIGS, QUICKSTART

from recast_pl.cli import main as command_line
from recast_pl.study.__main__ import main
from recast_pl.study.folder import RunFolder, collect, write_plan
from recast_pl.study.plan import read_study
from recast_pl.study.record import read_lines

STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))


def file_of(folder, content):
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def content(overlay=None, **rest):
    configs = [QUICKSTART, *([overlay] if overlay else [])]
    found = {
        "settings": {"s": {"configs": configs, "set": {"trainer.max_epochs": 1}}},
        "axes": {
            "strategy": {
                "uniform": {"configs": [str(CONFIGS / "credit/uniform.yaml")]},
                "snr": {
                    "configs": [str(CONFIGS / "credit/snr.yaml")],
                    "set": {"model.timesteps_per_sample": 1},
                },
            }
        },
        "seeds": [0, 1],
        "compare": {"axis": "strategy", "baseline": "uniform"},
    }
    return {**found, **rest}


# ------------------------------------------------------------------ the file


def test_a_grid_is_every_combination_in_the_file_s_order(tmp_path):
    axes = content()["axes"] | {"budget": {"x": {"set": {"rewards.budgets.jpeg": 2.0}}, "y": {}}}
    study = read_study(file_of(tmp_path, content(axes=axes)))
    names = [run.name for run in study.runs]
    assert len(names) == len(set(names)) == 2 * 2 * 2
    assert names[:3] == ["s/uniform/x/seed-0", "s/uniform/x/seed-1", "s/uniform/y/seed-0"]
    arguments = study.runs[5].arguments  # s/snr/x/seed-1
    assert arguments == [
        "--config", QUICKSTART, "--trainer.max_epochs=1",
        "--config", str(CONFIGS / "credit/snr.yaml"), "--model.timesteps_per_sample=1",
        "--rewards.budgets.jpeg=2.0", "--seed_everything=1",
    ]  # fmt: skip


def test_an_axis_of_one_setting_alone(tmp_path):
    settings = content()["settings"] | {"t": {"configs": [QUICKSTART], "axes": {"budget": {"x": {}, "y": {}}}}}
    names = [run.name for run in read_study(file_of(tmp_path, content(settings=settings))).runs]
    assert sum(name.startswith("s/") for name in names) == 4
    assert sum(name.startswith("t/") for name in names) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sedes": [0]}, "unknown key sedes"),
        ({"seeds": [0, 0]}, "expected each once"),
        ({"seeds": [0.5]}, "expected a list of whole numbers"),
        ({"seeds": []}, "seeds: expected a list of whole numbers, got nothing"),
        ({"compare": {"axis": "budget", "baseline": "x"}}, "expected an axis of every setting, got 'budget'"),
        ({"compare": {"axis": "strategy", "baseline": "recast"}}, "'recast' is no cell of strategy"),
        ({"axes": {"strategy": {"a/b": {}}}}, "cannot name a folder"),
        ({"axes": {"strategy": {"a": {"configs": ["nowhere.yaml"]}}}}, "strategy.a.configs: there is no file"),
        ({"axes": {"strategy": {"a": {"set": {"seed_everything": 1}}}}}, "seed_everything is set by `seeds`"),
        ({"settings": {"s": {}}}, "settings.s.configs: expected at least one configuration file"),
        ({"parallel": 0}, "parallel: expected a whole number of 1 or more, got 0"),
        ({"judges": "yes"}, "judges: expected true or false, got 'yes'"),
    ],
)
def test_a_wrong_file_is_refused_in_words(tmp_path, capsys, change, message):
    assert main(["run", str(file_of(tmp_path, content(**change)))]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"), [("a: [b", "no valid YAML"), (None, "no such file"), ("- a", "got a list")]
)
def test_what_is_no_study_file_is_told_in_a_line(text, said, tmp_path, capsys):
    path = tmp_path / "study.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["run", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_report_without_a_finished_run_says_so(tmp_path, capsys):
    write_plan(read_study(file_of(tmp_path, content())), tmp_path / "runs")
    assert main(["report", str(tmp_path / "runs")]) == 1
    assert "No run of this study is finished yet" in capsys.readouterr().err


def test_a_changed_file_is_noticed(tmp_path, capsys):
    root = tmp_path / "runs"
    for run in read_study(file_of(tmp_path, content())).runs:
        RunFolder(root, run).begin()
    # the order of keys within a file says nothing
    same = content()
    same["axes"]["strategy"] = dict(reversed(same["axes"]["strategy"].items()))
    for run in read_study(file_of(tmp_path, same)).runs:
        assert RunFolder(root, run).changes() == []
    changed = content()
    changed["axes"]["strategy"]["snr"]["set"]["model.timesteps_per_sample"] = 2
    path = file_of(tmp_path, changed)
    assert main(["run", str(path), "--folder", str(root)]) == 2
    said = capsys.readouterr().err
    assert "s/snr/seed-0 (begun): model.timesteps_per_sample" in said
    assert "uniform" not in said
    assert "--discard-changed" in said


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_studies_that_ship_can_be_run(path, capsys):
    """The real parser takes every cell, each at least once; nothing is loaded."""
    seen = set()
    for run in read_study(path).runs:
        cells = {(run.setting, *cell) for cell in run.cells}
        if not cells <= seen:
            seen |= cells
            with pytest.raises(SystemExit) as stopped:
                command_line(["fit", *run.arguments, "--print_config"])
            assert stopped.value.code == 0, capsys.readouterr().err
            printed = yaml.safe_load(capsys.readouterr().out)
            assert printed["seed_everything"] == run.seed


# ------------------------------------------------------------------ runs


def processes(folder, path, *extra):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "recast_pl.study",
            "run",
            str(path),
            "--folder",
            str(folder),
            "--threads",
            "1",
            *extra,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_two_runs_their_record_and_their_report(tmp_path, overlay):
    path = file_of(tmp_path, content(overlay, seeds=[0], judges=False, pictures=2))
    root = tmp_path / "runs"
    process = processes(root, path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "[2/2]" in said
    study = collect(root)
    assert [result.cells["strategy"] for result in study.results] == ["uniform", "snr"]
    uniform, snr = study.results
    assert uniform.before == snr.before  # same prompts, same noises
    assert uniform.after != snr.after
    assert uniform.reward_calls == 2 * 2 * 3 * 4  # iterations, groups, pictures, rewards
    assert [point.iteration for point in uniform.curve] == [0, 2]
    assert sum(map(sum, snr.weights["W"])) == pytest.approx(1.0)
    pictures = sorted((root / "s/snr/seed-0/pictures/iteration=00002").glob("*.png"))
    assert len(pictures) == 2
    # what is finished is not run again
    logs = [(path, path.stat().st_mtime_ns) for path in root.rglob("output.log")]
    assert len(logs) == 2
    assert main(["run", str(path), "--folder", str(root)]) == 0
    assert [(path, path.stat().st_mtime_ns) for path, _ in logs] == logs
    assert main(["report", str(root)]) == 0
    assert (root / "report" / "report.html").stat().st_size > 10_000


def test_a_run_that_fails_is_told_and_tried_again(tmp_path, overlay, capfd):
    bad = content(overlay, seeds=[0], judges=False)
    del bad["axes"]["strategy"]["snr"]
    bad["settings"]["s"]["set"]["model.timesteps_per_sample"] = 99
    path = file_of(tmp_path, bad)
    assert main(["run", str(path), "--folder", str(tmp_path / "runs")]) == 1
    said = capfd.readouterr().out
    assert "FAILED s/uniform/seed-0" in said
    assert "timesteps_per_sample" in said  # the reason, from the run's own output
    study = collect(tmp_path / "runs")
    assert [failure.name for failure in study.failures] == ["s/uniform/seed-0"]
    assert main(["run", str(path), "--folder", str(tmp_path / "runs"), "--list"]) == 0
    assert "to run   s/uniform/seed-0" in capfd.readouterr().out


def test_lines_written_twice_count_once_and_a_torn_one_not_at_all():
    line = json.dumps({"kind": "train", "iteration": 3, "seconds": 1.0}) + "\n"
    again = json.dumps({"kind": "train", "iteration": 3, "seconds": 2.0}) + "\n"
    found = read_lines(line + again + '{"kind": "train", "iter')
    assert found == {"train": {3: {"kind": "train", "iteration": 3, "seconds": 2.0}}}


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_a_study_that_was_stopped_comes_to_the_same_results(tmp_path, overlay, blow):
    """Judges too; stopped by Ctrl-C, or by a kill of the study and its runs in the middle of an epoch.

    Killed at an epoch's end, its evaluation would be lost, which a curve then lacks.
    """
    plan = content(overlay, pictures=1)
    plan["settings"]["s"]["set"] = {"trainer.max_epochs": 6, "data.iterations_per_epoch": 2}
    path = file_of(tmp_path, plan)
    whole = processes(tmp_path / "whole", path, "--parallel", "2")
    assert whole.wait(timeout=900) == 0
    stopped = processes(tmp_path / "stopped", path)
    record = tmp_path / "stopped/s/uniform/seed-1/record.jsonl"
    deadline = time.monotonic() + 600
    while not record.exists() or record.read_text().count('"train"') < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if blow == signal.SIGKILL:
        entry = json.loads((record.parent / "process.json").read_text())
        os.killpg(entry["pid"], signal.SIGKILL)
        stopped.kill()
    else:
        stopped.send_signal(blow)
    said, _ = stopped.communicate(timeout=120)
    assert stopped.returncode != 0
    assert ("goes on from here" in said) == (blow == signal.SIGINT)
    assert not (record.parent / "result.json").exists()
    again = processes(tmp_path / "stopped", path)
    said, _ = again.communicate(timeout=900)
    assert again.returncode == 0, said
    assert "s/uniform/seed-1: goes on from its last checkpoint" in said
    pairs = zip(collect(tmp_path / "whole").results, collect(tmp_path / "stopped").results, strict=True)
    for one, other in pairs:
        assert (one.after, one.judges, one.curve) == (other.after, other.judges, other.curve)
        assert (one.reward_calls, one.weights) == (other.reward_calls, other.weights)
