import torch
from conftest import prompt_batch

from recast_pl.callbacks.sample_grid import grid_figure
from recast_pl.types import Rollout, Scores, TextEmbeddings


def evaluation(count):
    images = torch.linspace(0, 1, count)[:, None, None, None].expand(-1, 3, 4, 4)
    rollout = Rollout.on_schedule(
        torch.tensor([1.0, 0.0]),
        batch=prompt_batch([f"prompt {i}" for i in range(count)]),
        text=TextEmbeddings(sequence_BLD=torch.zeros(count, 1, 1), pooled_BD=torch.zeros(count, 1)),
        x0_BCHW=torch.zeros(count, 1, 1, 1),
        images_B3HW=images,
    )
    values = torch.stack([torch.arange(count).float(), torch.full((count,), float("nan"))])
    scores = Scores(names=("index", "failed"), values_RB=values, valid_RB=values.isfinite())
    return rollout, scores


def test_each_picture_stands_with_its_own_prompt_and_scores():
    figure = grid_figure([evaluation(5)], count=5, columns=3)
    cells = [axis for axis in figure.subfigs[0].axes if axis.images]
    assert len(cells) == 5
    for index, cell in enumerate(cells):
        assert cell.get_title() == f"prompt {index}"
        assert cell.get_xlabel().splitlines() == [f"index {index}", "failed masked"]
        assert cell.images[0].get_array()[0, 0, 0] == index / 4


def test_fewer_pictures_than_asked_for():
    figure = grid_figure([evaluation(2), evaluation(2)], count=16, columns=8, titles=["before", "after"])
    assert [len(part.axes) for part in figure.subfigs] == [2, 2]
