"""Draw docs/timeline.svg: synchronous offload and ZenFlow over the same span of time.

    python docs/make_timeline.py

A schematic, not a measurement. The order of events is the real one: what starts in which ``step()``,
what waits for what, and in which step it is published. The lengths are chosen to be legible.
"""

from pathlib import Path
from xml.sax.saxutils import escape

TARGET = Path(__file__).with_name("timeline.svg")

# Lengths, in pixels: one step's compute, the work inside one step(), and what crosses the link.
COMPUTE = 158
FORWARD = 54
PUBLISH = 5
SELECTIVE = 9
STEP = COMPUTE + PUBLISH + SELECTIVE
GRADIENTS = 64
WEIGHTS = 44
HOST_UPDATE = 236
SWEEP = 88

NUM_STEPS = 6
FIRST_STEP = 5
INTERVAL = 4
SEGMENTS = "ABCD"

WIDTH = 1220
LEFT = 146
RIGHT = LEFT + NUM_STEPS * STEP

INK = "#1f2933"
MUTED = "#66727f"
LANE = "#f4f6f8"
COLOURS = {
    "forward": "#a9c4e6",
    "backward": "#6d9bd1",
    "selective": "#f0a202",
    "publish": "#8a4fae",
    "gradients": "#2f9c95",
    "slot": "#ffffff",
    "window": "#e2efe5",
    "sweep": "#57a773",
}


class Drawing:
    """SVG elements in the order in which they are painted."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def rect(self, x, y, width, height, fill, *, radius=3, stroke=None, dash=None):
        more = f' stroke="{stroke}"' if stroke else ""
        more += f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
            f'fill="{fill}"{more}/>'
        )

    def text(self, x, y, words, *, size=12, fill=INK, anchor="start", weight=400):
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" '
            f'text-anchor="{anchor}" font-weight="{weight}">{escape(words)}</text>'
        )

    def heading(self, y, words, remark):
        self.parts.append(
            f'<text x="26" y="{y:g}" fill="{INK}"><tspan font-size="16" font-weight="700">'
            f'{escape(words)}</tspan><tspan dx="12" font-size="12" fill="{MUTED}">'
            f"{escape(remark)}</tspan></text>"
        )

    def line(self, points, *, stroke=INK, width=1.2, dash=None, arrow=False):
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{width}" '
            f'stroke-linejoin="round"{more}/>'
        )

    def mark(self, x, y, number):
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="8.5" fill="{INK}" stroke="#ffffff"/>')
        self.text(x, y + 4, str(number), size=11, fill="#ffffff", anchor="middle", weight=700)

    def label(self, x, y, width, height, words, *, size=12, fill=INK, weight=400):
        self.text(
            x + width / 2,
            y + height / 2 + size * 0.36,
            words,
            size=size,
            fill=fill,
            anchor="middle",
            weight=weight,
        )

    def svg(self, height: int) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title desc" '
            "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, "
            'sans-serif">'
        )
        return "\n".join([head, *self.parts, "</svg>", ""])


def lanes(draw: Drawing, rows: list[tuple[str, str, float, float]]) -> None:
    """A grey band for each ``(name, remark, y, height)``, named at its left."""
    for name, remark, y, height in rows:
        draw.rect(LEFT, y, RIGHT - LEFT, height, LANE, radius=4)
        middle = y + height / 2 + 4
        if name:
            draw.text(26, middle, name, size=13, weight=600)
        if remark:
            draw.text(LEFT - 10, middle, remark, size=11, fill=MUTED, anchor="end")


def compute(draw: Drawing, x: float, y: float, height: float) -> None:
    """One step's forward and backward, cut off where the picture ends."""
    width = min(FORWARD, RIGHT - x)
    draw.rect(x, y, width, height, COLOURS["forward"])
    draw.label(x, y, width, height, "forward", size=11)
    if (width := min(COMPUTE - FORWARD, RIGHT - x - FORWARD)) > 0:
        draw.rect(x + FORWARD, y, width, height, COLOURS["backward"])
        draw.label(x + FORWARD, y, width, height, "backward" if width > 60 else "", size=11)


