"""What a browser makes of a page."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Text, and the class of each piece of it."""

    def __init__(self) -> None:
        super().__init__()
        self.classes: list[str | None] = []
        self.pieces: list[tuple[str | None, str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.classes.append(dict(attributes).get("class"))

    def handle_endtag(self, tag):
        self.classes.pop()

    def handle_data(self, text):
        self.pieces.append((self.classes[-1] if self.classes else None, text))
