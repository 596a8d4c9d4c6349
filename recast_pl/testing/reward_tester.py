"""One set of checks that every reward must pass, a user's own as this package's.

Imports no pytest: a notebook, or a process that has a reward's own packages alone, may run it. A check
that fails raises AssertionError.
"""

import gc
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from recast_pl.rewards import Reward, RewardSuite
from recast_pl.scenes import draw, sample_scene
from recast_pl.types import Prompt

CPU = torch.device("cpu")
EDGE_TEXTS = ("", "word " * 300, "🎉🎨", "一只红色的猫", "naïve ünï \u202e", " \n\t ", "<|endoftext|> [SEP]")


@dataclass(frozen=True, kw_only=True)
class RewardCase:
    """A reward under test, and what differs from what most rewards are."""

    reward: type[Reward]
    build: Callable[..., Reward] | None = None  # makes one; takes its constructor's `dtype`; None: the class
    reads_text: bool = True  # scores depend on the prompt's text
    prompts: Callable[[list[Prompt]], list[Prompt]] = list  # from captions of scenes to what the reward needs
    edge_texts: tuple[str, ...] = EDGE_TEXTS  # prompts that must be scored like any other
    pictures: Callable[[Tensor], Tensor] = Tensor.clone  # from drawn scenes, 6 × 3 × 64 × 64, to its own
    tolerance: float = 1e-5  # between batch sizes

    @property
    def has_dtype(self) -> bool:
        """Whether it has a network, whose precision can be chosen."""
        return "dtype" in inspect.signature(self.reward).parameters

    def made(self, **options: Any) -> Reward:
        """A new one, not loaded."""
        return (self.build or self.reward)(**options)