def synchronous(draw: Drawing, top: float) -> float:
    """The upper panel; returns its lower edge."""
    remark = "the device waits for the gradients, the update and the weights, in every step"
    draw.heading(top, "Synchronous offload", remark)
    device, to_host, to_device, host = top + 36, top + 82, top + 101, top + 126
    lanes(
        draw,
        [
            ("device", "", device, 36),
            ("link", "to host", to_host, 16),
            ("", "to device", to_device, 16),
            ("host", "", host, 28),
        ],
    )
    x, step = LEFT, FIRST_STEP
    while x < RIGHT:
        draw.text(x + 2, device - 7, f"step {step}", size=12, weight=600)
        compute(draw, x, device, 36)
        end = x + COMPUTE
        if end > RIGHT:
            break
        arrived = end + GRADIENTS * 0.4
        updated = arrived + HOST_UPDATE
        x = updated + WEIGHTS
        draw.rect(arrived - GRADIENTS / 0.9, to_host, GRADIENTS / 0.9, 16, COLOURS["gradients"])
        draw.label(
            arrived - GRADIENTS / 0.9,
            to_host,
            GRADIENTS / 0.9,
            16,
            "gradients",
            size=10,
            fill="#ffffff",
        )
        draw.rect(arrived, host, HOST_UPDATE, 28, COLOURS["sweep"])
        draw.label(
            arrived,
            host,
            HOST_UPDATE,
            28,
            f"AdamW on the host, step {step}",
            fill="#ffffff",
            weight=600,
        )
        draw.rect(updated, to_device, WEIGHTS, 16, COLOURS["publish"])
        draw.label(updated, to_device, WEIGHTS, 16, "weights", size=10, fill="#ffffff")
        draw.rect(end, device, x - end, 36, "url(#stall)", stroke="#c8553d")
        draw.label(end, device, x - end, 36, "stall", fill="#9c2f1b", weight=700, size=13)
        step += 1
    return host + 28


def zenflow(draw: Drawing, top: float) -> float:
    """The lower panel; returns its lower edge."""
    remark = (
        f"update interval S = {INTERVAL}: in each step about a quarter of the segments "
        "is swept beside the next step's compute"
    )
    draw.heading(top, "ZenFlow", remark)
    device, to_host, to_device, host = top + 36, top + 82, top + 101, top + 130
    row_height, row_pitch = 26, 32
    rows = {name: host + i * row_pitch for i, name in enumerate(SEGMENTS)}
    lanes(
        draw,
        [
            ("device", "", device, 36),
            ("link", "to host", to_host, 16),
            ("", "to device", to_device, 16),
        ],
    )
    lanes(
        draw,
        [
            ("host" if i == 0 else "", f"segment {name}", rows[name], row_height)
            for i, name in enumerate(SEGMENTS)
        ],
    )

    share = GRADIENTS / len(SEGMENTS)
    windows(draw, rows, row_height, share)
    for i in range(NUM_STEPS):
        x, step = LEFT + i * STEP, FIRST_STEP + i
        draw.text(x + 2, device - 7, f"step {step}", weight=600)
        compute(draw, x, device, 36)
        draw.rect(x + COMPUTE, device - 4, PUBLISH, 44, COLOURS["publish"], radius=1)
        draw.rect(x + COMPUTE + PUBLISH, device - 4, SELECTIVE, 44, COLOURS["selective"], radius=1)
        # Beside this step's compute, the link and the host work on the previous step's gradients.
        for j in range(len(SEGMENTS)):
            draw.rect(x + j * share, to_host, share - 1, 16, COLOURS["gradients"], radius=2)
            draw.label(x + j * share, to_host, share - 1, 16, SEGMENTS[j], size=10, fill="#ffffff")
        due = (step - 1) % INTERVAL
        swept = x + (due + 1) * share + SWEEP
        draw.rect(
            x + COMPUTE - WEIGHTS / INTERVAL - 1,
            to_device,
            WEIGHTS / INTERVAL,
            16,
            COLOURS["publish"],
            radius=2,
        )
        draw.label(
            x + COMPUTE - WEIGHTS / INTERVAL - 1,
            to_device,
            WEIGHTS / INTERVAL,
            16,
            SEGMENTS[due],
            size=10,
            fill="#ffffff",
        )
        assert swept <= x + COMPUTE
    follow_one_gradient(draw, device, to_host, to_device, rows["A"], share)
    return rows["D"] + row_height


