"""The log of a training."""

from common import folders
from training import logs


def test_the_last_line_of_a_log_however_long_it_is(tmp_path):
    log = tmp_path / logs.LOG
    assert logs.read_last_line(log) is None
    log.write_text("")
    assert logs.read_last_line(log) is None
    log.write_text("".join(f'{{"step": {step}}}\n' for step in range(5000)) + '{"step": 5000, "lo')
    assert log.stat().st_size > 2 * logs.MAX_LINE
    assert logs.read_last_line(log) == {"step": 4999}


def test_log_drops_what_lies_past_the_step_it_continues_from(tmp_path):
    log = logs.StepLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step, loss=float(step), grad_norm=float("nan"))
    log.close()
    with (tmp_path / logs.LOG).open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a kill
    logs.StepLog(tmp_path, 2).close()
    lines = folders.read_json_lines(tmp_path / logs.LOG)
    assert lines == [{"step": step, "loss": float(step), "grad_norm": None} for step in (1, 2)]
