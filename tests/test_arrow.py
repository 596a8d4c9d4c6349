"""prompts → rollout → rewards → advantages → credit → objective: nobody imports what comes after it.

`MAY_IMPORT` lists every module and room at the package's top level, each below all that it may import. A new
one is one line more, in its place in that order.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import recast_pl

PACKAGE = Path(recast_pl.__file__).parent

MAY_IMPORT = {
    # what belongs to no stage
    "lazy_names": set(),
    "__init__": {"lazy_names"},
    "shapes": set(),
    "schedule": set(),
    "noise": set(),
    "path": set(),
    "error_messages": set(),
    "trainer_limits": set(),
    "parallel": set(),
    "strategies": {"parallel"},  # its class paths in YAML files
    "figures": set(),
    "weights": {"shapes", "schedule"},
    "types": {"shapes", "schedule", "path", "weights"},
    "telemetry": {"types"},
    # the arrow
    "scenes": set(),
    "prompts": {"types", "noise", "scenes"},
    "assets": {"scenes"},
    "policy": {"types", "path", "assets", "parallel"},
    "rollout": {"types", "noise", "schedule", "path", "policy"},
    "rewards": {"types", "assets", "scenes", "error_messages"},
    "advantages": {"types", "shapes"},
    "credit": {"types", "shapes", "noise", "path", "parallel", "rollout", "figures"},
    "update": {"types", "shapes", "schedule", "noise"},
    "objectives": {"types", "shapes", "schedule", "path", "parallel", "policy", "rollout", "update"},
    "evaluation": {"types", "telemetry", "policy", "rewards"},
    "module": {
        "types", "prompts", "policy", "rollout", "rewards", "advantages", "credit", "objectives", "update",
        "evaluation",
        "parallel", "telemetry", "trainer_limits",
    },
    # around it
    "study": {"figures", "error_messages"},  # starts processes and reads files
    "callbacks": {"types", "parallel", "figures", "credit", "rewards", "module", "study"},
    "verbs": {
        "types", "trainer_limits", "prompts", "assets", "policy", "credit", "update", "module", "callbacks",
    },
    "testing": {
        "lazy_names", "types", "scenes", "prompts", "assets", "policy", "rollout", "rewards", "objectives",
        "module", "callbacks",
    },
    "cli": {
        "error_messages", "prompts", "policy", "rewards", "credit", "evaluation", "module", "callbacks",
        "verbs",
    },
    "__main__": {"__init__", "error_messages", "cli"},
}  # fmt: skip
ON_DEMAND = {  # what a function may import beside: it is asked for by name, and stands further down
    "credit": {"callbacks"},  # the class path recast_pl.credit.CreditAssigner
}
FOR_TYPES = {"credit": {"callbacks"}}  # under TYPE_CHECKING, for annotations alone
BY_COMPUTED_NAME = {"lazy_names", "error_messages"}  # may import modules whose names they are given

Found = tuple[int, str, str]  # line; "top", "function", "types" or "computed"; the top-level name


def imports(source: str, module: str) -> Iterator[Found]:
    """Every import of this package in a module's source, in whatever form."""

    def visit(node: ast.AST, where: str) -> Iterator[Found]:
        for target in targets(node, module):
            kind = "function" if is_call_of(node, "lazy_names") and where == "top" else where
            yield node.lineno, kind if target else "computed", target
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and where == "top":
            for child in node.body:
                yield from visit(child, "types")
            for child in node.orelse:
                yield from visit(child, where)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            where = "function" if where == "top" else where
        for child in ast.iter_child_nodes(node):
            yield from visit(child, where)

    yield from visit(ast.parse(source), "top")


def targets(node: ast.AST, module: str) -> Iterator[str]:
    """The top-level names that one node imports; "" for one that only a run could tell."""
    match node:
        case ast.Import(names=names):
            yield from (top_level(alias.name) for alias in names if is_ours(alias.name))
        case ast.ImportFrom(level=level, module=name, names=names):
            start = module.rsplit(".", level)[0] if level else ""
            whole = ".".join(filter(None, (start, name)))
            if is_ours(whole):
                yield from (top_level(f"{whole}.{alias.name}") for alias in names)
        case ast.Call(args=args) if is_call_of(node, "import_module", "__import__"):
            if not args or not isinstance(args[0], ast.Constant):
                yield ""
            elif is_ours(args[0].value):
                yield top_level(args[0].value)
        case ast.Call() if is_call_of(node, "lazy_names"):
            strings = (
                n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            )
            yield from (top_level(name) for name in strings if is_ours(name))


