import itertools
import json
from collections import Counter

import numpy as np
import pytest

from recast_pl.prompts import GenEvalPrompts, JSONLines
from recast_pl.prompts.geneval import FAMILIES, apportion, is_held_out, noun
from recast_pl.rewards import GenEval
from recast_pl.rewards.geneval.rules import fault_of
from recast_pl.scenes import sample_scene


def combination(prompt):
    """What is asked for, whatever the order of a pair and the side a relation is said from."""
    include = prompt.metadata["include"]
    relation = include[-1].get("position", [None])[0]
    objects = [(clause["class"], clause["count"], clause.get("color")) for clause in include]
    if relation in ("left of", "above"):  # the first spoken of is the last clause
        return prompt.metadata["tag"], relation, objects[1], objects[0]
    if relation in ("right of", "below"):
        return prompt.metadata["tag"], {"right of": "left of", "below": "above"}[relation], *objects
    return prompt.metadata["tag"], frozenset(objects)


def test_the_six_families_are_drawn_alike_and_mixed():
    prompts = GenEvalPrompts(count=120).prompts()
    assert Counter(p.metadata["tag"] for p in prompts) == dict.fromkeys(FAMILIES, 20)
    assert len({p.metadata["tag"] for p in prompts[:20]}) == 6


def test_shares_are_kept_and_a_family_draws_the_same_whatever_the_others_do():
    mixed = GenEvalPrompts(count=40, tasks={"counting": 3, "colors": 1, "position": 0}).prompts()
    assert Counter(p.metadata["tag"] for p in mixed) == {"counting": 30, "colors": 10}
    alone = GenEvalPrompts(count=30, tasks={"counting": 1}).prompts()
    assert {p.text for p in alone} == {p.text for p in mixed if p.metadata["tag"] == "counting"}


def test_a_seed_repeats_itself_and_another_does_not():
    first = GenEvalPrompts(count=60, seed=3)
    assert first.prompts() == first.prompts() == GenEvalPrompts(count=60, seed=3).prompts()
    assert [p.text for p in first.prompts()] != [p.text for p in GenEvalPrompts(count=60, seed=4).prompts()]


def test_held_out_combinations_are_never_trained_on():
    train = {combination(p) for seed in range(3) for p in GenEvalPrompts(count=6000, seed=seed).prompts()}
    held_out = {combination(p) for p in GenEvalPrompts(count=3000, held_out=True, seed=9).prompts()}
    assert {tag for tag, *_ in held_out} == {tag for tag, *_ in train} == set(FAMILIES)
    assert not train & held_out


@pytest.mark.parametrize(("family", "step"), [("two_object", 3), ("position", 11), ("color_attr", 211)])
def test_one_combination_in_five_is_held_out(family, step):
    places = itertools.product(*map(range, FAMILIES[family].choices))
    built = [FAMILIES[family].build(*place) for place in itertools.islice(places, 0, None, step)]
    sides = [is_held_out({"tag": family, **clauses}) for _, clauses in filter(None, built)]
    assert len(sides) > 2000
    assert sum(sides) / len(sides) == pytest.approx(0.2, abs=0.03)


def test_nothing_comes_twice_before_all_has_come_once():
    prompts = GenEvalPrompts(count=200, tasks={"single_object": 1}).prompts()
    seen = Counter(p.text for p in prompts)
    assert len(seen) < 80
    assert max(seen.values()) - min(seen.values()) <= 1
    both = {p.text for p in prompts} | {
        p.text for p in GenEvalPrompts(count=80, tasks={"single_object": 1}, held_out=True).prompts()
    }
    assert len(both) == 80  # together, all of COCO's classes
    many = GenEvalPrompts(count=500, tasks={"position": 1}).prompts()
    assert len({p.text for p in many}) == 500


