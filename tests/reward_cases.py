"""A case for every reward of this package, on checkpoints of the released layouts; a new reward is one more."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from miniature_rewards import RewardCheckpoints
from PIL import Image, ImageDraw, ImageFont
from reward_servers import chat_url, jpeg_url

from recast_pl.rewards import (
    OCR,
    Aesthetic,
    CLIPScore,
    Composition,
    GenEval,
    HPSv2,
    ImageReward,
    JPEGCompressibility,
    JPEGIncompressibility,
    PickScore,
    RemoteReward,
    Sharpness,
    VLMScore,
)
from recast_pl.scenes.coco import COCO_CLASSES
from recast_pl.testing import RewardCase, RewardTester
from recast_pl.types import Prompt


def geneval_prompts(prompts: list[Prompt]) -> list[Prompt]:
    """As many objects of all classes, one more with each prompt: an untrained detector finds some of them."""
    return [
        Prompt(
            text=prompt.text,
            metadata={
                "tag": "two_object",
                "include": [{"class": name, "count": 1} for name in COCO_CLASSES[: 10 + 14 * number]],
            },
        )
        for number, prompt in enumerate(prompts)
    ]


WORDS = ("Coffee", "Danger", "Winter", "Market", "Welcome", "Garden")


def quoting_prompts(prompts: list[Prompt]) -> list[Prompt]:
    return [Prompt(text=f'a sign that says "{word}"', metadata={}) for word in WORDS]


def rendered_words(images: torch.Tensor) -> torch.Tensor:
    """The words of `quoting_prompts`; one of them is not its prompt's."""
    pictures = []
    for word in (*WORDS[:2], WORDS[4], *WORDS[3:]):
        picture = Image.new("RGB", (128, 128), "ivory")
        face = ImageFont.load_default(24)
        ImageDraw.Draw(picture).text((64, 64), word, fill="navy", font=face, anchor="mm")
        pictures.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255)
    return torch.stack(pictures)


CASES: dict[str, Callable[[RewardCheckpoints], RewardCase]] = {
    "clipscore": lambda c: RewardCase(reward=CLIPScore, build=partial(CLIPScore, pretrained=c.clip)),
    "pickscore": lambda c: RewardCase(
        reward=PickScore, build=partial(PickScore, pretrained=c.clip_h, processor=c.clip_h)
    ),
    "hps": lambda c: RewardCase(reward=HPSv2, build=partial(HPSv2, weights=c.hps, tokenizer=c.clip_h)),
    "aesthetic": lambda c: RewardCase(
        reward=Aesthetic, build=partial(Aesthetic, pretrained=c.clip, weights=c.aesthetic), reads_text=False
    ),
    "imagereward": lambda c: RewardCase(
        reward=ImageReward, build=partial(ImageReward, weights=c.imagereward, tokenizer=c.bert)
    ),
    "geneval": lambda c: RewardCase(
        reward=GenEval,
        build=partial(GenEval, detector=c.detector, clip=c.clip, threshold=0.0, counting_threshold=0.0),
        prompts=geneval_prompts,
        reads_text=False,
    ),
    "ocr": lambda c: RewardCase(
        reward=OCR,
        build=partial(OCR, detection_side=128),
        prompts=quoting_prompts,
        pictures=rendered_words,
        edge_texts=('"' + "word " * 300 + '"', "a sign: “zażółć 文字 🎉” and more", '"one" and "two"'),
    ),
    "vlm": lambda c: RewardCase(reward=VLMScore, build=partial(VLMScore, url=chat_url(), model="judge")),
    "remote": lambda c: RewardCase(
        reward=RemoteReward, build=partial(RemoteReward, url=jpeg_url()), reads_text=False
    ),
    "composition": lambda c: RewardCase(reward=Composition, reads_text=False),
    "sharpness": lambda c: RewardCase(reward=Sharpness, reads_text=False),
    "jpeg": lambda c: RewardCase(reward=JPEGIncompressibility, reads_text=False),
    "jpeg_small": lambda c: RewardCase(reward=JPEGCompressibility, reads_text=False),
}
EXTRA = {"ocr": "ocr", "remote": "serve"}  # the optional dependencies of pyproject.toml that a case may import


def packages_of(distribution: str, extra: str = "") -> Iterator[str]:
    """A distribution and all it requires, by normalised name; of its extras only `extra`."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    stack, seen = [(distribution, extra)], set()
    while stack:
        name, extra = stack.pop()
        if (canonicalize_name(name), extra) in seen:
            continue
        seen.add((canonicalize_name(name), extra))
        yield canonicalize_name(name)
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                stack.extend((requirement.name, e) for e in (requirement.extras or {""}) | {""})


class Absent:
    """An import hook for which all installed packages are absent but those it is given."""

    def __init__(self, present: set[str]) -> None:
        from packaging.utils import canonicalize_name

        self.absent = {
            module
            for module, distributions in metadata.packages_distributions().items()
            if not present & {canonicalize_name(name) for name in distributions}
        }

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def score_with_own_packages(extra: str, folder: str, names: list[str]) -> None:
    """Loads and scores rewards where only the project's packages and those of `extra` can be imported.

    Run in a fresh process.
    """
    from packaging.utils import canonicalize_name

    present = {*packages_of("recast-pl", extra), canonicalize_name("pip"), "setuptools", "packaging"}
    already = {name.split(".")[0] for name in sys.modules} & Absent(present).absent
    assert not already, f"importing recast_pl.rewards imported {already}"
    sys.meta_path.insert(0, Absent(present))
    for name in names:
        tester = RewardTester(CASES[name](RewardCheckpoints(Path(folder))))
        assert tester.loaded().score(tester.images, tester.prompts).isfinite().all(), name
        print("scored", name)
