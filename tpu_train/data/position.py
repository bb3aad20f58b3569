"""The batches of one process, with a position from which any number of processes and workers can go on.

A position is plain JSON: what it belongs to (`layout`), for each row of this process its place, and the deal that the
places count from. The positions that all processes of a run saved are, put together, the position of the whole batch,
and each process of the next run takes the rows it has then.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from tpu_train.config import UserError
from tpu_train.data.dealing import Deal
from tpu_train.data.packing import COUNTS, Batch
from tpu_train.data.workers import WorkerDied

FORMAT = 2  # 1 had documents of their own for each process and worker
_WHAT = {
    "untrained": "tokens of prompts not trained on",
    "dropped": "tokens cut off",
    "lost": "documents left out",
}


class Batches(grain.DatasetIterator[Batch]):
    """Batches of the rows `rows`, from `start(places, deal)`: an iterator of what `RowsIterDataset` gives.

    It is called anew, at the next batch, where a position is set.
    """

    def __init__(
        self,
        start: Callable[[list[list[int]], Deal], Any],
        rows: range,
        batch_size: int,
        names: Sequence[str],
        layout: dict[str, Any],
    ):
        super().__init__()
        self._start, self._rows, self._batch_size, self._layout = start, rows, batch_size, layout
        self._names = [*COUNTS, *names]
        self._running: Any = None
        self._places: dict[int, list[int]] = {row: [0, 0, 0, 0, 0] for row in rows}  # a `Place` each
        self._deal = Deal.first(batch_size, len(names))
        self._counted = self._before = np.zeros(len(self._names), np.int64)

    def __next__(self) -> Batch:
        element = self._next()
        place = element["place"]
        self._places = dict(zip(self._rows, place["rows"].tolist(), strict=True))
        self._deal = Deal(
            int(place["block"]),
            *(tuple(place[name].tolist()) for name in ("loads", "taken", "owed")),
        )
        self._counted = self._before + place["counts"]
        return element["batch"]

    def _next(self) -> Any:
        """The next element, also where a worker died: a batch depends on its place alone."""
        if self._running is not None:
            try:
                return next(self._running)
            except WorkerDied as died:
                print(f"tpu-train: {died}; starting the workers again", file=sys.stderr, flush=True)
                self.close()
                self._before = self._counted
        self._running = self._start([self._places[row] for row in self._rows], self._deal)
        try:
            return next(self._running)
        except WorkerDied as died:
            raise WorkerDied(f"{died}, before its first batch; what it printed may say why") from None

    @property
    def counts(self) -> dict[str, int]:
        """What this process's rows held so far, over all runs that led here.

        `documents` begun, of them `split` over several rows; `tokens`, of them `untrained` (weight 0); `dropped` tokens
        beyond seq_len without packing; documents `lost` because they could not be read; and the tokens of each source
        of a mixture under its name.
        """
        return dict(zip(self._names, self._counted.tolist(), strict=True))

    @property
    def of_sources(self) -> tuple[int, dict[str, int]]:
        """(first row of this process, tokens that its rows held of each source of a mixture)."""
        names = self._names[len(COUNTS) :]
        return self._rows[0], {name: self.counts[name] for name in names}

    def describe(self) -> str:
        """The counts in one line."""
        counts = self.counts
        line = f"data: {counts['documents']:,} documents begun, {counts['split']:,} of them longer than a row"
        for name, what in _WHAT.items():
            if counts[name]:
                line += f", {counts[name]:,} {what}"
        sources = self._names[len(COUNTS) :]
        if len(sources) > 1:
            total = max(counts["tokens"], 1)
            line += "; tokens: " + ", ".join(f"{name} {counts[name] / total:.1%}" for name in sources)
        if len(self._rows) < self._batch_size:
            line += f" (in {len(self._rows)} of {self._batch_size} rows)"
        return line

    def get_state(self) -> dict[str, Any]:
        deal = self._deal
        return {
            "format": FORMAT,
            "layout": dict(self._layout),
            "rows": [[row, *place] for row, place in self._places.items()],
            "deal": {"block": deal.block, "loads": [*deal.loads], "taken": [*deal.taken], "owed": [*deal.owed]},
            "counts": self._counted.tolist(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self.set_states([state])

    def set_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues after what the processes of a run saved, `states` of all of them, in any order.

        Raises UserError if they were saved with other data or another order of it, or do not hold every row that this
        process needs.
        """
        for state in states:
            self._check(state)
        saved = {row: place for state in states for row, *place in state["rows"]}
        missing = [row for row in self._rows if row not in saved]
        if missing:
            raise UserError(
                f"the saved data position has {len(saved)} of {self._batch_size} rows of the batch, and not row "
                f"{missing[0]}, which this process needs; give the positions of all processes that saved it"
            )
        self.close()
        self._places = {row: saved[row] for row in self._rows}
        first = min((state["deal"] for state in states), key=lambda deal: deal["block"])
        self._deal = Deal(first["block"], *(tuple(first[name]) for name in ("loads", "taken", "owed")))
        self._before = self._counted = self._share_of_counts(states)

    def _check(self, state: dict[str, Any]) -> None:
        if "format" not in state and {"layout", "position"} <= state.keys():
            raise UserError(
                "the saved data position is of an older version of tpu_train, in which each process had an order of "
                "its own; start a new run directory, with run.init_from for the weights"
            )
        if state.get("format") != FORMAT:
            raise UserError("this is not a data position of train_batches; start a new run directory")
        for name, value in self._layout.items():
            saved = state["layout"].get(name)
            if saved != value:
                raise UserError(
                    f"the saved data position has {name}={saved}, this run {value}; "
                    "records would be lost or repeated, so resume with the same or start a new run directory"
                )

    def _share_of_counts(self, states: Sequence[dict[str, Any]]) -> np.ndarray:
        """The counts of a process with the same rows are its own; else the sum goes to the process of row 0."""
        parts = {tuple(row for row, *_ in state["rows"]): np.array(state["counts"], np.int64) for state in states}
        mine = parts.get(tuple(self._rows))
        if mine is not None:
            return mine
        return np.sum([*parts.values()], axis=0) * (0 in self._rows)

    def close(self) -> None:
        """Ends the workers."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def __str__(self) -> str:
        return "Batches"
