import json

import pytest

from train.measure.answer_log import ANSWERS, AnswerLog

HEADER = {"settings": {"num_steps": 3, "tree": "chain"}, "versions": {"torch": "2"}}


def answer(prompt: str, turn: int = 1, **more) -> dict:
    return {"set": "chat", "prompt": prompt, "turn": turn, "tokens": [1, 2], **more}


def test_a_second_start_finds_what_was_appended(tmp_path):
    log = AnswerLog(tmp_path, HEADER)
    log.append([answer("a"), answer("a", 2)])
    log.append([answer("b", pair=(1, 2))])
    again = AnswerLog(tmp_path, HEADER)
    assert again.answers == log.answers and len(again) == 3
    assert again.find("chat", "a", 2) == answer("a", 2)
    assert again.find("chat", "c", 1) is None and again.find("code", "a", 1) is None
    again.append([answer("c")])
    assert len(AnswerLog(tmp_path, HEADER)) == 4


def test_an_answer_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(descriptor))
    log = AnswerLog(tmp_path, HEADER)
    log.append([answer("a"), answer("b")])
    assert len(synced) == 2  # the header, and both answers at once
    assert (tmp_path / ANSWERS).read_text().count("\n") == 3


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    AnswerLog(tmp_path, HEADER).append([answer("a"), answer("b")])
    file = tmp_path / ANSWERS
    whole = file.read_bytes()
    for cut in range(1, len(json.dumps(answer("b"))) + 1):
        file.write_bytes(whole[:-cut])
        log = AnswerLog(tmp_path, HEADER)
        assert [a["prompt"] for a in log.answers] == ["a"]
        log.append([answer("b")])
        assert file.read_bytes() == whole
    file.write_bytes(whole[:5])  # not even the header: nothing was measured
    assert len(AnswerLog(tmp_path, HEADER)) == 0
    assert len(AnswerLog(tmp_path, HEADER)) == 0


def test_other_settings_are_refused_by_name(tmp_path):
    AnswerLog(tmp_path, HEADER).append([answer("a")])
    before = (tmp_path / ANSWERS).read_bytes()
    other = {"settings": {"num_steps": 5, "tree": "chain"}, "versions": {}}
    message = r"settings.num_steps is 5 now, 3 there; versions.torch is None now, '2' there\."
    with pytest.raises(ValueError, match=message):
        AnswerLog(tmp_path, other)
    assert (tmp_path / ANSWERS).read_bytes() == before
    assert len(AnswerLog(tmp_path, other, restart=True)) == 0
    assert len(AnswerLog(tmp_path, other)) == 0


@pytest.mark.parametrize("line", ["{", "5", '{"set": "chat", "prompt": "a"}'])
def test_a_line_that_no_log_has_is_named(tmp_path, line):
    AnswerLog(tmp_path, HEADER).append([answer("a")])
    with (tmp_path / ANSWERS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl:3 is not an answer .* restart=true"):
        AnswerLog(tmp_path, HEADER)


def test_a_figure_is_measured_once(tmp_path):
    log = AnswerLog(tmp_path, HEADER)
    assert log.once("costs", lambda: {"rows": (1, 2)}) == {"rows": [1, 2]}
    log.append([answer("a")])
    again = AnswerLog(tmp_path, HEADER)
    assert again.once("costs", lambda: pytest.fail("measured again")) == {"rows": [1, 2]}
    assert again.answers == [answer("a")]
    assert AnswerLog(tmp_path, HEADER, restart=True).once("costs", lambda: 5) == 5
