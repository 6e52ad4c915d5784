"""Kills an evaluation at every answer. Run by tests/test_evaluate_resume.py.

    python -m tests.kill_evaluate TARGET HEAD FOLDER

Each victim is a fork of this process, which has imported everything but run nothing yet: victim
number k dies in the middle of writing its k-th line of answers. All measure into one folder, so
that each goes on where the one before died. Ends when a victim survives.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

from tests.evaluations import evaluation
from train.measure.answer_log import AnswerLog
from train.measure.evaluate import evaluate


def die_at_answer(number: int) -> None:
    append, counter = AnswerLog.append, itertools.count()

    def append_or_die(self: AnswerLog, answers) -> None:
        append(self, answers)
        if next(counter) == number:
            with self.path.open("ab") as file:
                file.truncate(file.seek(0, os.SEEK_END) - 7)
            os.kill(os.getpid(), signal.SIGKILL)

    AnswerLog.append = append_or_die  # type: ignore[method-assign]


def main(target: str, head: str, folder: str) -> None:
    for number in itertools.count():
        victim = os.fork()
        if victim == 0:
            # The first one dies with its first answer, the next ones have written one before.
            die_at_answer(min(number, 1))
            evaluate(evaluation(Path(folder), Path(target), Path(head), limit=2))
            os._exit(0)
        _, status = os.waitpid(victim, 0)
        if not os.WIFSIGNALED(status):
            print(f"{number} died")
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
