"""Tokenizer and text encoders over the captions' vocabulary, in CLIP's classes and file layout."""

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from recast_pl.scenes import all_scenes

MAX_TOKENS = 16  # the longest caption has 12 words, start and end
START, END, WORD_END = "<|startoftext|>", "<|endoftext|>", "</w>"
NULL_TOKENS = 1  # zero vectors in the place of the T5 that SD3's pipeline may leave out


def build_tokenizer() -> CLIPTokenizer:
    """Byte-pair encoding in which every caption word is one token; any other text falls into pieces.

    The merges are written down rather than trained: a trainer breaks ties by hash order, and then two
    processes disagree about ids.
    """
    words = sorted({word for scene in all_scenes() for word in scene.caption.split()})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [START, END, *letters, *(letter + WORD_END for letter in letters)]
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = merged([*word[:-1], word[-1] + WORD_END], merges)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            tokens.append(pieces[0] + pieces[1])
            pieces = merged(pieces, merges)
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=MAX_TOKENS)


def merged(pieces: list[str], merges: list[tuple[str, str]]) -> list[str]:
    """Byte-pair encoding: the merges applied to `pieces` in their order.

    >>> merged(["r", "e", "d</w>"], [("e", "d</w>"), ("r", "ed</w>")])
    ['red</w>']
    """
    for first, second in merges:
        result: list[str] = []
        for piece in pieces:
            if result and (result[-1], piece) == (first, second):
                result[-1] = first + second
            else:
                result.append(piece)
        pieces = result
    return pieces


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
