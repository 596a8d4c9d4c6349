"""CLIPs that several rewards share: one set of weights, and one embedding of each batch of pictures.

Shape suffixes: B samples, C H W picture, D embedding.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from recast_pl.rewards.images import nan_where_broken, to_pil
from recast_pl.rewards.networks.weights import freeze, reading


@dataclass(frozen=True, slots=True)
class Preparation:
    """From pictures to what a CLIP sees. Equal keys promise equal pixels."""

    key: Hashable
    pixels: Callable[[Tensor], Tensor] = field(compare=False)  # [B, 3, H, W] in [0, 1] → normalised, on the CPU


class CLIPBackbone:
    """A loaded `CLIPModel` that remembers the embeddings of the last batch of pictures.

    Rewards may call it from several threads.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self._memo = EmbeddingMemo()
        self._lock = threading.RLock()

    @torch.no_grad()
    def embed_images(self, images_B3HW: Tensor, preparation: Preparation) -> Tensor:
        """Embeddings [B, D], float32, on the pictures' device; NaN for a picture that is not finite.

        Callers share the result: it must not be changed in place.
        """
        weights = self.model.logit_scale
        use = (preparation.key, weights.device, weights.dtype)
        with self._lock:
            embeddings_BD = self._memo.get(images_B3HW, use)
            if embeddings_BD is None:
                pixels = preparation.pixels(images_B3HW).to(weights.device, weights.dtype)
                embeddings_BD = _features(self.model.get_image_features(pixel_values=pixels)).float()
                embeddings_BD = nan_where_broken(embeddings_BD, images_B3HW)
                self._memo.put(images_B3HW, use, embeddings_BD)
        return embeddings_BD.to(images_B3HW.device)

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str], tokenizer: Any) -> Tensor:
        """Embeddings [B, D], float32, on the model's device; a text that repeats is embedded once."""
        row_of = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        with self._lock:  # the tokenizer, too, keeps state during a call
            tokens = tokenizer(
                list(row_of),
                padding="max_length",  # padding follows the pooled token, and attention is causal
                max_length=self.model.config.text_config.max_position_embeddings,
                truncation=True,
                return_tensors="pt",
            ).to(self.model.device)
            features = _features(self.model.get_text_features(**tokens)).float()
        return features[[row_of[text] for text in texts]]


class EmbeddingMemo:
    """Embeddings of the views of one batch of pictures.

    A batch is its memory and that memory's version, which every in-place operation raises; a view is its
    place in there. The reference to the memory is weak, so that pictures are not kept; while it exists the
    same identity is given to no other memory, so that a freed batch's embeddings cannot come back.
    """

    def __init__(self) -> None:
        self._storage: StorageWeakRef | None = None
        self._version = -1
        self._embeddings: dict[Hashable, Tensor] = {}

    def get(self, images: Tensor, use: Hashable) -> Tensor | None:
        """The embeddings for `use`, if it is this batch that was put."""
        return self._embeddings.get(self._view(images, use)) if self._is_of(images) else None

    def put(self, images: Tensor, use: Hashable, embeddings: Tensor) -> None:
        """Remembers `embeddings`; those of any other batch are forgotten."""
        if images.is_inference():
            return  # such tensors count no versions, so that a change would go unseen
        if not self._is_of(images):
            self._storage = StorageWeakRef(images.untyped_storage())  # type: ignore[no-untyped-call]
            self._version = images._version
            self._embeddings = {}
        self._embeddings[self._view(images, use)] = embeddings

    def _is_of(self, images: Tensor) -> bool:
        if self._storage is None or images.is_inference() or images._version != self._version:
            return False
        return bool(self._storage.cdata == images.untyped_storage()._cdata)

    @staticmethod
    def _view(images: Tensor, use: Hashable) -> Hashable:
        return use, images.dtype, images.storage_offset(), tuple(images.shape), images.stride()


@dataclass(frozen=True, slots=True)
class CLIPScorer:
    """A CLIP with the tokenizer and the preparation of pictures that one reward uses with it."""

    backbone: CLIPBackbone
    tokenizer: Any
    preparation: Preparation

    def cosines(self, images_B3HW: Tensor, texts: Sequence[str]) -> Tensor:
        """Cosine [B] of picture b and text b, float32."""
        image_BD = self.backbone.embed_images(images_B3HW, self.preparation)
        text_BD = self.backbone.embed_texts(texts, self.tokenizer).to(image_BD.device)
        return F.cosine_similarity(image_BD, text_BD, dim=-1)


