"""One set of checks that every reward must pass. Adding a reward is one entry in `CASES`.

Imports no pytest, so that a subprocess may run it where only a reward's own packages can be imported.
"""

import gc
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from miniature_rewards import RewardCheckpoints
from PIL import Image, ImageDraw, ImageFont
from reward_servers import chat_url, jpeg_url
from torch import nn

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
    Reward,
    RewardSuite,
    Sharpness,
    VLMScore,
)
from recast_pl.scenes import draw, sample_scene
from recast_pl.scenes.coco import COCO_CLASSES
from recast_pl.types import Prompt

CPU = torch.device("cpu")
EDGE_TEXTS = ("", "word " * 300, "🎉🎨", "一只红色的猫", "naïve ünï \u202e", " \n\t ", "<|endoftext|> [SEP]")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A reward under test."""

    build: Callable[..., Reward]  # (checkpoints, **options); options are constructor arguments such as dtype
    reward: type[Reward]
    reads_text: bool = True  # scores depend on the prompt's text
    prompts: Callable[[list[Prompt]], list[Prompt]] = list  # from captions of scenes to what the reward needs
    edge_texts: tuple[str, ...] = EDGE_TEXTS  # prompts that must be scored like any other
    pictures: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone  # from drawn scenes to its own
    extra: str | None = None  # the optional dependencies of pyproject.toml that it may import
    tolerance: float = 1e-5  # between batch sizes

    @property
    def has_dtype(self) -> bool:
        return "dtype" in inspect.signature(self.reward).parameters


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


CASES: dict[str, Case] = {
    "clipscore": Case(reward=CLIPScore, build=lambda c, **o: CLIPScore(pretrained=c.clip, **o)),
    "pickscore": Case(
        reward=PickScore, build=lambda c, **o: PickScore(pretrained=c.clip_h, processor=c.clip_h, **o)
    ),
    "hps": Case(reward=HPSv2, build=lambda c, **o: HPSv2(weights=c.hps, tokenizer=c.clip_h, **o)),
    "aesthetic": Case(
        reward=Aesthetic,
        build=lambda c, **o: Aesthetic(pretrained=c.clip, weights=c.aesthetic, **o),
        reads_text=False,
    ),
    "imagereward": Case(
        reward=ImageReward, build=lambda c, **o: ImageReward(weights=c.imagereward, tokenizer=c.bert, **o)
    ),
    "geneval": Case(
        reward=GenEval,
        build=lambda c, **o: GenEval(
            detector=c.detector, clip=c.clip, threshold=0.0, counting_threshold=0.0, **o
        ),
        prompts=geneval_prompts,
        reads_text=False,
    ),
    "ocr": Case(
        reward=OCR,
        build=lambda c: OCR(detection_side=128),
        prompts=quoting_prompts,
        pictures=rendered_words,
        edge_texts=('"' + "word " * 300 + '"', "a sign: “zażółć 文字 🎉” and more", '"one" and "two"'),
        extra="ocr",
    ),
    "vlm": Case(reward=VLMScore, build=lambda c: VLMScore(url=chat_url(), model="judge")),
    "remote": Case(
        reward=RemoteReward, build=lambda c: RemoteReward(url=jpeg_url()), reads_text=False, extra="serve"
    ),
    "composition": Case(reward=Composition, build=lambda c: Composition(), reads_text=False),
    "sharpness": Case(reward=Sharpness, build=lambda c: Sharpness(), reads_text=False),
    "jpeg": Case(reward=JPEGIncompressibility, build=lambda c: JPEGIncompressibility(), reads_text=False),
    "jpeg_small": Case(reward=JPEGCompressibility, build=lambda c: JPEGCompressibility(), reads_text=False),
}


class RewardTester:
    """Runs the checks of one case on six drawn scenes, of which one has another's prompt."""

    def __init__(self, case: Case, checkpoints: RewardCheckpoints) -> None:
        self.case, self.checkpoints = case, checkpoints
        generator = np.random.default_rng(0)
        scenes = [sample_scene(generator, held_out=False) for _ in range(6)]
        images = torch.from_numpy(np.stack([draw(scene, generator) for scene in scenes])).float()
        images[2] = images[4]  # so that no reward is constant
        self._images = case.pictures(images)
        self.prompts = case.prompts([Prompt(text=s.caption, metadata=s.metadata) for s in scenes])

    @property
    def images(self) -> torch.Tensor:
        """The pictures in fresh memory, so that no embedding of an earlier call can be taken for theirs."""
        return self._images.clone()

    def loaded(self, **options) -> Reward:
        reward = self.case.build(self.checkpoints, **options)
        reward.load(CPU)
        return reward

    def pairs(self) -> None:
        """Permuting pairs permutes scores; scores repeat, differ, and have the right shape and type."""
        reward = self.loaded()
        order = [3, 0, 5, 1, 4, 2]
        straight = reward.score(self.images, self.prompts)
        shuffled = reward.score(self.images[order], [self.prompts[i] for i in order])
        assert straight.shape == (6,)
        assert straight.dtype == torch.float32
        assert straight.isfinite().all()
        assert straight.std() > 0
        torch.testing.assert_close(shuffled, straight[order], atol=self.case.tolerance, rtol=1e-5)
        torch.testing.assert_close(reward.score(self.images, self.prompts), straight, atol=0, rtol=0)

    def right_rows(self) -> None:
        """Another prompt for one picture changes that picture's score, and no other, if text matters at all."""
        reward = self.loaded()
        straight = reward.score(self.images, self.prompts)
        prompts = [*self.prompts[:5], Prompt(text=self.prompts[0].text, metadata=self.prompts[5].metadata)]
        changed = (reward.score(self.images, prompts) - straight).abs() > self.case.tolerance
        assert changed.tolist() == [False] * 5 + [self.case.reads_text]

    def batches(self) -> None:
        """A batch scores as its items do one by one."""
        reward = self.loaded()
        images, prompts = self.images, self.prompts
        single = torch.cat([reward.score(images[i : i + 1], prompts[i : i + 1]) for i in range(6)])
        torch.testing.assert_close(reward.score(images, prompts), single, atol=self.case.tolerance, rtol=1e-5)

    def range(self) -> None:
        """Scores lie within the declared range, of black, white and noise pictures too."""
        reward = self.loaded()
        low, high = reward.range
        images = self.images
        images[0], images[1] = 0, 1
        images[2] = torch.rand(images.shape[1:], generator=torch.Generator().manual_seed(0))
        for batch in (self.images, images):
            scores = reward.score(batch, self.prompts)
            assert ((scores >= low) & (scores <= high)).all()

    def edge_prompts(self) -> None:
        """Any prompt can be scored: too long, empty, other scripts; alone as among others."""
        reward = self.loaded()
        texts = self.case.edge_texts
        prompts = [Prompt(text=text, metadata=self.prompts[0].metadata) for text in texts]
        images = self.images[:1].repeat(len(texts), 1, 1, 1)
        together = reward.score(images, prompts)
        assert together.isfinite().all()
        alone = torch.cat([reward.score(images[:1], [prompt]) for prompt in prompts])
        torch.testing.assert_close(together, alone, atol=self.case.tolerance, rtol=1e-5)

    def broken_picture(self) -> None:
        """A picture that is not finite gets no number, and its neighbours keep theirs."""
        reward = self.loaded()
        images = self.images
        images[1, 0, 3, 3] = torch.nan
        scores = reward.score(images, self.prompts)
        assert scores.isfinite().tolist() == [True, False, True, True, True, True]
        rest = [0, 2, 3, 4, 5]
        expected = reward.score(self.images, self.prompts)[rest]
        torch.testing.assert_close(scores[rest], expected, atol=self.case.tolerance, rtol=1e-5)

    def sizes(self) -> None:
        """Pictures that are not square, and larger or smaller ones, are scored."""
        reward = self.loaded()
        for size in ((40, 64), (96, 96), (64, 33)):
            images = nn.functional.interpolate(self.images, size=size, mode="bilinear")
            assert reward.score(images, self.prompts).isfinite().all()

    def half_precision_pictures(self) -> None:
        """A suite scores bfloat16 pictures as their float32 copies."""
        suite = RewardSuite(rewards={"reward": self.case.build(self.checkpoints)})
        suite.setup(CPU)
        half = self.images.bfloat16()
        scores = suite.score(half, self.prompts).values_RB[0]
        torch.testing.assert_close(scores, self.loaded().score(half.float(), self.prompts))

    def dtypes(self) -> None:
        """Half-precision weights give float32 scores near those of float32 weights."""
        if not self.case.has_dtype:
            return
        full = self.loaded().score(self.images, self.prompts)
        for name, tolerance in (("bfloat16", 0.05), ("float16", 0.01)):
            reward = self.loaded(dtype=name)
            assert getattr(torch, name) in {p.dtype for net in reward.networks() for p in net.parameters()}
            scores = reward.score(self.images, self.prompts)
            assert scores.dtype == torch.float32
            torch.testing.assert_close(scores, full, atol=tolerance, rtol=tolerance)
        complaint = ""
        try:
            self.case.build(self.checkpoints, dtype="float64")
        except ValueError as error:
            complaint = str(error)
        assert re.match(rf"{self.case.reward.__name__}\.dtype: .*float32.*'float64'", complaint), complaint

    def networks(self) -> None:
        """`networks` has every parameter: frozen, in eval mode; it can be moved; `unload` lets go of all."""
        reward = self.case.build(self.checkpoints)
        assert list(reward.networks()) == []
        reward.load(CPU)
        listed = {id(p) for network in reward.networks() for p in network.parameters()}
        assert listed == {id(p) for network in reachable_modules(reward) for p in network.parameters()}
        assert bool(listed) == self.case.has_dtype
        for network in reward.networks():
            assert not any(module.training for module in network.modules())
            assert not any(p.requires_grad for p in network.parameters())
        before = reward.score(self.images, self.prompts)
        assert not before.requires_grad
        elsewhere = [torch.float64, torch.float32] + ["cuda", "cpu"] * torch.cuda.is_available()
        for place in elsewhere:
            for network in reward.networks():
                network.to(place)
            images = self.images.to(place) if isinstance(place, str) else self.images
            after = reward.score(images, self.prompts)
            assert after.device == images.device
            torch.testing.assert_close(after.cpu().float(), before, atol=1e-4, rtol=1e-4)
        reward.unload()
        assert list(reward.networks()) == []
        assert reachable_modules(reward) == []
        reward.load(CPU)
        torch.testing.assert_close(reward.score(self.images, self.prompts), before)

    def checkpoint(self) -> None:
        """Nothing of a suite reaches the state dict or the parameters of the module that holds it."""
        module = pl.LightningModule()
        module.rewards = RewardSuite(rewards={"reward": self.case.build(self.checkpoints)})
        module.rewards.setup(CPU)
        module.rewards.score(self.images, self.prompts)
        assert module.state_dict() == {}
        assert list(module.parameters()) == []


CHECKS = tuple(
    name
    for name, member in vars(RewardTester).items()
    if inspect.isfunction(member) and name not in ("loaded",) and not name.startswith("_")
)


def reachable_modules(reward: Reward) -> list[nn.Module]:
    """Networks that a reward's attributes lead to, through this project's objects and plain containers."""
    found: list[nn.Module] = []
    stack, seen = [reward], set()
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        elif type(item).__module__.startswith("recast_pl") or isinstance(item, (dict, list, tuple)):
            stack.extend(gc.get_referents(item))
    return found


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
        tester = RewardTester(CASES[name], RewardCheckpoints(Path(folder)))
        assert tester.loaded().score(tester.images, tester.prompts).isfinite().all(), name
        print("scored", name)
