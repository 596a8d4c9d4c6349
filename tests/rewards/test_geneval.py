"""GenEval's networks, on miniatures of the real classes and file layout."""

import math

import numpy as np
import pytest
import torch
from conftest import clause, prompt_batch
from miniature_rewards import NAMES, save_detector
from PIL import Image
from transformers import (
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerForUniversalSegmentation,
)
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil

from recast_pl.rewards import GenEval, RewardFailure, RewardSuite
from recast_pl.rewards.geneval.detections import class_labels, cut_out, detections_of
from recast_pl.rewards.geneval.rules import (
    Detection,
    select,
)
from recast_pl.scenes.coco import COCO_CLASSES, COLOURS, coco_class
from recast_pl.testing import save_clip

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def detector_folder(tmp_path_factory):
    return save_detector(tmp_path_factory.mktemp("detector"))


@pytest.fixture(scope="module")
def pictures():
    """Three pictures of blobs, wider than high."""
    generator = torch.Generator().manual_seed(2)
    coarse = torch.rand(3, 3, 6, 10, generator=generator)
    return torch.nn.functional.interpolate(coarse, (48, 80), mode="bilinear")


@pytest.fixture(scope="module")
def reward(detector_folder, clip_folder):
    reward = GenEval(
        detector=str(detector_folder), clip=str(clip_folder), threshold=0.05, counting_threshold=0.2
    )
    reward.load(CPU)
    return reward


@torch.no_grad()
def detected(reward, image, threshold=0.05):
    """The reward's own detections of one picture, in the detector's order."""
    picture = to_picture(image)
    inputs = reward._prepare(images=[picture], return_tensors="pt")
    output = reward._detector(**inputs)
    return detections_of(
        output.class_queries_logits[0],
        output.masks_queries_logits[0],
        pixel_mask=inputs.pixel_mask[0],
        size=(picture.height, picture.width),
        labels=reward._labels,
        threshold=threshold,
    )


def to_picture(image_3HW):
    return Image.fromarray((image_3HW.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))


