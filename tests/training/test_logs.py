"""The log of a training."""

from common import board, folders
from training import logs


def test_log_drops_what_lies_past_the_step_it_continues_from(tmp_path):
    board.use(board.Board())
    log = logs.StepLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step, loss=float(step), grad_norm=float("nan"))
    log.close()
    assert board.current().news()[1] == {"step": 3, "loss": 3.0, "grad_norm": None}  # what the driver shows
    with (tmp_path / logs.LOG).open("a") as file:
        file.write('{"step": 4, "lo')  # cut short by a kill
    logs.StepLog(tmp_path, 2).close()
    lines = folders.read_json_lines(tmp_path / logs.LOG)
    assert lines == [{"step": step, "loss": float(step), "grad_norm": None} for step in (1, 2)]
