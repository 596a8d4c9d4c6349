"""What a Mask2Former's output says of one picture, as detections, in the way of mmdetection, which GenEval ran.

Shape suffixes: Q queries of the detector, C classes (the last: no object), K kept instances, H W picture, h w
masks as the detector predicts them.
"""

from collections.abc import Mapping

import numpy as np
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from recast_pl.rewards.geneval.rules import Detection
from recast_pl.scenes.coco import COCO_CLASSES, coco_class

GREY = 153
"""What covers all but the object when its colour is judged (#999, as in GenEval)."""


def class_labels(id2label: Mapping[int, str], *, key: str) -> dict[int, str]:
    """COCO's name of each of the detector's classes; classes that COCO's instances do not have are left out.

    Args:
        id2label: of the detector's configuration.
        key: the YAML key of the detector, for the error.

    Raises:
        ValueError: where one of COCO's classes is missing: pictures would be scored as without it.
    """
    labels = {index: found for index, label in id2label.items() if (found := coco_class(label))}
    missing = [name for name in COCO_CLASSES if name not in labels.values()]
    if missing:
        raise ValueError(
            f"{key}: expected a detector of COCO's 80 instance classes; of its {len(id2label)} labels none is "
            f"{', '.join(missing[:5])}{' and others' if len(missing) > 5 else ''}"
        )
    return labels


def detections_of(
    class_QC: Tensor,
    mask_Qhw: Tensor,
    *,
    pixel_mask: Tensor,
    size: tuple[int, int],
    labels: Mapping[int, str],
    threshold: float,
) -> list[Detection]:
    """The instances with a confidence above `threshold`.

    Confidence is the class's probability times the mean probability of the mask's pixels. Of all pairs of
    query and class the Q most probable are looked at, so that one query may stand for two classes.

    Args:
        class_QC: logits.
        mask_Qhw: logits, of the prepared picture with its padding.
        pixel_mask: 1 where the prepared picture is no padding; that lies to the right and below.
        size: height and width of the picture itself.
        labels: COCO's name by class index; others are no objects here.
        threshold: see above.
    """
    probability_QC = class_QC.softmax(dim=-1)[:, :-1]
    probability_K, flat_K = probability_QC.flatten().topk(len(class_QC))
    # confidence is at most the probability: what is below the threshold already needs no mask
    likely_K = probability_K > threshold
    probability_K, flat_K = probability_K[likely_K], flat_K[likely_K]
    detections: list[Detection] = []
    for probability, flat in zip(probability_K.tolist(), flat_K.tolist(), strict=True):
        query, index = divmod(flat, probability_QC.shape[1])
        if index not in labels:
            continue
        logits_HW = _resized(mask_Qhw[query], pixel_mask=pixel_mask, size=size)
        mask_HW = logits_HW > 0
        if not mask_HW.any():
            continue
        score = probability * logits_HW[mask_HW].sigmoid().mean().item()
        if score <= threshold:
            continue
        rows, columns = mask_HW.any(dim=1).nonzero(), mask_HW.any(dim=0).nonzero()
        box = (
            float(columns[0].item()), float(rows[0].item()), columns[-1].item() + 1.0, rows[-1].item() + 1.0,
        )  # fmt: skip
        detections.append(Detection(label=labels[index], score=score, box=box, mask_HW=mask_HW.cpu()))
    return detections


def cut_out(picture: Image.Image, detection: Detection) -> Image.Image:
    """The object's box, grey where the object is not."""
    pixels = np.asarray(picture)
    if detection.mask_HW is not None:
        pixels = np.where(detection.mask_HW.numpy()[..., None], pixels, np.uint8(GREY))
    left, top, right, bottom = (round(side) for side in detection.box)
    return Image.fromarray(pixels[top:bottom, left:right])


def _resized(mask_hw: Tensor, *, pixel_mask: Tensor, size: tuple[int, int]) -> Tensor:
    """Mask logits brought to the prepared picture, freed of its padding, and brought to the picture."""
    padded = F.interpolate(mask_hw[None, None], pixel_mask.shape, mode="bilinear", align_corners=False)
    height, width = int(pixel_mask.any(dim=1).sum()), int(pixel_mask.any(dim=0).sum())
    return F.interpolate(padded[..., :height, :width], size, mode="bilinear", align_corners=False)[0, 0]
