"""The tables of the papers as text to paste: Markdown, and LaTeX with booktabs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from onnxplain.evaluation.report.reading import Reading
from onnxplain.evaluation.report.tables import ARROWS, number

__all__ = ["as_latex", "as_markdown", "copies"]

Measures = Sequence[Mapping[str, Any]]

_LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "↓": r"$\downarrow$",
        "↑": r"$\uparrow$",
        "\N{MINUS SIGN}": "$-$",
        "\N{EN DASH}": "--",
    }
)


def copies(reading: Reading, measures: Measures) -> str:
    """Both texts, folded away."""
    texts = {"Markdown": as_markdown(reading, measures), "LaTeX": as_latex(reading, measures)}
    return "\n".join(
        f"<details><summary>Copy as {kind}</summary>\n"
        f'<pre tabindex="0">{escape(text)}</pre></details>'
        for kind, text in texts.items()
    )


def as_markdown(reading: Reading, measures: Measures) -> str:
    """Methods by measures, values alone, the best of a column bold."""

    def plain(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("_", "\\_")

    head, *rows = _grid(reading, measures, plain, "**{}**")
    rule = ["---", *("---:" for _ in measures)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def as_latex(reading: Reading, measures: Measures) -> str:
    r"""The same as a `tabular`, with the rules of booktabs."""

    def plain(text: str) -> str:
        return text.translate(_LATEX)

    head, *rows = ([*row] for row in _grid(reading, measures, plain, r"\textbf{{{}}}"))
    lines = [f"\\begin{{tabular}}{{l{'r' * len(measures)}}}", r"\toprule"]
    lines += [" & ".join(head) + r" \\", r"\midrule"]
    lines += [" & ".join(row) + r" \\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def _grid(
    reading: Reading, measures: Measures, plain: Callable[[str], str], bold: str
) -> list[list[str]]:
    head = [", ".join(filter(None, (one["title"], one["detail"]))) for one in measures]
    aims = [ARROWS[one["better"]] for one in measures]
    rows = [["method", *(f"{name} {aim}".strip() for name, aim in zip(head, aims, strict=True))]]
    rows = [[plain(cell) for cell in row] for row in rows]
    best = {one["name"]: reading.best(one, reading.methods) for one in measures}
    for method in reading.methods:
        row = [plain(method)]
        for one in measures:
            value = reading.values.get((method, one["name"]))
            cell = plain(number(None if value is None else value["value"]))
            row.append(bold.format(cell) if method in best[one["name"]] else cell)
        rows.append(row)
    return rows
