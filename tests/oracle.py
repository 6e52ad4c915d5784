"""What each template of tests/templates.py makes of a chat, by hand: pieces, supervised or not."""

from collections.abc import Callable, Iterator

from data.chats.conversations import Turn
from tests.templates import BOS, END, EOS, OTHER_END_IN_HISTORY, THINKING

Pieces = list[tuple[str, bool]]  # text, whether it is supervised
Oracle = Callable[[list[Turn]], Pieces]


def chatml(turns: list[Turn]) -> Pieces:
    pieces: Pieces = []
    for turn in turns:
        is_reply = turn.role == "assistant"
        pieces += [(f"<|start|>{turn.role}\n", False), (turn.text + END, is_reply), ("\n", False)]
    return pieces


def with_default(default: str) -> Oracle:
    def pieces(turns: list[Turn]) -> Pieces:
        system = [] if turns[0].role == "system" else [Turn("system", default)]
        return chatml(system + turns)

    return pieces


def llama2(turns: list[Turn]) -> Pieces:
    system, rest = split_system(turns)
    prefix = f"<<SYS>>\n{system}\n<</SYS>>\n\n" if system else ""
    pieces: Pieces = []
    for user, reply in zip(rest[::2], rest[1::2], strict=True):
        text = (prefix + user.text).strip()
        pieces += [(f"{BOS}[INST] {text} [/INST]", False), (f" {reply.text.strip()} {EOS}", True)]
        prefix = ""
    return pieces


def llama3(turns: list[Turn]) -> Pieces:
    pieces: Pieces = [(BOS, False)]
    for turn in turns:
        pieces.append((f"<|start|>{turn.role}<|header|>\n\n", False))
        pieces.append((turn.text.strip() + END, turn.role == "assistant"))
    return pieces


def llama31(turns: list[Turn]) -> Pieces:
    system, rest = split_system(turns)
    dates = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    head = f"{BOS}<|start|>system<|header|>\n\n{dates}{system.strip()}{END}"
    return [(head, False), *llama3(rest)[1:]]


def mistral(turns: list[Turn], *, before: str = " ", reply_before: str = "") -> Pieces:
    pieces: Pieces = [(BOS, False)]
    for user, reply in exchanges(turns):
        text = reply.strip() if reply_before else reply
        pieces += [(f"[INST] {user}{before}[/INST]", False), (reply_before + text + EOS, True)]
    return pieces


def mistral_v3(turns: list[Turn]) -> Pieces:
    return mistral(turns, before="", reply_before=" ")


def gemma(turns: list[Turn]) -> Pieces:
    pieces: Pieces = [(BOS, False)]
    for user, reply in exchanges(turns):
        pieces.append((f"<|start|>user\n{user.strip()}{END}\n<|start|>model\n", False))
        pieces += [(reply.strip() + END, True), ("\n", False)]
    return pieces


def gemma3(turns: list[Turn]) -> Pieces:
    system, rest = split_system(turns)
    pieces = gemma([Turn("user", rest[0].text.strip()), *rest[1:]])
    if system:
        start = "<|start|>user\n"
        first = pieces[1][0].removeprefix(start)
        pieces[1] = (f"{start}{system}\n\n{first}", False)
    return pieces


def phi3(turns: list[Turn]) -> Pieces:
    pieces: Pieces = []
    for user, reply in exchanges(turns):
        pieces.append((f"<|user|>\n{user}{END}\n<|assistant|>\n", False))
        pieces += [(reply + END, True), ("\n", False)]
    return [*pieces, (EOS, False)]


def phi4(turns: list[Turn]) -> Pieces:
    pieces: Pieces = []
    for turn in turns:
        pieces.append((f"<|start|>{turn.role}<|header|>", False))
        pieces.append((turn.text + END, turn.role == "assistant"))
    return pieces


def vicuna(turns: list[Turn]) -> Pieces:
    system, rest = split_system(turns)
    pieces: Pieces = [(f"{system} " if system else "", False)]
    for user, reply in exchanges(rest):
        pieces += [(f"USER: {user} ASSISTANT:", False), (f" {reply}{EOS}", True)]
    return pieces


def split_system(turns: list[Turn]) -> tuple[str, list[Turn]]:
    return (turns[0].text, turns[1:]) if turns[0].role == "system" else ("", turns)


def exchanges(turns: list[Turn]) -> Iterator[tuple[str, str]]:
    """User and reply; a system turn joined to the first user's, as where there is no place."""
    system, rest = split_system(turns)
    texts = [turn.text for turn in rest]
    if system:
        texts[0] = f"{system}\n\n{texts[0]}"
    return zip(texts[::2], texts[1::2], strict=True)


ORACLES: dict[str, Oracle] = {
    "chatml": chatml,
    "smollm2": with_default("Be brief."),
    "qwen25": with_default("Be kind."),
    "generation_tags": chatml,
    "llama2": llama2,
    "llama3": llama3,
    "llama31": llama31,
    "mistral": mistral,
    "mistral_v3": mistral_v3,
    "gemma": gemma,
    "gemma3": gemma3,
    "phi3": phi3,
    "phi4": phi4,
    "vicuna": vicuna,
    "no_generation_prompt": chatml,
}


def thinking(turns: list[Turn]) -> Pieces:
    """The last reply alone; its thought only if it has one."""
    pieces: Pieces = []
    for turn in turns[:-1]:
        text = turn.text
        if turn.role == "assistant" and "</think>" in text:
            text = text.split("</think>")[-1].lstrip("\n")
        pieces.append((f"<|start|>{turn.role}\n{text}{END}\n", False))
    text, is_thought = turns[-1].text, "</think>" in turns[-1].text
    thought = text.split("</think>")[0].split("<think>")[-1].strip("\n") if is_thought else ""
    text = text.split("</think>")[-1].lstrip("\n") if is_thought else text
    pieces += [("<|start|>assistant\n", False), (f"<think>\n{thought}\n</think>\n\n", is_thought)]
    return [*pieces, (text + END, True), ("\n", False)]


def other_end(turns: list[Turn]) -> Pieces:
    pieces = [(text, False) for text, _ in phi4(turns[:-1])]
    return [*pieces, ("<|start|>assistant<|header|>", False), (turns[-1].text + EOS, True)]


REWRITING: dict[str, tuple[str, Oracle]] = {
    "thinking": (THINKING, thinking),
    "other end in history": (OTHER_END_IN_HISTORY, other_end),
}