_loaded: WeakValueDictionary[Hashable, CLIPBackbone] = WeakValueDictionary()
_loading = threading.Lock()


def share_clip(
    source: Hashable, *, dtype: torch.dtype, device: torch.device, build: Callable[[], Any]
) -> CLIPBackbone:
    """The CLIP of `source`, built if no reward holds it; it is freed when the last one lets go.

    Args:
        source: what the weights are; equal sources promise equal weights.
        dtype: of the weights.
        device: where to.
        build: makes the `CLIPModel`.
    """
    home = torch.empty(0, device=device).device  # "cuda" and "cuda:0" are one
    with _loading:
        backbone = _loaded.get((source, dtype, home))
        if backbone is None:
            backbone = CLIPBackbone(freeze(build()).to(dtype=dtype))
            _loaded[source, dtype, home] = backbone
        backbone.model.to(home)  # another holder may have moved it away
    return backbone


def load_clip(source: str, *, dtype: torch.dtype, device: torch.device, key: str) -> CLIPBackbone:
    """The CLIP of a folder or hub id in transformers' layout, shared.

    Raises:
        ValueError: naming `key`, if there is none or weights are missing.
    """

    def build() -> Any:
        from transformers import CLIPModel

        with reading(source, key=key):
            try:
                model, report = CLIPModel.from_pretrained(source, dtype=dtype, output_loading_info=True)
            except RuntimeError as error:  # weights of other shapes than the configuration's
                raise ValueError(str(error)) from error
            if report["missing_keys"]:  # transformers would leave them at random values
                raise ValueError(f"no CLIPModel: {', '.join(sorted(report['missing_keys']))} missing")
        return model

    path = Path(source)
    return share_clip(str(path.resolve()) if path.is_dir() else source, dtype=dtype, device=device, build=build)


def load_tokenizer(source: str, backbone: CLIPBackbone, *, key: str) -> Any:
    """The CLIP tokenizer of a folder or hub id.

    Raises:
        ValueError: naming `key`, if there is none or its ids are not those of the model.
    """
    from transformers import CLIPTokenizer

    with reading(source, key=key):
        tokenizer = CLIPTokenizer.from_pretrained(source)
    config = backbone.model.config.text_config
    # For the id 2, which old configurations carry, transformers pools at the highest id.
    end = config.vocab_size - 1 if config.eos_token_id == 2 else config.eos_token_id
    if len(tokenizer) > config.vocab_size or tokenizer.eos_token_id != end:
        raise ValueError(
            f"{key}: the tokenizer of {source!r} has {len(tokenizer)} tokens and ends texts with "
            f"{tokenizer.eos_token_id}; the model has {config.vocab_size} and reads texts at {end}"
        )
    return tokenizer


def load_preparation(source: str, *, key: str) -> Preparation:
    """What the image processor of a folder or hub id does; its PIL class needs no torchvision.

    Raises:
        ValueError: naming `key`, if there is none.
    """
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    with reading(source, key=key):
        processor = CLIPImageProcessorPil.from_pretrained(source)

    def pixels(images_B3HW: Tensor) -> Tensor:
        output: Tensor = processor(images=to_pil(images_B3HW), return_tensors="pt").pixel_values
        return output

    return Preparation(processor.to_json_string(), pixels)


def held(value: Any, reward: object) -> Any:
    """What a reward holds between `load` and `unload`.

    Raises:
        RuntimeError: outside.
    """
    if value is None:
        raise RuntimeError(f"{type(reward).__name__}.score before load")
    return value


def networks_of(scorer: CLIPScorer | None) -> Iterable[Any]:
    """The networks of a scorer that may not be loaded."""
    return () if scorer is None else (scorer.backbone.model,)


def _features(output: Any) -> Tensor:
    """Transformers 5 returns an output object where transformers 4 returned the tensor."""
    features: Tensor = output if isinstance(output, Tensor) else output.pooler_output
    return features
