import json

import pytest
import torch

from recast_pl.prompts import (
    EvaluationPrompts,
    JSONLines,
    PromptData,
    SceneGrammar,
    TextFile,
    grouped_batch,
    prompt_at,
)
from recast_pl.types import Prompt

PROMPTS = [Prompt(text=f"prompt {i}", metadata={"i": i}) for i in range(7)]
GEOMETRY = {"num_groups": 4, "group_size": 3, "seed": 0}


def test_every_pass_visits_each_prompt_once_in_another_order():
    passes = [[prompt_at(7 * p + i, total=7, seed=0) for i in range(7)] for p in range(3)]
    assert all(sorted(order) == list(range(7)) for order in passes)
    assert passes[0] != passes[1]
    assert passes[0] != [prompt_at(i, total=7, seed=1) for i in range(7)]


def test_groups_are_whole_and_never_share_an_id():
    batches = [grouped_batch(PROMPTS, iteration=i, **GEOMETRY) for i in range(5)]
    ids = torch.cat([batch.group_B for batch in batches])
    assert ids.dtype == torch.int64
    assert ids.bincount().tolist() == [3] * 20
    for batch in batches:
        for group in batch.group_B.unique():
            rows = (batch.group_B == group).nonzero().flatten().tolist()
            assert len({batch.prompts[row].text for row in rows}) == 1


def test_equal_texts_are_two_groups():
    same = [
        Prompt(text="Straße", metadata={}),
        Prompt(text="STRASSE", metadata={}),
        Prompt(text="Straße", metadata={}),
    ]
    batch = grouped_batch(same, iteration=0, num_groups=3, group_size=2, seed=0)
    assert len(batch.group_B.unique()) == 3


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_share_the_iteration_that_one_would_have(world_size):
    whole = grouped_batch(PROMPTS, iteration=5, **GEOMETRY)
    parts = [
        grouped_batch(PROMPTS, iteration=5, rank=r, world_size=world_size, **GEOMETRY)
        for r in range(world_size)
    ]
    assert torch.equal(torch.cat([part.sample_B for part in parts]), whole.sample_B)
    assert torch.equal(torch.cat([part.group_B for part in parts]), whole.group_B)
    assert sum((part.prompts for part in parts), ()) == whole.prompts


@pytest.mark.parametrize(("count", "world_size"), [(7, 1), (7, 2), (7, 3), (2, 3)])
def test_evaluation_sees_each_prompt_once_in_equally_many_batches(count, world_size):
    loaders = [
        EvaluationPrompts(PROMPTS[:count], batch_size=2, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    assert len({tuple(len(batch) for batch in loader) for loader in loaders}) == 1
    kept = [batch.rows(torch.arange(len(batch) - batch.padding)) for loader in loaders for batch in loader]
    assert [int(i) for batch in kept for i in batch.sample_B] == list(range(count))


def test_text_file(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  ein Bär 🐻 \n", encoding="utf-8")
    assert [p.text for p in TextFile(path=str(path)).prompts()] == ["a cat", "ein Bär 🐻"]
    assert len(TextFile(path=str(path), limit=1).prompts()) == 1


@pytest.mark.parametrize("inside", ["\u2028", "\x85", "\x0b", "\x1e"])
def test_only_newlines_end_a_line(tmp_path, inside):
    text = f"a cat{inside}on a mat"
    (tmp_path / "p.txt").write_text(f"\ufeff{text}\r\nnext\n", encoding="utf-8", newline="")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False), encoding="utf-8")
    assert [p.text for p in TextFile(path=str(tmp_path / "p.txt")).prompts()] == [text, "next"]
    assert [p.text for p in JSONLines(path=str(tmp_path / "p.jsonl")).prompts()] == [text]


def test_json_lines_keep_their_metadata(tmp_path):
    path = tmp_path / "prompts.jsonl"
    entry = {"tag": "counting", "include": [{"class": "bench", "count": 2}], "prompt": "two benches"}
    path.write_text(json.dumps(entry) + "\n", encoding="utf-8")
    (prompt,) = JSONLines(path=str(path)).prompts()
    assert prompt.text == "two benches"
    assert prompt.metadata == {"tag": "counting", "include": [{"class": "bench", "count": 2}]}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ('{"prompt": "a"}\nno json', "line 2"),
        ('{"text": "a"}', "line 1.*'prompt'"),
        ("\n", "holds no prompt"),
    ],
)
def test_unreadable_lines_are_named(tmp_path, content, match):
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=match):
        JSONLines(path=str(path)).prompts()


@pytest.mark.parametrize("source", [TextFile, JSONLines])
def test_a_missing_file_is_named_at_once(source):
    with pytest.raises(ValueError, match=r"nowhere\.txt"):
        source(path="nowhere.txt")


def test_scene_grammar_repeats_itself_and_keeps_the_halves_apart():
    train, held_out = SceneGrammar(count=300), SceneGrammar(count=300, held_out=True)
    assert train.prompts() == train.prompts()

    def without_background(source):
        return {p.text.split(" on a ")[0] for p in source.prompts()}

    assert not without_background(train) & without_background(held_out)


def test_position_goes_into_the_state_when_a_batch_is_used():
    data = PromptData(
        train=SceneGrammar(count=9),
        evaluation=SceneGrammar(count=4),
        num_groups=2,
        group_size=2,
        iterations_per_epoch=3,
    )
    batches = list(data.train_dataloader())
    assert [batch.iteration for batch in batches] == [0, 1, 2]
    assert data.state_dict() == {"position": 0}  # fetched is not used
    data.on_before_batch_transfer(batches[1], 0)
    assert data.state_dict() == {"position": 2}
    assert [batch.iteration for batch in data.train_dataloader()] == [2]  # the rest of the epoch
    data.load_state_dict({"position": 6})
    assert [batch.iteration for batch in data.train_dataloader()] == [6, 7, 8]


@pytest.mark.parametrize(
    ("wrong", "key"),
    [({"num_groups": 0}, "num_groups"), ({"group_size": 1}, "group_size"),
     ({"iterations_per_epoch": 0}, "iterations_per_epoch")],
)  # fmt: skip
def test_impossible_geometry_names_its_key(wrong, key):
    with pytest.raises(ValueError, match=rf"data\.{key}"):
        PromptData(train=SceneGrammar(count=1), evaluation=SceneGrammar(count=1), **wrong)


def test_the_origin_of_prompts_names_key_and_file(tmp_path):
    (tmp_path / "mine.txt").write_text("a red circle\n")
    source = TextFile(path=str(tmp_path / "mine.txt"))
    data = PromptData(train=source, evaluation=SceneGrammar(count=4))
    assert data.origin("train") == f"data.train ({tmp_path / 'mine.txt'})"
    assert data.origin("evaluation") == "data.evaluation"


def test_samples_that_processes_cannot_share_name_a_number_that_they_can():
    data = PromptData(train=SceneGrammar(count=4), evaluation=SceneGrammar(count=4), num_groups=3, group_size=3)
    data.check_shares(3)
    with pytest.raises(ValueError, match=r"num_groups × data\.group_size = 9 .* multiple of 4, such as 12"):
        data.check_shares(4)
