"""The notebooks, each run in a kernel of its own, and the outputs that are kept in them."""

import base64
import math
import os
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
SLOW = {"3_your_own_reward", "4_comparing_strategies"}  # all four take more than a minute on one core
NUMBER = re.compile(r"[+\-−]?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
PLACE = re.compile(r"(?<![\w.])/(?:work|tmp|home|root|usr|opt|var|private|mnt|Users)/|[A-Z]:\\\\")
TAGS = {"close", "timed"}  # numbers of training differ a little between machines, seconds a lot


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    """What a cell has printed, and its value where that is text."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif "image/png" not in output.data:
            parts.append(output.data["text/plain"])
    return "".join(parts)


def pictures_of(cell):
    found = [output.data.get("image/png") for output in cell.outputs if output.output_type != "stream"]
    return [base64.b64decode(data) for data in found if data]


def executed(path, folder, monkeypatch, *, place):
    """A notebook without its outputs, run in a fresh kernel that starts at `place`."""
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(variable, str(folder / variable.lower()))
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))  # the package under test
    notebook = read(path)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(place)}},
    )
    return client.execute(env={**os.environ, "PYTHONWARNINGS": "ignore:IProgress not found"})  # tqdm's


def assert_close(new, kept):
    """The same words, and numbers that differ by little: by 0.05 or 15 % of the larger."""
    assert re.sub(r"\s+", " ", NUMBER.sub("#", new)) == re.sub(r"\s+", " ", NUMBER.sub("#", kept))
    for one, other in zip(NUMBER.findall(new), NUMBER.findall(kept), strict=True):
        a, b = (float(number.replace("−", "-")) for number in (one, other))
        assert math.isclose(a, b, rel_tol=0.15, abs_tol=0.05), f"{one} now, {other} kept"


def test_there_are_four():
    assert [path.name[0] for path in PATHS] == ["1", "2", "3", "4"]
    assert {path.stem for path in PATHS} >= SLOW


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_kept_outputs_are_whole_and_name_no_place(path):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(text_of(cell)) for cell in cells) >= 3
    assert sum(len(pictures_of(cell)) for cell in cells) >= 2
    for cell in cells:
        assert set(cell.metadata.get("tags", [])) <= TAGS
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
        for data in pictures_of(cell):
            assert data.startswith(b"\x89PNG")
    text = path.read_text(encoding="utf-8")
    assert not PLACE.search(text), PLACE.search(text)
    for place in (str(ROOT), str(Path.home()), tempfile.gettempdir()):
        assert place + "/" not in text


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path):
    for cell in read(path).cells:
        for target in re.findall(r"\]\(([^)#]+)\)", cell.source) if cell.cell_type == "markdown" else ():
            assert target.startswith("http") or (FOLDER / target).exists(), target
        for name in re.findall(r"configs/[\w/]+\.(?:yaml|npz)", cell.source):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.stem in SLOW else ()) for path in PATHS],
    ids=lambda path: path.stem,
)
def test_a_fresh_kernel_says_the_same(path, tmp_path, monkeypatch):
    """From the root and from the notebooks' folder, in turn."""
    place = ROOT if path.name[0] in "13" else FOLDER
    notebook = executed(path, tmp_path, monkeypatch, place=place)
    for new, kept in zip(code_cells(notebook), code_cells(read(path)), strict=True):
        assert len(pictures_of(new)) == len(pictures_of(kept))
        tags = kept.metadata.get("tags", [])
        if "timed" in tags:
            assert text_of(new).strip()
        elif "close" in tags:
            assert_close(text_of(new), text_of(kept))
        else:
            assert text_of(new) == text_of(kept)


def test_a_changed_number_or_word_is_noticed():
    assert_close("sharpness 0.1255 −0.50", "sharpness  0.1256 −0.48")
    for other in ("sharpness 0.1255 0.50", "sharpness 1.1255 −0.50", "jpeg 0.1255 −0.50"):
        with pytest.raises(AssertionError):
            assert_close("sharpness 0.1255 −0.50", other)
