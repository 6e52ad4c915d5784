"""An evaluation as one page that explains itself: no other file, no network, no script."""

from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from train.measure import report_plots as plots
from train.measure.report_style import PAGE
from train.measure.report_text import (
    COUNTING,
    WAYS,
    drafting_text,
    equality_text,
    pays_text,
    rows_of,
    sampling_text,
    target_name,
)
from train.measure.report_trees import tree_svg


def page(report: dict[str, Any]) -> str:
    """The whole report as HTML."""
    sections = [
        _summary(report),
        _acceptance(report),
        _ways(report),
        _time(report),
        _confidence(report),
        _trees(report),
        _paper(report),
        _setting(report),
    ]
    target = target_name(report)
    return PAGE.substitute(title=escape(f"Draft head for {target}"), body="\n".join(sections))


def _summary(report: dict[str, Any]) -> str:
    settings, overall = report["settings"], report["overall"]
    length, between = overall["acceptance_length"], overall["interval"]
    target = target_name(report)
    warnings = "".join(
        f'<p class="warning"><b>Not the target this head was trained for.</b> {escape(line)}</p>'
        for line in report["fingerprint_differences"]
    )
    cards = [
        _card(
            f"{length:.2f}",
            "tokens per target forward",
            f"95 % interval {between[0]:.2f} to {between[1]:.2f}" if between else "one prompt",
        ),
        _card(
            f"{100 * overall['alpha'][0]:.0f} %",
            "of first draft tokens accepted",
            f"{overall['accepted'][0]:,} of {overall['tried'][0]:,}",
        ),
        _card(
            f"{overall['speedup']:.2f}x",
            "the speed of plain decoding",
            f"{overall['tokens_per_second']['with_head']:.1f} against "
            f"{overall['tokens_per_second']['without_head']:.1f} tokens/s",
        ),
        _card(
            f"{report['outputs_equal']} / {overall['answers']}",
            "answers equal plain decoding",
            "token for token" if not settings["temperature"] else "with the same random numbers",
        ),
    ]
    return f"""
<header>
<p class="eyebrow">Evaluation of a draft head</p>
<h1>{escape(target)}</h1>
<p class="lead">A small head guesses what the model will say next; the model checks all guesses in
one forward and keeps those that it would have written itself. Its output stays the same, and each
forward yields more than one token.</p>
<p class="facts">{escape(drafting_text(report))} · {escape(sampling_text(settings))} · batch size
{settings["batch_size"]} · {overall["answers"]} answers to {escape(", ".join(report["sets"]))},
{overall["tokens"]:,} tokens · {escape(report["machine"]["device"])}</p>
{warnings}</header>
<div class="cards">{"".join(cards)}</div>"""


def _card(figure: str, what: str, more: str) -> str:
    return (
        f'<div class="card"><div class="figure">{escape(figure)}</div>'
        f'<div class="what">{escape(what)}</div><div class="more">{escape(more)}</div></div>'
    )


def _acceptance(report: dict[str, Any]) -> str:
    steps = len(report["overall"]["alpha"])
    heads = ["", "answers", "tokens", "rounds", *(f"α<sub>{n + 1}</sub>" for n in range(steps))]
    heads += ["τ", "95 % interval", "with head", "without", "ratio"]
    rows = [_acceptance_row(name, one) for name, one in rows_of(report)]
    return f"""
<section><h2>How much is accepted</h2>
<p>In each <b>round</b> the head drafts and the model checks. <b>α<sub>n</sub></b> is the share of
rounds that accept draft token n, among those that accepted all before it. <b>τ</b> is the number
of tokens that a round yields: the accepted ones and the bonus token, which the model adds itself.
1 means that the head is of no use.</p>
<div class="pair">{_picture(plots.acceptance_by_step(report), "Acceptance by draft step")}
{_picture(plots.length_by_set(report), "Tokens per round")}</div>
{_table(heads, rows, total=len(rows) > 1)}
<p class="small">Speeds are in tokens per second, prompts included, measured alternately in one
run. They depend on this machine; α and τ do not.</p></section>"""


