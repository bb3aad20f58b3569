"""Checkpoints of a run: its train state, data position and config at a step, saved by Orbax and verified by us.

store.py has the checkpoints of one workdir; manifest.py what makes one good; restore.py how its arrays and data
positions come back.
"""

from tpu_train.checkpoint.manifest import PARTS
from tpu_train.checkpoint.restore import refuse_other_run
from tpu_train.checkpoint.store import Checkpoints, SaveFailed

__all__ = ["PARTS", "Checkpoints", "SaveFailed", "refuse_other_run"]