def is_call_of(node: ast.AST, *names: str) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
            return called in names
    return False


def is_ours(name: str) -> bool:
    return name == "recast_pl" or name.startswith("recast_pl.")


def top_level(name: str) -> str:
    """`recast_pl.policy.base.Policy` → policy; a name that the package itself offers → where it stands."""
    first = name.split(".")[1] if "." in name else "__init__"
    if first in MAY_IMPORT or (PACKAGE / first).is_dir() or (PACKAGE / f"{first}.py").exists():
        return first
    home = getattr(getattr(recast_pl, first, None), "__module__", "")
    return top_level(home) if is_ours(home) and home != "recast_pl" else "__init__"


def names_at_the_top() -> set[str]:
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    return modules | {path.name for path in PACKAGE.iterdir() if any(path.glob("**/*.py"))}


def files(name: str) -> list[Path]:
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def dotted(path: Path) -> str:
    """A file's module; with `.__init__` for a package's, so that relative imports count from the package."""
    return ".".join(("recast_pl", *path.relative_to(PACKAGE).with_suffix("").parts))


def test_every_module_and_room_is_listed():
    new, gone = names_at_the_top() - MAY_IMPORT.keys(), MAY_IMPORT.keys() - names_at_the_top()
    assert not new, f"recast_pl has {sorted(new)}: list each in MAY_IMPORT, with what it may import"
    assert not gone, f"recast_pl no longer has {sorted(gone)}: take them out of MAY_IMPORT"


def test_the_arrow_has_no_way_back():
    """The order of the list is the arrow: an entry may import what stands above it."""
    above: set[str] = set()
    for name, allowed in MAY_IMPORT.items():
        below = allowed - above
        assert not below, f"MAY_IMPORT lets {name} import {sorted(below)}, which it does not list above {name}"
        above.add(name)


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_nobody_imports_what_comes_after_it(name):
    allowed = {"top": MAY_IMPORT[name] | {name}}
    allowed["function"] = allowed["top"] | ON_DEMAND.get(name, set())
    allowed["types"] = allowed["top"] | FOR_TYPES.get(name, set())
    allowed["computed"] = {""} if name in BY_COMPUTED_NAME else set()
    for path in files(name):
        for line, where, target in imports(path.read_text(encoding="utf-8"), dotted(path)):
            place = f"recast_pl/{path.relative_to(PACKAGE)}:{line}"
            assert target in allowed[where], (
                f"{place} imports {f'recast_pl.{target}' if target else 'by a computed name'} ({where}); "
                f"MAY_IMPORT lets {name} import {sorted(MAY_IMPORT[name])}"
            )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from recast_pl.credit.base import Uniform", [("top", "credit")]),
        ("import recast_pl.credit.base as base, os", [("top", "credit")]),
        ("from recast_pl import credit, noise", [("top", "credit"), ("top", "noise")]),
        ("from recast_pl import __version__", [("top", "__init__")]),
        ("import recast_pl", [("top", "__init__")]),
        ("from ..credit import base", [("top", "credit")]),
        ("from .. import credit", [("top", "credit")]),
        ("from .adapters import x", [("top", "policy")]),
        ("from . import adapters", [("top", "policy")]),
        ("def f():\n    from recast_pl.credit import x", [("function", "credit")]),
        ("class A:\n    async def f(self):\n        import recast_pl.credit", [("function", "credit")]),
        ("import importlib\nimportlib.import_module('recast_pl.credit.base')", [("top", "credit")]),
        ("f = lambda: __import__('recast_pl.credit')", [("function", "credit")]),
        ("import_module(f'recast_pl.{name}')", [("computed", "")]),
        ("import_module('json')", []),
        ("__getattr__, _ = lazy_names(__name__, {'x': 'recast_pl.credit.base'})", [("function", "credit")]),
        (
            "if TYPE_CHECKING:\n    from recast_pl.credit import x\nelse:\n    import recast_pl.noise",
            [("types", "credit"), ("top", "noise")],
        ),
        ("try:\n    import recast_pl.credit\nexcept ImportError:\n    pass", [("top", "credit")]),
        ("import recast_plus\nfrom recast_plus.credit import x\nimport lightning", []),
    ],
)  # fmt: skip
def test_every_form_of_import_is_read(source, found):
    assert [entry[1:] for entry in imports(source, "recast_pl.policy.base")] == found


def test_relative_imports_of_a_package_count_from_itself():
    assert [e[2] for e in imports("from . import sd3\nfrom .. import noise", "recast_pl.policy.__init__")] == [
        "policy",
        "noise",
    ]


def test_files_stay_short_enough_to_read():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
