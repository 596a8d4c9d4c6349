"""prompts → rollout → rewards → advantages → credit → objective: nobody imports what comes after it."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "recast_pl"

MAY_IMPORT = {
    "types": {"path"},
    "noise": set(),
    "path": set(),
    "error_messages": set(),
    "trainer_limits": set(),
    "telemetry": {"types"},
    "parallel": set(),
    "figures": set(),
    "scenes": set(),
    "prompts": {"types", "noise", "scenes"},
    "policy": {"types", "path", "assets", "parallel"},
    "rollout": {"types", "noise", "path", "policy"},
    "rewards": {"types", "assets", "scenes", "error_messages"},
    "advantages": {"types"},
    "objectives": {"types", "path", "rollout"},
    "update": {"types", "noise"},
    "credit": {
        "types",
        "noise",
        "path",
        "rollout",
        "figures",
        "callbacks",
    },  # `credit` names the callback's class lazily
    "evaluation": {"types", "telemetry", "policy", "rewards"},
    "study": {"figures", "error_messages"},  # it starts processes and reads files
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("recast_pl."):
            yield node.module.split(".")[1]


def files(stage):
    folder = PACKAGE / stage
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{stage}.py"]


@pytest.mark.parametrize("stage", MAY_IMPORT)
def test_a_stage_knows_nothing_of_what_comes_after(stage):
    for path in files(stage):
        foreign = set(imported(path)) - MAY_IMPORT[stage] - {stage}
        assert not foreign, f"{path.relative_to(PACKAGE)} imports {sorted(foreign)}"


def test_the_pure_parts_of_credit_do_not_know_the_module():
    for path in files("credit"):
        if path.name != "__init__.py":
            assert "module" not in set(imported(path)), path.name


def test_files_stay_short_enough_to_read():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path
