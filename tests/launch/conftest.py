import pytest
from launch_sandbox import Sandbox


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)
