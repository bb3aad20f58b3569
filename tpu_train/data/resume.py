"""A data position that knows what it belongs to, so that resuming under another layout is an error, not other data."""

from typing import Any

import grain

from tpu_train.config import UserError
from tpu_train.data.packing import Batch


class Resumable(grain.DatasetIterator[Batch]):
    """Passes `parent` on; its state also holds `layout`, which must be equal when the state is set."""

    def __init__(self, parent: grain.DatasetIterator[Batch], layout: dict[str, Any]):
        super().__init__(parent)
        self._batches, self._layout = parent, layout

    def __next__(self) -> Batch:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return {"layout": dict(self._layout), "position": self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        if "layout" not in state or "position" not in state:
            raise UserError("this is not a data position of train_batches; start a new run directory")
        for name, value in self._layout.items():
            saved = state["layout"].get(name)
            if saved != value:
                raise UserError(
                    f"the saved data position has {name}={saved}, this run {value}; "
                    "records would be lost or repeated, so resume with the same or start a new run directory"
                )
        self._batches.set_state(state["position"])

    def __str__(self) -> str:
        return "Resumable"
