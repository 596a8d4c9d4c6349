"""The whole way to a win rate on the embedded pipeline, before a judge who answers by the detector's score.

`predict` twice, the pairwise command over a server of OpenAI's format: what it says must be what the detector
says of the same files, which is known without it.
"""

import json

import numpy as np
import torch
from chat_server import chat_server
from command_line import QUICKSTART
from PIL import Image
from test_pairwise import caption, run

from recast_pl.cli import main
from recast_pl.rewards import Composition
from recast_pl.types import Prompt


def predicted(folder, *extra):
    """Pictures of 12 held-out prompts."""
    main(
        ["predict", "--config", QUICKSTART, "--pictures.folder", str(folder), "--trainer.logger", "false",
         "--data.evaluation.init_args.count", "12", "--trainer.enable_progress_bar", "false", *extra]
    )  # fmt: skip
    return folder


def scores_of(folder):
    """The detector's score of each file, and each prompt's metadata by its text."""
    lines = [json.loads(line) for line in (folder / "pictures.jsonl").read_text().splitlines()]
    prompts = [Prompt(text=line["prompt"], metadata=line["metadata"]) for line in lines]
    arrays = [np.asarray(Image.open(folder / line["file"])) for line in lines]
    return judged(arrays, prompts), {prompt.text: prompt for prompt in prompts}


def judged(arrays, prompts):
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float() / 255
    return Composition().score(images, prompts).tolist()


def test_the_win_rate_is_the_detectors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fine = predicted(tmp_path / "fine")
    coarse = predicted(tmp_path / "coarse", "--model.rollout.init_args.num_steps", "2",
                       "--model.timesteps_per_sample", "1")  # fmt: skip
    (ours, prompts), (theirs, _) = scores_of(fine), scores_of(coarse)

    def detector(arrays, text):
        prompt = prompts[caption(text)]
        first, second = judged(arrays, [prompt] * 2)
        return f"Verdict: {'tie' if first == second else '1' if first > second else '2'}"

    with chat_server(detector) as stand:
        result = run(stand, (fine, coarse))
    pairs = list(zip(ours, theirs, strict=True))
    wins, losses = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    assert (result["wins"], result["losses"], result["ties"]) == (wins, losses, len(pairs) - wins - losses)
    assert result["win_rate"] == (wins + 0.5 * result["ties"]) / len(pairs)
    assert (result["unparsable"], result["missing"], result["consistent"]) == (0, 0, 1)
    assert wins > losses  # two steps are too few
