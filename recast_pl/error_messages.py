"""What goes wrong before a run has begun, in one message that says what to do.

Three sources: configuration files, jsonargparse's complaints, and exceptions. Nothing heavy is imported here.
"""

import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

TRACEBACK = "RECAST_PL_TRACEBACK"
_PACKAGE = Path(__file__).parent
_PUBLIC = ("rewards", "credit", "objectives", "advantages", "rollout", "policy", "prompts", "callbacks")


def shows_traceback() -> bool:
    """Whether the user asks for tracebacks, by RECAST_PL_TRACEBACK=1."""
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def closest(name: str, known: Iterable[str]) -> str:
    """A suggestion that can follow a message, empty where nothing is near.

    >>> closest("fitt", ["fit", "test"]), closest("recast", ["ReCAST"]), closest("zebra", ["fit"])
    (' (did you mean fit?)', ' (did you mean ReCAST?)', '')
    """
    of = {one.lower(): one for one in known}
    near = difflib.get_close_matches(name.lower(), of, n=1)
    return f" (did you mean {of[near[0]]}?)" if near else ""


def help_text(program: str, verbs: Mapping[str, str]) -> str:
    """The overview of the command line."""
    width = max(map(len, verbs))
    lines = [f"  {verb:{width}}  {what}" for verb, what in verbs.items()]
    return "\n".join(
        [f"usage: {program} VERB --config FILE [--config OVERLAY …] [--KEY VALUE …]", "", *lines, "",
         f"A verb's keys: {program} VERB --help. The traceback of an error: {TRACEBACK}=1."]
    )  # fmt: skip


def unreadable_configuration(arguments: Sequence[str]) -> str | None:
    """What is wrong with the first `--config` file that cannot be one."""
    for named in _configurations(arguments):
        if "://" in named or named.lstrip().startswith("{"):  # fsspec's, or the content itself
            continue
        if wrong := wrong_with(Path(named)):
            return f"--config {named}: {wrong}"
    return None


def _configurations(arguments: Sequence[str]) -> Iterator[str]:
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word in ("--config", "-c") and following and not following.startswith("-"):
            yield following
        elif word.startswith("--config="):
            yield word.removeprefix("--config=")


