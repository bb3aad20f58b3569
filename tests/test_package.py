"""What a user installs: how many packages, and what the shipped configs say of themselves."""

import ast
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def base_install(name: str, found: set[str], extras: Iterable[str] = ()) -> set[str]:
    """`found` with `name` and all that it requires with these extras, as installed here."""
    canonical = re.sub(r"[-_.]+", "-", name).lower()
    if canonical in found and not extras:
        return found
    found.add(canonical)
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": e}) for e in {"", *extras}):
            base_install(requirement.name, found, requirement.extras)
    return found


def test_base_install_is_at_most_45_packages():
    packages = base_install("tpu-train", set())
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"} <= packages
    assert len(packages) <= 45, sorted(packages)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_config_docstring_gives_its_command_and_the_expected_loss(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring is not None
    assert f"--config=configs/{path.name}" in docstring
    assert "loss" in docstring


def test_every_command_of_the_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text()
    named = re.findall(r"(?:configs|benchmarks|launch)/[\w/]+\.(?:py|sh)", text)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
