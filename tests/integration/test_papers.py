"""The paper index: what it names is there, and every overlay has its place in it."""

import re
from pathlib import Path

import pytest

from recast_pl.cli import main

ROOT = Path(__file__).parents[2]
INDEX = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
FOLDERS = ("objective", "rollout", "advantages", "credit")
THERE = [folder for folder in FOLDERS if (ROOT / "configs" / folder).is_dir()]


def named(text):
    return re.findall(r"configs/[\w/.-]+", text)


def of_absent_folders(path):
    """Only whole folders of overlays may be absent, not a file of one that is there."""
    folder = Path(path).parts[1]
    return folder in FOLDERS and folder not in THERE


def test_every_file_that_the_index_names_exists():
    paths = [path for path in named(INDEX) if not of_absent_folders(path)]
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).is_file()]


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", INDEX)
    assert links
    assert not [link for link in links if not (ROOT / "docs" / link).is_file()]


def test_every_overlay_is_in_the_index():
    overlays = {f"configs/{folder}/{path.name}" for folder in THERE
                for path in (ROOT / "configs" / folder).glob("*.yaml")}  # fmt: skip
    assert "configs/credit/recast.yaml" in overlays
    assert not overlays - set(named(INDEX))


def rows():
    """Overlays of one row, which go together (those after a semicolon are alternatives)."""
    for line in INDEX.splitlines():
        cells = line.split(" | ")
        if len(cells) > 1 and named(cells[1]):
            for choice in cells[1].split(";"):
                overlays = named(choice)
                if not any(map(of_absent_folders, overlays)):
                    yield pytest.param(overlays, id=" + ".join(Path(path).stem for path in overlays))


@pytest.mark.parametrize("overlays", rows())
def test_overlays_of_one_row_go_together(overlays, capsys):
    """`--print_config` parses all, and loads nothing."""
    layers = [
        part for path in ("configs/quickstart.yaml", *overlays) for part in ("--config", str(ROOT / path))
    ]
    with pytest.raises(SystemExit) as exit_:
        main(["fit", *layers, "--print_config"])
    assert exit_.value.code == 0
    assert "recast_pl.objectives." in capsys.readouterr().out