def _acceptance_row(name: str, one: dict[str, Any]) -> list[str]:
    between, speed = one["interval"], one["tokens_per_second"]
    alpha = zip(one["alpha"], one["tried"], one["accepted"], strict=True)
    return [
        escape(name),
        f"{one['answers']:,}",
        f"{one['tokens']:,}",
        f"{one['rounds']:,}",
        *(f'<span title="{a} of {t}">{rate:.3f}</span>' if t else "–" for rate, t, a in alpha),
        f"<b>{one['acceptance_length']:.3f}</b>" if one["rounds"] else "–",
        f"{between[0]:.2f} – {between[1]:.2f}" if between and one["rounds"] else "–",
        f"{speed['with_head']:.1f}",
        f"{speed['without_head']:.1f}",
        f"{one['speedup']:.2f}x",
    ]


def _ways(report: dict[str, Any]) -> str:
    overall = report["overall"]
    speed, answers = overall["tokens_per_second"], overall["answers"]
    rows = [
        ["plain decoding", "1.000", f"{speed['without_head']:.1f}", "1.00x", "–"],
        [
            "<b>this head</b>",
            f"{overall['acceptance_length']:.3f}",
            f"{speed['with_head']:.1f}",
            f"{overall['speedup']:.2f}x",
            f"{report['outputs_equal']} of {answers}",
        ],
    ]
    for name, one in overall["baselines"].items():
        figures = f"{one['acceptance_length']:.3f}", f"{one['tokens_per_second']:.1f}"
        equal = f"{one['outputs_equal']} of {answers}"
        rows.append([WAYS[name], *figures, f"{one['speedup']:.2f}x", equal])
    heads = ["", "tokens per forward", "tokens/s", "ratio", "equal answers"]
    note = (
        "Prompt lookup copies drafts from the prompt; an assistant model is a smaller model that "
        "drafts. Both need no training and run in Transformers' own implementation; their forward "
        "over the prompt is counted, as it checks drafts too."
        if overall["baselines"]
        else "baselines=[prompt_lookup] puts decoding with drafts copied from the prompt beside it."
    )
    return f"""
<section><h2>Against other ways to decode</h2>
{_table(heads, rows, kind="narrow")}
<p class="small">{escape(equality_text(report))}. {escape(note)}</p></section>"""


def _time(report: dict[str, Any]) -> str:
    return f"""
<section><h2>Where the time goes</h2>
<p>Drafting and checking cost time, too. A head pays where the tokens that are accepted save more
forwards of the model than drafting and checking take.</p>
{_picture(plots.time_by_phase(report), "Milliseconds per token by phase")}</section>"""


def _confidence(report: dict[str, Any]) -> str:
    error = report["calibration"]["expected_calibration_error"]
    if error is None:
        return ""
    return f"""
<section><h2>Can the head's confidence be trusted?</h2>
<div class="beside">{_picture(plots.reliability(report), "Acceptance against confidence")}
<div><p>Each point gathers draft tokens of which the head was about equally sure; its height is the
share that the model accepted. On the dashed line the head is as sure as it is right; below it, it
is too sure.</p>
<p>Dynamic trees (EAGLE-2) rely on this: they grow where the head is confident. The pale bars are
what chance may do to so few tokens; the panel below counts them.</p>
<p><b>{error:.3f}</b> is the mean distance from the line over
{report["calibration"]["nodes"]:,} draft tokens (expected calibration error).</p></div>
</div></section>"""


def _trees(report: dict[str, Any]) -> str:
    blocks = []
    for tree in report["trees"]:
        count = len(tree["path"])
        told = "no draft token" if not count else f"{count} draft token{'s' * (count > 1)}"
        where = (
            f"{tree['set']}, prompt {tree['prompt']}, turn {tree['turn']}, round {tree['round']}"
        )
        blocks.append(
            f'<figure><figcaption><b>{told} accepted</b> <span class="small">{escape(where)}'
            f'</span></figcaption><p class="context">… {escape(_one_line(tree["context"]))}</p>'
            f'<div class="scroll">{tree_svg(tree)}</div></figure>'
        )
    if not blocks:
        return ""
    return f"""
<section><h2>What a round looks like</h2>
<p>The root is the newest token of the answer. To its right stand the head's guesses of what
follows, with the probability that the head gives each after the one before it.
<span class="key accepted">accepted</span> <span class="key refused">not accepted</span>
<span class="key bonus">bonus token, from the model itself</span></p>
{"".join(blocks)}</section>"""