def test_every_prompt_can_be_judged_and_says_what_its_clauses_say():
    for prompt in GenEvalPrompts(count=1200, seed=1).prompts():
        metadata = prompt.metadata
        assert fault_of(metadata) is None
        assert metadata["prompt"] == prompt.text
        assert json.loads(json.dumps(metadata)) == metadata
        for clause in metadata["include"]:
            assert clause.get("color", "") in prompt.text
            if clause["count"] == 1:
                assert clause["class"] in prompt.text
        tag, include = metadata["tag"], metadata["include"]
        assert len(include) == (2 if tag in ("two_object", "position", "color_attr") else 1)
        assert len({clause["class"] for clause in include}) == len(include)
        if tag == "counting":
            (clause,) = include
            assert metadata["exclude"] == [{"class": clause["class"], "count": clause["count"] + 1}]
            assert ["two", "three", "four"][clause["count"] - 2] in prompt.text
        else:
            assert "exclude" not in metadata
        if tag == "position":
            relation, index = include[1]["position"]
            assert index == 0
            spoken = prompt.text.index(f" {relation} ")
            assert prompt.text.index(include[1]["class"]) < spoken < prompt.text.rindex(include[0]["class"])
        if tag == "color_attr":
            assert include[0]["color"] != include[1]["color"]
        assert not any(c["class"] == "person" and "color" in c for c in include)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (noun("airplane"), "an airplane"), (noun("umbrella"), "an umbrella"),
        (noun("umbrella", colour="red"), "a red umbrella"), (noun("cup", colour="orange"), "an orange cup"),
        (noun("person", count=3), "three people"), (noun("sheep", count=2), "two sheep"),
        (noun("knife", count=4), "four knives"), (noun("bench", count=2), "two benches"),
        (noun("toothbrush", count=2), "two toothbrushes"), (noun("wine glass", count=2), "two wine glasses"),
        (noun("skis"), "a pair of skis"), (noun("skis", count=2), "two pairs of skis"),
        (noun("broccoli", count=2), "two heads of broccoli"), (noun("mouse", count=3), "three computer mice"),
        (noun("remote"), "a tv remote"), (noun("scissors", colour="blue"), "a pair of blue scissors"),
    ],
)  # fmt: skip
def test_articles_and_plurals(said, right):
    assert said == right


def test_apportionment_never_loses_a_prompt():
    assert apportion(7, [1] * 6) == [2, 1, 1, 1, 1, 1]
    assert apportion(10, [0.5, 0.25, 0.25]) == [5, 3, 2]
    assert all(sum(apportion(n, [1, 2, 3, 0])) == n for n in range(1, 40))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"count": 0}, r"GenEvalPrompts\.count"),
        ({"tasks": {"colours": 1.0}}, r"GenEvalPrompts\.tasks.*colours.*colors"),
        ({"tasks": {"colors": -1.0}}, r"GenEvalPrompts\.tasks\.colors"),
        ({"tasks": {"colors": float("nan")}}, r"GenEvalPrompts\.tasks\.colors"),
        ({"tasks": {"colors": 0.0}}, r"GenEvalPrompts\.tasks: expected at least one"),
        ({"tasks": {}}, r"GenEvalPrompts\.tasks: expected at least one"),
    ],
)
def test_wrong_settings_name_their_key(wrong, match):
    with pytest.raises(ValueError, match=match):
        GenEvalPrompts(**wrong)


def test_geneval_own_layout_is_read_as_it_is(tmp_path):
    entries = [
        {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
        {"tag": "counting", "include": [{"class": "clock", "count": 2}],
         "exclude": [{"class": "clock", "count": 3}], "prompt": "a photo of two clocks"},
        {"tag": "position", "include": [{"class": "computer mouse", "count": 1},
                                        {"class": "bear", "count": 1, "position": ["above", 0]}],
         "prompt": "a photo of a bear above a computer mouse"},
        {"tag": "color_attr", "include": [{"class": "tv", "count": 1, "color": "blue"},
                                          {"class": "hair drier", "count": 1, "color": "white"}],
         "prompt": "a photo of a blue tv and a white hair drier"},
    ]  # fmt: skip
    path = tmp_path / "evaluation_metadata.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    prompts = JSONLines(path=str(path)).prompts()
    assert [p.text for p in prompts] == [entry["prompt"] for entry in entries]
    for prompt, entry in zip(prompts, entries, strict=True):
        assert {**prompt.metadata, "prompt": prompt.text} == entry
        assert fault_of(prompt.metadata) is None
        assert all(key in prompt.metadata for key in GenEval.required_metadata)


def test_drawn_scenes_are_not_coco():
    assert "COCO has no class" in fault_of(sample_scene(np.random.default_rng(0), held_out=False).metadata)