def test_detections_are_those_of_transformers_own_processing(tmp_path, reward):
    """Pictures of the size at which transformers compares, 384: there, both ways see the same masks."""
    folder = save_detector(tmp_path, size=384)
    model = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    processor = Mask2FormerImageProcessorPil.from_pretrained(folder)
    coarse = torch.rand(1, 3, 6, 6, generator=torch.Generator().manual_seed(5))
    picture = to_picture(torch.nn.functional.interpolate(coarse, (384, 384), mode="bilinear")[0])
    inputs = processor(images=[picture], return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    ours = detections_of(
        output.class_queries_logits[0],
        output.masks_queries_logits[0],
        pixel_mask=inputs.pixel_mask[0],
        size=(384, 384),
        labels=class_labels(model.config.id2label, key="k"),
        threshold=0.05,
    )
    (theirs,) = processor.post_process_instance_segmentation(
        output, threshold=0.05, target_sizes=[(384, 384)], return_binary_maps=True
    )
    names = [coco_class(model.config.id2label[s["label_id"]]) for s in theirs["segments_info"]]
    order = np.argsort([-s["score"] for s in theirs["segments_info"]], kind="stable")
    ours.sort(key=lambda d: -d.score)
    assert len(ours) == len(names) >= 3
    for detection, index in zip(ours, order, strict=True):
        segment, mask = theirs["segments_info"][index], theirs["segmentation"][index].bool()
        assert detection.label == names[index]
        assert detection.score == pytest.approx(segment["score"], abs=1e-5)
        assert torch.equal(detection.mask_HW, mask)
        rows, columns = np.where(mask.numpy())
        assert detection.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


def test_a_mask_is_freed_of_padding_and_brought_to_the_picture():
    """A hand-made output: query 0 is a cat on the left half of the unpadded part, query 1 no object."""
    class_QC = torch.full((2, 3), -20.0)
    class_QC[0, 1] = class_QC[1, 2] = 20.0
    mask_Qhw = torch.full((2, 8, 8), -9.0)
    mask_Qhw[0, :, :2] = 9.0
    pixel_mask = torch.zeros(32, 32)
    pixel_mask[:, :16] = 1  # the right half is padding
    (cat,) = detections_of(
        class_QC, mask_Qhw, pixel_mask=pixel_mask, size=(10, 20), labels={0: "dog", 1: "cat"}, threshold=0.3
    )
    assert cat.label == "cat"
    assert cat.box == (0.0, 0.0, 10.0, 10.0)  # the left half of 20 columns, all 10 rows
    assert 0.97 < cat.score < 1  # the mask's edge is soft
    assert cat.mask_HW.sum() == 100


def test_scores_follow_from_detections_and_rules(reward, pictures):
    found = [select(detected(reward, image), threshold=0.05, max_objects=16) for image in pictures]
    assert all(sum(map(len, f.values())) >= 2 for f in found)
    label = max(found[0], key=lambda name: len(found[0][name]))
    count = len(found[0][label])
    absent = next(name for name in COCO_CLASSES if not any(f.get(name) for f in found))
    metadata = [
        {"tag": "single_object", "include": [clause(label, count)]},
        {"tag": "two_object", "include": [clause(label, count), clause(absent)]},
        {"tag": "single_object", "include": [clause(absent)]},
    ]
    prompts = prompt_batch(["a", "b", "c"], metadata=metadata).prompts
    same = pictures[:1].expand(3, -1, -1, -1)
    assert reward.score(same, prompts).tolist() == [1.0, 0.5, 0.0]
    strict = GenEval(detector=reward.detector_source, clip=reward.clip_source, credit="strict", threshold=0.05)
    strict.load(CPU)
    assert strict.score(same, prompts).tolist() == [1.0, 0.0, 0.0]


def test_counting_has_a_threshold_of_its_own(reward, pictures):
    confident = detected(reward, pictures[0])
    lower = [d for d in confident if d.score <= 0.2]
    label = next(d.label for d in lower if not any(o.label == d.label and o.score > 0.2 for o in confident))
    count = sum(d.label == label for d in confident)
    prompts = prompt_batch(
        ["a", "a"], metadata=[{"tag": tag, "include": [clause(label, count)]} for tag in ("colors", "counting")]
    ).prompts
    assert reward.score(pictures[[0, 0]], prompts).tolist() == [1.0, 0.0]


@pytest.fixture(scope="module")
def prompts(reward, pictures):
    """Prompts for the three pictures whose scores differ and need colours."""
    metadata = []
    for image in pictures:
        found = select(detected(reward, image), threshold=0.05, max_objects=16)
        names = sorted(found)
        metadata.append({"tag": "color_attr", "include": [
            clause(names[0], len(found[names[0]]), color="red"), clause(names[-1], 2, color="blue"),
        ]})  # fmt: skip
    return prompt_batch(["one", "two", "three"], metadata=metadata).prompts


def test_permuting_pairs_permutes_scores_and_a_batch_scores_as_its_items(reward, pictures, prompts):
    images, asked = pictures.repeat(2, 1, 1, 1), [*prompts, prompts[1], prompts[2], prompts[0]]
    straight = reward.score(images, asked)
    order = [4, 0, 5, 2, 1, 3]
    torch.testing.assert_close(reward.score(images[order], [asked[i] for i in order]), straight[order])
    single = torch.cat([reward.score(images[i : i + 1], asked[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(straight, single)
    assert straight.std() > 0
    assert ((straight >= 0) & (straight <= 1)).all()
    assert torch.equal(straight, reward.score(images, asked))


@torch.no_grad()
def test_colours_are_those_of_an_independent_path(reward, pictures, clip_folder):
    picture = to_picture(pictures[1])
    objects = detected(reward, pictures[1])
    colours = reward._colours(picture, "tv", objects, CPU)
    model, tokenizer = CLIPModel.from_pretrained(clip_folder).eval(), CLIPTokenizer.from_pretrained(clip_folder)
    mean = np.array([0.48145466, 0.4578275, 0.40821073])
    std = np.array([0.26862954, 0.26130258, 0.27577711])
    for colour, detection in zip(colours, objects, strict=True):
        covered = Image.composite(
            picture, Image.new("RGB", picture.size, "#999"), Image.fromarray(detection.mask_HW.numpy())
        )
        crop = covered.crop([int(side) for side in detection.box])
        scale = 16 / min(crop.size)
        small = crop.resize([int(side * scale) for side in crop.size], Image.Resampling.BICUBIC)
        left, top = ((side - 16) // 2 for side in small.size)
        pixels = np.asarray(small)[top : top + 16, left : left + 16] / 255
        pixels = torch.from_numpy(((pixels - mean) / std).transpose(2, 0, 1)[None]).float()
        image_D = model(pixel_values=pixels, **tokenizer("x", return_tensors="pt")).image_embeds[0]
        similarity = []
        for name in COLOURS:
            phrases = [
                f"a photo of a {name} tv",
                f"a photo of a {name}-colored tv",
                f"a photo of a {name} object",
            ]
            text_D = sum(
                model(
                    pixel_values=pixels, **tokenizer(phrase, truncation=True, return_tensors="pt")
                ).text_embeds[0]
                for phrase in phrases
            )
            similarity.append((image_D @ text_D / text_D.norm()).item())
        best = sorted(similarity)[-2:]
        assert colour == COLOURS[int(np.argmax(similarity))] or best[1] - best[0] < 1e-4
    assert len(objects) >= 2


def test_an_object_is_cut_out_on_grey():
    pixels = np.full((6, 8, 3), 255, np.uint8)
    mask = torch.zeros(6, 8, dtype=torch.bool)
    mask[2:4, 3:7] = True
    mask[2, 3] = False
    cut = cut_out(
        Image.fromarray(pixels), Detection(label="cat", score=1.0, box=(3.0, 2.0, 7.0, 4.0), mask_HW=mask)
    )
    assert cut.size == (4, 2)
    assert cut.getpixel((0, 0)) == (153, 153, 153)
    assert cut.getpixel((1, 0)) == (255, 255, 255)


def test_an_object_of_three_rows_is_no_picture_of_three_channels(reward, pictures):
    mask = torch.zeros(48, 80, dtype=torch.bool)
    mask[10:13, :] = True
    flat = Detection(label="tv", score=1.0, box=(0.0, 10.0, 80.0, 13.0), mask_HW=mask)
    one = Detection(label="tv", score=1.0, box=(4.0, 10.0, 5.0, 11.0), mask_HW=mask)
    assert all(c in COLOURS for c in reward._colours(to_picture(pictures[0]), "tv", [flat, one], CPU))


def test_what_is_not_finite_is_no_score(detector_folder, tmp_path, pictures, prompts):
    own_clip = save_clip(tmp_path)  # loaded weights are shared, and these are spoilt
    reward = GenEval(detector=str(detector_folder), clip=str(own_clip), threshold=0.05)
    reward.load(CPU)
    with torch.no_grad():
        reward._clip.visual_projection.weight.fill_(math.nan)
    with pytest.raises(RuntimeError, match="not finite"):
        reward.score(pictures, prompts)
    with torch.no_grad():
        reward._detector.class_predictor.bias[0] = math.nan
    assert reward.score(pictures, prompts).isnan().all()
    suite = RewardSuite(rewards={"geneval": reward})
    suite._device = CPU
    with pytest.raises(RewardFailure, match=r"rewards\.rewards\.geneval"):
        suite.score(pictures, prompts)


def test_a_prompt_that_cannot_be_judged_is_refused_by_name(reward, pictures):
    prompts = prompt_batch(["a unicorn"], metadata=[{"tag": "colors", "include": [clause("unicorn")]}]).prompts
    assert "unicorn" in reward.check(prompts[0])
    with pytest.raises(ValueError, match="COCO has no class 'unicorn'.*a unicorn"):
        reward.score(pictures[:1], prompts)


def test_a_detector_without_coco_classes_is_refused(tmp_path, clip_folder):
    folder = save_detector(tmp_path, names=[*COCO_CLASSES[:79], "brush"])
    with pytest.raises(ValueError, match=r"GenEval\.detector: .*80 labels none is toothbrush"):
        GenEval(detector=str(folder), clip=str(clip_folder)).load(CPU)


def test_labels_beyond_cocos_are_left_out():
    labels = class_labels({0: "sky", **{i + 1: name for i, name in enumerate(NAMES)}}, key="k")
    assert list(labels.values()) == list(COCO_CLASSES)
    assert 0 not in labels


def test_networks_are_there_while_loaded(detector_folder, clip_folder):
    reward = GenEval(detector=str(detector_folder), clip=str(clip_folder))
    assert list(reward.networks()) == []
    reward.load(CPU)
    assert [type(network) for network in reward.networks()] == [Mask2FormerForUniversalSegmentation, CLIPModel]
    reward.unload()
    assert list(reward.networks()) == []


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 1.0}, {"counting_threshold": -0.1}, {"threshold": math.nan}, {"max_objects": 0},
     {"batch_size": 0}, {"credit": "half"}, {"detector": "no_hub_id"}, {"clip": "recast_pl://none"}],
)  # fmt: skip
def test_wrong_settings_name_their_key(wrong):
    with pytest.raises(ValueError, match=rf"GenEval\.{next(iter(wrong))}"):
        GenEval(**wrong)
