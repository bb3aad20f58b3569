from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    made.end_commands()
