"""Checkpoints of a run: its train state, data position and config at a step, saved by Orbax and verified by us.

store.py has the checkpoints of one workdir; manifest.py what makes one good; policies.py which are kept; restore.py how
arrays and data positions come back; init_from.py a new run's first weights; saver.py when a run saves, and what it does
when its storage fails; shared_saver.py how several processes do that.
"""

from tpu_train.checkpoint.errors import SaveFailed
from tpu_train.checkpoint.init_from import initial_model
from tpu_train.checkpoint.manifest import PARTS
from tpu_train.checkpoint.restore import refuse_other_run
from tpu_train.checkpoint.saver import SAVE, Saver
from tpu_train.checkpoint.shared_saver import SharedSaver
from tpu_train.checkpoint.store import Checkpoints

__all__ = ["PARTS", "SAVE", "Checkpoints", "SaveFailed", "Saver", "SharedSaver", "initial_model", "refuse_other_run"]