class RewardTester:
    """Runs the checks of one case on six drawn scenes, of which one has another's prompt.

    `check` runs all; `CHECKS` names them, for a test of each.
    """

    def __init__(self, case: RewardCase) -> None:
        self.case = case
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

    def check(self) -> None:
        """Runs every check.

        Raises:
            AssertionError: at the first that fails.
        """
        for name in CHECKS:
            getattr(self, name)()

    def loaded(self, **options: Any) -> Reward:
        """A reward that is ready to score."""
        reward = self.case.made(**options)
        reward.load(CPU)
        return reward

    def pairs(self) -> None:
        """Permuting pairs permutes scores; scores repeat, differ, and have the right shape and type."""
        reward = self.loaded()
        order = [3, 0, 5, 1, 4, 2]
        straight = reward.score(self.images, self.prompts)
        shuffled = reward.score(self.images[order], [self.prompts[i] for i in order])
        assert straight.shape == (6,), f"expected six scores, got the shape {tuple(straight.shape)}"
        assert straight.dtype == torch.float32, f"expected float32 scores, got {straight.dtype}"
        assert straight.isfinite().all(), f"expected finite scores of drawn scenes, got {straight}"
        assert straight.std() > 0, "six pictures have one score"
        torch.testing.assert_close(shuffled, straight[order], atol=self.case.tolerance, rtol=1e-5)
        torch.testing.assert_close(reward.score(self.images, self.prompts), straight, atol=0, rtol=0)

    def right_rows(self) -> None:
        """Another prompt for one picture changes that picture's score, and no other, if text matters at all."""
        reward = self.loaded()
        straight = reward.score(self.images, self.prompts)
        prompts = [*self.prompts[:5], Prompt(text=self.prompts[0].text, metadata=self.prompts[5].metadata)]
        changed = (reward.score(self.images, prompts) - straight).abs() > self.case.tolerance
        expected = [False] * 5 + [self.case.reads_text]
        assert changed.tolist() == expected, f"with another last prompt these scores changed: {changed}"

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
            assert ((scores >= low) & (scores <= high)).all(), f"{scores} outside [{low}, {high}]"

    def edge_prompts(self) -> None:
        """Any prompt can be scored: too long, empty, other scripts; alone as among others."""
        reward = self.loaded()
        texts = self.case.edge_texts
        prompts = [Prompt(text=text, metadata=self.prompts[0].metadata) for text in texts]
        images = self.images[:1].repeat(len(texts), 1, 1, 1)
        together = reward.score(images, prompts)
        assert together.isfinite().all(), f"of the prompts {texts} the scores are {together}"
        alone = torch.cat([reward.score(images[:1], [prompt]) for prompt in prompts])
        torch.testing.assert_close(together, alone, atol=self.case.tolerance, rtol=1e-5)

    def broken_picture(self) -> None:
        """A picture that is not finite gets no number, and its neighbours keep theirs."""
        reward = self.loaded()
        images = self.images
        images[1, 0, 3, 3] = torch.nan
        scores = reward.score(images, self.prompts)
        assert scores.isfinite().tolist() == [True, False, True, True, True, True], (
            f"the second of six pictures holds a NaN: {scores}"
        )
        rest = [0, 2, 3, 4, 5]
        expected = reward.score(self.images, self.prompts)[rest]
        torch.testing.assert_close(scores[rest], expected, atol=self.case.tolerance, rtol=1e-5)

    def sizes(self) -> None:
        """Pictures that are not square, and larger or smaller ones, are scored."""
        reward = self.loaded()
        for size in ((40, 64), (96, 96), (64, 33)):
            images = nn.functional.interpolate(self.images, size=size, mode="bilinear")
            scores = reward.score(images, self.prompts)
            assert scores.isfinite().all(), f"pictures of {size}: {scores}"

    def half_precision_pictures(self) -> None:
        """A suite scores bfloat16 pictures as their float32 copies."""
        suite = RewardSuite(rewards={"reward": self.case.made()})
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
            self.case.made(dtype="float64")
        except ValueError as error:
            complaint = str(error)
        assert re.match(rf"{self.case.reward.__name__}\.dtype: .*float32.*'float64'", complaint), complaint

    def networks(self) -> None:
        """`networks` has every parameter: frozen, in eval mode; it can be moved; `unload` lets go of all."""
        reward = self.case.made()
        assert list(reward.networks()) == [], "it has networks before `load`"
        reward.load(CPU)
        listed = {id(p) for network in reward.networks() for p in network.parameters()}
        reachable = {id(p) for network in reachable_modules(reward) for p in network.parameters()}
        assert listed == reachable, f"`networks` lists {len(listed)} parameters of {len(reachable)}"
        assert bool(listed) == self.case.has_dtype, "a reward takes `dtype` if it has networks, and only then"
        for network in reward.networks():
            assert not any(module.training for module in network.modules()), "not in eval mode"
            assert not any(p.requires_grad for p in network.parameters()), "not frozen"
        before = reward.score(self.images, self.prompts)
        assert not before.requires_grad, "scores hold a graph"
        elsewhere = [torch.float64, torch.float32] + ["cuda", "cpu"] * torch.cuda.is_available()
        for place in elsewhere:
            for network in reward.networks():
                network.to(place)
            images = self.images.to(place) if isinstance(place, str) else self.images
            after = reward.score(images, self.prompts)
            assert after.device == images.device
            torch.testing.assert_close(after.cpu().float(), before, atol=1e-4, rtol=1e-4)
        reward.unload()
        assert list(reward.networks()) == [], "`networks` lists some after `unload`"
        assert reachable_modules(reward) == [], "`unload` keeps a network"
        reward.load(CPU)
        torch.testing.assert_close(reward.score(self.images, self.prompts), before)

    def checkpoint(self) -> None:
        """Nothing of a suite reaches the state dict or the parameters of the module that holds it."""
        module = pl.LightningModule()
        suite = RewardSuite(rewards={"reward": self.case.made()})
        module.suite = suite  # type: ignore[assignment]  # torch types attributes as tensors and modules
        suite.setup(CPU)
        suite.score(self.images, self.prompts)
        assert module.state_dict() == {}
        assert list(module.parameters()) == []


CHECKS = tuple(
    name
    for name, member in vars(RewardTester).items()
    if inspect.isfunction(member) and name not in ("check", "loaded", "__init__")
)


def reachable_modules(reward: Reward) -> list[nn.Module]:
    """Networks that a reward's attributes lead to, through plain containers, its package's objects and ours."""
    own = {"recast_pl", type(reward).__module__.split(".")[0]}
    found: list[nn.Module] = []
    stack, seen = [reward], set()
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, nn.Module):
            found.append(item)
        elif type(item).__module__.split(".")[0] in own or isinstance(item, (dict, list, tuple)):
            stack.extend(gc.get_referents(item))
    return found
