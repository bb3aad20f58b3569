"""metrics.jsonl across resumes, kills and readers; the progress line."""

import json
import math
import resource
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_train import metrics
from tpu_train.config import UserError
from tpu_train.metrics import MetricsWriter, format_duration, format_progress


def write_run(workdir, steps, resume_step=-1):
    with MetricsWriter(workdir, resume_step) as writer:
        for step in steps:
            writer.write(step, {"loss": 5.0 - step / 10})


def steps_of(workdir):
    return [record["step"] for record in metrics.read(workdir)]


def test_write_puts_step_first_and_flushes_each_line(tmp_path):
    with MetricsWriter(tmp_path / "new" / "dir", resume_step=0) as writer:
        writer.write(3, {"loss": 2.5, "mfu": None})
        assert (tmp_path / "new" / "dir" / "metrics.jsonl").read_text() == '{"step": 3, "loss": 2.5, "mfu": null}\n'


def test_nan_and_infinity_become_null(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": np.float32(0.5)})
    assert metrics.read(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]


def test_lines_that_a_full_disk_refuses_wait_and_none_is_lost_or_torn(tmp_path, capsys):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write(1, {"loss": 1.5})
        size = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, hard))  # room for a part of the next line
        try:
            for step in range(2, 6):
                writer.write(step, {"loss": 1.5})
            with pytest.raises(OSError, match=r"File too large, and lines of metrics\.jsonl wait$"):
                writer.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert steps_of(tmp_path) == [1]
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"tpu-train: {tmp_path}/metrics.jsonl: File too large; its lines wait"
        writer.flush()
        assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


def test_step_among_the_values_is_rejected(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer, pytest.raises(ValueError, match="'step'"):
        writer.write(1, {"step": 2})


def test_read_without_a_file_is_empty(tmp_path):
    assert metrics.read(tmp_path) == []


def test_resume_leaves_no_step_twice(tmp_path):
    write_run(tmp_path, range(1, 11))
    write_run(tmp_path, range(5, 13), resume_step=4)
    assert steps_of(tmp_path) == list(range(1, 13))
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_resume_keeps_earlier_lines_byte_for_byte(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{ "step":1,"loss":2.50 }\n{"step": 2, "note": "by hand"}\n')
    write_run(tmp_path, [3], resume_step=2)
    assert path.read_bytes().startswith(b'{ "step":1,"loss":2.50 }\n{"step": 2, "note": "by hand"}\n{"step": 3')


@given(cut=st.integers(min_value=0))
def test_a_line_cut_short_anywhere_is_dropped(tmp_path_factory, cut):
    workdir = tmp_path_factory.mktemp("run")
    whole = b'{"step": 1, "loss": 4.9}\n'
    last = b'{"step": 2, "loss": 4.8}'  # whole but for its newline when cut is len(last)
    cut %= len(last) + 1
    (workdir / "metrics.jsonl").write_bytes(whole + last[:cut])
    expected = [1, 2] if cut == len(last) else [1]
    assert steps_of(workdir) == expected
    write_run(workdir, [3], resume_step=2)
    assert steps_of(workdir) == [*expected, 3]


def test_zeros_left_by_a_power_cut_count_as_a_line_cut_short(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + b"\0" * 100)
    write_run(tmp_path, [2], resume_step=1)
    assert steps_of(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    "bad", [b"not json", b"[1]", b'{"loss": 1.0}', b'{"step": "2"}', b'{"step": 2, "l', b"\xff\xfe"]
)
def test_a_damaged_line_in_the_middle_is_an_error_and_stays(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + bad + b'\n{"step": 9}\n'
    path.write_bytes(content)
    for attempt in (lambda: MetricsWriter(tmp_path, resume_step=1), lambda: metrics.read(tmp_path)):
        with pytest.raises(UserError, match=r"metrics\.jsonl:2 is not a line of metrics") as error:
            attempt()
        assert "\n" not in str(error.value)
    assert path.read_bytes() == content


def test_a_kill_while_rewriting_leaves_the_old_file(tmp_path, monkeypatch):
    write_run(tmp_path, range(1, 4))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.paths.Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricsWriter(tmp_path, resume_step=1)
    monkeypatch.undo()
    assert steps_of(tmp_path) == [1, 2, 3]
    write_run(tmp_path, [2], resume_step=1)
    assert steps_of(tmp_path) == [1, 2]


def test_a_reader_beside_the_writer_sees_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(MetricsWriter, "_tensorboard_writer", lambda self: self)
    monkeypatch.setattr(MetricsWriter, "add_scalar", lambda *_: None, raising=False)
    done = threading.Event()

    def run():
        write_run(tmp_path, range(2000))
        done.set()

    writer = threading.Thread(target=run)
    writer.start()
    while not done.is_set():
        seen = steps_of(tmp_path)
        assert seen == list(range(len(seen)))
    writer.join()
    assert len(steps_of(tmp_path)) == 2000


def tensorboard_events(workdir):
    """The events of all files, oldest first. A record is length (8), its checksum (4), data, checksum (4)."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 8], "little")
            events.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += length + 16
    return events


def test_tensorboard_gets_the_finite_values_and_forgets_steps_that_run_again(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write(1, {"loss": 2.5, "mfu": None, "grad_norm": math.nan})
    scalars = [(e.step, v.tag, v.simple_value) for e in tensorboard_events(tmp_path) for v in e.summary.value]
    assert scalars == [(1, "loss", 2.5)]
    write_run(tmp_path, [8], resume_step=7)
    starts = [e.step for e in tensorboard_events(tmp_path) if e.WhichOneof("what") == "session_log"]
    assert 8 in starts


def test_nothing_is_imported_or_written_for_tensorboard_before_the_first_value(tmp_path):
    with MetricsWriter(tmp_path, resume_step=0) as writer:
        writer.write(1, {"mfu": None})
    assert not (tmp_path / "tensorboard").exists()


FULL = {
    "loss": 2.31449,
    "learning_rate": 9.1e-4,
    "grad_norm": 0.83,
    "tokens_per_second": 15_190.0,
    "step_seconds": 0.05031,
    "mfu": 0.412,
}


def test_progress_line_shows_everything_that_is_there():
    line = "step 120/400  loss 2.3145  lr 9.1e-04  grad 0.83  15.2k tok/s  50.3 ms/step  mfu 41.2%  eta 0:14"
    assert format_progress(120, 400, FULL, 14.2) == line


@pytest.mark.parametrize("name", FULL)
def test_progress_line_drops_what_is_none(name):
    with_none = format_progress(120, 400, FULL | {name: None}, None)
    without = format_progress(120, 400, {key: value for key, value in FULL.items() if key != name}, None)
    assert with_none == without
    assert "None" not in with_none
    assert "   " not in with_none
    assert "eta" not in with_none


def test_progress_line_keeps_its_columns_and_shows_nan():
    assert format_progress(7, 400, {"loss": math.nan, "unknown": 1.0}, math.inf) == "step   7/400  loss nan"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0, "0"), (999.4, "999"), (999.6, "1.0k"), (15_200, "15.2k"), (999_960, "1.0M"), (2.5e6, "2.5M"), (3e9, "3.0B")],
)
def test_rates_change_unit_without_a_fourth_digit(rate, text):
    assert format_progress(1, 1, {"tokens_per_second": rate}, None) == f"step 1/1  {text} tok/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (185, "3:05"), (3599.7, "1:00:00"), (7385, "2:03:05"), (93_785, "1d 02:03:05")],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


def test_lines_are_json_that_other_tools_read(tmp_path):
    write_run(tmp_path, range(3))
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
