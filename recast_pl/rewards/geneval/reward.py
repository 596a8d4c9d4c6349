"""GenEval: whether a picture shows the objects that its prompt asks for, as many, in colour and in place.

Shape suffixes: B samples, Q C h w the detector's queries, classes and masks, H W picture, N colours, P phrases,
D width of CLIP's joint space.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from recast_pl.assets import resolve
from recast_pl.rewards.base import Reward
from recast_pl.rewards.geneval.detections import class_labels, cut_out, detections_of
from recast_pl.rewards.geneval.rules import Detection, fault_of, partial_score, select, strict_score
from recast_pl.rewards.images import nan_where_broken, to_pil
from recast_pl.rewards.networks.backbones import CLIPBackbone, load_clip
from recast_pl.rewards.networks.weights import Precision, torch_dtype
from recast_pl.scenes.coco import COLOURS
from recast_pl.types import Prompt

COLOUR_PHRASES = ("a photo of a {c} {name}", "a photo of a {c}-colored {name}", "a photo of a {c} object")
"""GenEval's zero-shot templates."""


class GenEval(Reward):
    """Share of the prompt's facts that hold, or GenEval's own verdict of 0 or 1; metadata in GenEval's layout.

    Objects come from a Mask2Former trained on COCO's instances, their colours from CLIP, zero-shot, on the
    object cut out of the picture and laid on grey. GenEval ran mmdetection's weights of the same network at a
    larger size, so single verdicts may differ from its tables.

    Args:
        detector: a folder or hub id of a `Mask2FormerForUniversalSegmentation` whose labels cover COCO's 80.
        clip: a folder or hub id of a `CLIPModel`.
        credit: `partial` or `strict`; see `geneval_rules.partial_score` and `strict_score`.
        threshold: confidence above which an object is there.
        counting_threshold: the same for prompts with the tag `counting`.
        max_objects: of one class, the most confident so many.
        batch_size: pictures that the detector sees at a time.
        dtype: precision of both networks' weights; confidences and similarities are compared in float32.

    Reference: Ghosh et al., "GenEval: An object-focused framework for evaluating text-to-image alignment",
    2023; the defaults are its public code's.
    """

    range = (0.0, 1.0)
    required_metadata = ("tag", "include")

    def __init__(
        self,
        *,
        detector: str = "facebook/mask2former-swin-small-coco-instance",
        clip: str = "openai/clip-vit-large-patch14",
        credit: Literal["partial", "strict"] = "partial",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_objects: int = 16,
        batch_size: int = 8,
        dtype: Precision = "float32",
    ) -> None:
        for key, value in (("threshold", threshold), ("counting_threshold", counting_threshold)):
            if not 0 <= value < 1:
                raise ValueError(f"GenEval.{key}: expected 0 or more and less than 1, got {value}")
        for key, number in (("max_objects", max_objects), ("batch_size", batch_size)):
            if number < 1:
                raise ValueError(f"GenEval.{key}: expected 1 or more, got {number}")
        if credit not in ("partial", "strict"):
            raise ValueError(f"GenEval.credit: expected partial or strict, got {credit!r}")
        self.detector_source = resolve(detector, key="GenEval.detector")
        self.clip_source = resolve(clip, key="GenEval.clip")
        self.credit, self.max_objects, self.batch_size = credit, max_objects, batch_size
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.dtype = torch_dtype(dtype, key="GenEval.dtype")
        self._detector: Any = None
        self._backbone: CLIPBackbone | None = None
        self._colour_texts: dict[str, Tensor] = {}

    def load(self, device: torch.device) -> None:
        """Loads both networks; image processors are the PIL classes, which need no torchvision.

        Raises:
            ValueError: where the detector does not know all of COCO's classes.
        """
        from transformers import CLIPTokenizer, Mask2FormerForUniversalSegmentation
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.mask2former.image_processing_pil_mask2former import (
            Mask2FormerImageProcessorPil,
        )

        detector = Mask2FormerForUniversalSegmentation.from_pretrained(self.detector_source, dtype=self.dtype)
        self._labels = class_labels(detector.config.id2label, key="GenEval.detector")
        self._prepare = Mask2FormerImageProcessorPil.from_pretrained(self.detector_source)
        self._detector = detector.to(device).eval().requires_grad_(False)
        self._tokenizer = CLIPTokenizer.from_pretrained(self.clip_source)
        self._prepare_crop = CLIPImageProcessorPil.from_pretrained(self.clip_source)
        self._backbone = load_clip(self.clip_source, dtype=self.dtype, device=device, key="GenEval.clip")

    def unload(self) -> None:
        """Drops both networks and what CLIP said of the colours' names."""
        self._detector = self._backbone = None
        self._colour_texts = {}

    @property
    def _clip(self) -> Any:
        return None if self._backbone is None else self._backbone.model

    def networks(self) -> Iterable[nn.Module]:
        """Detector and CLIP."""
        return [network for network in (self._detector, self._clip) if network is not None]

    def check(self, prompt: Prompt) -> str | None:
        """Clauses must be such that a picture can fulfil them."""
        return fault_of(prompt.metadata)

    def score(self, images_B3HW: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [B], NaN for a picture of which the detector says nothing finite.

        Raises:
            ValueError: where a prompt's clauses cannot be judged.
        """
        for prompt in prompts:
            if fault := self.check(prompt):
                raise ValueError(f"GenEval: {fault}; of the prompt {prompt.text!r}")
        pictures, device = to_pil(images_B3HW), images_B3HW.device
        scores: list[float] = []
        for start in range(0, len(pictures), self.batch_size):
            rows = slice(start, start + self.batch_size)
            scores += self._scores_of(pictures[rows], prompts[rows], device)
        return nan_where_broken(torch.tensor(scores, device=device), images_B3HW)

    def _scores_of(
        self, pictures: Sequence[Image.Image], prompts: Sequence[Prompt], device: torch.device
    ) -> list[float]:
        inputs = self._prepare(images=list(pictures), return_tensors="pt").to(device)
        pixels = inputs.pixel_values.to(self._detector.dtype)
        output = self._detector(pixel_values=pixels, pixel_mask=inputs.pixel_mask)
        judge = strict_score if self.credit == "strict" else partial_score
        scores = []
        for b, (picture, prompt) in enumerate(zip(pictures, prompts, strict=True)):
            class_QC = output.class_queries_logits[b].float()
            mask_Qhw = output.masks_queries_logits[b].float()
            if not (class_QC.isfinite().all() and mask_Qhw.isfinite().all()):
                scores.append(math.nan)
                continue
            counting = prompt.metadata["tag"] == "counting"
            threshold = self.counting_threshold if counting else self.threshold
            detections = detections_of(
                class_QC,
                mask_Qhw,
                pixel_mask=inputs.pixel_mask[b],
                size=(picture.height, picture.width),
                labels=self._labels,
                threshold=threshold,
            )
            found = select(detections, threshold=threshold, max_objects=self.max_objects)

            def colours_of(
                name: str, objects: Sequence[Detection], picture: Image.Image = picture
            ) -> list[str]:
                return self._colours(picture, name, objects, device)

            scores.append(judge(found, prompt.metadata, colours_of))
        return scores

    def _colours(
        self, picture: Image.Image, name: str, objects: Sequence[Detection], device: torch.device
    ) -> list[str]:
        if not objects:
            return []
        if name not in self._colour_texts:
            texts = [phrase.format(c=colour, name=name) for colour in COLOURS for phrase in COLOUR_PHRASES]
            text_NPD = self._text_features(texts, device).unflatten(0, (len(COLOURS), -1))
            self._colour_texts[name] = F.normalize(text_NPD.mean(dim=1), dim=-1)
        crops = [cut_out(picture, detection) for detection in objects]
        similarity = self._image_features(crops, device) @ self._colour_texts[name].to(device).T
        if not similarity.isfinite().all():
            raise RuntimeError("GenEval: CLIP's similarities to the colours are not finite")
        return [COLOURS[int(index)] for index in similarity.argmax(dim=1)]

    def _image_features(self, crops: Sequence[Image.Image], device: torch.device) -> Tensor:
        pixels = self._prepare_crop(images=list(crops), return_tensors="pt").pixel_values
        return _unit(self._clip.get_image_features(pixel_values=pixels.to(device, self._clip.dtype)))

    def _text_features(self, texts: Sequence[str], device: torch.device) -> Tensor:
        tokens = self._tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt").to(device)
        return _unit(self._clip.get_text_features(**tokens))


def _unit(output: Any) -> Tensor:
    """CLIP's features at length 1; transformers 5 returns an output object, transformers 4 the tensor."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return F.normalize(features.float(), dim=-1)
