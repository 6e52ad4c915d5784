"""An evaluation as files: a text, a page and JSON."""

import logging
from pathlib import Path
from typing import Any

from data.files import atomic_write, write_json
from train.measure.report_page import page
from train.measure.report_text import table

log = logging.getLogger(__name__)


def write_report(report: dict[str, Any], out: Path) -> None:
    """Write report.txt, report.html and, last, report.json into `out`, each by rename."""
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.txt", table(report) + "\n"), ("report.html", page(report))):
        with atomic_write(out / name) as tmp:
            tmp.write_text(text, encoding="utf-8")
    write_json(out / "report.json", report)
    log.info("report      %s", out)
