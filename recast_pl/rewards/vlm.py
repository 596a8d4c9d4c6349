"""VLMScore: a vision-language model behind a chat server, asked for a number.

Shape suffixes: B pictures, H W their sides.
"""

import math
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from recast_pl.rewards.base import Reward
from recast_pl.rewards.images import score_finite, to_pil
from recast_pl.rewards.remote.chat import ChatServer
from recast_pl.types import Prompt

# In the layout and with the scale of the UnifiedReward models' published question, in our own words: for scores
# to be compared with published ones, put the model card's text into `template`.
UNIFIED_REWARD = """\
Here is a picture that was generated for the caption below. Grade it by two things together: how well it shows \
what the caption says (objects, their attributes, their relations), and how good it is as a picture (clarity, \
detail, colours, composition). Give one grade from 1 (bad) to 5 (excellent), and write it after 'Final Score:'.
Text Caption: [{prompt}]"""

# a number that is not cut short ("45" is not 4), and not out of something else than 5 ("4/10" is not 4)
FINAL_SCORE = r"(?i)Final Score:[\s*]*(-?\d+(?:\.\d+)?)(?!\.?\d)(?!\s*/\s*(?!5(?:\.0*)?(?!\.?\d))\d)"


class VLMScore(Reward):
    """The number that a model gives each picture, on UnifiedReward's scale (1 to 5) or one of your own.

    A picture whose answer has no number, or one off the scale, is NaN. A server that fails raises.

    Args:
        url: of an OpenAI-compatible server, with its version: `http://gpu-2:8000/v1`.
        model: as the server calls it.
        template: the question; `{prompt}` in it stands for the prompt. Other braces are left alone.
        pattern: regular expression with one group, the number; of several matches the last one counts, since
            models repeat the question before they answer.
        scale: lowest and highest number that the template asks for.
        parallel_requests: pictures asked about at a time.
        timeout: seconds for one answer.
        max_tokens: longest answer.
        seed: sent along; not every server heeds it. The temperature is 0.
        key_variable: name of the environment variable that holds the API key; None: no key.

    Raises:
        RewardUnavailable: from `load` and `score`, where another attempt may help.
        RewardUnusable: where it will not.

    Reference: Wang et al., "Unified reward model for multimodal understanding and generation", 2025
    (`CodeGoat24/UnifiedReward-7b-v1.5`).
    """

    def __init__(
        self,
        *,
        url: str,
        model: str = "CodeGoat24/UnifiedReward-7b-v1.5",
        template: str = UNIFIED_REWARD,
        pattern: str = FINAL_SCORE,
        scale: tuple[float, float] = (1.0, 5.0),
        parallel_requests: int = 16,
        timeout: float = 60.0,
        max_tokens: int = 1024,
        seed: int = 0,
        key_variable: str | None = None,
    ) -> None:
        if "{prompt}" not in template:
            raise ValueError(f"VLMScore.template: expected {{prompt}} somewhere in it, got {template!r:.200}")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"VLMScore.pattern: {error}, in {pattern!r}") from error
        if self._pattern.groups != 1:
            raise ValueError(f"VLMScore.pattern: expected one group, got {self._pattern.groups} in {pattern!r}")
        if not (scale[0] < scale[1] and all(map(math.isfinite, scale))):
            raise ValueError(f"VLMScore.scale: expected [lowest, highest], both finite, got {list(scale)}")
        if parallel_requests < 1:
            raise ValueError(f"VLMScore.parallel_requests: expected 1 or more, got {parallel_requests}")
        self.template, self.range, self.parallel_requests = template, scale, parallel_requests
        self.server = ChatServer(
            url=url,
            model=model,
            timeout=timeout,
            max_tokens=max_tokens,
            seed=seed,
            key_variable=key_variable,
            key="VLMScore",
        )

    def load(self, device: torch.device) -> None:
        """Connects, and makes sure that the server has the model."""
        self.server.open()

    def unload(self) -> None:
        """Closes the connections."""
        self.server.close()

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Numbers [B] on the scale; NaN where the answer has none."""
        return score_finite(images_B3HW, prompts, self._ask)

    def _ask(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        threads = ThreadPoolExecutor(self.parallel_requests, thread_name_prefix="vlm")
        try:
            waiting = [
                threads.submit(self.server.ask, self.template.replace("{prompt}", prompt.text), [image])
                for image, prompt in zip(to_pil(images_B3HW), prompts, strict=True)
            ]
            scores = [self.number(future.result()) for future in waiting]
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
        return torch.tensor(scores, dtype=torch.float32, device=images_B3HW.device)

    def number(self, answer: str) -> float:
        """The number in an answer; NaN where there is none, or it is off the scale."""
        matches = self._pattern.findall(answer)
        try:
            value = float(matches[-1])
        except (IndexError, ValueError):
            return math.nan
        return value if self.range[0] <= value <= self.range[1] else math.nan
