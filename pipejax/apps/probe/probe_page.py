"""The self-contained page of a summary: its sentence, the costs as bars, the graph of rows, and tables.

page.html, a `string.Template`, has the layout and the colours.
"""

from collections.abc import Mapping, Sequence

from pipejax.apps.markup import STYLE, count, escape, template
from pipejax.apps.probe.measuring import Found
from pipejax.apps.probe.summary import Cost, is_significant

TITLE = "How much rows depend on one another"
# Pixels: distance of rows in the graph; radius of a node; and the sizes of bars and their labels. All fit a page of
# 500.
PITCH, RADIUS, BAR, LABEL, ROOM, VALUE = 58, 15, 26, 64, 226, 178
LABELLED = 8  # the most arcs with a visible label; every arc has its cost as a tooltip


def html(found: Found) -> str:
    """Returns the page of a measurement."""
    conditions = found["conditions"]
    rows, places = [*conditions["hidden"]["rows"]], [*conditions["hidden"]["places"]]
    by_row = {label_of(name): [part, *part["rows"].values()] for name, part in conditions.items()}
    by_place = {label_of(name): [*part["places"].values()] for name, part in conditions.items()}
    cells = {f"row {row}": [parts.get(p) for p in places] for row, parts in conditions["delay_1"]["cells"].items()}
    last = len(found["graph"]) - 1
    graph = {f"row {i + 1}": [*above, *[None] * (last - i)] for i, above in enumerate(found["graph"]) if i}
    return template("pipejax.apps.probe", "page.html").substitute(
        title=TITLE,
        style=STYLE,
        says=escape(found["says"]),
        facts=escape(facts(found)),
        bars=bars(conditions),
        graph=arcs(found["graph"]),
        graph_table=table(["without", *(f"row {k + 1}" for k in range(last))], graph),
        rows=table(["", "all", *(f"row {row}" for row in rows)], by_row),
        places=table(["", *places], by_place),
        cells=table(["", *places], cells),
    )


def label_of(name: str) -> str:
    """Returns the label of a condition."""
    return name.replace("delay_", "Δt = ")


def facts(found: Found) -> str:
    """Describes the measurement in a line."""
    return (
        f"{found['checkpoint']}, step {found['step']}; {count(found['examples'], 'example')} of {found['input']}, "
        f"{count(found['tokens'], 'token')}; {found['nll']['whole']:.3f} nats a token with the rows above seen whole"
    )


def number(cost: float) -> str:
    """Formats a cost with three decimals."""
    return f"{cost:.3f}".replace("-0.000", "0.000")


def bars(conditions: Mapping[str, Cost]) -> str:
    """Returns a bar for each condition as SVG, with twice its error to each side."""
    most = max(max(part["cost"] + 2 * part["error"] for part in conditions.values()), 1e-9)
    width, height = LABEL + ROOM + VALUE, BAR * len(conditions) + 6
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" font-size="13">']
    for i, (name, part) in enumerate(conditions.items()):
        top, end = i * BAR + 4, LABEL + ROOM * max(part["cost"], 0) / most
        low, high = (LABEL + ROOM * max(part["cost"] + side * 2 * part["error"], 0) / most for side in (-1, 1))
        said = number(part["cost"]) + ("" if is_significant(part) else ", as good as nothing")
        parts += [
            f'<text x="0" y="{top + 13}">{escape(label_of(name))}</text>',
            f'<rect class="cost" x="{LABEL}" y="{top}" width="{max(end - LABEL, 1):.1f}" height="{BAR - 8}" rx="2"/>',
            f'<path class="error" d="M{low:.1f} {top + 9}H{high:.1f}"/>',
            f'<text class="quiet" x="{max(end, high) + 8:.1f}" y="{top + 13}">{said}</text>',
        ]
    return "\n".join([*parts, "</svg>"])


def arcs(graph: Sequence[Sequence[Cost]]) -> str:
    """Returns the rows in a line as SVG, with an arc from each row to the rows that depend on it."""
    told = [
        (part["cost"], k, i) for i, above in enumerate(graph) for k, part in enumerate(above) if is_significant(part)
    ]
    told.sort(reverse=True)
    said = "; ".join(f"row {i + 1} needs row {k + 1}: {cost:.2f}" for cost, k, i in told) or "no row needs another"
    most, reach = told[0][0] if told else 1.0, max((i - k for _, k, i in told), default=0)
    base, width = reach * PITCH // 2 + 40, PITCH * len(graph)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{base + RADIUS + 6}" role="img" '
        f'font-size="11" text-anchor="middle"><title>{escape(said)}</title>'
    ]
    labels = []  # drawn after, and thus above, all arcs
    for cost, k, i in told:
        left, right = PITCH * k + PITCH // 2 + 6, PITCH * i + PITCH // 2 - 6
        radius, top = (right - left) / 2, base - RADIUS
        parts.append(
            f'<path class="arc" d="M{left} {top}A{radius} {radius} 0 0 1 {right} {top}" '
            f'stroke-width="{1 + 7 * cost / most:.1f}" stroke-opacity="{0.3 + 0.6 * cost / most:.2f}">'
            f"<title>row {i + 1} without row {k + 1}: {cost:.3f}</title></path>"
        )
        labels.append(f'<text x="{(left + right) / 2}" y="{top - radius - 5:.1f}">{cost:.2f}</text>')
    parts += labels[:LABELLED]
    for i in range(len(graph)):
        middle = PITCH * i + PITCH // 2
        parts.append(f'<circle class="node" cx="{middle}" cy="{base}" r="{RADIUS}"/>')
        parts.append(f'<text x="{middle}" y="{base + 4}">{i + 1}</text>')
    return "\n".join([*parts, "</svg>"])


def table(head: Sequence[str], lines: Mapping[str, Sequence[Cost | None]]) -> str:
    """Returns a table of costs. A greater cost has a stronger colour; a cost that is not significant has none."""
    most = max((part["cost"] for line in lines.values() for part in line if part), default=0.0) or 1.0

    def cell(part: Cost | None) -> str:
        if not part or not part["tokens"]:
            return "<td></td>"
        share = f' style="--share: {0.75 * part["cost"] / most:.2f}"' if is_significant(part) else ""
        tip = f"± {part['error']:.3f}, {count(part['tokens'], 'token')}"
        return f'<td{share} title="{tip}">{number(part["cost"])}</td>'

    titles = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(map(cell, line))}</tr>' for name, line in lines.items()
    )
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
