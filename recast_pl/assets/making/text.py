"""Tokenizer and text encoders over the captions' vocabulary, in CLIP's classes and file layout."""

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from recast_pl.scenes import all_scenes

MAX_TOKENS = 16  # the longest caption has 12 words, start and end
START, END = "<|startoftext|>", "<|endoftext|>"
NULL_TOKENS = 1  # zero vectors in the place of the T5 that SD3's pipeline may leave out


def build_tokenizer() -> CLIPTokenizer:
    """Byte-pair encoding in which every caption word is one token; any other text falls into pieces."""
    trained = Tokenizer(BPE(end_of_word_suffix="</w>", unk_token=END))
    # CLIPTokenizer's own way to cut words
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = BpeTrainer(
        vocab_size=4096,
        special_tokens=[START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    trained.train_from_iterator((scene.caption for scene in all_scenes()), trainer)
    vocabulary = dict(sorted(trained.get_vocab().items(), key=lambda item: item[1]))
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):  # so that no text contains an unknown piece
        vocabulary.setdefault(f"{letter}</w>", len(vocabulary))
    merges = [tuple(pair) for pair in _merges(trained)]
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def _merges(tokenizer: Tokenizer) -> list[list[str]]:
    import json

    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in pairs]


def text_config(
    tokenizer: CLIPTokenizer, *, width: int = 64, layers: int = 3, heads: int = 2, activation: str = "gelu"
) -> CLIPTextConfig:
    """A small text tower's configuration, its special tokens those of `tokenizer`."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=MAX_TOKENS,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build_text_encoders(tokenizer: CLIPTokenizer) -> torch.nn.ModuleList:
    """Two untrained text encoders that differ in heads and activation."""
    return torch.nn.ModuleList(
        [
            CLIPTextModelWithProjection(text_config(tokenizer, heads=2, activation="quick_gelu")),
            CLIPTextModelWithProjection(text_config(tokenizer, heads=4, activation="gelu")),
        ]
    )


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Token ids [captions, MAX_TOKENS]."""
    ids: Tensor = tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def encode(encoders: torch.nn.ModuleList, ids: Tensor) -> tuple[Tensor, Tensor]:
    """What SD3's pipeline makes of token ids, with gradients: sequence and pooled embeddings."""
    outputs = [encoder(ids, output_hidden_states=True) for encoder in encoders]
    sequence = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    null = sequence.new_zeros(sequence.shape[0], NULL_TOKENS, sequence.shape[2])
    pooled = torch.cat([output.text_embeds for output in outputs], dim=-1)
    return torch.cat([sequence, null], dim=1), pooled