def windows(draw: Drawing, rows: dict[str, float], height: float, share: float) -> None:
    """Each segment's windows: slots arriving, then the sweep that applies them all."""
    cell = SWEEP / INTERVAL
    for j, name in enumerate(SEGMENTS):
        y, opened = rows[name], LEFT
        for i in range(NUM_STEPS):
            # In this column arrive the gradients of the step before it.
            step, arrived = FIRST_STEP + i - 1, LEFT + i * STEP + (j + 1) * share
            if step % INTERVAL != j:
                continue
            draw.rect(opened, y, arrived - opened, height, COLOURS["window"], radius=4)
            draw.rect(arrived, y, SWEEP, height, COLOURS["sweep"])
            for n in range(INTERVAL):
                if n:
                    draw.line(
                        [(arrived + n * cell, y + 4), (arrived + n * cell, y + height - 4)],
                        stroke="#bfe0cb",
                        width=1,
                    )
                draw.label(
                    arrived + n * cell,
                    y,
                    cell,
                    height,
                    str(step - INTERVAL + 1 + n),
                    fill="#ffffff",
                    weight=700,
                )
            opened = LEFT + (i + 1) * STEP + (j + 1) * share
        if opened < RIGHT:
            draw.rect(opened, y, RIGHT - opened, height, COLOURS["window"], radius=4)
        if j == 0:  # the way of the gradient that follow_one_gradient() marks, behind the slots
            waits = LEFT + STEP + share + 18, LEFT + INTERVAL * STEP + share - 1
            draw.line([(x, y + height / 2) for x in waits], arrow=True)
        for i in range(NUM_STEPS):
            step, arrived = FIRST_STEP + i - 1, LEFT + i * STEP + (j + 1) * share
            if step % INTERVAL != j:
                draw.rect(arrived, y + 4, 18, height - 8, COLOURS["slot"], stroke="#57a773")
                draw.label(arrived, y + 4, 18, height - 8, str(step), fill="#2e6b45", weight=600)


def follow_one_gradient(draw, device, to_host, to_device, row, share) -> None:
    """Numbered marks on the way of step 5's gradient of segment A."""
    column = {step: LEFT + (step - FIRST_STEP) * STEP for step in (5, 6, 9)}
    taken = column[5] + COMPUTE + PUBLISH + SELECTIVE / 2
    sent = column[6] + share / 2
    slot = column[6] + share + 9
    sweep = column[9] + share
    published = column[9] + COMPUTE
    staged = published - WEIGHTS / INTERVAL / 2 - 1
    bend = to_host - 5
    draw.line(
        [(taken, device + 39), (taken, bend), (sent, bend), (sent, to_host - 0.5)], arrow=True
    )
    draw.line([(sent, to_host + 16), (sent, row - 6), (slot, row - 6), (slot, row + 3)], arrow=True)
    draw.line([(sweep + SWEEP, row + 13), (staged, row + 13), (staged, to_device + 17)], arrow=True)
    draw.line(
        [
            (staged, to_device),
            (staged, bend),
            (published + 2.5, bend),
            (published + 2.5, device + 39),
        ]
    )
    draw.mark(taken, device + 31, 1)
    draw.mark(slot + 22, row + 13, 2)
    draw.mark(sweep - 13, row + 13, 3)
    draw.mark(staged - 18, to_device + 8, 4)
    draw.mark(published + 2.5, device + 31, 5)


