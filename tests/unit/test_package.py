"""What the documents say of the package holds for the package."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import yaml

import flowprefill
from flowprefill.config import EngineConfig

ROOT = Path(__file__).parents[2]
SOURCE_FOLDERS = ("flowprefill", "backend", "clients")


def test_changelog_s_top_version_is_the_package_s() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    top = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert top and top.group(1) == flowprefill.__version__


def test_public_names_resolve() -> None:
    assert all(getattr(flowprefill, name) is not None for name in flowprefill.__all__)


def test_readme_lists_every_key_of_model_json() -> None:
    readme = (ROOT / "README.md").read_text()
    table = readme.split("| key | default | meaning |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    keys = {key.strip("`") for cell in cells for key in cell.split(", ")}
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert keys == fields


def expand_braces(path: str) -> list[str]:
    """a/{b,c}.py -> a/b.py, a/c.py."""
    parts = re.split(r"\{([^}]*)\}", path)
    options = [p.split(",") if i % 2 else [p] for i, p in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*options)]


def test_file_map_of_the_architecture_page_equals_the_tree() -> None:
    """A line of the map starts with a path, `backend/model.py` or `flowprefill/ops/{a,b}.py`."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    pattern = rf"^(?:- )?`?((?:{'|'.join(SOURCE_FOLDERS)})/[^\s`]*\.py)"
    paths = re.findall(pattern, page, re.MULTILINE)
    mapped = {path for pattern in paths for path in expand_braces(pattern)}
    tree = {
        str(path.relative_to(ROOT))
        for folder in SOURCE_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert mapped == tree


def test_compose_file_names_an_existing_dockerfile() -> None:
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    build = compose["services"]["server"]["build"]
    context = (ROOT / "docker" / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()


def test_dockerfile_copies_only_what_exists() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert sources and all((ROOT / source).exists() for source in sources)


def test_constraints_pin_every_direct_dependency() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *itertools.chain(*project["optional-dependencies"].values()),
    ]
    pinned = {
        line.split("==")[0].strip()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    }
    assert {re.split(r"[\[<>=]", name)[0] for name in wanted} <= pinned
