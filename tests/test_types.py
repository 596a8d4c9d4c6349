"""Text embeddings: rows of all tensors together, prompts of unequal lengths, one vector a prompt."""

import pickle

import pytest
import torch

from recast_pl.types import TextEmbeddings


def prompt(length, fill):
    return {"sequence_BLD": torch.full((length, 2), fill), "pooled_BD": torch.full((3,), fill)}


def test_rows_of_all_tensors_go_together():
    text = TextEmbeddings.padded([prompt(2, float(n)) for n in range(4)])
    assert text.mask_BL is None
    for index in (slice(1, 3), torch.tensor([1, 2])):
        part = text[index]
        assert len(part) == 2
        assert part["sequence_BLD"][:, 0, 0].tolist() == part["pooled_BD"][:, 0].tolist() == [1, 2]
    again = pickle.loads(pickle.dumps(text))
    assert torch.equal(again["sequence_BLD"], text["sequence_BLD"])


def test_shorter_prompts_are_filled_up_and_the_mask_says_so():
    text = TextEmbeddings.padded([prompt(1, 5.0), prompt(3, 7.0)])
    assert text.mask_BL.tolist() == [[True, False, False], [True, True, True]]
    assert text["sequence_BLD"][:, :, 0].tolist() == [[5, 0, 0], [7, 7, 7]]
    assert torch.equal(text[1:].mask_BL, torch.ones(1, 3, dtype=torch.bool))
    own = [prompt(n, 1.0) | {"mask_BL": torch.tensor([True] + [False] * (n - 1))} for n in (1, 3)]
    assert TextEmbeddings.padded(own).mask_BL.tolist() == [[True, False, False]] * 2


def test_a_pooled_vector_is_the_model_s_or_the_mean_of_tokens_that_count():
    sequence = torch.tensor([[[1.0], [3.0]], [[5.0], [9.0]]])
    mask = torch.tensor([[True, True], [True, False]])
    assert TextEmbeddings(sequence_BLD=sequence).pooled_BD.tolist() == [[2.0], [7.0]]
    assert TextEmbeddings(sequence_BLD=sequence, mask_BL=mask).pooled_BD.tolist() == [[2.0], [5.0]]
    own = TextEmbeddings(sequence_BLD=sequence, pooled_BD=torch.zeros(2, 4))
    assert own.pooled_BD.tolist() == [[0.0] * 4] * 2


def test_tensors_of_unequal_numbers_of_prompts_are_refused():
    with pytest.raises(ValueError, match=r"a row for each prompt, got .*\[2, 1\].*\[3, 1\]"):
        TextEmbeddings(sequence_BLD=torch.zeros(2, 1), pooled_BD=torch.zeros(3, 1))
