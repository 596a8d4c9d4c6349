"""Two runs' pictures, as `predict` wrote them, matched into pairs."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One line of a `predict` folder."""

    prompt: str
    path: Path


def read_run(folder: Path) -> dict[int, Picture]:
    """A run's pictures by sample.

    Raises:
        ValueError: naming the file and line that are not as `predict` writes them.
    """
    files = sorted(folder.glob("pictures*.jsonl"))
    if not files:
        raise ValueError(f"{folder}: no pictures*.jsonl in it; expected a folder that `predict` wrote")
    pictures: dict[int, Picture] = {}
    for file in files:
        # bytes: a prompt may hold what Python's text takes for the end of a line
        for number, line in enumerate(file.read_bytes().splitlines(), start=1):
            try:
                entry = json.loads(line)
                sample = int(entry["sample"])
                picture = Picture(prompt=str(entry["prompt"]), path=folder / entry["file"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: not a line of `predict`: {error!r}") from error
            if sample in pictures:
                raise ValueError(f"{file}, line {number}: sample {sample} is there twice")
            if not picture.path.is_file():
                raise ValueError(f"{file}, line {number}: {picture.path} is missing")
            pictures[sample] = picture
    return dict(sorted(pictures.items()))


def match(a: Mapping[int, Picture], b: Mapping[int, Picture]) -> dict[int, tuple[Picture, Picture]]:
    """Pairs by sample.

    Raises:
        ValueError: naming the first difference, where the runs are not of the same prompts.
    """
    for name, more, less in (("A", a, b), ("B", b, a)):
        if only := sorted(more.keys() - less.keys()):
            raise ValueError(f"{len(only)} samples are in {name} only, the first one {only[0]}")
    for sample in a:
        if a[sample].prompt != b[sample].prompt:
            raise ValueError(
                f"sample {sample} has the prompt {a[sample].prompt!r} in A and {b[sample].prompt!r} in B"
            )
    if not a:
        raise ValueError("there is no picture in A, and none in B")
    return {sample: (a[sample], b[sample]) for sample in a}


def digest(pictures: Mapping[int, Picture]) -> str:
    """Changes with any prompt, sample or bit of a picture."""
    total = hashlib.sha256()
    for sample, picture in pictures.items():
        content = hashlib.sha256(picture.path.read_bytes()).hexdigest()
        total.update(json.dumps([sample, picture.prompt, content]).encode())
    return total.hexdigest()