def wrong_with(path: Path) -> str | None:
    """What keeps a file from being one of keys and values."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        folder = path.absolute().parent
        near = closest(path.name, (file.name for file in folder.glob("*.y*ml")))
        return f"no such file (looked in {folder}){near}"
    except IsADirectoryError:
        return "a folder; name a YAML file in it"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "no text in UTF-8; is it a YAML file?"
    except yaml.YAMLError as error:
        return "no valid YAML: " + str(error).replace('"<unicode string>"', path.name)
    if content is not None and not isinstance(content, dict):
        return f"expected keys and values (model:, rewards:, data:, …), got a {type(content).__name__}"
    return None


def explained(message: str, keys: Iterable[str]) -> str:
    """A complaint of jsonargparse's, shorter and with a suggestion.

    Args:
        message: the complaint.
        keys: those that the parser knows.

    >>> explained("Subcommand 'fit' does not accept option 'credit.every_n_step'", ["credit.every_n_steps"])
    'credit.every_n_step: no such key (did you mean credit.every_n_steps?)'
    """
    if own := re.findall(r"^\s*- (\w+(?:\.\w+)+: .+)", message, re.M):
        return str(own[-1])  # what a constructor of this package refused, innermost
    found = re.search(
        r"does not accept option '([^']+)'|unrecognized arguments: (?:--)?([^\s=]+)"
        r"|^\s*Option '([^']+)' is not accepted",
        message,
    )
    if found:
        key = found[1] or found[2] or found[3]
        return f"{key}: no such key{_closest_key(key, keys)}"
    if said := _required(message) or _argument_type(message):
        return said
    key = (re.search(r'Parser key "([^"]+)"', message) or ["", ""])[1]
    for line in (_argument, _class_path, _entry, _bare_name, _other_class):
        if said := line(message):
            return f"{key}: {said}" if key else said
    shorter = re.sub(r'^Parser key "([^"]+)":\s*', r"\1: ", message.strip())
    plain = re.sub(r"<class '([\w.]+)'>", r"\1", shorter)
    return re.sub(r"Expected an? ([\w.]+)\. Got value: ", r"expected \1, got ", plain)


def _closest_key(key: str, keys: Iterable[str]) -> str:
    """Also of what stands above a key: `modell.policy` is no misspelt leaf."""
    parts = {".".join(known.split(".")[: depth + 1]) for known in keys for depth in range(known.count(".") + 1)}
    for depth in range(key.count(".") + 1):
        above = ".".join(key.split(".")[: depth + 1])
        if above not in parts:
            return closest(above, (part for part in parts if part.count(".") == depth))
    return ""


def _required(message: str) -> str | None:
    """About keys without a value; the verb before them is left out."""
    found = re.search(r"arguments are required: (.+)", message)
    if not found:
        return None
    if above := re.findall(r'Parser key "([^"]+)"', message[: found.start()]):  # of a class
        return f"no value for {', '.join('.init_args.'.join([*above, key]) for key in found[1].split(', '))}"
    missing = [key.strip().partition(".")[2] or key.strip() for key in found[1].split(",")]
    hint = "; a file that has them: --config configs/quickstart.yaml" if "model.policy" in missing else ""
    return f"no value for {', '.join(missing)}{hint}"


def _argument_type(message: str) -> str | None:
    """About an argument of a class: the last key that is named, below the first."""
    keys = list(re.finditer(r'Parser key "([^"]+)"', message))
    tail = message[keys[-1].end() :] if len(keys) > 1 else ""
    kinds = [kind for kind in re.findall(r"Expected an? <class '([\w.]+)'>", tail) if kind != "NoneType"]
    value = re.search(r"(?:Got|Given) value: (.+?)(?:\. Got value: .*)?$", tail, re.M)
    if not kinds or value is None or "given class_path" in tail:
        return None
    return f"{keys[0][1]}.init_args.{keys[-1][1]}: expected {' or '.join(kinds)}, got {value[1]}"


def _argument(message: str) -> str | None:
    found = re.search(r"given class_path '([\w.]+)':\s*(?:.*\n)??\s*Option '([^']+)' is not accepted", message)
    if not found:
        return None
    path, name = found[1], found[2]
    module, _, attribute = path.rpartition(".")
    signature = inspect.signature(getattr(importlib.import_module(module), attribute))
    known = [parameter for parameter in signature.parameters if parameter != "self"]
    near = closest(name.split(".")[0], known)
    return f"{attribute} has no argument {name!r}{near}; it has {', '.join(known) or 'none'}"


def _class_path(message: str) -> str | None:
    found = re.search(
        r"given class_path '([\w.]+)':\s*(.*(?:has no attribute|No module named|not found).*)", message
    )
    if not found:
        return None
    known = public_classes()
    short = found[1].rpartition(".")[2]
    near = closest(found[1], known.values()) or closest(short, known)
    return f"no class {found[1]!r}{near}: {found[2].strip()}"


def _bare_name(message: str) -> str | None:
    found = re.search(r"Expected a dot import path string: (\S+)", message)
    if not found:
        return None
    names = _public_of_kind(message)
    near = closest(found[1], names or public_classes())
    listed = f"; there are {', '.join(names)}, and" if names else ";"
    return f"no class {found[1]!r}{near}{listed} a class of your own goes by its path, module.Class"


def _other_class(message: str) -> str | None:
    found = re.search(r"does not correspond to a subclass of (\w+)(?:.|\n)*Given value: ([\w.]+)", message)
    if not found:
        return None
    return f"{found[2]} is no {found[1]}; there are {', '.join(_public_of_kind(message)) or 'none here'}"


def _entry(message: str) -> str | None:
    """About a key below a name of the user's own, which the command line cannot set by itself."""
    found = re.search(
        r"Subtypes: \[dict\[.*(?:.|\n)*NestedArg\(key='([^.']+)\.([^']+)', val='([^']*)'", message
    )
    if not found:
        return None
    name, key, value = found.groups()
    return (
        f"{name}.{key} cannot be set by itself here; put it into a YAML file, or give all as JSON: "
        f'{{"{name}": {{"{key}": {value}}}}}'
    )


