"""The code that the documentation shows, run."""

import re
from pathlib import Path

import pytest
import torch

from recast_pl.credit import CreditAssigner
from recast_pl.objectives import Objective
from recast_pl.rewards import Reward
from recast_pl.testing import Near, theta, train

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def shown():
    """The classes of docs/extending.md."""
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "extending.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, names)
    return names


def test_the_reward_scores(shown):
    images = torch.zeros(2, 3, 2, 2)
    images[1, :, 0] = 1
    reward = shown["Contrast"]()
    assert isinstance(reward, Reward)
    assert reward.score(images, []).tolist() == [0.0, 0.5]


def test_the_strategy_keeps_budgets_and_trains(shown):
    strategy = shown["LateOnly"]()
    W_RK = strategy.table(("a", "b"), torch.tensor([3.0, 1.0]).double(), torch.linspace(1, 0, 6))
    assert W_RK.sum(1).tolist() == pytest.approx([0.75, 0.25])
    assert W_RK[:, :2].abs().max() == 0
    module, _ = train({"near": Near(0.5)}, epochs=6, credit=CreditAssigner(strategy=strategy))
    assert theta(module) > 0.2


def test_the_objective_trains(shown):
    objective = shown["WeightedMatching"]()
    assert isinstance(objective, Objective)
    module, _ = train({"near": Near(0.5)}, epochs=6, objective=objective)
    assert theta(module) > 0.2


def test_the_example_of_the_mathematics():
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "mathematics.md").read_text(encoding="utf-8"), re.S)
    names = {}
    exec(block, names)  # holds W against the closed form
    assert names["W"].sum(0).tolist() == names["W"].sum(1).tolist() == pytest.approx([0.5, 0.5])


def test_every_link_of_the_documentation_leads_somewhere():
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_overlay_that_the_documentation_names_exists():
    for path in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        for name in re.findall(r"configs/[\w/]+\.yaml", path.read_text(encoding="utf-8")):
            assert (DOCS.parent / name).exists(), f"{path.name}: {name}"
