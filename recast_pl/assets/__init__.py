"""Models that ship inside the package: a small SD3-type pipeline and two small CLIPs.

`recast_pl://tiny` is the pipeline, `recast_pl://clip` the CLIP that rewards, `recast_pl://judge` the CLIP that
only judges. `python -m recast_pl.assets.make` rebuilds them from nothing.
"""

from pathlib import Path

SCHEME = "recast_pl://"
_FOLDER = Path(__file__).parent / "tiny"
EMBEDDED = {"tiny": _FOLDER / "pipeline", "clip": _FOLDER / "clip", "judge": _FOLDER / "judge"}


def resolve(source: str, *, key: str) -> str:
    """A source of weights as `from_pretrained` reads it: an embedded model's folder, a folder, or a hub id.

    Args:
        source: what the user wrote.
        key: the YAML key it stands under, for the error.

    Raises:
        ValueError: for an embedded model that does not exist, or a path that is no folder of a model.
    """
    if source.startswith(SCHEME):
        name = source.removeprefix(SCHEME)
        if name not in EMBEDDED:
            known = ", ".join(SCHEME + name for name in EMBEDDED)
            raise ValueError(f"{key}: no embedded model {source!r}; there are {known}")
        return str(EMBEDDED[name])
    looks_local = source.startswith((".", "/", "~")) or source.count("/") != 1
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not any((folder / name).exists() for name in ("model_index.json", "config.json")):
            raise ValueError(f"{key}: the folder {source!r} holds no model_index.json and no config.json")
        return str(folder)
    if looks_local:
        raise ValueError(
            f"{key}: {source!r} is no folder and no hub id (owner/name); embedded models: "
            + ", ".join(SCHEME + name for name in EMBEDDED)
        )
    return source
