"""What an engine would make of a head's folder: pure functions over its files, no engine needed."""

from dataclasses import dataclass

from train.serve.case import Case, Hit
from train.serve.config_checks import CONFIG_CHECKS
from train.serve.folder import HeadFolder
from train.serve.rules import ENGINES, NOTE, OTHER, REFUSED, RULES
from train.serve.target_facts import TargetFacts
from train.serve.tensor_checks import TENSOR_CHECKS


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one engine makes of a hit."""

    rule: str
    engine: str
    verdict: str  # one of rules.VERDICTS
    subject: str
    found: str
    why: str
    repair: str | None


def findings(folder: HeadFolder, facts: TargetFacts) -> list[Finding]:
    """All that is known to matter about a folder, for both engines. Pure: reads no file."""
    case = Case(folder=folder, facts=facts)
    return effects([hit for check in TENSOR_CHECKS + CONFIG_CHECKS for hit in check(case)])


def effects(hits: list[Hit]) -> list[Finding]:
    """What each engine does about hits; nothing where a hit does not matter to it."""
    found = []
    for engine in ENGINES:
        for hit in hits:
            rule = RULES[hit.rule]
            effect = rule.effect(engine) if engine in hit.engines else None
            if effect is not None:
                verdict, why = effect
                found.append(
                    Finding(
                        rule=hit.rule,
                        engine=engine,
                        verdict=verdict,
                        subject=hit.subject,
                        found=hit.found,
                        why=why,
                        repair=rule.repair,
                    )
                )
    return found


def verdict(found: list[Finding], engine: str) -> str:
    """The worst of an engine's findings: REFUSED, OTHER or NOTE."""
    verdicts = {finding.verdict for finding in found if finding.engine == engine}
    return next((v for v in (REFUSED, OTHER) if v in verdicts), NOTE)