def legend(draw: Drawing, top: float) -> None:
    """One chip for each colour, in the words of docs/design.md."""
    entries = [
        ("forward", "forward"),
        ("backward", "backward"),
        ("selective", "selective update"),
        ("gradients", "deferred gradients"),
        ("slot", "slot"),
        ("sweep", "sweep"),
        ("publish", "new weights, publish"),
        ("stall", "stall"),
    ]
    x = LEFT
    for key, words in entries:
        if key == "stall":
            draw.rect(x, top, 16, 14, "url(#stall)", stroke="#c8553d")
        elif key == "slot":
            draw.rect(x, top, 16, 14, "#ffffff", stroke="#57a773")
        else:
            draw.rect(x, top, 16, 14, COLOURS[key])
        draw.text(x + 22, top + 11.5, words)
        x += 22 + 6.4 * len(words) + 30


def notes(draw: Drawing, top: float) -> float:
    """Two lists under the picture; returns their lower edge."""
    draw.line([(26, top), (WIDTH - 26, top)], stroke="#d9dfe5", width=1)
    top += 30
    draw.text(26, top, "Follow one gradient: step 5, segment A", size=13, weight=700)
    story = [
        "step() 5 takes it: selected channels are updated now, the rest goes to a slot.",
        "It waits in its slot, with the lr, step count and scale of its own step.",
        "A host worker sweeps A: four AdamW sub-steps (5, 6, 7, 8) in one pass over memory.",
        "The new weights cross the link.",
        "step() 9 publishes them. Had the sweep been late, that wait would be the stall.",
    ]
    for i, words in enumerate(story):
        draw.mark(36, top + 22 + i * 24, i + 1)
        draw.text(54, top + 26 + i * 24, words)
    column = 660
    draw.text(column, top, "Inside one step(), in this order", size=13, weight=700)
    order = [
        ("publish", "check the gradients; publish what was swept beside this step"),
        (None, "handover: channels that change sides move, with their state"),
        ("selective", "update selected channels and resident parameters; score channels if due"),
        ("gradients", "move the deferred gradients to slots"),
        ("sweep", "start the sweeps that are due"),
    ]
    for i, (key, words) in enumerate(order):
        y = top + 14 + i * 24
        draw.rect(column + 2, y, 16, 16, COLOURS[key] if key else "#c9d1d9")
        draw.text(column + 28, y + 12, words)
    return top + 26 + 4 * 24


def timeline() -> str:
    """The picture as SVG text."""
    draw = Drawing()
    draw.parts += [
        '<title id="title">Synchronous offload and ZenFlow over the same span of time</title>',
        '<desc id="desc">With synchronous offload the device stalls in every step while gradients, '
        "update and weights pass. With ZenFlow the device computes back to back: selected channels are "
        "updated in step(), deferred gradients go to slots, and each step a part of the segments is "
        "swept on the host and published in the next step().</desc>",
        '<defs><pattern id="stall" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="7" height="7" fill="#fdeeea"/>'
        '<rect width="2.4" height="7" fill="#f2b8aa"/></pattern>'
        '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0.6 L7.6 4 L0 7.4 Z" fill="{INK}"/></marker></defs>',
    ]
    body = Drawing()
    body.text(26, 42, "One span of time, two ways to offload AdamW", size=20, weight=700)
    body.text(
        26, 64, "Schematic: the order of events is real, the lengths are not measured.", fill=MUTED
    )
    legend(body, 84)
    lower = synchronous(body, 140)
    lower = zenflow(body, lower + 52)
    lower = notes(body, lower + 30)
    height = int(lower + 26)
    draw.rect(0.5, 0.5, WIDTH - 1, height - 1, "#ffffff", radius=10, stroke="#d9dfe5")
    draw.parts += body.parts
    return draw.svg(height)


if __name__ == "__main__":
    TARGET.write_text(timeline(), encoding="utf-8", newline="\n")
    print(f"wrote {TARGET}")
