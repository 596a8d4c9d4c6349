"""OCR: whether the text that a prompt asks for can be read in the picture."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import nan_where_broken, to_pil
from recast_pl.types import Prompt

_MARKS = '"“”„‟＂'
_QUOTED = re.compile(f"[{_MARKS}]([^{_MARKS}]*)[{_MARKS}]")


class OCR(Reward):
    """1 − min(d, n) / n, with d the edit distance from target to recognised text, and n the target's length.

    Both texts are lower-cased and freed of white space; a recognised text that contains the target scores 1,
    whatever else the picture says. A picture without any text scores 0, and that is a true 0.

    The target is the prompt's metadata `text` where there is one, else what stands between the prompt's first
    pair of double quotes, straight or curly. Later pairs are ignored, as in the recipe; a prompt that wants
    all of them, or has an inch mark before its text, says so by `text`. A prompt without target is refused.

    The engine is RapidOCR (PP-OCR; its package brings the weights), on the CPU, with as many threads as torch.

    Args:
        detection_side: pictures whose shorter side is below this are enlarged before text is looked for.
            More finds smaller letters and costs time: the picture's area, about.
        min_confidence: lines that the engine trusts less are not counted as read, in [0, 1].

    Reference: Liu et al., "Flow-GRPO: Training flow matching models via online RL", 2025 (the score); Cui et
    al., "PaddleOCR 3.0 technical report", 2025 (the engine's models).
    """

    range = (0.0, 1.0)

    def __init__(self, *, detection_side: int = 320, min_confidence: float = 0.5) -> None:
        if detection_side < 32:
            raise ValueError(f"OCR.detection_side: expected 32 pixels or more, got {detection_side}")
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"OCR.min_confidence: expected 0 to 1, got {min_confidence}")
        self.detection_side, self.min_confidence = detection_side, min_confidence
        self._engine: Any = None

    def load(self, device: torch.device) -> None:
        """Builds the engine; it stays on the CPU whatever `device` is."""
        try:
            import onnxruntime  # noqa: F401 - RapidOCR would miss it only at the first picture
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ImportError(
                "OCR needs the packages of the extra `ocr`, from a checkout: python -m pip install "
                f"-c constraints.txt '.[ocr]' ({error})"
            ) from error
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",  # an empty picture is no warning
                "Det.limit_type": "min",
                "Det.limit_side_len": self.detection_side,
                "EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads(),
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )

    def unload(self) -> None:
        """Drops the engine."""
        self._engine = None

    def check(self, prompt: Prompt) -> str | None:
        """A prompt must have a target."""
        try:
            target_text(prompt)
        except ValueError as error:
            return str(error)
        return None

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [B]; see the class.

        Raises:
            ValueError: where a prompt has no target.
            RuntimeError: where the engine found text and did not read it.
        """
        targets = [target_text(prompt) for prompt in prompts]
        texts = [self._read(image) for image in to_pil(images_B3HW)]
        scores = [text_score(target, text) for target, text in zip(targets, texts, strict=True)]
        return nan_where_broken(torch.tensor(scores, device=images_B3HW.device), images_B3HW)

    def _read(self, image: Any) -> str:
        """All lines that the engine reads, top to bottom; "" where there is no text."""
        result = self._engine(  # the engine keeps flags from call to call: all of them, every time
            image,
            use_det=True,
            use_cls=False,  # upside-down lines are not what a prompt asks for
            use_rec=True,
            return_word_box=False,
            text_score=self.min_confidence,
        )
        if not hasattr(result, "txts"):  # boxes alone: it logs that recognition failed, and goes on
            raise RuntimeError("OCR: the engine found text and failed to recognise it")
        return "".join(result.txts or ())


def target_text(prompt: Prompt) -> str:
    """The text that a picture of the prompt must show.

    >>> target_text(Prompt(text='A sign that says “Open late”, next to a "Closed" one', metadata={}))
    'Open late'

    Raises:
        ValueError: where it is missing or blank.
    """
    if "text" in prompt.metadata:
        target, place = prompt.metadata["text"], "metadata `text`"
    else:
        found = _QUOTED.search(prompt.text)
        if found is None:
            raise ValueError(f"OCR: no text in double quotes, and no metadata `text`: {prompt.text!r}")
        target, place = found[1], "first pair of quotes"
    if not isinstance(target, str) or not _comparable(target):
        raise ValueError(f"OCR: the {place} holds no text ({target!r}): {prompt.text!r}")
    return target


def text_score(target: str, recognised: str) -> float:
    """1 − min(d, n) / n; see `OCR`.

    >>> text_score("Open late", "OPEN  L8TE"), text_score("cat", "concatenate"), text_score("cat", "")
    (0.875, 1.0, 0.0)
    """
    wanted, found = _comparable(target), _comparable(recognised)
    if wanted in found:
        return 1.0
    return 1 - min(edit_distance(wanted, found), len(wanted)) / len(wanted)


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions that make one text of the other (Levenshtein, 1966).

    >>> edit_distance("kitten", "sitting")
    3
    """
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(b, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != other))
    return row[-1]


def _comparable(text: str) -> str:
    """Lower case, without white space, and accents composed, as engines write them."""
    return unicodedata.normalize("NFC", "".join(text.lower().split()))
