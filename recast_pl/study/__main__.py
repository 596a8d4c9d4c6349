"""`python -m recast_pl.study run STUDY.yaml` and `python -m recast_pl.study report FOLDER`."""

import argparse
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

from recast_pl.error_messages import wrong_with
from recast_pl.study.folder import RESULT, RunFolder, check_unchanged, write_plan
from recast_pl.study.plan import Study, read_study
from recast_pl.study.runner import Runner


def main(arguments: list[str] | None = None) -> int:
    """Runs a study or reports on one; returns 1 where runs have not ended well, or a report has none."""
    parser = argparse.ArgumentParser(prog="python -m recast_pl.study", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="bring all runs of a study to their ends")
    run.add_argument("study", type=Path, help="the study file")
    run.add_argument("--folder", type=Path, help="where runs go, instead of the study file's")
    run.add_argument("--parallel", type=int, help="runs at a time, instead of the study file's")
    run.add_argument("--threads", type=int, help="of each process, instead of the study file's")
    run.add_argument("--only", metavar="PATTERN", help="runs whose name matches, such as '*/recast/*'")
    run.add_argument("--list", action="store_true", help="print the runs and their states, and run nothing")
    run.add_argument(
        "--discard-changed",
        action="store_true",
        help="throw away runs that were made with another configuration than the study file has now",
    )
    report = verbs.add_parser("report", help="tables and figures of what is finished")
    report.add_argument("folder", type=Path, help="the study's folder")
    report.add_argument("--output", type=Path, help="where to; without it FOLDER/report")
    report.add_argument(
        "--compare", metavar="AXIS=BASELINE", help="rows and what they are held against, instead of the study's"
    )
    given = parser.parse_args(arguments)
    try:
        return _run(given) if given.verb == "run" else _report(given)
    except (ValueError, FileNotFoundError) as error:
        print(f"{parser.prog} {given.verb}: {error}", file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    if wrong := wrong_with(given.study):
        raise ValueError(f"{given.study}: {wrong}")
    study = _overruled(read_study(given.study), given)
    root = (given.folder or study.folder).resolve()
    folders = [
        RunFolder(root, run) for run in study.runs if given.only is None or fnmatch(run.name, given.only)
    ]
    if not folders:
        raise ValueError(f"--only: no run's name matches {given.only!r}; one of them is {study.runs[0].name}")
    if given.list:
        for folder in folders:
            print(f"{'finished' if folder.finished else 'to run':9}{folder.run.name}")
        return 0
    check_unchanged(folders, discard=given.discard_changed)
    write_plan(study, root)
    complete = Runner(study, folders, say=_say).run()
    print(f"Report: python -m recast_pl.study report {root}")
    return 0 if complete else 1


def _overruled(study: Study, given: argparse.Namespace) -> Study:
    for key in ("parallel", "threads"):
        value = getattr(given, key)
        if value is not None:
            if value < 1:
                raise ValueError(f"--{key}: expected 1 or more, got {value}")
            study = replace(study, **{key: value})
    return study


def _report(given: argparse.Namespace) -> int:
    from recast_pl.study.report import write_report  # draws, which `run` need not wait for

    output = given.output or given.folder / "report"
    for path in write_report(given.folder, output, compare=given.compare):
        print(path)
    if not any(given.folder.rglob(RESULT)):
        print("No run of this study is finished yet: there is nothing to compare.", file=sys.stderr)
        return 1
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # into a file or a pipe, too


if __name__ == "__main__":
    sys.exit(main())
