"""What the preview shows is what a dump stores."""

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.chats.preview import preview, wants_color
from data.chats.statistics import measure, percent, pieces, table
from data.chats.template import control_tokens
from data.chats.tokens import tokenise
from data.config import DatasetConfig, DumpConfig, PreviewConfig, TargetConfig
from tests.pages import Page
from tests.templates import THINKING
from tests.tiny import save_tiny_chats, tiny_chats, tiny_tokenizer

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("choice", "is_terminal", "environment", "expected"),
    [
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
        ("auto", True, {"TERM": "xterm"}, True),
        ("auto", True, {"NO_COLOR": ""}, True),  # no-color.org: when not empty
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"TERM": "dumb"}, False),
        ("auto", False, {"TERM": "xterm"}, False),
    ],
)
def test_colour_is_for_terminals_that_want_it(choice, is_terminal, environment, expected):
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    assert wants_color(choice, Stream(), environment) is expected


@pytest.fixture(scope="module")
def tokenizer_path(target_path, tmp_path_factory) -> Path:
    """A target without weights."""
    folder = tmp_path_factory.mktemp("tokenizer") / "target"
    return Path(
        shutil.copytree(target_path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    )


def config_of(target: Path, chats: Path, **changes) -> PreviewConfig:
    values = {
        "target": TargetConfig(path=str(target)),
        "dataset": DatasetConfig(path=str(chats)),
        "max_length": 256,
    }
    return PreviewConfig(**{**values, **changes})


def ids_in(text: str) -> list[str]:
    return re.findall(r"^(\S+): [\d,]+ tokens", text, flags=re.MULTILINE)


def test_every_sequence_of_a_dump_is_shown_as_it_is_stored(tokenizer_path, chats_path, tmp_path):
    config = config_of(tokenizer_path, chats_path, show=99, max_chars=None, max_length=128)
    text = preview(config, color=False)
    stored = DumpConfig(target=config.target, dataset=config.dataset, out="x", max_length=128)
    tokenizer = tiny_tokenizer()
    ids, tokens, counts = tokenise(tokenizer, stored, tmp_path)
    blocks = re.split(r"\n\n(?=chat\d+_0: |24 of 24)", text)[1:]
    assert len(blocks) == len(ids) + 1
    for index, (name, block) in enumerate(zip(ids, blocks, strict=False)):
        rows = slice(*tokens.offsets[index : index + 2].tolist())
        input_ids, mask = tokens.input_ids[rows], tokens.loss_mask[rows]
        title, _, body = block.partition("\n")
        share = int(mask.sum()) / len(mask)
        cut = "; cut to max_length" * (len(mask) == 128)
        assert (
            title == f"{name}: {len(mask)} tokens, {mask.sum()} supervised ({percent(share)}){cut}"
        )
        assert re.sub("[⟦⟧]", "", body) == tokenizer.decode(input_ids.tolist()).rstrip("\n")
        inside = "".join(re.findall("⟦(.*?)⟧", body, flags=re.DOTALL))
        assert inside == tokenizer.decode(input_ids[mask].tolist())
        assert cut or inside.endswith("<|im_end|>")
    assert any("cut to max_length" in block for block in blocks[:-1])
    statistics = measure(
        pieces(tokens),
        max_length=128,
        end_tokens=control_tokens(tokenizer),
        spell=tokenizer.decode,
    )
    figures = f"{counts.summary()}\n\n{table(statistics)}"
    assert blocks[-1] == f"{figures}\n\nNothing looks wrong: a dump would take these chats."


def test_the_draw_is_seeded_ordered_and_spread_over_the_file(tokenizer_path, chats_path):
    draws = [
        ids_in(preview(config_of(tokenizer_path, chats_path, seed=seed), color=False))
        for seed in [*range(100), 0]
    ]
    assert draws[0] == draws[-1]
    numbers = [[int(re.findall(r"\d+", name)[0]) for name in draw] for draw in draws[:-1]]
    assert all(draw == sorted(set(draw)) and len(draw) == 3 for draw in numbers)
    often = [sum(number in draw for draw in numbers) for number in range(24)]
    assert min(often) >= 3 and max(often) <= 25  # 12.5 on average


def test_chats_are_shown_by_id_and_nothing_else_is_rendered(tokenizer_path, chats_path):
    config = config_of(tokenizer_path, chats_path, ids=["chat20_0", "chat3_0"])
    text = preview(config, color=False)
    assert ids_in(text) == ["chat3_0", "chat20_0"]
    assert "sequences" not in text


def test_one_reply_is_shown_by_the_id_of_its_sequence(tokenizer_path, tmp_path):
    target = Path(shutil.copytree(tokenizer_path, tmp_path / "target"))
    thinking = THINKING.replace("<|start|>", "<|im_start|>").replace("<|end|>", "<|im_end|>")
    tiny_tokenizer(thinking).save_pretrained(target)
    turns = [{"role": role, "content": "abc"} for role in ("user", "assistant") * 3]
    chats = tmp_path / "chats.json"
    chats.write_text(json.dumps([{"id": "a_1", "messages": turns}]))

    def shown(*ids: str) -> list[str]:
        return ids_in(preview(config_of(target, chats, ids=list(ids)), color=False))

    assert shown("a_1~reply2") == ["a_1~reply2"]
    assert shown("a_1") == ["a_1~reply1", "a_1~reply2", "a_1~reply3"]
    with pytest.raises(ValueError, match=r"no usable chat 'a_1~reply4'"):
        shown("a_1~reply4")


def test_an_id_cannot_steer_the_terminal(tokenizer_path, tmp_path):
    (tmp_path / "chats.json").write_text(json.dumps([{**tiny_chats(1)[0], "id": "a\x1b[2J"}]))
    text = preview(config_of(tokenizer_path, tmp_path / "chats.json"), color=False)
    assert "a␛[2J: " in text.split("conversations used")[0]
    assert "\x1b" not in text


def test_an_id_that_is_not_there_is_named_with_what_became_of_the_records(
    tokenizer_path, chats_path
):
    config = config_of(tokenizer_path, chats_path, ids=["chat3_0", "nix"])
    with pytest.raises(ValueError, match=r"no usable chat 'nix' in .*chats.json.*\n24 of 24"):
        preview(config, color=False)


def test_a_chat_that_a_dump_drops_says_why(tokenizer_path, chats_path):
    config = config_of(tokenizer_path, chats_path, ids=["chat3_0"], max_length=9)
    text = preview(config, color=False)
    assert text.endswith("chat3_0: dropped, no reply within max_length")


def test_what_a_dump_would_refuse_is_said(tokenizer_path, tmp_path):
    same = [{**tiny_chats(1)[0], "id": f"a{i}"} for i in range(20)]
    (tmp_path / "chats.json").write_text(json.dumps(same))
    text = preview(config_of(tokenizer_path, tmp_path / "chats.json"), color=False)
    assert "A dump would refuse these chats" in text
    assert "  - 1 of 20 sequences differ" in text
    few = preview(config_of(tokenizer_path, save_tiny_chats(tmp_path / "few.json", 3)), color=False)
    assert "Too few to judge" in few


def test_nothing_supervised_is_an_error_with_the_reasons(tokenizer_path, chats_path):
    config = config_of(tokenizer_path, chats_path, max_length=9)
    with pytest.raises(ValueError, match=r"No supervised token in .*\n.*\n.* 24  no reply within"):
        preview(config, color=False)


def test_the_page_is_one_file_with_whole_sequences_and_figures(tokenizer_path, tmp_path):
    turns = [("human", "<i>x</i>" * 300), ("gpt", "Yes & no.")]
    record = {"id": "<a>", "conversations": [{"from": f, "value": v} for f, v in turns]}
    (tmp_path / "chats.json").write_text(json.dumps([record]))
    file = tmp_path / "new" / "page.html"
    config = config_of(
        tokenizer_path,
        tmp_path / "chats.json",
        html=str(file),
        max_chars=100,
        max_length=9000,
    )
    text = preview(config, color=True)
    assert "more characters" in text
    page = Page()
    page.feed(file.read_text(encoding="utf-8"))
    assert ("turn", "<i>x</i>" * 300) in page.pieces
    assert ("supervised", "Yes & no.") in page.pieces
    assert ("supervised control", "<|im_end|>") in page.pieces
    assert any("1 of 1 conversations used" in piece for _, piece in page.pieces)
    assert any(piece.startswith("<a>: ") for _, piece in page.pieces)
    assert not page.tags & {"i", "a", "script", "link", "img"}


def test_the_command_prints_the_preview(tokenizer_path, chats_path):
    command = [sys.executable, "-m", "scripts.preview_data", f"target={tokenizer_path}"]
    command += [f"dataset={chats_path}", "max_length=256", "ids=[chat3_0]"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    config = config_of(tokenizer_path, chats_path, ids=["chat3_0"])
    assert result.stdout == preview(config, color=False) + "\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"color": "blue"}, r"color is 'blue', expected one of auto, always, never"),
        ({"show": -1}, r"show is -1, but must be at least 0"),
        ({"max_chars": 9}, r"max_chars is 9, but must be at least 100"),
        ({"max_length": 0}, r"max_length is 0, but must be at least 1"),
    ],
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        PreviewConfig(**changes)
