"""Where prompts come from: text files, JSON lines with metadata, the scene grammar."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recast_pl.types import Prompt


class PromptSource(ABC):
    """An ordered, finite collection of prompts. Equal texts at two places are two prompts."""

    @abstractmethod
    def prompts(self) -> Sequence[Prompt]:
        """All prompts, the same ones at each call.

        Raises:
            ValueError: where there are none or one cannot be read; the message names file and line.
        """


class TextFile(PromptSource):
    """One prompt a line; blank lines are passed over.

    Args:
        path: of the file, UTF-8.
        limit: the first so many prompts only.
    """

    def __init__(self, *, path: str, limit: int | None = None) -> None:
        self.path, self.limit = existing(path), limit

    def prompts(self) -> Sequence[Prompt]:
        """See the class."""
        lines = [line.strip() for line in _lines(self.path)]
        found = [Prompt(text=line, metadata={}) for line in lines if line][: self.limit]
        if not found:
            raise ValueError(f"{self.path} holds no prompt")
        return found


class JSONLines(PromptSource):
    """One JSON object a line (GenEval's layout): the prompt under `key`, everything else is metadata.

    Args:
        path: of the file, UTF-8.
        key: of the prompt's text.
        limit: the first so many prompts only.
    """

    def __init__(self, *, path: str, key: str = "prompt", limit: int | None = None) -> None:
        self.path, self.key, self.limit = existing(path), key, limit

    def prompts(self) -> Sequence[Prompt]:
        """See the class."""
        found: list[Prompt] = []
        for number, line in enumerate(_lines(self.path), start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{self.path}, line {number}: no JSON ({error})") from error
            if not isinstance(entry, dict) or not isinstance(entry.get(self.key), str):
                raise ValueError(f"{self.path}, line {number}: no text under the key {self.key!r}")
            found.append(Prompt(text=entry.pop(self.key), metadata=entry))
        if not found:
            raise ValueError(f"{self.path} holds no prompt")
        return found[: self.limit]


class SceneGrammar(PromptSource):
    """Captions of procedurally drawn scenes, with the metadata that a composition reward checks.

    Args:
        count: how many prompts are drawn.
        held_out: from the half of the combinations that the embedded pipeline never saw in training.
        relation_share: share of scenes with two objects in a relation, in [0, 1].
        seed: of the draw.
    """

    def __init__(
        self, *, count: int = 512, held_out: bool = False, relation_share: float = 0.5, seed: int = 0
    ) -> None:
        if count < 1:
            raise ValueError(f"SceneGrammar.count: expected 1 or more, got {count}")
        if not 0 <= relation_share <= 1:
            raise ValueError(f"SceneGrammar.relation_share: expected 0 to 1, got {relation_share}")
        self.count, self.held_out = count, held_out
        self.relation_share, self.seed = relation_share, seed

    def prompts(self) -> Sequence[Prompt]:
        """See the class."""
        from recast_pl.scenes import sample_scene

        generator = np.random.default_rng(self.seed)
        drawn = [
            sample_scene(generator, held_out=self.held_out, relation_share=self.relation_share)
            for _ in range(self.count)
        ]
        return [Prompt(text=scene.caption, metadata=scene.metadata) for scene in drawn]


def _lines(path: Path) -> list[str]:
    """Lines end at newlines alone: `str.splitlines` also cuts at U+2028 and U+0085, which prompts may hold."""
    return path.read_text(encoding="utf-8-sig").replace("\r\n", "\n").split("\n")


def existing(path: str) -> Path:
    """The path of a prompt file.

    Raises:
        ValueError: where there is no such file.
    """
    found = Path(path).expanduser()
    if not found.is_file():
        raise ValueError(
            f"data.train or data.evaluation: no prompt file {path!r} (looked in {found.absolute().parent}); "
            "init_args.path is relative to where the run is started"
        )
    return found
