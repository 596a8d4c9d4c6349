"""Rewards for a server's process, which finds them by class path."""

import threading
import time
from pathlib import Path

import torch

from recast_pl.rewards import Reward


class Bits(Reward):
    """Every bit of a picture counts, and the prompt says what to do with it."""

    range = (0.0, float("inf"))
    higher_is_better = False
    required_metadata = ("offset",)

    def __init__(self):
        self.inside = threading.Lock()

    def score(self, images_B3HW, prompts):
        if not self.inside.acquire(blocking=False):
            raise RuntimeError("two at once")
        try:
            time.sleep(0.01)  # long enough for another thread to come in
            return self.answer(images_B3HW, prompts)
        finally:
            self.inside.release()

    def answer(self, images_B3HW, prompts):
        scores = images_B3HW.view(torch.int32).long().flatten(1).sum(1).remainder(1 << 20).float() / 3
        for row, prompt in enumerate(prompts):
            word, _, argument = prompt.text.partition(" ")
            if word == "raise":
                raise RuntimeError("no mercy")
            if word == "touch":
                Path(argument).touch()  # tells the test that the request is in here
            if word == "sleep":
                time.sleep(float(argument))
            if word == "short":
                return scores[1:]
            scores[row] += prompt.metadata["offset"]
            scores[row] = {"nan": float("nan"), "negative": -1.0}.get(word, scores[row])
        return scores
