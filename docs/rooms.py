"""Draws docs/rooms.svg: the packages of pipejax/ ("rooms") in layers, with arrows for the imports between them.

    python docs/rooms.py

The arrows are read from the code. Left out are arrows that follow from two others, arrows to `system`, which every room
may import, imports by commands, and the few imports of a higher room, which functions run on demand.
"""

import ast
from collections.abc import Iterable
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "pipejax"
# Of each room: column (0 to 2), layer (0 is the lowest), and its content.
ROOMS = {
    "apps": (0.35, 11, "server, schemas, bulk, export, pictures"),
    "training": (0.35, 10, "steps, log, resuming, memory plan"),
    "testing": (1.65, 10, "checks of custom pieces"),
    "offline": (0.35, 9, "decode and evaluate files"),
    "kernels": (1.65, 9, "fast products and attention"),
    "inference": (0.35, 8, "from text to record"),
    "convert": (2, 7, "Hugging Face weights, in and out"),
    "checkpoint": (1.65, 6, "verified steps on disk"),
    "data": (0, 5, "tasks, tokenizer, padded batches"),
    "methods": (1, 4, "from target to text, a file for each"),
    "decoding": (1, 3, "the loop, and a file for each strategy"),
    "backbones": (2, 3, "UMT5, T5Gemma, T5Gemma 2"),
    "config": (1.5, 2, "sections, files, --set"),
    "metrics": (0, 1, "spans, keyphrases, ROUGE"),
    "grid": (1, 1, "the paper in integers"),
    "model": (2, 1, "the T5: masks in, logits out"),
    "system": (1, 0, "errors, files, streams, processes, caches: for all rooms"),
}
WIDTH, HEIGHT, COLUMN, FLOOR, EDGE = 236, 50, 256, 88, 8  # of a box, between boxes, around all
FILLS = [
    "#dfe6ee",
    "#e6edf8",
    "#e1ecf9",
    "#e0eafa",
    "#dcebf9",
    "#e4e6f9",
    "#efe6f6",
    "#f8e6dd",
    "#f6efdc",
    "#eef3dc",
    "#e2f2e2",
    "#dff0ee",
]  # by layer
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def imports() -> dict[str, set[str]]:
    """Returns the lower rooms that each room imports from."""
    found: dict[str, set[str]] = {name: set() for name in ROOMS}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in found or parts[-1] == "__main__":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: Iterable[str] = ()
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                package, _, rest = name.partition(".")
                room = rest.partition(".")[0]
                if package == "pipejax" and room in found and ROOMS[room][1] < ROOMS[parts[0]][1]:
                    found[parts[0]].add(room)
    return found


def needed(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Returns the edges that do not follow from others, without those to `system`."""

    def below(room: str) -> set[str]:
        return edges[room].union(*(below(other) for other in edges[room]))

    return [
        (room, other)
        for room in edges
        for other in sorted(edges[room] - {"system"})
        if not any(other in below(between) for between in edges[room] - {other})
    ]


def box(name: str) -> tuple[float, float, float]:
    """Returns left, top and width of a room's box."""
    column, layer, _ = ROOMS[name]
    top = EDGE + (max(f for _, f, _ in ROOMS.values()) - layer) * FLOOR
    if name == "system":
        return EDGE, top, 2 * COLUMN + WIDTH
    return EDGE + column * COLUMN, top, WIDTH


def draw() -> str:
    """Returns the picture as SVG."""
    width, height = 2 * EDGE + 2 * COLUMN + WIDTH, 2 * EDGE + max(f for _, f, _ in ROOMS.values()) * FLOOR + HEIGHT
    edges = needed(imports())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="The packages of pipejax and the imports between them" font-family="{escape(FONT)}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0.5L8 4L0 7.5z" fill="#768290"/></marker></defs>',
    ]
    for upper, lower in edges:
        (x, y, w), (u, v, o) = box(upper), box(lower)
        starts = [e for e in edges if e[0] == upper]
        ends = sorted((e for e in edges if e[1] == lower), key=lambda e: box(e[0])[0])
        starts.sort(key=lambda e: box(e[1])[0])
        begin = x + w * (starts.index((upper, lower)) + 1) / (len(starts) + 1)
        end = u + o * (ends.index((upper, lower)) + 1) / (len(ends) + 1)
        y += HEIGHT
        bend = min(40.0, (v - y) / 2)
        path = f"M{begin:.0f} {y:.0f}C{begin:.0f} {y + bend:.0f} {end:.0f} {v - bend:.0f} {end:.0f} {v - 1:.0f}"
        lines.append(f'<path d="{path}" fill="none" stroke="#768290" stroke-width="1.3" marker-end="url(#tip)"/>')
    for name, (_, layer, words) in ROOMS.items():
        x, y, w = box(name)
        fill = FILLS[layer]
        middle = x + w / 2
        lines += [
            f'<rect x="{x:.0f}" y="{y}" width="{w}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="#9aa7b5"/>',
            f'<text x="{middle:.0f}" y="{y + 21}" font-size="14" font-weight="600" text-anchor="middle" fill="#1d2733">'
            f"{name}</text>",
            f'<text x="{middle:.0f}" y="{y + 39}" font-size="11" text-anchor="middle" fill="#3b4856">'
            f"{escape(words)}</text>",
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    (HERE / "rooms.svg").write_text(draw(), encoding="utf-8")