def _public_of_kind(message: str) -> list[str]:
    """The public classes of the kind that a complaint says it expected."""
    found = re.search(r"Subtypes: \[<class 'recast_pl\.([\w.]+)\.(\w+)'", message)
    if not found:
        return []
    kind = getattr(importlib.import_module(f"recast_pl.{found[1]}"), found[2])
    module = importlib.import_module(f"recast_pl.{found[1].split('.')[0]}")
    public = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return [
        name
        for name, one in public.items()
        if inspect.isclass(one) and issubclass(one, kind) and not inspect.isabstract(one)
    ]


def public_classes() -> dict[str, str]:
    """The class paths that YAML files may name, by bare name."""
    paths: dict[str, str] = {}
    for name in _PUBLIC:
        module = importlib.import_module(f"recast_pl.{name}")
        paths |= {public: f"recast_pl.{name}.{public}" for public in module.__all__}
    return paths


def refusal(error: Exception) -> str | None:
    """What a user can do about an exception from before the first step; None: it is to be seen whole.

    A `ValueError` or `ImportError` raised by this package's own code, a model that cannot be fetched, a device
    or a file that is not there. Whatever comes out of the running loops is none of them.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.name == "_run_stage" for frame in frames):  # Lightning's, around all loops
        return None
    if isinstance(error, OSError) and any(frame.name == "from_pretrained" for frame in frames):
        return _unfetched(error)
    if type(error).__name__ == "MisconfigurationException":
        hint = (
            "; --trainer.accelerator auto takes what is there, cpu needs nothing" if "gpu" in str(error) else ""
        )
        return f"trainer: {str(error).rstrip('.!')}{hint}"
    if isinstance(error, (FileNotFoundError, FileExistsError, PermissionError)):
        return str(error)
    ours = bool(frames) and _PACKAGE in Path(frames[-1].filename).parents
    return str(error) if ours and type(error) in (ValueError, ImportError) else None


def _unfetched(error: OSError) -> str:
    """About a model that neither the cache nor the hub gave."""
    names: set[str] = set()
    link: BaseException | None = error
    while link is not None:
        names.add(type(link).__name__)
        link = link.__cause__ or link.__context__
    said = str(error).strip().splitlines()[0].partition(" Please check out the root cause")[0]  # none is shown
    if "found in directory" in said:  # a folder, and no hub was asked
        return f"{said}\n`pretrained` names a folder that holds no such model."
    if "GatedRepoError" in names or "gated repo" in str(error):
        return (
            f"{said}\nThe model is gated: accept its licence on its page at huggingface.co, then `hf auth "
            "login` or HF_TOKEN=…; or give `pretrained` the path of a folder that holds it."
        )
    return (
        f"{said}\nThe cache and the Hugging Face Hub were tried. Is the name (owner/name) right, is there a "
        "network, and is HF_HUB_OFFLINE unset? A private or gated model needs `hf auth login` or HF_TOKEN. "
        "Without the hub, give `pretrained` the path of a folder that holds the model."
    )


def print_error(message: str, *, help_command: str, error: BaseException | None) -> None:
    """To standard error: the message, a hint, and the traceback where it was asked for."""
    if error is not None and shows_traceback():
        traceback.print_exception(error)
    print(f"error: {message}\nAll keys: {help_command}", file=sys.stderr)
