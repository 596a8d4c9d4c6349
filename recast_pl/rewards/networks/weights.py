"""Weights of rewards: where they lie, in which precision they work, and no key too few or too many."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bfloat16", "float16"]


def torch_dtype(name: str, *, key: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ValueError: for any other name than a `Precision`.
    """
    if name not in get_args(Precision):
        raise ValueError(f"{key}: expected one of {', '.join(get_args(Precision))}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def check_source(source: str, *, key: str, holds: tuple[str, ...], files: bool = False) -> str:
    """A hub id, or a folder that holds at least one of `holds`, or with `files` a file; as an absolute path.

    Raises:
        ValueError: for a path where nothing of that kind is.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not any((path / name).exists() for name in holds):
            raise ValueError(f"{key}: the folder {source!r} holds no {' and no '.join(holds)}")
        return str(path.resolve())
    if files and path.is_file():
        return str(path.resolve())
    if source.startswith((".", "/", "~")) or source.count("/") != 1:
        kinds = "no file, no folder" if files else "no folder"
        raise ValueError(f"{key}: {source!r} is {kinds} and no hub id (owner/name)")
    return source


@contextmanager
def reading(source: str, *, key: str) -> Iterator[None]:
    """Gives what goes wrong while reading `source` the name of its YAML key."""
    try:
        yield
    except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{key}: cannot read {source!r}: {error}") from error


def read_state_dict(source: str, filename: str, *, key: str) -> dict[str, Tensor]:
    """The tensors of a `torch.save` file, alone or under `state_dict`.

    Args:
        source: a file, a folder that holds `filename`, or the hub id of a repository that does.
        filename: ignored where `source` is a file.
        key: the YAML key of `source`.

    Raises:
        ValueError: if there is no such file, or it holds something else.
    """
    with reading(source, key=key):
        path = Path(source)
        if path.is_dir():
            path = path / filename
        elif not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(source, filename))
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, LookupError, TypeError, AttributeError) as error:
            # What the unpickler meets in a damaged file, or in the web page that was saved instead of one.
            raise ValueError(f"no torch.save file ({type(error).__name__}: {error})") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{key}: {source!r} is no state dict: expected a mapping of names to tensors")
    return dict(content)


def load_strictly(module: nn.Module, state: Mapping[str, Tensor], *, key: str) -> None:
    """`module.load_state_dict`, its complaints under the name of the YAML key.

    Raises:
        ValueError: naming every key that is missing, left over or of another shape.
    """
    try:
        module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise ValueError(f"{key}: {error}") from error


def tensor(state: Mapping[str, Tensor], name: str, *, key: str) -> Tensor:
    """A state dict's entry from which sizes are read.

    Raises:
        ValueError: naming the missing entry and some that are there.
    """
    if name not in state:
        raise ValueError(f"{key}: {name!r} is missing; the file has {', '.join(sorted(state)[:5])}, …")
    return state[name]


def count_blocks(state: Mapping[str, Tensor], prefix: str) -> int:
    """Number of blocks under `prefix`, numbered from 0.

    >>> count_blocks({"a.0.w": torch.ones(1), "a.1.w": torch.ones(1), "b.2.w": torch.ones(1)}, "a.")
    2
    """
    numbers = {name.removeprefix(prefix).split(".")[0] for name in state if name.startswith(prefix)}
    return len(numbers)


def freeze(module: nn.Module) -> nn.Module:
    """Eval mode, and no parameter asks for a gradient."""
    return module.eval().requires_grad_(False)
