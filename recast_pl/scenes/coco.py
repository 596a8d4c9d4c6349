"""What GenEval's prompts are made of: COCO's object classes, and the colours and relations it asks for."""

COCO_CLASSES: tuple[str, ...] = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow",
    "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee",
    "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard",
    "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple",
    "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch",
    "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "mouse", "remote", "keyboard",
    "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors",
    "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
"""The 80 classes of COCO's instances, in COCO's order (Lin et al., "Microsoft COCO: Common objects in context",
2014)."""

COLOURS: tuple[str, ...] = (
    "red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white",
)  # fmt: skip
"""GenEval's colours."""

RELATIONS: tuple[str, ...] = ("left of", "right of", "above", "below")
"""GenEval's relations, as seen in the picture's plane."""

_OTHER_NAMES: dict[str, str] = {
    # GenEval's prompts, where COCO's name alone would be misread
    "computer mouse": "mouse", "tv remote": "remote", "computer keyboard": "keyboard",
    # Pascal VOC's spellings, which some COCO checkpoints carry as labels
    "aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch", "pottedplant": "potted plant",
    "diningtable": "dining table", "tvmonitor": "tv",
}  # fmt: skip


def coco_class(name: str) -> str | None:
    """COCO's name of an object class; None if it has no such class.

    >>> coco_class("computer mouse"), coco_class("dog"), coco_class("unicorn")
    ('mouse', 'dog', None)
    """
    name = _OTHER_NAMES.get(name, name)
    return name if name in COCO_CLASSES else None