def _one_line(text: str) -> str:
    return " ⏎ ".join(line.strip() for line in text.splitlines() if line.strip())


def _paper(report: dict[str, Any]) -> str:
    if "speed_model" not in report:
        return ""
    model, best, chain = (report[k] for k in ("speed_model", "best_tree", "best_chain"))
    return f"""
<section><h2>What to expect elsewhere</h2>
<p>From τ and the measured cost of single forwards follows what speculation is worth at other batch
sizes: <b>{escape(pays_text(model))}</b>. At batch size {best["batch_size"]} the expectation is
{model["expected_speedup"]:.2f}x, measured were
{report["overall"]["speedup_after_prefill"]:.2f}x after the prefill.</p>
<div class="pair">{_picture(plots.speedup_by_batch(report), "Expected speed-up by batch size")}
{_picture(plots.forward_costs(report), "Cost of a forward by its tokens")}</div>
<p class="small">Where a forward over many tokens costs as much as over one, as on a GPU with a
small batch, checking is nearly free and the gain comes near τ. Where the cost grows with the
tokens, each guess that is not accepted has to be paid for.</p>
<h3>Which tree would be the fastest here</h3>
<p>Each cell is the expected speed-up of the best size for this depth and width, from how often the
model's token is the head's first, second, … guess at each depth, with the nodes of the tree and
its τ. Width 1 is a chain.</p>
{_tree_table(report)}
<p class="small">The best tree: <code>{escape(_arguments(best))}</code>. The best chain, which is
what vLLM can draft: <code>num_speculative_tokens {chain["speculative_num_steps"]}</code>.</p>
</section>"""


def _arguments(best: dict[str, Any]) -> str:
    """As SGLang's command line has them."""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return " ".join(f"--{name.replace('_', '-')} {best[name]}" for name in names)


def _tree_table(report: dict[str, Any]) -> str:
    plans = report["tree_table"]
    cells = {(plan["num_steps"], plan["topk"]): plan for plan in plans}
    best = report["best_tree"]
    chosen = (best["speculative_num_steps"], best["speculative_eagle_topk"])
    widths = sorted({plan["topk"] for plan in plans})
    top, low = (f(plan["speedup"] for plan in plans) for f in (max, min))
    body = []
    for depth in sorted({plan["num_steps"] for plan in plans}):
        row = []
        for width in widths:
            plan = cells[depth, width]
            shade = (plan["speedup"] - low) / (top - low) if top > low else 0
            mark = ' class="best"' if (depth, width) == chosen else ""
            row.append(
                f'<td{mark} style="--shade:{0.42 * shade:.2f}">{plan["speedup"]:.2f}x'
                f"<small>{plan['num_draft_tokens']} nodes · {plan['length']:.2f}</small></td>"
            )
        body.append(f"<tr><th>depth {depth}</th>{''.join(row)}</tr>")
    heads = "".join(f"<th>width {width}</th>" for width in widths)
    return (
        f'<div class="scroll"><table class="grid"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _setting(report: dict[str, Any]) -> str:
    machine, settings = report["machine"], report["settings"]
    facts = {
        "head": settings["head"],
        "target": settings["target"]["path"],
        "dtype": settings["dtype"],
        "drafting": drafting_text(report),
        "sampling": sampling_text(settings),
        "batch size": settings["batch_size"],
        "longest answer": f"{settings['max_new_tokens']} tokens",
        "left out as too long": len(report["too_long"]),
        **machine,
        **{f"target {key}": value for key, value in report["fingerprint"].items() if value},
    }
    rows = [
        [escape(str(key)), f"<code>{escape(str(value))}</code>"] for key, value in facts.items()
    ]
    return f"""
<section><h2>How this was measured</h2>
{_table(["", ""], rows, kind="facts-table")}
<p class="small counting">{escape(COUNTING)}</p></section>"""


def _picture(figure: Figure, name: str) -> str:
    return f'<img class="picture" alt="{escape(name)}" src="{plots.data_uri(figure)}">'


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, total: bool = False, kind: str = ""
) -> str:
    """Cells are HTML already. total: whether the last row sums up the others."""
    head = "".join(f"<th>{cell}</th>" for cell in heads) if any(heads) else ""
    body = []
    for i, row in enumerate(rows):
        mark = ' class="total"' if total and i == len(rows) - 1 else ""
        body.append(f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>")
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
